"""How is the state kept and brought back without moving what did not change?

A capsule is the small state plus the KV range [0, position). KV is append-only, so it is kept as
immutable segments of 512 tokens that capsules of one lineage share; only the last, partial segment
belongs to one capsule. `LiveSegments` knows which segments the live buffer already holds: a restore
copies the others alone.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from capserve.engine.seam import CapsulePart
from capserve.engine.state import State

SEGMENT_TOKENS = 512
"""Small enough that a tail copy is cheap, large enough that a 256k journal has 512 segments."""

_keys = itertools.count(1)


@dataclass(frozen=True, eq=False)
class Segment:
    """KV of whole positions [i * 512, (i + 1) * 512), or of the tail; never written after birth."""

    kv: Tensor
    """[layers, k|v, Hkv, tokens, D]"""
    part: CapsulePart

    @classmethod
    def copy_of(cls, kv: Tensor) -> Segment:
        kept = kv.clone(memory_format=torch.contiguous_format)
        return cls(kept, CapsulePart(next(_keys), kept.nbytes))


@dataclass(frozen=True, eq=False)
class TorchCapsule:
    """The restorable state at `position`. Immutable."""

    position: int
    recurrent: Tensor
    conv: Tensor
    hidden: Tensor
    segments: tuple[Segment, ...]
    """Full segments, then the tail when position is no multiple of 512."""
    small: CapsulePart

    @property
    def parts(self) -> Sequence[CapsulePart]:
        return (self.small, *(segment.part for segment in self.segments))


class LiveSegments:
    """Which kept segments does the live KV buffer hold, position by position?"""

    def __init__(self, state: State) -> None:
        self._state = state
        # Weak: what no capsule keeps any more is not kept alive by having been live.
        self._held: list[weakref.ref[Segment]] = []

    def _at(self, i: int) -> Segment | None:
        return self._held[i]() if i < len(self._held) else None

    def written_from(self, position: int) -> None:
        """The buffer changes at `position` and beyond."""
        del self._held[position // SEGMENT_TOKENS :]

    def snapshot(self, position: int) -> TorchCapsule:
        """Needs a settled state with `state.hidden[0]` that of position - 1."""
        state = self._state
        full = position // SEGMENT_TOKENS
        segments: list[Segment] = []
        for i in range(full):
            segment = self._at(i)
            if segment is None:
                span = slice(i * SEGMENT_TOKENS, (i + 1) * SEGMENT_TOKENS)
                segment = Segment.copy_of(state.kv[:, :, :, span])
                self._held[i : i + 1] = [weakref.ref(segment)]
            segments.append(segment)
        if position % SEGMENT_TOKENS:
            tail = state.kv[:, :, :, full * SEGMENT_TOKENS : position]
            segments = [*segments, Segment.copy_of(tail)]
        small = (
            state.recurrent.clone(),
            state.conv[:, : state.taps].clone(),
            state.hidden[0].clone(),
        )
        part = CapsulePart(next(_keys), sum(t.nbytes for t in small))
        return TorchCapsule(position, *small, tuple(segments), part)

    def restore(self, capsule: TorchCapsule) -> int:
        """Make the live buffers those of the capsule; returns the bytes moved."""
        state = self._state
        moved = capsule.small.nbytes
        state.recurrent.copy_(capsule.recurrent)
        state.conv[:, : state.taps].copy_(capsule.conv)
        state.hidden[0].copy_(capsule.hidden)
        for i, segment in enumerate(capsule.segments):
            if self._at(i) is segment:
                continue
            start = i * SEGMENT_TOKENS
            tokens = segment.kv.shape[3]
            if tokens < SEGMENT_TOKENS:
                self.written_from(start)
            state.kv[:, :, :, start : start + tokens].copy_(segment.kv)
            moved += segment.part.nbytes
            if tokens == SEGMENT_TOKENS:
                self._held[i : i + 1] = [weakref.ref(segment)]
        return moved
