"""Which capsules and parts are on the disk, what do they share, and who leaves next?

The manifest in memory, without I/O, threads or locks: `DiskTier` guards it. A part counts
once, whoever shares it, and stays counted until its file is gone. What leaves first is decided by
GreedyDual (`greedy_dual.py`; Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms", 1997): the
fewest tokens to read again per byte that its going frees, aged by how long nobody used it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from capserve.serving.capsules.greedy_dual import GreedyDual
from capserve.serving.capsules.rows import CapsuleKey, CapsuleRow, PartRow
from capserve.serving.disk.files import PartFile


@dataclass(slots=True)
class Part:
    row: PartRow
    file: PartFile
    holders: set[int] = field(default_factory=set)
    """Ids of the entries that need it."""
    fixed: int = 0
    """Holders among them that may not be evicted."""


@dataclass(slots=True)
class Entry:
    id: int
    row: CapsuleRow
    fixed: bool
    """May not be evicted: pinned, or being written."""
    broken: bool = False
    """A part of it was found bad while the rest was being written."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a capsule's part files: those that no other capsule needs, and the others."""

    exclusive_bytes: int
    shared_bytes: int


class DiskIndex:
    def __init__(self) -> None:
        self.parts: dict[bytes, Part] = {}
        self.used_bytes = 0
        """Of all part files, those that wait for their removal included."""
        self.fixed_bytes = 0
        """Of parts that some capsule which may not be evicted needs."""
        self.dead: set[bytes] = set()
        """Parts that no capsule needs; their files are still there."""
        self._entries: dict[int, Entry] = {}
        self._ids: dict[CapsuleKey, int] = {}
        self._hidden: dict[CapsuleKey, list[Entry]] = {}
        """Entries that are not held any more; their rows, and so their parts, are still there."""
        self._writing: set[CapsuleKey] = set()
        """Between `begin` and its end. An older entry of the same key stays until then."""
        self._next_id = itertools.count()
        self._order: GreedyDual[int] = GreedyDual()
        """Of the entries that may be evicted."""

    def __contains__(self, key: CapsuleKey) -> bool:
        return key in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def rows(self) -> list[CapsuleRow]:
        return [self._entries[entry_id].row for entry_id in self._ids.values()]

    def get(self, key: CapsuleKey) -> CapsuleRow | None:
        return self._entries[self._ids[key]].row if key in self._ids else None

    def load(self, parts: Iterable[tuple[PartRow, PartFile]], rows: Sequence[CapsuleRow]) -> None:
        """Take over a manifest, whose rows come in the order of their last use."""
        # 200,000 holds of 10,000 capsules: in bulk, where `_hold` and `_value` would take a second.
        self.parts = known = {row.name: Part(row, file) for row, file in parts}
        self.used_bytes = sum(part.file.file_bytes for part in known.values())
        for row in rows:
            entry = Entry(next(self._next_id), row, row.pinned)
            self._entries[entry.id] = entry
            self._ids[row.key] = entry.id
            for part_row in row.parts:
                known[part_row.name].holders.add(entry.id)
            if row.pinned:
                for part in self._parts_of(entry):
                    self._fix(part, 1)
        self.dead = {name for name, part in known.items() if not part.holders}
        exclusive: Counter[int] = Counter()
        for part in known.values():
            if len(part.holders) == 1:
                exclusive.update(dict.fromkeys(part.holders, part.file.file_bytes))
        for entry in self._entries.values():
            if not entry.fixed:
                self._order.use(entry.id, _worth(entry.row, exclusive[entry.id]))

    def begin(self, row: CapsuleRow) -> Entry:
        """Hold the parts of `row` that are there, so that none leaves while others are written."""
        assert row.key not in self._writing, "one at a time for each key"
        self._writing.add(row.key)
        if row.key in self._ids:
            self._use(self._entries[self._ids[row.key]])
        return self._hold(row, fixed=True)

    def add_part(self, row: PartRow, file: PartFile, entry: Entry | None = None) -> None:
        """A file that is there now; `entry` is what it was written for."""
        assert row.name not in self.parts, "a part is written once"
        self.parts[row.name] = part = Part(row, file)
        self.used_bytes += file.file_bytes
        self.dead.add(row.name)
        if entry is not None:
            self._take(part, entry)

    def finish(self, entry: Entry) -> None:
        """The row of `entry` is committed: it counts from now on, in place of an older one."""
        self._writing.remove(entry.row.key)
        self.discard(entry.row.key)
        self._ids[entry.row.key] = entry.id
        self._set_fixed(entry, entry.row.pinned)
        self._use(entry)

    def abort(self, entry: Entry) -> None:
        """`entry` will not be committed; what was written for it alone is dead."""
        self._release(entry)
        self._writing.remove(entry.row.key)
        if entry.row.key in self._ids:
            self._use(self._entries[self._ids[entry.row.key]])

    def hide(self, key: CapsuleKey) -> None:
        """Not held any more; `discard` must follow when its row is about to go."""
        entry_id = self._ids.pop(key, None)
        if entry_id is not None:
            self._order.discard(entry_id)
            self._hidden.setdefault(key, []).append(self._entries[entry_id])

    def discard(self, key: CapsuleKey) -> None:
        """Its row goes with the next transaction, and with it what it alone needs."""
        self.hide(key)
        for entry in self._hidden.pop(key, ()):
            self._release(entry)

    def discard_all(self) -> None:
        for key in [*self._ids, *self._hidden]:
            self.discard(key)

    def set_pinned(self, key: CapsuleKey, pinned: bool) -> None:
        if key in self._ids:
            entry = self._entries[self._ids[key]]
            entry.row = replace(entry.row, pinned=pinned)
            if entry.fixed != pinned:
                self._set_fixed(entry, pinned)
                self._use(entry)

    def touch(self, key: CapsuleKey, used_at: float) -> None:
        if key in self._ids:
            entry = self._entries[self._ids[key]]
            entry.row = replace(entry.row, used_at=used_at)
            self._use(entry)

    def evict_one(self) -> CapsuleKey | None:
        """Remove the capsule with the lowest score; None when all that is left is fixed."""
        entry_id = self._order.lowest(lambda _: True)
        if entry_id is None:
            return None
        self._order.evict(entry_id)
        key = self._entries[entry_id].row.key
        self.discard(key)
        return key

    def drop_part(self, name: bytes) -> list[CapsuleKey]:
        """Forget a part whose file is bad, and hide every capsule that needs it; their keys."""
        part = self.parts[name]
        lost = []
        for entry in [self._entries[holder] for holder in part.holders]:
            if self._ids.get(entry.row.key) == entry.id:
                self.hide(entry.row.key)
                lost.append(entry.row.key)
            else:
                entry.broken = True
        self.remove_part(name)
        return lost

    def remove_part(self, name: bytes) -> None:
        part = self.parts.pop(name)
        self.used_bytes -= part.file.file_bytes
        if part.fixed:
            self.fixed_bytes -= part.file.file_bytes
        self.dead.discard(name)

    def dead_bytes(self) -> int:
        return sum(self.parts[name].file.file_bytes for name in self.dead)

    def footprint(self, key: CapsuleKey) -> Footprint:
        parts = list(self._parts_of(self._entries[self._ids[key]]))
        exclusive = sum(part.file.file_bytes for part in parts if len(part.holders) == 1)
        return Footprint(exclusive, sum(part.file.file_bytes for part in parts) - exclusive)

    def check(self) -> None:
        """Count afresh. Raises AssertionError where a counter has drifted."""
        assert self.used_bytes == sum(part.file.file_bytes for part in self.parts.values())
        assert self.fixed_bytes == sum(p.file.file_bytes for p in self.parts.values() if p.fixed)
        needed = {part.name for entry in self._entries.values() for part in entry.row.parts}
        assert self.parts.keys() - needed == self.dead, "a part is dead when nobody needs it"

    def _hold(self, row: CapsuleRow, fixed: bool) -> Entry:
        entry = Entry(next(self._next_id), row, fixed)
        self._entries[entry.id] = entry
        for part in self._parts_of(entry):
            self._take(part, entry)
        return entry

    def _take(self, part: Part, entry: Entry) -> None:
        part.holders.add(entry.id)
        self.dead.discard(part.row.name)
        self._fix(part, entry.fixed)
        if len(part.holders) == 2:
            self._reprice_others(part, entry)

    def _release(self, entry: Entry) -> None:
        del self._entries[entry.id]
        self._order.discard(entry.id)
        for part in self._parts_of(entry):
            if entry.id not in part.holders:
                continue  # a part of an aborted entry that was never written for it
            part.holders.discard(entry.id)
            self._fix(part, -entry.fixed)
            if not part.holders:
                self.dead.add(part.row.name)
            elif len(part.holders) == 1:
                self._reprice_others(part, entry)

    def _reprice_others(self, part: Part, than: Entry) -> None:
        """Whether the others share this part with anybody has changed, and so has their value."""
        for holder in part.holders - {than.id}:
            other = self._entries[holder]
            if self._may_go(other):
                self._order.reprice(holder, self._value(other))

    def _set_fixed(self, entry: Entry, fixed: bool) -> None:
        if entry.fixed != fixed:
            entry.fixed = fixed
            for part in self._parts_of(entry):
                self._fix(part, 1 if fixed else -1)

    def _fix(self, part: Part, change: int) -> None:
        before, part.fixed = part.fixed, part.fixed + change
        self.fixed_bytes += (bool(part.fixed) - bool(before)) * part.file.file_bytes

    def _parts_of(self, entry: Entry) -> Iterator[Part]:
        for row in entry.row.parts:
            part = self.parts.get(row.name)
            if part is not None:
                yield part

    def _may_go(self, entry: Entry) -> bool:
        key = entry.row.key
        return not entry.fixed and self._ids.get(key) == entry.id and key not in self._writing

    def _use(self, entry: Entry) -> None:
        if self._may_go(entry):
            self._order.use(entry.id, self._value(entry))
        else:
            self._order.discard(entry.id)

    def _value(self, entry: Entry) -> float:
        """Tokens to read again per byte that its going frees."""
        exclusive = 0
        for part in self._parts_of(entry):
            if len(part.holders) == 1:
                exclusive += part.file.file_bytes
        return _worth(entry.row, exclusive)


def _worth(row: CapsuleRow, exclusive_bytes: int) -> float:
    return row.rebuild_tokens / max(1, exclusive_bytes)
