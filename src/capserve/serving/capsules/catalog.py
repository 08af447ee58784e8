"""Which capsules exist, in memory or on disk, which are gone, and what would each be rebuilt from?

Plain bookkeeping: names, positions, losses and lineage. Bytes and tiers are the store's.

Lineage: a capsule is based on the boundary before it in the journal that it was taken from. When
that one goes, the capsule is based on what it was based on, and its rebuild costs more. (One that
comes back later does not get its children back: that would need a search for what a rare event
gains.)
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from capserve.engine.seam import Capsule
from capserve.serving.capsules.rows import CapsuleKey, CapsuleRow, PartRow
from capserve.serving.journal import Span, SpanKind

REMEMBERED = 4096
"""Names of lost capsules that are kept for miss reasons: about 1 MB at most."""


class Loss(StrEnum):
    """Why a capsule that was worth keeping is not there."""

    EVICTED = "evicted"
    OVER_BUDGET = "over_budget"


@dataclass(slots=True)
class Entry:
    key: CapsuleKey
    spans: tuple[Span, ...]
    """How the state before `position` was computed: a resumed journal starts with them."""
    parts: tuple[PartRow, ...]
    used_at: float
    """On the store's clock, in seconds."""
    based_on: CapsuleKey | None = None
    capsule: Capsule | None = None
    """None: it lies on disk alone."""
    tier: str | None = None
    """The memory tier of `capsule`."""
    on_disk: bool = False
    """It was handed to the disk tier, which has not reported it as gone. `Disk.holds` says whether
    it is durable yet."""
    pinned: bool = False
    pinned_on_disk: bool = False
    pin_refused: bool = False
    holds: int = 0
    """Parked turns that will come back to it."""
    parked_as: CapsuleKey | None = None
    """For the state of a parked turn, which no plan may find: the name it would have otherwise."""
    _exact: bool | None = None

    def is_exact(self, grid: int) -> bool:
        """Prefilled from grid points alone: a cold run would come to the same bits."""
        if self._exact is None:
            self._exact = self.key.position % grid == 0 and prefilled_from_grid(self.spans, grid)
        return self._exact

    @property
    def rebuild_tokens(self) -> int:
        """Tokens that would be read again to have it back."""
        return self.key.position - (0 if self.based_on is None else self.based_on.position)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class Catalog:
    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._entries: dict[CapsuleKey, Entry] = {}
        self._positions: dict[str, Counter[int]] = {}
        self._children: dict[CapsuleKey, set[CapsuleKey]] = {}
        # Of what was lost: why, and what it was based on.
        self._lost: OrderedDict[CapsuleKey, tuple[Loss, CapsuleKey | None]] = OrderedDict()
        self._lost_positions: dict[str, Counter[int]] = {}
        self._remembered = remembered

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: CapsuleKey) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def find(self, key: CapsuleKey) -> Entry | None:
        return self._entries.get(key)

    def positions(self, namespace: str) -> list[int]:
        """Positions at which some capsule of the namespace lies, ascending."""
        return sorted(self._positions.get(namespace, ()))

    def lost_positions(self, namespace: str) -> list[int]:
        return sorted(self._lost_positions.get(namespace, ()))

    def loss(self, key: CapsuleKey) -> Loss | None:
        lost = self._lost.get(key)
        return None if lost is None else lost[0]

    def held_base(self, key: CapsuleKey, base: CapsuleKey | None) -> CapsuleKey | None:
        """The nearest boundary at `base` or before it that is still there, and before `key`."""
        while base is not None and (base not in self._entries or base.position >= key.position):
            _, base = self._lost.get(base, (None, None))
        return base

    # -- coming and going ---------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        key = entry.key
        assert key not in self._entries
        self._entries[key] = entry
        _count_up(self._positions, key)
        self.forget_loss(key)
        self._base(entry, self.held_base(key, entry.based_on))

    def adopt(self, rows: Iterable[CapsuleRow], used_at: float, now: float) -> int:
        """Fill in what lies on disk alone. `used_at` on the rows' clock is `now` on this one."""
        adopted = []
        for row in rows:
            key = row.key
            if key in self._entries:
                continue
            entry = Entry(
                key,
                row.spans,
                row.parts,
                now - max(0.0, used_at - row.used_at),
                row.based_on,
                on_disk=True,
                pinned=row.pinned,
                pinned_on_disk=row.pinned,
            )
            self._entries[key] = entry
            _count_up(self._positions, key)
            self.forget_loss(key)
            adopted.append(entry)
        for entry in adopted:  # a row may come before the one that it is based on
            self._base(entry, self.held_base(entry.key, entry.based_on))
        return len(adopted)

    def remove(self, key: CapsuleKey, loss: Loss | None) -> list[Entry]:
        """Take it out; returns those that now cost more to rebuild. `loss` None: nobody will miss
        it."""
        entry = self._entries.pop(key)
        _count_down(self._positions, key)
        if entry.based_on is not None:
            self._orphan(entry)
        children = [self._entries[child] for child in self._children.pop(key, ())]
        for child in children:
            self._base(child, entry.based_on)
        if loss is not None:
            self.remember(key, loss, entry.based_on)
        return children

    def remember(self, key: CapsuleKey, loss: Loss, based_on: CapsuleKey | None = None) -> None:
        self.forget_loss(key)
        self._lost[key] = (loss, based_on)
        _count_up(self._lost_positions, key)
        while len(self._lost) > self._remembered:
            self.forget_loss(next(iter(self._lost)))

    def forget_loss(self, key: CapsuleKey) -> None:
        if self._lost.pop(key, None) is not None:
            _count_down(self._lost_positions, key)

    def check(self) -> None:
        counted = sum(sum(counter.values()) for counter in self._positions.values())
        assert counted == len(self._entries), "the index and the store disagree"
        for entry in self._entries.values():
            base = entry.based_on
            if base is not None:
                assert base in self._entries, "a capsule is based on one that is gone"
                assert entry.key in self._children[base], "a boundary does not know its child"
        children = sum(len(children) for children in self._children.values())
        based = sum(entry.based_on is not None for entry in self._entries.values())
        assert children == based, "the lineage names children that are gone"

    def _base(self, entry: Entry, base: CapsuleKey | None) -> None:
        entry.based_on = base
        if base is not None:
            self._children.setdefault(base, set()).add(entry.key)

    def _orphan(self, entry: Entry) -> None:
        assert entry.based_on is not None
        siblings = self._children[entry.based_on]
        siblings.discard(entry.key)
        if not siblings:
            del self._children[entry.based_on]


def prefilled_from_grid(spans: Iterable[Span], grid: int) -> bool:
    return all(span.kind is SpanKind.PREFILL and span.start % grid == 0 for span in spans)


def _count_up(index: dict[str, Counter[int]], key: CapsuleKey) -> None:
    counter = index.get(key.namespace)
    if counter is None:
        counter = index[key.namespace] = Counter()
    counter[key.position] += 1


def _count_down(index: dict[str, Counter[int]], key: CapsuleKey) -> None:
    counter = index[key.namespace]
    counter[key.position] -= 1
    if counter[key.position] == 0:
        del counter[key.position]
        if not counter:
            del index[key.namespace]
