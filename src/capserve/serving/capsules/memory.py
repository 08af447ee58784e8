"""In which memory tier does a capsule lie, and what makes way for it?

The engine's tiers in their order, the nearest first. For room in one, the capsule that is the least
worth its bytes goes to the next one that can have it, and from the last one out of memory: what
becomes of it then is the owner's to say. Some capsules stay where they are; that is judged before
the first one makes way, so that a refusal never empties a tier for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Protocol

from capserve.engine.seam import Capsule, CapsulePart
from capserve.serving.capsules.catalog import Entry
from capserve.serving.capsules.rows import CapsuleKey
from capserve.serving.capsules.tiers import MemoryTier, Mover, Sized, out_of_memory

log = logging.getLogger("capserve.store")


class Owner(Protocol):
    """Who knows the entries, and what is behind the last tier."""

    def entry(self, key: CapsuleKey, /) -> Entry: ...
    def stays(self, key: CapsuleKey, /) -> bool: ...
    def is_pending(self, entry: Entry, /) -> bool:
        """Not on disk yet, but on its way: rather wait than let it go."""
        ...

    def left_memory(self, entry: Entry, capsule: Capsule, /) -> None:
        """`entry` has made way, out of the last tier; `capsule` is what it was."""
        ...


class Memory:
    def __init__(self, engine: Mover, budgets: Mapping[str, int], owner: Owner) -> None:
        self._engine = engine
        self._owner = owner
        self.tiers = [MemoryTier(name, budgets.get(name, 0)) for name in engine.limits.tiers]
        self.demoted = 0
        """Moves to a lower tier."""

    @property
    def last(self) -> MemoryTier:
        return self.tiers[-1]

    def tier(self, name: str) -> MemoryTier:
        return next(tier for tier in self.tiers if tier.name == name)

    def living(self, name: bytes) -> CapsulePart | None:
        """A part of this name, from the last tier if it lies there."""
        found = (tier.part(name) for tier in reversed(self.tiers))
        return next((part for part in found if part is not None), None)

    def clear(self) -> None:
        self.tiers = [MemoryTier(tier.name, tier.budget_bytes) for tier in self.tiers]

    # -- in and out ---------------------------------------------------------------------------

    def enter(self, entry: Entry, capsule: Capsule) -> str | None:
        """Bring it into the nearest tier, from its own on, that can have it; or say why not."""
        refusal: str | None = None
        for tier in self._from(capsule.parts[0].tier):
            moved = self._moved(capsule, tier)
            if not isinstance(moved, str):
                self._settle(entry, tier, moved)
                return None
            refusal = moved
        return refusal

    def leave(self, entry: Entry, *, evicted: bool = False) -> Capsule:
        """`evicted`: as the lowest of those that could go."""
        assert entry.tier is not None
        assert entry.capsule is not None
        capsule = entry.capsule
        self.tier(entry.tier).leave(entry.key, evicted=evicted)
        entry.capsule = entry.tier = None
        return capsule

    def rebase(self, entry: Entry) -> None:
        """What `entry` is based on has changed."""
        if entry.tier is not None:
            self.tier(entry.tier).rebase(entry.key, entry.rebuild_tokens)

    # -- room ---------------------------------------------------------------------------------

    def refusal(self, tier: MemoryTier, parts: Iterable[Sized]) -> str | None:
        """Why `tier` can't have these, whoever makes way."""
        parts = tuple(parts)
        if tier.used_bytes + tier.added_bytes(parts) <= tier.budget_bytes:
            return None
        needed = tier.bytes_of(self._staying(tier), parts)
        if needed <= tier.budget_bytes:
            return None
        return f"needs {needed} bytes beside the pins, the budget is {tier.budget_bytes}"

    def make_room(self, tier: MemoryTier, parts: Iterable[Sized]) -> None:
        parts = tuple(parts)
        while tier.used_bytes + tier.added_bytes(parts) > tier.budget_bytes:
            self._demote_lowest(tier)

    def spare(self, nbytes: int) -> None:
        """Make room for `nbytes` in the nearest tier that can have them; for none, if none can."""
        for tier in self.tiers:
            if tier.bytes_of(self._staying(tier)) + nbytes <= tier.budget_bytes:
                while tier.used_bytes + nbytes > tier.budget_bytes:
                    self._demote_lowest(tier)
                return

    def demote_one(self, name: str) -> CapsuleKey | None:
        tier = self.tier(name)
        victim = self._victim(tier)
        if victim is not None:
            self._demote(tier, victim)
        return victim

    # -- pins ---------------------------------------------------------------------------------

    def pins_with(self, entry: Entry, tier: MemoryTier) -> int:
        """Bytes of the pins in `tier`, if `entry` were one of them."""
        pins = [key for key in tier if self._owner.entry(key).pinned]
        return tier.bytes_of(pins, entry.parts)

    def place_pin(self, entry: Entry) -> str | None:
        """Have `entry` lie in the nearest tier, from its own on, in which pins have room."""
        assert entry.tier is not None
        assert entry.capsule is not None
        refusal: str | None = None
        for tier in self._from(entry.tier):
            pins = self.pins_with(entry, tier)
            if pins > tier.pin_budget_bytes:
                refusal = (
                    f"needs {pins} bytes beside the pins, "
                    f"the budget for pins is {tier.pin_budget_bytes}"
                )
                continue
            if tier.name == entry.tier:
                return None
            moved = self._moved(entry.capsule, tier)
            if not isinstance(moved, str):
                self.leave(entry)
                self._settle(entry, tier, moved)
                self.demoted += 1
                return None
            refusal = moved
        return refusal

    # -- inside -------------------------------------------------------------------------------

    def _from(self, name: str) -> list[MemoryTier]:
        return self.tiers[self.tiers.index(self.tier(name)) :]

    def _staying(self, tier: MemoryTier) -> list[CapsuleKey]:
        return [key for key in tier if self._owner.stays(key)]

    def _demote_lowest(self, tier: MemoryTier) -> None:
        victim = self._victim(tier)
        assert victim is not None, "room was promised before"
        self._demote(tier, victim)

    def _victim(self, tier: MemoryTier) -> CapsuleKey | None:
        owner = self._owner
        if tier is self.last:
            settled = tier.lowest(
                lambda key: not owner.stays(key) and not owner.is_pending(owner.entry(key))
            )
            if settled is not None:
                return settled
        return tier.lowest(lambda key: not owner.stays(key))

    def _demote(self, tier: MemoryTier, key: CapsuleKey) -> None:
        entry = self._owner.entry(key)
        assert entry.capsule is not None
        for lower in self._from(tier.name)[1:]:
            moved = self._moved(entry.capsule, lower)
            if not isinstance(moved, str):
                self.leave(entry, evicted=True)
                self._settle(entry, lower, moved)
                self.demoted += 1
                return
        self._owner.left_memory(entry, self.leave(entry, evicted=True))

    def _moved(self, capsule: Capsule, tier: MemoryTier) -> Capsule | str:
        """`capsule` in `tier`, where others made way for it; or why not."""
        refusal = self.refusal(tier, capsule.parts)
        if refusal is not None:
            return refusal
        self.make_room(tier, capsule.parts)
        if capsule.parts[0].tier == tier.name:
            return capsule
        try:
            return self._engine.move(capsule, tier.name)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            log.warning("no memory in tier %s for a capsule: %s", tier.name, error)
            return f"the machine has no memory for it in tier {tier.name}"

    def _settle(self, entry: Entry, tier: MemoryTier, capsule: Capsule) -> None:
        entry.capsule, entry.tier = capsule, tier.name
        tier.enter(entry.key, capsule.parts, entry.rebuild_tokens)
