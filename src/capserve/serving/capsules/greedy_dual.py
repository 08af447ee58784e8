"""Which of the kept things is the least worth its bytes?

GreedyDual (Young 1994), in the form of Cao and Irani (1997) for things of many sizes: when a thing
is used, H = L + value, value being what it costs to make again per byte; the lowest H leaves first,
and L rises to it. So a thing that is dear to make lives long, but not forever without use.

The value of a thing changes while it lies there, when what it shares with others comes or goes:
`reprice` moves H by the change and leaves L as it was at the last use.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")

_SLACK = 64
"""Stale heap entries that are not worth a rebuild."""


@dataclass(slots=True)
class _Rank:
    floor: float
    """L at the last use."""
    priority: float
    used: int
    """Counts uses; of two equal priorities, the one used earlier goes first."""
    version: int


class GreedyDual(Generic[K]):
    """A heap with lazy updates: `use`, `reprice` and `discard` are O(log n)."""

    def __init__(self) -> None:
        self._ranks: dict[K, _Rank] = {}
        self._heap: list[tuple[float, int, int, K]] = []  # priority, used, version, key
        self._floor = 0.0
        self._uses = 0
        self._versions = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def priority(self, key: K) -> float:
        return self._ranks[key].priority

    def use(self, key: K, value: float) -> None:
        """`key` is used now, for the first time or again."""
        self._uses += 1
        self._push(key, _Rank(self._floor, self._floor + value, self._uses, 0))

    def reprice(self, key: K, value: float) -> None:
        rank = self._ranks[key]
        self._push(key, _Rank(rank.floor, rank.floor + value, rank.used, 0))

    def discard(self, key: K) -> None:
        self._ranks.pop(key, None)

    def evict(self, key: K) -> None:
        """`key` leaves because it is the lowest of those that may: L rises to its H."""
        self._floor = max(self._floor, self._ranks.pop(key).priority)

    def lowest(self, may_go: Callable[[K], bool]) -> K | None:
        """The lowest of those that may go; None when none may."""
        passed: list[tuple[float, int, int, K]] = []
        found: K | None = None
        while self._heap and found is None:
            top = heapq.heappop(self._heap)
            rank = self._ranks.get(top[3])
            if rank is None or rank.version != top[2]:
                continue
            passed.append(top)
            if may_go(top[3]):
                found = top[3]
        for item in passed:
            heapq.heappush(self._heap, item)
        return found

    def _push(self, key: K, rank: _Rank) -> None:
        self._versions += 1
        rank.version = self._versions
        self._ranks[key] = rank
        heapq.heappush(self._heap, (rank.priority, rank.used, rank.version, key))
        if len(self._heap) > 2 * len(self._ranks) + _SLACK:
            self._heap = [(r.priority, r.used, r.version, k) for k, r in self._ranks.items()]
            heapq.heapify(self._heap)
