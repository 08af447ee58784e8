"""How does a capsule at rest change its tier, or come back from bytes?

Nothing here touches the live state. Bytes are checked against the one form that this engine would
have written, and against each other: every part names the one before it, and the small state's own
tokens must give its name, so parts of different histories don't make a capsule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch

from capserve.engine import packing
from capserve.engine.capsule import TorchCapsule
from capserve.engine.history import SEGMENT_TOKENS, Tail, empty_tail, name_of, renamed
from capserve.engine.packing import Label, Layout
from capserve.engine.parts import (
    DTYPES,
    Part,
    PartPool,
    Segment,
    SmallState,
    segment_layout,
    small_layout,
)
from capserve.engine.seam import CapsulePart
from capserve.engine.state import State
from capserve.engine.tiers import Tiers
from capserve.errors import CapsuleError

P = TypeVar("P", bound=Part)


class Shelf:
    """Moves and unpacks the capsules of one engine."""

    def __init__(self, state: State, tiers: Tiers, pool: PartPool, fingerprint: str) -> None:
        self._state = state
        self._tiers = tiers
        self._pool = pool
        self._fingerprint = fingerprint

    def move(self, capsule: TorchCapsule, tier: str) -> TorchCapsule:
        """As `seam.Engine.move`."""
        assert tier in self._tiers.names, f"tier {tier!r} is none of {self._tiers.names}"
        if capsule.tier == tier:
            return capsule
        small = self._pool.small_in(capsule.small, tier)
        segments = tuple(self._pool.segment_in(part, tier) for part in capsule.segments)
        self._tiers.wait()
        return TorchCapsule(capsule.position, small, segments)

    def unpack(
        self, position: int, parts: Sequence[CapsulePart | memoryview], apart: bytes = b""
    ) -> TorchCapsule:
        """As `seam.Engine.unpack`. Bytes are copied: nothing refers to `parts` afterwards."""
        assert not apart or all(isinstance(part, memoryview) for part in parts)
        room = self._state.max_positions
        if not 0 <= position <= room:
            raise CapsuleError(f"capsule: position {position} in a context of {room} tokens")
        starts = range(0, position, SEGMENT_TOKENS)
        if len(parts) != 1 + len(starts):
            raise CapsuleError(f"capsule at {position}: {len(parts)} parts, not {1 + len(starts)}")
        small, tail = self._small_state(parts[0], position)
        segments = [
            self._segment(part, start, min(start + SEGMENT_TOKENS, position))
            for part, start in zip(parts[1:], starts, strict=True)
        ]
        _check_chain(small.label, tail, [segment.label for segment in segments])
        if apart:
            small, segments = _set_apart(small, tail, segments, apart)
        capsule = TorchCapsule(
            position, small.take(small.label), tuple(each.take(each.label) for each in segments)
        )
        self._tiers.wait()
        return capsule

    def _small_state(
        self, part: CapsulePart | memoryview, position: int
    ) -> tuple[_Found[SmallState], Tail]:
        expected = Label("small", 0, position, self._fingerprint, b"", b"", b"")
        tier = self._tiers.names[-1]
        if not isinstance(part, memoryview):
            own = _living(SmallState, part, expected)
            tail: Tail = own.history.numpy()
            return _Found(own.label, lambda _: self._pool.small_in(own, tier)), tail
        layouts = small_layout(self._state, torch.from_numpy(empty_tail()))
        label, views = packing.read(part, expected, layouts)

        def take(label: Label) -> SmallState:
            def make() -> SmallState:
                tensors = {name: self._tensor(views[name], layouts[name]) for name in layouts}
                return SmallState(label, tier, **tensors)

            return self._pool.share(SmallState, label.name, tier, make)

        tail = np.frombuffer(views["history"], "<i4").reshape(2, SEGMENT_TOKENS)
        return _Found(label, take), tail

    def _segment(self, part: CapsulePart | memoryview, start: int, end: int) -> _Found[Segment]:
        expected = Label("kv", start, end, self._fingerprint, b"", b"", b"")
        tier = self._tiers.names[-1]
        if not isinstance(part, memoryview):
            own = _living(Segment, part, expected)
            return _Found(own.label, lambda _: self._pool.segment_in(own, tier))
        layout = segment_layout(self._state, end - start)
        label, views = packing.read(part, expected, layout)

        def take(label: Label) -> Segment:
            def make() -> Segment:
                return Segment(label, tier, self._tensor(views["kv"], layout["kv"]))

            return self._pool.share(Segment, label.name, tier, make)

        return _Found(label, take)

    def _tensor(self, data: memoryview, layout: Layout) -> torch.Tensor:
        return self._tiers.from_bytes(data, layout.shape, DTYPES[layout.dtype])


@dataclass(frozen=True)
class _Found(Generic[P]):
    """A part that is what it should be, taken only when all others are, too."""

    label: Label
    take: Callable[[Label], P]
    """The part under this label; a living one keeps its own."""


def _living(kind: type[P], part: CapsulePart, expected: Label) -> P:
    wanted = replace(expected, name=part.name)
    if not isinstance(part, kind):
        raise CapsuleError(f"capsule part {wanted.words()}: {type(part).__name__} is no such part")
    found = replace(part.label, after=b"", root=b"")
    if found != wanted:
        raise CapsuleError(
            f"capsule part {wanted.words()} of engine {wanted.fingerprint}: "
            f"it is {found.words()} of engine {found.fingerprint}"
        )
    return part


def _check_chain(small: Label, tail: Tail, segments: Sequence[Label]) -> None:
    """Are they of one history? Raises CapsuleError with both names where they part."""
    after = small.root
    for label in segments:
        _check_name(f"{label.words()}: its root", label.root, small.root)
        _check_name(f"{label.words()}: the part before it", label.after, after)
        if label.end - label.start == SEGMENT_TOKENS:
            after = label.name
        else:
            _check_name(
                f"{label.words()}: its name", label.name, name_of("kv", after, small.end, tail)
            )
    _check_name(f"{small.words()}: the part before it", small.after, after)
    _check_name(f"{small.words()}: its name", small.name, name_of("small", after, small.end, tail))
    rest = np.flatnonzero(tail[:, small.end % SEGMENT_TOKENS :])
    if len(rest):
        raise CapsuleError(
            f"capsule part {small.words()}: {len(rest)} numbers beyond its position, not 0"
        )


def _set_apart(
    small: _Found[SmallState], tail: Tail, segments: Sequence[_Found[Segment]], apart: bytes
) -> tuple[_Found[SmallState], list[_Found[Segment]]]:
    """All parts under names of their own; so are the names of whatever goes on from them."""
    end = small.label.end
    after = root = renamed(small.label.root, apart)
    found: list[_Found[Segment]] = []
    for each in segments:
        full = each.label.end - each.label.start == SEGMENT_TOKENS
        name = renamed(each.label.name, apart) if full else name_of("kv", after, end, tail)
        found.append(replace(each, label=replace(each.label, name=name, after=after, root=root)))
        after = name if full else after
    label = replace(small.label, name=name_of("small", after, end, tail), after=after, root=root)
    return replace(small, label=label), found


def _check_name(what: str, found: bytes, wanted: bytes) -> None:
    if found != wanted:
        raise CapsuleError(f"capsule part {what} is {found.hex()}, not {wanted.hex()}")
