"""Which capsules have a copy on disk, and how does one come back from there?

What is kept in memory is handed to the disk tier at once and becomes durable in the background. One
that must leave memory before that is *leaving*: its bytes are alive in the writer's queue anyway,
and so it can still be taken from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from capserve.engine.seam import Capsule, CapsulePart
from capserve.errors import CapsuleError
from capserve.serving.capsules.catalog import Catalog, Entry
from capserve.serving.capsules.rows import CapsuleKey, CapsuleRow
from capserve.serving.capsules.tiers import PIN_SHARE, Disk

AGAIN_BYTES = 64 << 20
"""Of saves that are handed over again at a time."""


class DiskCopies:
    def __init__(self, disk: Disk | None, unix_time: Callable[[Entry], float]) -> None:
        self.disk = disk
        self._unix_time = unix_time
        self.leaving: dict[CapsuleKey, Capsule] = {}
        self._owed: dict[CapsuleKey, None] = {}
        """Given up before they were written, the oldest first."""

    def is_durable(self, entry: Entry) -> bool:
        return self.disk is not None and entry.on_disk and self.disk.holds(entry.key)

    def is_pending(self, entry: Entry) -> bool:
        """On its way to a disk that still takes things."""
        disk = self.disk
        if disk is None or disk.fault is not None or not entry.on_disk:
            return False
        return not disk.holds(entry.key)

    def save(self, entry: Entry, pinned_before: Iterable[Entry]) -> None:
        """Hand over what is in memory, to a faulty disk too: it says when it can write again."""
        disk = self.disk
        if disk is None:
            return
        assert entry.capsule is not None
        entry.on_disk = True
        entry.pinned_on_disk = entry.pinned and self.pin_fits(entry, pinned_before)
        row = CapsuleRow(
            entry.key,
            entry.spans,
            entry.parts,
            entry.based_on,
            entry.pinned_on_disk,
            self._unix_time(entry),
        )
        disk.save(row, entry.capsule.parts)

    def forget(self, entry: Entry) -> None:
        if entry.on_disk and self.disk is not None:
            self.disk.forget(entry.key)
        entry.on_disk = entry.pinned_on_disk = False
        self.leaving.pop(entry.key, None)
        self._owed.pop(entry.key, None)

    def has_news(self) -> bool:
        return self.disk is not None and (self.disk.has_news or bool(self.leaving))

    def note_owed(self, catalog: Catalog) -> None:
        """Remember what the disk gave up and memory has."""
        if self.disk is None:
            return
        for key in self.disk.take_given_up():
            entry = catalog.find(key)
            if entry is not None and entry.tier is not None and not entry.on_disk:
                self._owed[key] = None

    def save_owed(self, catalog: Catalog) -> None:
        """Hand these over again, no more at a time than a disk writes in a moment."""
        if self.disk is None or not self._owed or self.disk.pending_bytes:
            return
        while self._owed and self.disk.takes_saves and self.disk.pending_bytes < AGAIN_BYTES:
            key = next(iter(self._owed))
            del self._owed[key]
            entry = catalog.find(key)
            if entry is not None and entry.tier is not None and not entry.on_disk:
                self.save(entry, catalog)

    def touch(self, entry: Entry) -> None:
        if entry.on_disk and self.disk is not None:
            self.disk.touch(entry.key)

    def set_pinned(self, entry: Entry, pinned: bool) -> None:
        if entry.on_disk and self.disk is not None and entry.pinned_on_disk != pinned:
            entry.pinned_on_disk = pinned
            self.disk.set_pinned(entry.key, pinned)

    def pin_fits(self, entry: Entry, others: Iterable[Entry]) -> bool:
        """Else it is a pin in memory alone: a restart may lose it."""
        if self.disk is None:
            return False
        pins = [other for other in others if other.pinned_on_disk and other is not entry]
        sizes = {part.name: part.nbytes for e in [*pins, entry] for part in e.parts}
        return sum(sizes.values()) <= int(self.disk.budget_bytes * PIN_SHARE)

    def take_lost(self) -> list[CapsuleKey]:
        """Those that are no longer on disk, or will never get there, since the last call."""
        disk = self.disk
        if disk is None:
            return []
        idle = disk.pending_bytes == 0 or disk.fault is not None  # before `holds` is asked
        lost = list(disk.take_evicted())
        for key in list(self.leaving):
            if disk.holds(key):
                del self.leaving[key]
            elif idle:
                lost.append(key)
        return lost

    def read(
        self, entry: Entry, living: dict[bytes, CapsulePart | None], tier: str
    ) -> tuple[list[CapsulePart | memoryview], int]:
        """The parts for `unpack` into `tier`, and how many of their bytes were read from disk.

        Raises PartLostError when one can't be read.
        """
        assert self.disk is not None
        parts: list[CapsulePart | memoryview] = []
        read_bytes = 0
        for row in entry.parts:
            part = living[row.name]
            if part is None:
                parts.append(self._read_part(row.name))
                read_bytes += row.nbytes
            elif part.tier == tier:
                parts.append(part)
            else:
                parts.append(memoryview(b"".join(part.pack())))
        return parts, read_bytes

    def on_disk_only(self, name: bytes) -> DiskPart:
        assert self.disk is not None
        return DiskPart(name, self.disk.read)

    def _read_part(self, name: bytes) -> memoryview:
        assert self.disk is not None
        try:
            return self.disk.read(name)
        except CapsuleError as error:
            raise PartLostError(name, str(error)) from error


@dataclass(frozen=True, slots=True)
class DiskPart:
    """A part that whoever packs it reads, in a thread of its own."""

    name: bytes
    read: Callable[[bytes], memoryview]

    def pack(self) -> list[memoryview]:
        """Raises CapsuleError when it is not there any more."""
        return [self.read(self.name)]


class PartLostError(Exception):
    """A file is gone or torn; `name` is the part that it was."""

    def __init__(self, name: bytes, why: str) -> None:
        super().__init__(why)
        self.name = name
