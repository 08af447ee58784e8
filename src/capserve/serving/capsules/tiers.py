"""What do the capsules of one memory tier weigh together, and which of them leaves first?

Parts are counted once per tier, by name: equal names are equal bytes (E10), and an engine shares
them within a tier. The order of leaving is GreedyDual's. The value of a capsule is the number of
tokens that would have to be read again without it, over the bytes that nobody else in the tier
holds: tokens, not milliseconds, since the factor between them is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from capserve.engine.seam import Capsule, CapsulePart, EngineLimits
from capserve.serving.capsules.greedy_dual import GreedyDual
from capserve.serving.capsules.rows import CapsuleKey, CapsuleRow, PartRow

PIN_SHARE = 0.5
"""Of a tier's budget, for pins: they never leave, so all other reuse lives in what they spare."""

DISK = "disk"


class Mover(Protocol):
    """What a store needs of an engine (`capserve.engine.seam.Engine`)."""

    @property
    def limits(self) -> EngineLimits: ...
    def move(self, capsule: Capsule, tier: str) -> Capsule: ...
    def unpack(
        self, position: int, parts: Sequence[CapsulePart | memoryview], apart: bytes = b""
    ) -> Capsule: ...


class Disk(Protocol):
    """What a store needs of a disk tier (`serving/disk/tier.py`). Only `read` waits for it."""

    @property
    def used_bytes(self) -> int: ...
    @property
    def budget_bytes(self) -> int: ...
    @property
    def pending_bytes(self) -> int:
        """0: whatever was handed over is written, or was given up."""
        ...

    @property
    def fault(self) -> str | None:
        """Why nothing is written now; what is there can still be read."""
        ...

    def save(self, row: CapsuleRow, parts: Sequence[CapsulePart]) -> None: ...
    def holds(self, key: CapsuleKey) -> bool: ...
    def read(self, name: bytes) -> memoryview: ...
    def forget(self, key: CapsuleKey) -> None: ...
    def set_pinned(self, key: CapsuleKey, pinned: bool) -> None: ...
    def take_given_up(self) -> Collection[CapsuleKey]:
        """Saves, since the last call, that may be handed over again."""
        ...

    @property
    def takes_saves(self) -> bool:
        """No fault stands in the way, or it is time to try again."""
        ...

    @property
    def has_news(self) -> bool:
        """Does one of the two `take_` have anything to say? Cheap."""
        ...

    def touch(self, key: CapsuleKey) -> None: ...
    def take_evicted(self) -> Collection[CapsuleKey]:
        """Capsules that are no longer there since the last call, for whatever reason but
        `forget`: the budget, a fault, a torn file."""
        ...


class Sized(Protocol):
    """A part, or the row of one."""

    @property
    def name(self) -> bytes: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(slots=True)
class _Shared:
    part: CapsulePart
    holders: set[CapsuleKey]


class MemoryTier:
    """The account and the order of one tier; it moves nothing itself."""

    def __init__(self, name: str, budget_bytes: int) -> None:
        assert budget_bytes >= 0
        self.name = name
        self.budget_bytes = budget_bytes
        self.pin_budget_bytes = int(budget_bytes * PIN_SHARE)
        self.used_bytes = 0
        self._shared: dict[bytes, _Shared] = {}
        self._parts: dict[CapsuleKey, Sequence[CapsulePart]] = {}
        self._rebuild_tokens: dict[CapsuleKey, int] = {}
        self._order: GreedyDual[CapsuleKey] = GreedyDual()

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, key: CapsuleKey) -> bool:
        return key in self._parts

    def __iter__(self) -> Iterator[CapsuleKey]:
        return iter(self._parts)

    def part(self, name: bytes) -> CapsulePart | None:
        shared = self._shared.get(name)
        return None if shared is None else shared.part

    def added_bytes(self, parts: Iterable[Sized]) -> int:
        """What these would add to the account."""
        return sum({p.name: p.nbytes for p in parts if p.name not in self._shared}.values())

    def bytes_of(self, keys: Iterable[CapsuleKey], parts: Iterable[Sized] = ()) -> int:
        """What these capsules, and `parts`, weigh together: a shared part once."""
        sizes = {part.name: part.nbytes for part in parts}
        for key in keys:
            sizes.update((part.name, part.nbytes) for part in self._parts[key])
        return sum(sizes.values())

    def exclusive_bytes(self, key: CapsuleKey) -> int:
        """What leaves the tier with this one."""
        names = {part.name: part.nbytes for part in self._parts[key]}
        return sum(n for name, n in names.items() if len(self._shared[name].holders) == 1)

    # -- in and out ---------------------------------------------------------------------------

    def enter(self, key: CapsuleKey, parts: Sequence[CapsulePart], rebuild_tokens: int) -> None:
        assert key not in self._parts
        lost_alone: set[CapsuleKey] = set()
        for part in parts:
            shared = self._shared.get(part.name)
            if shared is None:
                self._shared[part.name] = _Shared(part, {key})
                self.used_bytes += part.nbytes
            elif key not in shared.holders:
                if len(shared.holders) == 1:
                    lost_alone |= shared.holders
                shared.holders.add(key)
        self._parts[key] = parts
        self._rebuild_tokens[key] = rebuild_tokens
        self._order.use(key, self._value(key))
        self._reprice(lost_alone)

    def leave(self, key: CapsuleKey, *, evicted: bool = False) -> None:
        """`evicted`: it was the lowest of those that could go."""
        now_alone: set[CapsuleKey] = set()
        for name in {part.name for part in self._parts.pop(key)}:
            shared = self._shared[name]
            shared.holders.remove(key)
            if not shared.holders:
                del self._shared[name]
                self.used_bytes -= shared.part.nbytes
            elif len(shared.holders) == 1:
                now_alone |= shared.holders
        del self._rebuild_tokens[key]
        if evicted:
            self._order.evict(key)
        else:
            self._order.discard(key)
        self._reprice(now_alone)

    def use(self, key: CapsuleKey) -> None:
        self._order.use(key, self._value(key))

    def rebase(self, key: CapsuleKey, rebuild_tokens: int) -> None:
        """The boundary that this one would be rebuilt from has come or gone."""
        self._rebuild_tokens[key] = rebuild_tokens
        self._order.reprice(key, self._value(key))

    def lowest(self, may_go: Callable[[CapsuleKey], bool]) -> CapsuleKey | None:
        return self._order.lowest(may_go)

    def check(self, capsules: dict[CapsuleKey, Capsule]) -> None:
        """The account against `capsules`, which the store believes to lie here, counted afresh."""
        assert capsules.keys() == self._parts.keys(), f"{self.name}: the tier and the store differ"
        sizes: dict[bytes, int] = {}
        for capsule in capsules.values():
            for part in capsule.parts:
                assert part.tier == self.name, f"a part in {part.tier}, counted in {self.name}"
                assert sizes.setdefault(part.name, part.nbytes) == part.nbytes
        fresh = sum(sizes.values())
        assert fresh == self.used_bytes, (
            f"{self.name}: counter {self.used_bytes} bytes, parts {fresh}"
        )
        assert sizes.keys() == self._shared.keys(), f"{self.name}: a part outlives its capsules"
        self.check_counters(len(capsules))

    def check_counters(self, capsules: int) -> None:
        """Against the parts as they are listed; `capsules` lie here as the store believes."""
        assert len(self._parts) == capsules, f"{self.name}: the tier and the store differ"
        assert len(self._order) == capsules, f"{self.name}: some capsule has no rank"
        listed = sum(shared.part.nbytes for shared in self._shared.values())
        assert listed == self.used_bytes, (
            f"{self.name}: counter {self.used_bytes} bytes, parts {listed}"
        )
        assert self.used_bytes <= self.budget_bytes, (
            f"{self.name}: {self.used_bytes} bytes kept, budget {self.budget_bytes}"
        )

    def check_capsule(self, key: CapsuleKey, capsule: Capsule) -> None:
        """Its parts are the ones that are counted, and counted for it."""
        for part in capsule.parts:
            assert part.tier == self.name, f"a part in {part.tier}, counted in {self.name}"
            shared = self._shared.get(part.name)
            assert shared is not None, f"{self.name}: a part is not counted"
            assert shared.part.nbytes == part.nbytes
            assert key in shared.holders, f"{self.name}: a part does not know its capsule"

    def _value(self, key: CapsuleKey) -> float:
        return self._rebuild_tokens[key] / max(1, self.exclusive_bytes(key))

    def _reprice(self, keys: Iterable[CapsuleKey]) -> None:
        for key in keys:
            self._order.reprice(key, self._value(key))


def part_rows(parts: Iterable[CapsulePart]) -> tuple[PartRow, ...]:
    return tuple(PartRow(part.name, part.nbytes) for part in parts)


def out_of_memory(error: Exception) -> bool:
    """Allocators say so in two ways: by type, or only in words."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in said or "can't allocate" in said
