"""What has this turn cost so far? The mutable side of `TurnMetrics`, owned by the running turn."""

from __future__ import annotations

from dataclasses import dataclass

from capserve.serving.lifecycle import Lifecycle
from capserve.serving.metrics import TurnMetrics
from capserve.serving.prefix import PrefixPlan


@dataclass(slots=True)
class Tally:
    """Times are milliseconds, counts are tokens."""

    tokenize_ms: float
    prompt_tokens: int
    queued_at: float
    """`time.monotonic()` when the turn entered the queue, after tokenizing."""
    plan: PrefixPlan | None = None
    restore_ms: float = 0.0
    prefill_ms: float = 0.0
    new_prefill_tokens: int = 0
    decode_ms: float = 0.0
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_steps: int = 0
    draft_step_tokens: int = 0
    pin: str | None = None
    session_id: str | None = None
    parked_ms: float = 0.0
    parks: int = 0

    def freeze(self, request_id: str, life: Lifecycle, graph_capture_count: int) -> TurnMetrics:
        """The record of the turn, which must be in a terminal state."""
        state, plan = life.terminal_state, self.plan
        assert state is not None
        assert life.finished_at is not None
        started_at = life.finished_at if life.started_at is None else life.started_at
        first_ms = None
        if life.first_token_at is not None:
            first_ms = (life.first_token_at - life.enqueued_at) * 1e3
        rate = None
        if self.output_tokens > 0 and self.decode_ms > 0:
            rate = self.output_tokens / self.decode_ms * 1e3
        length = self.draft_step_tokens / self.draft_steps if self.draft_steps else None
        return TurnMetrics(
            request_id=request_id,
            terminal_state=state.value,
            prefix_action=None if plan is None else plan.action.value,
            miss_reason=None if plan is None or plan.miss is None else str(plan.miss),
            queued_ms=(started_at - self.queued_at) * 1e3,
            tokenize_ms=self.tokenize_ms,
            restore_ms=self.restore_ms,
            prefill_ms=self.prefill_ms,
            first_delta_ms=first_ms,
            decode_ms=self.decode_ms,
            decode_tok_per_s=rate,
            spec_attempts=self.drafted,
            spec_accepts=self.accepted,
            accept_length=length,
            graph_capture_count=graph_capture_count,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=0 if plan is None else plan.position,
            new_prefill_tokens=self.new_prefill_tokens,
            output_tokens=self.output_tokens,
            pin=self.pin,
            session_id=self.session_id,
            restored_from=None if plan is None else plan.tier,
            parked_ms=self.parked_ms,
            parks=self.parks,
        )
