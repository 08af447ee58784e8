"""What are the pieces of the fake engine's capsules?

Names digest the tokens and how each was absorbed, as a real engine's do. Packed, a piece is a file
of the real form and of the real size. Like the real engine, `read_parts` looks at what the parts
say of themselves and not at their KV: bytes that changed on their way show in `restore`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from capserve.engine import packing
from capserve.engine.packing import Label, Layout
from capserve.engine.seam import CapsulePart, EngineLimits
from capserve.errors import CapsuleError

ROOT = bytes(16)
"""The name before the first segment."""


@dataclass(frozen=True, eq=False)
class FakePart:
    """A segment's tokens and `how` each was absorbed; or the fold over all tokens, and both of the
    last, partial segment."""

    label: Label
    tier: str
    nbytes: int
    """As the limits promise; what the tensors lack is packed as zeros."""
    tensors: Mapping[str, bytes]

    @property
    def name(self) -> bytes:
        return self.label.name

    def pack(self) -> list[memoryview]:
        head = packing.header(self.label, _layouts(self.tensors, self.nbytes))
        filling = bytes(_filling(self.tensors, self.nbytes))
        return [memoryview(piece) for piece in (head, *self.tensors.values(), filling)]


def _filling(tensors: Mapping[str, bytes], nbytes: int) -> int:
    return max(0, nbytes - sum(map(len, tensors.values())))


def _layouts(tensors: Mapping[str, bytes], nbytes: int) -> dict[str, Layout]:
    own = {name: Layout("U8", (len(data),)) for name, data in tensors.items()}
    return own | {"filling": Layout("U8", (_filling(tensors, nbytes),))}


def _name(kind: str, after: bytes, tokens: bytes, how: bytes) -> bytes:
    return blake2b(after + tokens + how, digest_size=16, person=kind.encode()).digest()


@dataclass(frozen=True)
class FakeCapsule:
    position: int
    parts: tuple[FakePart, ...]

    @property
    def tier(self) -> str:
        return self.parts[0].tier

    @property
    def root(self) -> bytes:
        """The name before its first part."""
        return self.parts[0].label.root


def parts_of(
    absorbed: bytes | bytearray,
    how: bytes | bytearray,
    fold: bytes,
    limits: EngineLimits,
    root: bytes = ROOT,
) -> list[FakePart]:
    """The pieces of the state that absorbed these int32 tokens after `root`, each so (`how`, int16:
    see `engine/history.py`), in the first tier."""
    tier, room = limits.tiers[0], limits.segment_tokens
    end = len(absorbed) // 4
    after, tail, tail_how, segments = root, b"", b"", []
    for start in range(0, end, room):
        tokens = bytes(absorbed[4 * start : 4 * (start + room)])
        ways = bytes(how[2 * start : 2 * (start + room)])
        count = len(tokens) // 4
        name = _name("kv", after, tokens, ways)
        label = Label("kv", start, start + count, limits.fingerprint, name, after, root)
        nbytes = count * limits.kv_bytes_per_token
        segments.append(FakePart(label, tier, nbytes, {"tokens": tokens, "how": ways}))
        full = count == room
        after, tail, tail_how = (name, b"", b"") if full else (after, tokens, ways)
    name = _name("small", after, tail, tail_how)
    label = Label("small", 0, end, limits.fingerprint, name, after, root)
    tensors = {
        "fold": fold,
        "tail": tail.ljust(4 * room, b"\0"),
        "tail_how": tail_how.ljust(2 * room, b"\0"),
    }
    return [FakePart(label, tier, limits.small_state_bytes, tensors), *segments]


def read_parts(
    position: int, parts: Sequence[CapsulePart | memoryview], limits: EngineLimits
) -> list[FakePart]:
    """As `seam.Engine.unpack` takes them, in the last tier. Raises CapsuleError."""
    if not 0 <= position <= limits.max_positions:
        raise CapsuleError(
            f"capsule: position {position} in a context of {limits.max_positions} tokens"
        )
    room = limits.segment_tokens
    starts = range(0, position, room)
    if len(parts) != 1 + len(starts):
        raise CapsuleError(f"capsule at {position}: {len(parts)} parts, not {1 + len(starts)}")
    label = Label("small", 0, position, limits.fingerprint, b"", b"", b"")
    found = [_read(parts[0], label, {"fold": 16, "tail": 4 * room, "tail_how": 2 * room}, limits)]
    for part, start in zip(parts[1:], starts, strict=True):
        end = min(start + room, position)
        label = Label("kv", start, end, limits.fingerprint, b"", b"", b"")
        found.append(
            _read(part, label, {"tokens": 4 * (end - start), "how": 2 * (end - start)}, limits)
        )
    _check_chain(found[0], [part.label for part in found[1:]], room)
    return found


def _read(
    part: CapsulePart | memoryview, expected: Label, sizes: Mapping[str, int], limits: EngineLimits
) -> FakePart:
    tier = limits.tiers[-1]
    if isinstance(part, memoryview):
        kv = (expected.end - expected.start) * limits.kv_bytes_per_token
        nbytes = kv if expected.kind == "kv" else limits.small_state_bytes
        layouts = _layouts({name: bytes(size) for name, size in sizes.items()}, nbytes)
        label, views = packing.read(part, expected, layouts)
        return FakePart(label, tier, nbytes, {name: bytes(views[name]) for name in sizes})
    if not isinstance(part, FakePart):
        raise CapsuleError(f"capsule part {expected.words()}: {type(part).__name__} is no such")
    if replace(part.label, name=b"", after=b"", root=b"") != expected:
        raise CapsuleError(f"capsule part {expected.words()}: it is {part.label.words()}")
    return replace(part, tier=tier)


def _check_chain(small: FakePart, labels: Sequence[Label], room: int) -> None:
    """By what the parts say, and by the tail in the small state; as a real engine."""
    tail = _tail(small, room)
    after = root = small.label.root
    for label in labels:
        full = label.end - label.start == room
        if (
            label.root != root
            or label.after != after
            or not (full or label.name == _name("kv", after, *tail))
        ):
            raise CapsuleError(f"capsule part {label.words()}: not of the history before it")
        after = label.name if full else after
    if small.label.after != after or small.name != _name("small", after, *tail):
        raise CapsuleError(f"capsule part {small.label.words()}: not of its KV's history")


def _tail(small: FakePart, room: int) -> tuple[bytes, bytes]:
    """Tokens since the last full segment, and how they were absorbed."""
    length = small.label.end % room
    return small.tensors["tail"][: 4 * length], small.tensors["tail_how"][: 2 * length]


def set_apart(parts: Sequence[FakePart], apart: bytes) -> list[FakePart]:
    """All parts under names that no other history has; as a real engine."""
    small, *segments = parts
    room = len(small.tensors["tail"]) // 4
    after = root = blake2b(small.label.root, digest_size=16, key=apart).digest()
    found = []
    for part in segments:
        name = _name("kv", after, part.tensors["tokens"], part.tensors["how"])
        found.append(replace(part, label=replace(part.label, name=name, after=after, root=root)))
        after = name if part.label.end - part.label.start == room else after
    name = _name("small", after, *_tail(small, room))
    label = replace(small.label, name=name, after=after, root=root)
    return [replace(small, label=label), *found]
