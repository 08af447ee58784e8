"""What may a request, a session and a store take? (seam 4)

Frozen; consulted at enqueue and at pin. Every limit has a status code (P4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


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
    """Sessions, and capsules that are not pinned, are dropped when unused for longer."""
    capsule_budget_bytes: Mapping[str, int] = field(
        default_factory=lambda: MappingProxyType({"host": 2 << 30})
    )
    """Bytes per tier."""
    max_decode_ms: float | None = None
    """A turn's decode ends with finish reason `length` after this time."""
    max_body_bytes: int = 16 << 20
    """413 above it."""
    stream_stall_timeout_s: float = 30.0
    """A stream whose reader takes nothing for this long is cancelled."""
