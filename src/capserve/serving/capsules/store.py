"""Which states are kept, and where?

A store of capsules over the engine's memory tiers, the nearest first, and the disk. A capsule is
named by its content (namespace, position, digest of the tokens before it). It lies in at most one
memory tier, and on disk too: whatever is kept is written there at once, in the background, so that
leaving memory costs nothing and a crash loses little.

For room, the capsule that is the least worth its bytes (`tiers.py`) goes to the next memory tier,
and from the last one to the disk; without a disk it is lost. A pin, the state of a parked turn and
the protected one (the running or hot session's newest) stay where they are. What can't fit is
refused with a reason before anything makes way for it, and what was lost is remembered for a while,
so that a later miss can say why.

One thread uses a store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping

from capserve.engine.seam import Capsule, CapsulePart
from capserve.errors import CapsuleError
from capserve.serving.capsules.audit import CHECKED_PARTS, StoreCheck, is_made_of
from capserve.serving.capsules.catalog import REMEMBERED, Catalog, Entry, Loss, prefilled_from_grid
from capserve.serving.capsules.copies import DiskCopies, DiskPart, PartLostError
from capserve.serving.capsules.footprint import (
    CapsuleInfo,
    Footprint,
    Location,
    Taken,
    TierFootprint,
)
from capserve.serving.capsules.memory import Memory
from capserve.serving.capsules.rows import CapsuleKey, CapsuleRow
from capserve.serving.capsules.tiers import DISK, Disk, Mover, out_of_memory, part_rows
from capserve.serving.journal import Span

log = logging.getLogger("capserve.store")


class CapsuleLostError(Exception):
    """A capsule of the index could not be read back from disk, and has left the index."""


class CapsuleStore:
    def __init__(
        self,
        engine: Mover,
        budgets: Mapping[str, int],
        disk: Disk | None = None,
        *,
        remembered: int = REMEMBERED,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """`budgets`: bytes per memory tier; one that is absent has none. The disk has its own."""
        self._engine = engine
        self._clock = clock
        self._unix_clock = unix_clock
        self._catalog = Catalog(remembered)
        self._parked: dict[CapsuleKey, Entry] = {}
        self._memory = Memory(engine, budgets, self)
        self._copies = DiskCopies(disk, self._unix_time)
        self._protected: CapsuleKey | None = None
        self._evicted = 0
        self._refused = 0
        self._left_memory = 0
        self._checker = StoreCheck(self._catalog, self._parked, self._memory, self._copies)

    @property
    def budget_bytes(self) -> int:
        """Of all memory tiers."""
        return sum(tier.budget_bytes for tier in self._memory.tiers)

    @property
    def largest_budget_bytes(self) -> int:
        """Of one memory tier: what is larger fits nowhere."""
        return max(tier.budget_bytes for tier in self._memory.tiers)

    # -- the index that the policy reads -----------------------------------------------------

    def positions(self, namespace: str) -> list[int]:
        """Positions at which some capsule of the namespace lies, ascending."""
        return self._catalog.positions(namespace)

    def holds(self, key: CapsuleKey) -> bool:
        return key in self._catalog

    def exact(self, key: CapsuleKey) -> bool:
        """Whether a cold run would come to the same bits. KeyError when absent."""
        return self.entry(key).is_exact(self._engine.limits.grid)

    def lost_positions(self, namespace: str) -> list[int]:
        """Like `positions`, of capsules that are remembered as lost."""
        return self._catalog.lost_positions(namespace)

    def loss(self, key: CapsuleKey) -> Loss | None:
        return self._catalog.loss(key)

    def locate(self, key: CapsuleKey) -> Location:
        """Where it lies, and what its way to the live state costs. KeyError when absent."""
        entry = self.entry(key)
        if entry.tier is not None:
            return Location(entry.tier, entry.nbytes)
        leaving = self._copies.leaving.get(key)
        if leaving is not None:
            return Location(leaving.parts[0].tier, entry.nbytes)
        living = self._memory.living
        return Location(DISK, sum(p.nbytes for p in entry.parts if living(p.name) is None))

    # -- keeping ------------------------------------------------------------------------------

    def put(
        self,
        key: CapsuleKey,
        capsule: Capsule,
        spans: Iterable[Span],
        *,
        based_on: CapsuleKey | None = None,
        pin: bool = False,
    ) -> str | None:
        """Keep `capsule`; others make way for it. Returns why not, or None when all went well.

        `based_on` is the boundary before it in its journal. A pin that is refused may still be
        kept unpinned: `holds` tells. Two states under one name can't be: of those computed in other
        pieces, one that a cold run would come to stays or takes the place of one that it would not.
        """
        assert capsule.position == key.position
        spans = tuple(spans)
        known = self._catalog.find(key)
        if known is not None and self._makes_way(known, capsule, spans):
            pin = pin or known.pinned
            self._copies.forget(known)
            self._remove(known, None)
            known = None
        if known is not None:
            if known.tier is None and is_made_of(known, capsule) and self._may_enter(known):
                self._come_back(known, capsule)
            self.use(key)
            return self.pin(key) if pin else None
        entry = Entry(key, spans, part_rows(capsule.parts), self._clock(), based_on)
        entry.based_on = self._catalog.held_base(key, based_on)
        refusal = self._memory.enter(entry, capsule)
        if refusal is not None:
            self.note_refusal(key)
            return refusal
        self._catalog.add(entry)
        self._memory.rebase(entry)  # its base may have made way for it
        if pin:
            refusal = self.pin(key)
        self._copies.save(entry, self._catalog)
        return refusal

    def get(self, key: CapsuleKey) -> Taken:
        """The capsule and its spans; it is now the most recently used. KeyError when absent.

        One that lies on disk alone is read, and is in memory afterwards when there is room.
        Raises CapsuleLostError when it can't be read.
        """
        entry = self.entry(key)
        read_bytes: int | None = None
        capsule = entry.capsule or self._copies.leaving.get(key)
        if capsule is None:
            capsule, read_bytes = self._read(entry)
        if entry.tier is None and self._may_enter(entry):
            capsule = self._come_back(entry, capsule)
        self.use(key)
        return Taken(capsule, entry.spans, read_bytes)

    def parts_of(self, key: CapsuleKey) -> tuple[CapsulePart | DiskPart, ...]:
        """To be packed in any thread, the small state first. Nothing moves, and it is no use of the
        capsule: a copy says nothing about what is worth keeping. KeyError when absent."""
        entry = self.entry(key)
        capsule = entry.capsule or self._copies.leaving.get(key)
        if capsule is not None:
            return tuple(capsule.parts)
        living = self._memory.living
        return tuple(living(row.name) or self._copies.on_disk_only(row.name) for row in entry.parts)

    def in_memory(self, key: CapsuleKey) -> bool:
        entry = self._catalog.find(key) or self._parked.get(key)
        return entry is not None and entry.tier is not None

    def use(self, key: CapsuleKey) -> None:
        """It was worth having. KeyError when absent."""
        entry = self.entry(key)
        entry.used_at = self._clock()
        if entry.tier is not None:
            self._memory.tier(entry.tier).use(key)
        self._copies.touch(entry)

    def pin(self, key: CapsuleKey) -> str | None:
        """Keep it until `unpin`. KeyError when absent.

        A pin lies in the nearest memory tier in which pins have room, or on disk alone. Returns why
        not, when all pins together would take more than their share of the last one.
        """
        entry = self.entry(key)
        if entry.pinned:
            return None
        fits_disk = self._copies.pin_fits(entry, self._catalog)
        if entry.tier is not None:
            refusal = self._memory.place_pin(entry)
        else:
            refusal = None if fits_disk else "the pins on disk have their share already"
        entry.pin_refused = refusal is not None
        if refusal is not None:
            self._refused += 1
            return refusal
        entry.pinned = True
        self._copies.set_pinned(entry, fits_disk)
        return None

    def unpin(self, key: CapsuleKey) -> None:
        entry = self.entry(key)
        entry.pinned = False
        self._copies.set_pinned(entry, False)

    def protect(self, key: CapsuleKey | None) -> None:
        """Let this one stay where it is, in place of the one before (None: none)."""
        self._protected = key

    def drop(self, key: CapsuleKey) -> bool:
        """Remove it from every tier, pinned or not, and forget that it was. False when a parked
        turn holds it. KeyError when absent."""
        entry = self.entry(key)
        if entry.holds:
            return False
        self._copies.forget(entry)
        self._remove(entry, None)
        return True

    def note_refusal(self, key: CapsuleKey) -> None:
        """Remember that this one was not kept for lack of room."""
        self._refused += 1
        if key not in self._catalog:
            self._catalog.remember(key, Loss.OVER_BUDGET)

    # -- parked turns -------------------------------------------------------------------------

    def hold(self, key: CapsuleKey) -> None:
        """It stays in memory until `release`; holds are counted."""
        entry = self.entry(key)
        assert entry.tier is not None, "only what is in memory can be held there"
        entry.holds += 1
        self.use(key)

    def hold_equal(self, key: CapsuleKey, spans: tuple[Span, ...]) -> bool:
        """Hold the capsule of this name if it is in memory and was computed in these pieces."""
        entry = self._catalog.find(key)
        if entry is None or entry.tier is None or entry.spans != spans:
            return False
        self.hold(key)
        return True

    def put_parked(
        self,
        parked: CapsuleKey,
        key: CapsuleKey,
        capsule: Capsule,
        spans: tuple[Span, ...],
        *,
        based_on: CapsuleKey | None = None,
    ) -> str | None:
        """Keep and hold `capsule` under the name `parked`, where no plan finds it. It is not
        written to disk. Returns why not, or None. `key` is the name that it may get at its end.
        """
        assert parked not in self._parked
        entry = Entry(parked, spans, part_rows(capsule.parts), self._clock(), parked_as=key)
        entry.based_on = self._catalog.held_base(key, based_on)
        refusal = self._memory.enter(entry, capsule)
        if refusal is None:
            entry.holds = 1
            self._parked[parked] = entry
        return refusal

    def release(self, key: CapsuleKey, *, keep: bool) -> None:
        """End one hold. A parked state goes with its last one, or with `keep` becomes a capsule
        like any other. Nothing happens when `clear` was there first."""
        entry = self._parked.get(key) or self._catalog.find(key)
        if entry is None or entry.holds == 0:
            return
        entry.holds -= 1
        if entry.holds or entry.parked_as is None:
            return
        del self._parked[key]
        capsule = self._memory.leave(entry)
        if keep:
            self.put(entry.parked_as, capsule, entry.spans, based_on=entry.based_on)

    # -- room ---------------------------------------------------------------------------------

    def spare(self, nbytes: int) -> None:
        """Make room for `nbytes` more in the nearest tier that can have them."""
        self._memory.spare(nbytes)

    def demote(self, tier: str) -> CapsuleKey | None:
        """Move the capsule that is the least worth its bytes out of `tier`. None when all stay."""
        return self._memory.demote_one(tier)

    def expire(self, idle_ttl_s: float) -> int:
        """Free the memory of what nobody used for longer than this; returns how many left it.

        What is durable stays on disk, until the disk's own budget needs the room: a conversation
        goes on after a night, for the price of a read.
        """
        now = self._clock()
        idle = [
            entry
            for entry in self._catalog
            if entry.tier is not None
            and now - entry.used_at > idle_ttl_s
            and not self.stays(entry.key)
            and not self.is_pending(entry)
        ]
        for entry in idle:
            self.left_memory(entry, self._memory.leave(entry))
        return len(idle)

    def clear(self) -> None:
        """Empty the memory, pins and holds too, whatever the accounts say: what to do when they are
        wrong. What is durable stays known."""
        self._memory.clear()
        self._parked.clear()
        self._copies.leaving.clear()
        self._protected = None
        for entry in self._catalog:
            entry.capsule = entry.tier = None
            entry.holds = 0
        for entry in [e for e in self._catalog if not self._copies.is_durable(e)]:
            self._lose(entry)

    # -- the disk -----------------------------------------------------------------------------

    def adopt(self, rows: Iterable[CapsuleRow]) -> int:
        """At start-up: know what the disk holds, without reading it. Returns how many."""
        return self._catalog.adopt(rows, self._unix_clock(), self._clock())

    def note_disk(self) -> None:
        """Hear what has left the disk and what arrived there: in upkeep, and when a part is lost. A
        plan on what has left meanwhile ends in CapsuleLostError, and is made again."""
        if not self._copies.has_news():
            return
        for key in self._copies.take_lost():
            entry = self._catalog.find(key)
            if entry is not None:
                entry.on_disk = entry.pinned_on_disk = False
                if entry.tier is None:
                    self._lose(entry)
        self._copies.note_owed(self._catalog)

    def save_again(self) -> None:
        """Hand over what lies in memory and was given up before it was written."""
        self._copies.save_owed(self._catalog)

    # -- what others want to see --------------------------------------------------------------

    def entries_in(self, namespace: str) -> list[CapsuleKey]:
        keys = [entry.key for entry in self._catalog if entry.key.namespace == namespace]
        return sorted(keys, key=lambda key: key.position)

    def describe(self, key: CapsuleKey) -> CapsuleInfo:
        """KeyError when absent."""
        entry = self.entry(key)
        tier = None if entry.tier is None else self._memory.tier(entry.tier)
        return CapsuleInfo(
            position=key.position,
            tier=self.locate(key).tier,
            nbytes=entry.nbytes,
            exclusive_bytes=None if tier is None else tier.exclusive_bytes(key),
            pinned=entry.pinned,
            durable=self._copies.is_durable(entry),
            used_at=self._unix_time(entry),
        )

    def footprint(self) -> Footprint:
        memory, disk = self._memory, self._copies.disk
        tiers = {
            tier.name: TierFootprint(tier.used_bytes, tier.budget_bytes, len(tier))
            for tier in memory.tiers
        }
        if disk is not None:
            count = sum(entry.on_disk for entry in self._catalog)
            tiers[DISK] = TierFootprint(
                disk.used_bytes, disk.budget_bytes, count, disk.fault, disk.pending_bytes
            )
        return Footprint(
            used_bytes=sum(tier.used_bytes for tier in memory.tiers),
            budget_bytes=self.budget_bytes,
            capsules=len(self._catalog),
            pinned=sum(entry.pinned for entry in self._catalog),
            evicted=self._evicted,
            refused=self._refused,
            demoted=memory.demoted + self._left_memory,
            tiers=tiers,
        )

    def check(self) -> None:
        """Every account equals its bytes, counted afresh, and every capsule is where it is said to
        be. Raises AssertionError."""
        self._checker.check_all()

    def check_some(self, most_parts: int = CHECKED_PARTS) -> None:
        """The counters, and as many capsules as have `most_parts` parts in all: each call goes on
        where the last one ended. Raises AssertionError."""
        self._checker.check_some(most_parts)

    # -- what the memory tiers ask ------------------------------------------------------------

    def entry(self, key: CapsuleKey) -> Entry:
        """KeyError when absent."""
        entry = self._catalog.find(key) or self._parked.get(key)
        if entry is None:
            raise KeyError(key)
        return entry

    def stays(self, key: CapsuleKey) -> bool:
        entry = self.entry(key)
        return entry.pinned or entry.holds > 0 or key == self._protected

    def is_pending(self, entry: Entry) -> bool:
        return self._copies.is_pending(entry)

    def left_memory(self, entry: Entry, capsule: Capsule) -> None:
        """To the disk if it is there or on its way, else it is lost."""
        if self._copies.is_durable(entry):
            self._left_memory += 1
        elif self._copies.is_pending(entry):
            self._left_memory += 1
            self._copies.leaving[entry.key] = capsule
        else:
            self._lose(entry)

    # -- inside -------------------------------------------------------------------------------

    def _makes_way(self, known: Entry, capsule: Capsule, spans: tuple[Span, ...]) -> bool:
        """Does `capsule`, computed in `spans`, take the place of `known`?"""
        if is_made_of(known, capsule) or known.holds:
            return False
        grid = self._engine.limits.grid
        if known.is_exact(grid):
            exact = prefilled_from_grid(spans, grid)
            return exact and known.tier is None
        # In memory it is as good as a new one that isn't exact either; from disk it must be read.
        return known.tier is None or prefilled_from_grid(spans, grid)

    def _come_back(self, entry: Entry, capsule: Capsule) -> Capsule:
        """From disk, or on its way there, into memory if there is room; it need not be."""
        if self._memory.enter(entry, capsule) is None:
            self._copies.leaving.pop(entry.key, None)
        return entry.capsule or capsule

    def _may_enter(self, entry: Entry) -> bool:
        """A pin that lies on disk comes into memory only where pins have room."""
        last = self._memory.last
        return not entry.pinned or self._memory.pins_with(entry, last) <= last.pin_budget_bytes

    def _lose(self, entry: Entry) -> None:
        self._copies.forget(entry)
        # A refused pin is not asked for again: see `Keeper.find_pin`.
        self._remove(entry, Loss.OVER_BUDGET if entry.pin_refused else Loss.EVICTED)

    def _remove(self, entry: Entry, loss: Loss | None) -> None:
        if entry.tier is not None:
            self._memory.leave(entry)
        for child in self._catalog.remove(entry.key, loss):
            self._memory.rebase(child)
        self._evicted += loss is not None

    def _read(self, entry: Entry) -> tuple[Capsule, int]:
        """The capsule, in the last memory tier, from parts there and on disk; and the bytes read.

        Raises CapsuleLostError.
        """
        memory, last = self._memory, self._memory.last
        # References, not names: the room that is made may be theirs.
        living = {part.name: memory.living(part.name) for part in entry.parts}
        if self._may_enter(entry) and memory.refusal(last, entry.parts) is None:
            memory.make_room(last, entry.parts)  # so that both never exist together
        try:
            parts, read_bytes = self._copies.read(entry, living, last.name)
            capsule = self._engine.unpack(entry.key.position, parts)
        except PartLostError as error:
            self._lose_part(error.name)
            raise CapsuleLostError(str(error)) from error
        except (CapsuleError, MemoryError, RuntimeError) as error:
            if not isinstance(error, CapsuleError) and not out_of_memory(error):
                raise
            # Not to be planned for again and again: what can't be taken back is as good as lost.
            log.warning("a capsule of %d tokens can't be read: %s", entry.key.position, error)
            self._lose(entry)
            raise CapsuleLostError(str(error)) from error
        assert is_made_of(entry, capsule), "unpacked parts are named as they were"
        return capsule, read_bytes

    def _lose_part(self, name: bytes) -> None:
        """A file is gone or torn, and so is every capsule that needs it: it is in no memory tier,
        or it would not have been read."""
        self.note_disk()
        for entry in [e for e in self._catalog if any(part.name == name for part in e.parts)]:
            if entry.key not in self._copies.leaving:
                self._lose(entry)

    def _unix_time(self, entry: Entry) -> float:
        return self._unix_clock() - (self._clock() - entry.used_at)
