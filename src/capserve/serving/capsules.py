"""Which states are kept, and what do they weigh together?

A store of capsules in host memory under one byte budget. A capsule is named by its content
(namespace, position, digest of the tokens before it). Capsules share parts, so bytes are counted
once per live part, by reference counts. Unpinned capsules leave in the order of last use; a pin and
the protected one (the running or hot session's newest) never do. What can't fit is refused with a
reason, and what left is remembered for a while, so that a later miss can say why.

One thread uses a store. `Footprint` values may go anywhere.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from capserve.engine.seam import Capsule
from capserve.serving.journal import Span

REMEMBERED = 4096
"""Names of lost capsules that are kept for miss reasons: about 0.5 MB at most."""


@dataclass(frozen=True, slots=True)
class CapsuleKey:
    namespace: str
    position: int
    digest: bytes
    """blake2b of the int32 bytes of the tokens before `position`."""


class Loss(StrEnum):
    """Why a capsule that was worth keeping is not there."""

    EVICTED = "evicted"
    OVER_BUDGET = "over_budget"


@dataclass(frozen=True, slots=True)
class Footprint:
    used_bytes: int
    budget_bytes: int
    capsules: int
    pinned: int
    evicted: int
    refused: int


@dataclass(slots=True)
class Entry:
    capsule: Capsule
    spans: tuple[Span, ...]
    """How the state before `position` was computed: a resumed journal starts with them."""
    pinned: bool = False


class CapsuleStore:
    def __init__(self, budget_bytes: int, remembered: int = REMEMBERED) -> None:
        assert budget_bytes >= 0
        self.budget_bytes = budget_bytes
        self._entries: OrderedDict[CapsuleKey, Entry] = OrderedDict()  # least recently used first
        self._references: dict[int, tuple[int, int]] = {}  # part key -> (capsules, bytes)
        self._used_bytes = 0
        self._protected: CapsuleKey | None = None
        self._positions: dict[str, Counter[int]] = {}
        self._lost: OrderedDict[CapsuleKey, Loss] = OrderedDict()
        self._lost_positions: dict[str, Counter[int]] = {}
        self._remembered = remembered
        self._evicted = 0
        self._refused = 0

    # -- the index that the policy reads -----------------------------------------------------

    def positions(self, namespace: str) -> list[int]:
        """Positions at which some capsule of the namespace lies, ascending."""
        return sorted(self._positions.get(namespace, ()))

    def holds(self, key: CapsuleKey) -> bool:
        return key in self._entries

    def lost_positions(self, namespace: str) -> list[int]:
        """Like `positions`, of capsules that are remembered as lost."""
        return sorted(self._lost_positions.get(namespace, ()))

    def loss(self, key: CapsuleKey) -> Loss | None:
        return self._lost.get(key)

    # -- keeping ------------------------------------------------------------------------------

    def put(
        self, key: CapsuleKey, capsule: Capsule, spans: Iterable[Span], *, pin: bool = False
    ) -> str | None:
        """Keep `capsule`; evict older ones for it. Returns why not, or None when it is kept."""
        assert capsule.position == key.position
        if key in self._entries:
            self._entries.move_to_end(key)
            self._entries[key].pinned |= pin
            return None
        refusal = self._make_room(capsule)
        if refusal is not None:
            self.note_refusal(key)
            return refusal
        self._entries[key] = Entry(capsule, tuple(spans), pin)
        self._positions.setdefault(key.namespace, Counter())[key.position] += 1
        for part in capsule.parts:
            count, _ = self._references.get(part.key, (0, 0))
            self._references[part.key] = (count + 1, part.nbytes)
            if count == 0:
                self._used_bytes += part.nbytes
        self._forget_loss(key)
        return None

    def get(self, key: CapsuleKey) -> Entry:
        """The capsule and its spans; it is now the most recently used. KeyError when absent."""
        self._entries.move_to_end(key)
        return self._entries[key]

    def pin(self, key: CapsuleKey) -> None:
        """Keep it until `unpin`. It is already within the budget. KeyError when absent."""
        self._entries[key].pinned = True

    def unpin(self, key: CapsuleKey) -> None:
        self._entries[key].pinned = False

    def protect(self, key: CapsuleKey | None) -> None:
        """Spare this one from eviction, in place of the one before (None: spare none)."""
        self._protected = key

    def evict_lru(self) -> CapsuleKey | None:
        """Drop the least recently used capsule that may go. None when none may."""
        for key, entry in self._entries.items():
            if not entry.pinned and key != self._protected:
                self._remove(key)
                self._evicted += 1
                return key
        return None

    def expire(self, keys: Iterable[CapsuleKey]) -> int:
        """Drop these, pins excepted (their sessions are gone). Returns how many went."""
        gone = [key for key in keys if key in self._entries and not self._entries[key].pinned]
        for key in gone:
            self._remove(key)
        self._evicted += len(gone)
        return len(gone)

    def note_refusal(self, key: CapsuleKey) -> None:
        """Remember that this one was not kept for lack of room."""
        self._refused += 1
        self._remember(key, Loss.OVER_BUDGET)

    def footprint(self) -> Footprint:
        return Footprint(
            used_bytes=self._used_bytes,
            budget_bytes=self.budget_bytes,
            capsules=len(self._entries),
            pinned=sum(entry.pinned for entry in self._entries.values()),
            evicted=self._evicted,
            refused=self._refused,
        )

    def check(self) -> None:
        """The counter equals the bytes of all live parts, counted afresh, and keeps the budget."""
        parts: dict[int, int] = {}
        for entry in self._entries.values():
            parts.update((part.key, part.nbytes) for part in entry.capsule.parts)
        fresh = sum(parts.values())
        assert fresh == self._used_bytes, f"counter {self._used_bytes} bytes, parts {fresh}"
        assert parts.keys() == self._references.keys(), "a part outlives its capsules"
        assert self._used_bytes <= self.budget_bytes, (
            f"{self._used_bytes} bytes kept, budget {self.budget_bytes}"
        )
        counted = sum(sum(counter.values()) for counter in self._positions.values())
        assert counted == len(self._entries), "the index and the store disagree"

    # -- accounting ---------------------------------------------------------------------------

    def _added_bytes(self, capsule: Capsule) -> int:
        fresh = {p.key: p.nbytes for p in capsule.parts if p.key not in self._references}
        return sum(fresh.values())

    def _make_room(self, capsule: Capsule) -> str | None:
        if self._used_bytes + self._added_bytes(capsule) <= self.budget_bytes:
            return None
        # Judge before the first eviction: a refusal must not have emptied the store for nothing.
        staying = {part.key: part.nbytes for part in capsule.parts}
        for key, entry in self._entries.items():
            if entry.pinned or key == self._protected:
                staying.update((part.key, part.nbytes) for part in entry.capsule.parts)
        needed = sum(staying.values())
        if needed > self.budget_bytes:
            return f"needs {needed} bytes beside the pins, the budget is {self.budget_bytes}"
        while self._used_bytes + self._added_bytes(capsule) > self.budget_bytes:
            evicted = self.evict_lru()
            assert evicted is not None, "room was promised above"
        return None

    def _remove(self, key: CapsuleKey) -> None:
        entry = self._entries.pop(key)
        _count_down(self._positions, key)
        for part in entry.capsule.parts:
            count, nbytes = self._references[part.key]
            if count > 1:
                self._references[part.key] = (count - 1, nbytes)
            else:
                del self._references[part.key]
                self._used_bytes -= nbytes
        self._remember(key, Loss.EVICTED)

    def _remember(self, key: CapsuleKey, loss: Loss) -> None:
        self._forget_loss(key)
        self._lost[key] = loss
        self._lost_positions.setdefault(key.namespace, Counter())[key.position] += 1
        while len(self._lost) > self._remembered:
            self._forget_loss(next(iter(self._lost)))

    def _forget_loss(self, key: CapsuleKey) -> None:
        if self._lost.pop(key, None) is not None:
            _count_down(self._lost_positions, key)


def _count_down(index: dict[str, Counter[int]], key: CapsuleKey) -> None:
    counter = index[key.namespace]
    counter[key.position] -= 1
    if counter[key.position] == 0:
        del counter[key.position]
        if not counter:
            del index[key.namespace]
