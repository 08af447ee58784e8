"""What may a request, a session and a store take? (seam 4)

Frozen; consulted at enqueue and at pin. Every limit has a status code (P4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True, slots=True)
class Limits:
    max_prompt_tokens: int
    """413 above it; the context length itself is a 400."""
    max_output_tokens: int
    """Upper bound of a turn's output; a larger `max_tokens` is lowered to what is left."""
    max_active_sessions: int = 256
    """Journals of the least recently used sessions beyond it are dropped; their capsules stay."""
    max_queue_depth: int = 64
    """429 with Retry-After above it."""
    session_idle_ttl_s: float = 4 * 3600.0
    """Sessions, and the memory of capsules that are not pinned, are dropped when unused for longer.
    Capsules on disk stay until its budget needs the room."""
    capsule_budget_bytes: Mapping[str, int] = field(
        default_factory=lambda: MappingProxyType({"host": 2 << 30})
    )
    """Bytes per tier: the engine's own (`gpu`, `host`), and `disk`. One that is absent has none."""
    schedule: Literal["fair", "fifo"] = "fair"
    """`fair`: a long turn is parked for a short one that waits. `fifo`: turns run to their end."""
    fair_share: float = 0.5
    """Most of a long turn's time, from its start to its end, that turns it is parked for may take;
    in [0, 1). 0.5: it takes at the most twice as long as alone."""
    min_slice_ms: float = 200.0
    """A turn runs at least this long between two parkings."""
    short_turn_ms: float = 3000.0
    """A waiting turn is short when its estimate is below this, and below half of what the running
    one has left."""
    max_parked_turns: int = 2
    """Turns that are parked at the same time; each holds a capsule that can't be evicted."""
    max_decode_ms: float | None = None
    """A turn's decode ends with finish reason `length` after this time."""
    max_body_bytes: int = 16 << 20
    """413 above it."""
    stream_stall_timeout_s: float = 30.0
    """A stream whose reader takes nothing for this long is cancelled."""
