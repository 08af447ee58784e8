"""How is the state kept and brought back without moving what did not change?

A capsule is the small state plus the KV range [0, position). KV is append-only, so it is kept as
immutable segments of 512 tokens that capsules of equal history share; only the last, partial
segment belongs to one position. `LiveSegments` knows by name which full segments the live buffer
holds: a restore copies the others alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from capserve.engine.history import SEGMENT_TOKENS, History
from capserve.engine.packing import Label
from capserve.engine.parts import Part, PartPool, Segment, SmallState
from capserve.engine.state import State
from capserve.engine.tiers import Tiers

_UNKNOWN = b""
"""In place of a name: the buffer is being written there."""


@dataclass(frozen=True, eq=False)
class TorchCapsule:
    """The restorable state at `position`. Immutable."""

    position: int
    small: SmallState
    segments: tuple[Segment, ...]
    """Full segments, then the tail when position is no multiple of 512."""

    @property
    def parts(self) -> Sequence[Part]:
        return (self.small, *self.segments)

    @property
    def tier(self) -> str:
        return self.small.tier

    @property
    def root(self) -> bytes:
        """The name before its first part."""
        return self.small.label.root


class LiveSegments:
    """What does the live state hold: its history, and full KV segments by name?"""

    def __init__(self, state: State, tiers: Tiers, pool: PartPool, fingerprint: str) -> None:
        self._state = state
        self._tiers = tiers
        self._pool = pool
        self._fingerprint = fingerprint
        self.history = History()
        self._held: list[bytes] = []
        """Names of the full segments in the buffer. Those of the history are the first; what lies
        beyond the position may still be there after a step back."""

    def written_from(self, position: int) -> None:
        """The buffer changes at `position` and beyond, or is not complete there."""
        del self._held[position // SEGMENT_TOKENS :]

    def absorbed(self) -> None:
        """The history went on: the full segments up to its position are held."""
        self._held += self.history.names[len(self._held) :]

    def snapshot(self) -> TorchCapsule:
        """Needs a settled state with `state.hidden[0]` that of the history's position - 1."""
        history = self.history
        segments = [
            self._kept_segment(i, name, history.names[i - 1] if i else history.root)
            for i, name in enumerate(history.names)
        ]
        if history.position % SEGMENT_TOKENS:
            segments.append(self._kept_segment(len(segments), history.name("kv"), history.after))
        small = self._kept_small_state()
        return TorchCapsule(history.position, small, tuple(segments))

    def _kept_segment(self, i: int, name: bytes, after: bytes) -> Segment:
        tier = self._tiers.names[0]
        start = i * SEGMENT_TOKENS
        end = min(start + SEGMENT_TOKENS, self.history.position)

        def make() -> Segment:
            label = Label("kv", start, end, self._fingerprint, name, after, self.history.root)
            return Segment(label, tier, self._tiers.copy(self._state.kv[:, :, :, start:end], tier))

        return self._pool.share(Segment, name, tier, make)

    def _kept_small_state(self) -> SmallState:
        state, history, tier = self._state, self.history, self._tiers.names[0]
        name = history.name("small")

        def make() -> SmallState:
            return SmallState(
                Label(
                    "small",
                    0,
                    history.position,
                    self._fingerprint,
                    name,
                    history.after,
                    history.root,
                ),
                tier,
                self._tiers.copy(state.recurrent, tier),
                self._tiers.copy(state.conv[:, : state.taps], tier),
                self._tiers.copy(state.hidden[0], tier),
                torch.from_numpy(history.tail.copy()),
            )

        return self._pool.share(SmallState, name, tier, make)

    def restore(self, capsule: TorchCapsule) -> int:
        """Make the live buffers and the history those of the capsule; returns the bytes moved."""
        state, small = self._state, capsule.small
        moved = small.nbytes
        state.recurrent.copy_(small.recurrent, non_blocking=True)
        state.conv[:, : state.taps].copy_(small.conv, non_blocking=True)
        state.hidden[0].copy_(small.hidden, non_blocking=True)
        names: list[bytes] = []
        fresh: list[Segment] = []
        for i, segment in enumerate(capsule.segments):
            start, end = segment.label.start, segment.label.end
            full = end - start == SEGMENT_TOKENS
            if full:
                names.append(segment.name)
                if self._held[i : i + 1] == [segment.name]:
                    continue
                self._held[i : i + 1] = [_UNKNOWN]
            else:
                self.written_from(start)
            fresh.append(segment)
            moved += segment.nbytes
        self._tiers.place(state.kv, [(part.label.start, part.kv) for part in fresh])
        for segment in fresh:
            start, end = segment.label.start, segment.label.end
            if end - start == SEGMENT_TOKENS:
                self._held[start // SEGMENT_TOKENS] = segment.name
        self._tiers.wait()  # the capsule may be gone when this returns
        self.history.restore(names, small.history.numpy(), capsule.position, capsule.root)
        return moved
