"""Do a store's accounts say what it holds?

`check_all` counts everything afresh: 0.2 s for some thousand capsules of a hundred parts each, too
long for between two units of work. There `check_some` compares the counters with what is listed,
and one slice of the capsules with the lists, so that in time it comes to each.
"""

from __future__ import annotations

from collections.abc import Mapping

from capserve.engine.seam import Capsule
from capserve.serving.capsules.catalog import Catalog, Entry
from capserve.serving.capsules.copies import DiskCopies
from capserve.serving.capsules.memory import Memory
from capserve.serving.capsules.rows import CapsuleKey

CHECKED_PARTS = 20_000
"""Of one slice: about 10 ms."""


class StoreCheck:
    def __init__(
        self,
        catalog: Catalog,
        parked: Mapping[CapsuleKey, Entry],
        memory: Memory,
        copies: DiskCopies,
    ) -> None:
        self._catalog = catalog
        self._parked = parked
        self._memory = memory
        self._copies = copies
        self._checked = 0
        """Capsules that the slices of this round have checked."""

    def check_all(self) -> None:
        entries = self._entries()
        for tier in self._memory.tiers:
            tier.check({e.key: e.capsule for e in entries if e.tier == tier.name and e.capsule})
        for entry in entries:
            _check_entry(entry)
        self._check_lists()

    def check_some(self, most_parts: int) -> None:
        entries = self._entries()
        for tier in self._memory.tiers:
            tier.check_counters(sum(entry.tier == tier.name for entry in entries))
        parts = 0
        start = self._checked if self._checked < len(entries) else 0
        for number, entry in enumerate(entries[start:], start + 1):
            _check_entry(entry)
            if entry.tier is not None and entry.capsule is not None:
                self._memory.tier(entry.tier).check_capsule(entry.key, entry.capsule)
            self._checked = number
            parts += len(entry.parts)
            if parts >= most_parts:
                break
        self._check_lists()

    def _entries(self) -> list[Entry]:
        return [*self._catalog, *self._parked.values()]

    def _check_lists(self) -> None:
        assert all(entry.holds for entry in self._parked.values()), "a parked state nobody holds"
        for key in self._copies.leaving:
            entry = self._catalog.find(key)
            assert entry is not None, "a capsule left the index, but not the memory"
            assert entry.tier is None, "a capsule is in memory twice"
        self._catalog.check()


def _check_entry(entry: Entry) -> None:
    assert (entry.capsule is None) == (entry.tier is None)
    assert entry.tier is not None or entry.on_disk, "a capsule lies nowhere"
    assert entry.tier is not None or not entry.holds, "a held capsule left the memory"
    assert entry.capsule is None or is_made_of(entry, entry.capsule)


def is_made_of(entry: Entry, capsule: Capsule) -> bool:
    """Are its parts those that the entry names?"""
    return [part.name for part in entry.parts] == [part.name for part in capsule.parts]
