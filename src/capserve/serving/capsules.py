"""Which states are kept, and what do they weigh together?

A store of capsules in host memory under one byte budget. A capsule is named by its content
(namespace, position, digest of the tokens before it). Capsules share parts, so bytes are counted
once per live part, by reference counts. Unpinned capsules leave in the order of last use, for room
or after a time without use; a pin and the protected one (the running or hot session's newest) never
do. What can't fit is refused with a reason, and what left is remembered for a while, so that a
later miss can say why.

One thread uses a store. `Footprint` values may go anywhere.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from capserve.engine.seam import Capsule
from capserve.serving.journal import Span

REMEMBERED = 4096
"""Names of lost capsules that are kept for miss reasons: about 0.5 MB at most."""


PIN_SHARE = 0.5
"""Of the budget, for pins: they never leave, so all other reuse lives in what they spare."""


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
    """Capsules, and pins, that there was no room for."""


@dataclass(slots=True)
class Entry:
    capsule: Capsule
    spans: tuple[Span, ...]
    """How the state before `position` was computed: a resumed journal starts with them."""
    used_at: float
    """On the store's clock, in seconds."""
    pinned: bool = False
    pin_refused: bool = False


class CapsuleStore:
    def __init__(
        self,
        budget_bytes: int,
        remembered: int = REMEMBERED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert budget_bytes >= 0
        self.budget_bytes = budget_bytes
        self.pin_budget_bytes = int(budget_bytes * PIN_SHARE)
        self._clock = clock
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
        """Keep `capsule`; evict older ones for it. Returns why not, or None when all went well.

        A pin that is refused may still be kept unpinned: `holds` tells.
        """
        assert capsule.position == key.position
        if key in self._entries:
            self.get(key)
            return self.pin(key) if pin else None
        refusal = self._make_room(capsule)
        if refusal is not None:
            self.note_refusal(key)
            return refusal
        self._entries[key] = Entry(capsule, tuple(spans), self._clock())
        self._positions.setdefault(key.namespace, Counter())[key.position] += 1
        for part in capsule.parts:
            count, _ = self._references.get(part.key, (0, 0))
            self._references[part.key] = (count + 1, part.nbytes)
            if count == 0:
                self._used_bytes += part.nbytes
        self._forget_loss(key)
        return self.pin(key) if pin else None

    def get(self, key: CapsuleKey) -> Entry:
        """The capsule and its spans; it is now the most recently used. KeyError when absent."""
        self._entries.move_to_end(key)
        entry = self._entries[key]
        entry.used_at = self._clock()
        return entry

    def pin(self, key: CapsuleKey) -> str | None:
        """Keep it until `unpin`. KeyError when absent.

        Returns why not, when all pins together would take more than their share of the budget.
        """
        entry = self._entries[key]
        if entry.pinned:
            return None
        pins = _bytes_of([e.capsule for e in self._entries.values() if e.pinned] + [entry.capsule])
        entry.pinned = pins <= self.pin_budget_bytes
        entry.pin_refused = not entry.pinned
        if entry.pinned:
            return None
        self._refused += 1
        return f"needs {pins} bytes beside the pins, the budget for pins is {self.pin_budget_bytes}"

    def unpin(self, key: CapsuleKey) -> None:
        self._entries[key].pinned = False

    def protect(self, key: CapsuleKey | None) -> None:
        """Spare this one from eviction, in place of the one before (None: spare none)."""
        self._protected = key

    def spare(self, nbytes: int) -> None:
        """Evict until `nbytes` more would fit; evict nothing when they can't."""
        if _bytes_of(self._staying()) + nbytes <= self.budget_bytes:
            while self._used_bytes + nbytes > self.budget_bytes:
                evicted = self.evict_lru()
                assert evicted is not None, "room was promised above"

    def evict_lru(self) -> CapsuleKey | None:
        """Drop the least recently used capsule that may go. None when none may."""
        for key, entry in self._entries.items():
            if not entry.pinned and key != self._protected:
                self._remove(key)
                self._evicted += 1
                return key
        return None

    def expire(self, idle_ttl_s: float) -> int:
        """Drop what nobody used for longer than this. Returns how many went."""
        now = self._clock()
        gone = [
            key
            for key, entry in self._entries.items()
            if now - entry.used_at > idle_ttl_s and not entry.pinned and key != self._protected
        ]
        for key in gone:
            self._remove(key)
        self._evicted += len(gone)
        return len(gone)

    def clear(self) -> None:
        """Drop everything, pins too, whatever the accounts say: what to do when they are wrong."""
        lost = list(self._entries)
        self._entries.clear()
        self._references.clear()
        self._used_bytes = 0
        self._protected = None
        self._positions.clear()
        for key in lost:
            self._remember(key, Loss.EVICTED)
        self._evicted += len(lost)

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

    def _staying(self) -> list[Capsule]:
        """What no eviction takes."""
        staying: list[Capsule] = []
        for key, entry in self._entries.items():
            if entry.pinned or key == self._protected:
                staying.append(entry.capsule)
        return staying

    def _make_room(self, capsule: Capsule) -> str | None:
        if self._used_bytes + self._added_bytes(capsule) <= self.budget_bytes:
            return None
        # Judge before the first eviction: a refusal must not have emptied the store for nothing.
        needed = _bytes_of([capsule, *self._staying()])
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
        # A refused pin is not asked for again: see `Keeper.find_pin`.
        self._remember(key, Loss.OVER_BUDGET if entry.pin_refused else Loss.EVICTED)

    def _remember(self, key: CapsuleKey, loss: Loss) -> None:
        self._forget_loss(key)
        self._lost[key] = loss
        self._lost_positions.setdefault(key.namespace, Counter())[key.position] += 1
        while len(self._lost) > self._remembered:
            self._forget_loss(next(iter(self._lost)))

    def _forget_loss(self, key: CapsuleKey) -> None:
        if self._lost.pop(key, None) is not None:
            _count_down(self._lost_positions, key)


def _bytes_of(capsules: Iterable[Capsule]) -> int:
    """What these weigh together, a shared part once."""
    parts = {part.key: part.nbytes for capsule in capsules for part in capsule.parts}
    return sum(parts.values())


def _count_down(index: dict[str, Counter[int]], key: CapsuleKey) -> None:
    counter = index[key.namespace]
    counter[key.position] -= 1
    if counter[key.position] == 0:
        del counter[key.position]
        if not counter:
            del index[key.namespace]
