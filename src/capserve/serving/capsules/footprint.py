"""What does a store show of itself? Frozen values, which may go to any thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from capserve.engine.seam import Capsule
from capserve.serving.journal import Span


@dataclass(frozen=True, slots=True)
class TierFootprint:
    used_bytes: int
    budget_bytes: int
    capsules: int
    fault: str | None = None
    pending_bytes: int = 0
    """On their way there: what a crash now would lose."""


@dataclass(frozen=True, slots=True)
class Footprint:
    used_bytes: int
    """Of all memory tiers, as is `budget_bytes`."""
    budget_bytes: int
    capsules: int
    """In memory or on disk."""
    pinned: int
    evicted: int
    """Capsules that are in no tier any more."""
    refused: int
    """Capsules, and pins, that there was no room for."""
    demoted: int
    """Capsules that went to a lower tier, the disk included."""
    tiers: Mapping[str, TierFootprint]


@dataclass(frozen=True, slots=True)
class Location:
    tier: str
    """A memory tier, or `disk` for one that lies there alone."""
    move_bytes: int
    """From a memory tier: the whole capsule, of which the live state may share a part. From disk:
    what must be read, since it is in no memory tier."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What `get` hands out."""

    capsule: Capsule
    spans: tuple[Span, ...]
    read_bytes: int | None
    """Read from disk for it; None when it was in memory."""


@dataclass(frozen=True, slots=True)
class CapsuleInfo:
    position: int
    tier: str
    nbytes: int
    exclusive_bytes: int | None
    """What its memory tier gets back when it leaves; None on disk alone, where nobody counts."""
    pinned: bool
    durable: bool
    """It would survive a crash now."""
    used_at: float
    """Unix seconds."""
