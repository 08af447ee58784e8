"""What a store's test needs: capsules with chosen parts, an engine that moves them, and a disk
whose writer works when it is told to."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from capserve.engine.seam import Capsule, CapsulePart, EngineLimits
from capserve.errors import CapsuleError
from capserve.serving.capsules.rows import CapsuleKey, CapsuleRow
from capserve.serving.capsules.store import CapsuleStore
from capserve.testing.fake_engine import fake_limits


@dataclass(frozen=True)
class PlainPart:
    name: bytes
    nbytes: int
    tier: str = "host"

    def pack(self) -> Sequence[memoryview]:
        return [memoryview(self.name), memoryview(struct.pack("<q", self.nbytes))]


@dataclass(frozen=True)
class PlainCapsule:
    position: int
    parts: tuple[PlainPart, ...]


class PlainEngine:
    """Moves by name alone. `full` tiers have no memory left."""

    def __init__(self, tiers: tuple[str, ...] = ("host",)) -> None:
        self._limits = fake_limits(tiers=tiers)
        self.full: set[str] = set()
        self.moves: list[tuple[int, str]] = []

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def move(self, capsule: Capsule, tier: str) -> Capsule:
        assert isinstance(capsule, PlainCapsule)
        if capsule.parts[0].tier == tier:
            return capsule
        if tier in self.full:
            raise MemoryError("planted")
        self.moves.append((capsule.position, tier))
        return replace(capsule, parts=tuple(replace(part, tier=tier) for part in capsule.parts))

    def unpack(
        self, position: int, parts: Sequence[CapsulePart | memoryview], apart: bytes = b""
    ) -> Capsule:
        tier = self._limits.tiers[-1]
        made = []
        for part in parts:
            if isinstance(part, memoryview):
                data = bytes(part)
                if data[:-8] == b"foreign":
                    raise CapsuleError("another engine's")
                made.append(PlainPart(data[:-8], struct.unpack("<q", data[-8:])[0], tier))
            else:
                assert isinstance(part, PlainPart)
                assert part.tier == tier, "a living part lies where the capsule is made"
                made.append(part)
        return PlainCapsule(position, tuple(made))


class ManualDisk:
    """Written is what `write` was told to write; evicted and torn what a test says."""

    def __init__(self, budget_bytes: int = 1 << 20) -> None:
        self.budget_bytes = budget_bytes
        self.fault: str | None = None
        self.waiting: dict[CapsuleKey, tuple[CapsuleRow, Sequence[CapsulePart]]] = {}
        self.rows: dict[CapsuleKey, CapsuleRow] = {}
        self.files: dict[bytes, bytes] = {}
        self.torn: set[bytes] = set()
        self.reads: list[bytes] = []
        self.touched: list[CapsuleKey] = []
        self._evicted: list[CapsuleKey] = []
        self._given_up: list[CapsuleKey] = []

    @property
    def takes_saves(self) -> bool:
        return self.fault is None

    @property
    def has_news(self) -> bool:
        return bool(self._evicted or self._given_up)

    @property
    def used_bytes(self) -> int:
        sizes = {part.name: part.nbytes for row in self.rows.values() for part in row.parts}
        return sum(sizes.values())

    @property
    def pending_bytes(self) -> int:
        return sum(part.nbytes for _, parts in self.waiting.values() for part in parts)

    def save(self, row: CapsuleRow, parts: Sequence[CapsulePart]) -> None:
        if self.fault is not None:
            self._evicted.append(row.key)
            self._given_up.append(row.key)
        else:
            self.waiting[row.key] = (row, parts)

    def holds(self, key: CapsuleKey) -> bool:
        return key in self.rows

    def read(self, name: bytes) -> memoryview:
        self.reads.append(name)
        if name in self.torn or name not in self.files:
            for key in [k for k, row in self.rows.items() if name in {p.name for p in row.parts}]:
                self.evict(key)
            self.files.pop(name, None)
            self.torn.discard(name)
            raise CapsuleError(f"part {name.hex()} is torn")
        return memoryview(self.files[name])

    def forget(self, key: CapsuleKey) -> None:
        self.waiting.pop(key, None)
        self.rows.pop(key, None)
        self._sweep()

    def set_pinned(self, key: CapsuleKey, pinned: bool) -> None:
        if key in self.waiting:
            row, parts = self.waiting[key]
            self.waiting[key] = (replace(row, pinned=pinned), parts)
        elif key in self.rows:
            self.rows[key] = replace(self.rows[key], pinned=pinned)

    def touch(self, key: CapsuleKey) -> None:
        self.touched.append(key)

    def take_evicted(self) -> list[CapsuleKey]:
        gone, self._evicted = self._evicted, []
        return [key for key in gone if key not in self.rows and key not in self.waiting]

    def take_given_up(self) -> list[CapsuleKey]:
        given_up, self._given_up = self._given_up, []
        return given_up

    # -- what a test does -----------------------------------------------------------------------

    def write(self, *keys: CapsuleKey) -> None:
        """The writer gets to these, or to all that wait."""
        for key in keys or tuple(self.waiting):
            row, parts = self.waiting.pop(key)
            for part in parts:
                self.files.setdefault(part.name, b"".join(part.pack()))
            self.rows[key] = row

    def evict(self, key: CapsuleKey) -> None:
        del self.rows[key]
        self._evicted.append(key)
        self._sweep()

    def fail(self) -> None:
        self.fault = "no space left on device"
        self._evicted += self.waiting
        self._given_up += self.waiting
        self.waiting.clear()

    def _sweep(self) -> None:
        named = {part.name for row in self.rows.values() for part in row.parts}
        self.files = {name: data for name, data in self.files.items() if name in named}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def key(position: int, namespace: str = "k/a") -> CapsuleKey:
    return CapsuleKey(namespace, position, bytes([position]))


def capsule(position: int, *parts: tuple[int, int], tier: str = "host") -> PlainCapsule:
    """`parts`: (name, bytes)."""
    made = [PlainPart(name.to_bytes(16, "little"), nbytes, tier) for name, nbytes in parts]
    return PlainCapsule(position, tuple(made))


def small(position: int, nbytes: int = 10, tier: str = "host") -> PlainCapsule:
    return capsule(position, (1000 + position, nbytes), tier=tier)


def make_store(
    budgets: int | Mapping[str, int],
    disk: ManualDisk | None = None,
    *,
    engine: PlainEngine | None = None,
    remembered: int = 4096,
    clock: Clock | None = None,
) -> CapsuleStore:
    """One tier of so many bytes, or those of `budgets`."""
    given = {"host": budgets} if isinstance(budgets, int) else budgets
    clock = clock or Clock()
    return CapsuleStore(
        engine or PlainEngine(tuple(given)),
        given,
        disk,
        remembered=remembered,
        clock=clock,
        unix_clock=lambda: 1e9 + clock(),
    )
