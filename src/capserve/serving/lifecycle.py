"""Where is a turn in its life, and which step may follow? (seam 2)

One table of legal transitions; each stamps its time. A turn reaches a terminal state exactly once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum


class TurnState(StrEnum):
    ENQUEUED = "enqueued"
    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    ERROR = "error"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


TERMINAL = frozenset({TurnState.DONE, TurnState.REJECTED, TurnState.CANCELLED, TurnState.ERROR})

LEGAL: dict[TurnState, frozenset[TurnState]] = {
    TurnState.ENQUEUED: frozenset({TurnState.QUEUED, TurnState.REJECTED, TurnState.CANCELLED}),
    TurnState.QUEUED: frozenset(
        {TurnState.PREFILL, TurnState.REJECTED, TurnState.CANCELLED, TurnState.ERROR}
    ),
    TurnState.PREFILL: frozenset(
        {TurnState.DECODE, TurnState.REJECTED, TurnState.CANCELLED, TurnState.ERROR}
    ),
    TurnState.DECODE: frozenset({TurnState.DONE, TurnState.CANCELLED, TurnState.ERROR}),
    TurnState.DONE: frozenset(),
    TurnState.REJECTED: frozenset(),
    TurnState.CANCELLED: frozenset(),
    TurnState.ERROR: frozenset(),
}


@dataclass
class Lifecycle:
    """One turn's state and time stamps (`time.monotonic()` seconds)."""

    enqueued_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    state: TurnState = TurnState.ENQUEUED

    def to(self, state: TurnState) -> None:
        """Take a legal step, or raise AssertionError: an illegal one is our own bug."""
        assert state in LEGAL[self.state], f"illegal transition {self.state} -> {state}"
        self.state = state
        now = time.monotonic()
        if state is TurnState.PREFILL:
            self.started_at = now
        elif state in TERMINAL:
            self.finished_at = now

    def first_token(self) -> None:
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()

    @property
    def terminal_state(self) -> TurnState | None:
        return self.state if self.state in TERMINAL else None
