"""What did a turn cost, and what did it reuse? (seam 5)

One record per request: the log line, the `/health` aggregate, the Prometheus series and the
response's `capserve` block are four views of it.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as PrometheusCounter

from capserve.serving.lifecycle import TurnState

log = logging.getLogger("capserve.turns")


@dataclass(frozen=True, slots=True)
class TurnMetrics:
    """All times in milliseconds; None where the turn never got that far."""

    request_id: str
    terminal_state: str
    prefix_action: str | None = None
    miss_reason: str | None = None
    queued_ms: float = 0.0
    tokenize_ms: float = 0.0
    restore_ms: float = 0.0
    prefill_ms: float = 0.0
    first_delta_ms: float | None = None
    """From arrival to the first committed token."""
    decode_ms: float = 0.0
    decode_tok_per_s: float | None = None
    spec_attempts: int = 0
    spec_accepts: int = 0
    accept_length: float | None = None
    """Mean tokens per step with drafts."""
    graph_capture_count: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_prefill_tokens: int = 0
    output_tokens: int = 0
    pin: str | None = None
    """`pinned` or `refused: ...` when the request asked for a pin."""
    session_id: str | None = None
    restored_from: str | None = None
    """The tier that the state came from; None for the hot state, and for a rebuild."""
    parked_ms: float = 0.0
    """Time that the turn made way for others after it had begun."""
    parks: int = 0
    """How many times it did."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def rejected_before_submit(request_id: str, tokenize_ms: float) -> TurnMetrics:
    """The record of a request that was refused before it became a turn of the worker."""
    return TurnMetrics(request_id, TurnState.REJECTED.value, tokenize_ms=tokenize_ms)


LATENCY_WINDOW = 512
"""Turns over which the percentiles of `/health` are taken: enough for a p95, and it forgets."""

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class MetricsLog:
    """Takes each turn's record once and shows it three ways. Thread-safe.

    `queue_depth` is asked whenever a view is made, so it is never older than the view.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: Counter[str] = Counter()
        self._actions: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._first_ms: deque[float] = deque(maxlen=LATENCY_WINDOW)
        self._queue_depth: Callable[[], int] = lambda: 0
        self.registry = CollectorRegistry()
        self._series = _Series(self.registry)
        self._series.queue_depth.set_function(lambda: self._queue_depth())

    def watch_queue(self, depth: Callable[[], int]) -> None:
        self._queue_depth = depth

    def record(self, turn: TurnMetrics) -> None:
        with self._lock:
            self._states[turn.terminal_state] += 1
            if turn.prefix_action is not None:
                self._actions[turn.prefix_action] += 1
            if turn.first_delta_ms is not None:
                self._first_ms.append(turn.first_delta_ms)
            # What was taken in, so that the sums agree: a refused prompt was never looked at, and
            # a cancelled one only as far as its prefill came.
            self._totals["prompt_tokens"] += turn.cached_tokens + turn.new_prefill_tokens
            self._totals["cached_tokens"] += turn.cached_tokens
            self._totals["new_prefill_tokens"] += turn.new_prefill_tokens
            self._totals["output_tokens"] += turn.output_tokens
        self._series.add(turn)
        log.info("%s", line(turn))

    def health(self) -> dict[str, Any]:
        """The aggregate for `/health`: counts since the start, percentiles of the last turns."""
        with self._lock:
            first_ms = sorted(self._first_ms)
            body: dict[str, Any] = {
                "by_state": dict(self._states),
                "by_action": dict(self._actions),
                **{name: self._totals[name] for name in _TOTALS},
            }
        body["first_delta_ms"] = {
            "p50": _percentile(first_ms, 0.50),
            "p95": _percentile(first_ms, 0.95),
            "turns": len(first_ms),
        }
        body["queue_depth"] = self._queue_depth()
        return body

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)


_TOTALS = ("prompt_tokens", "cached_tokens", "new_prefill_tokens", "output_tokens")


class _Series:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.turns = PrometheusCounter(
            "capserve_turns", "Finished turns", ["state", "action"], registry=registry
        )
        self.misses = PrometheusCounter(
            "capserve_misses", "Turns that read known tokens again", ["reason"], registry=registry
        )
        self.prompt = PrometheusCounter(
            "capserve_prompt_tokens", "Prompt tokens", ["source"], registry=registry
        )
        self.output = PrometheusCounter(
            "capserve_output_tokens", "Generated tokens", registry=registry
        )
        self.drafts = PrometheusCounter(
            "capserve_draft_tokens", "Drafted tokens", ["outcome"], registry=registry
        )
        self.captures = Gauge(
            "capserve_graph_captures", "Graphs captured since the start", registry=registry
        )
        self.queue_depth = Gauge("capserve_queue_depth", "Waiting turns", registry=registry)
        self.phases = Histogram(
            "capserve_phase_seconds",
            "Time of a turn's phases",
            ["phase"],
            buckets=_SECONDS,
            registry=registry,
        )

    def add(self, turn: TurnMetrics) -> None:
        self.turns.labels(turn.terminal_state, turn.prefix_action or "none").inc()
        if turn.miss_reason is not None:
            # Message and token numbers would make a series for every turn.
            self.misses.labels(turn.miss_reason.split("(", 1)[0]).inc()
        self.prompt.labels("cached").inc(turn.cached_tokens)
        self.prompt.labels("prefilled").inc(turn.new_prefill_tokens)
        self.output.inc(turn.output_tokens)
        self.drafts.labels("accepted").inc(turn.spec_accepts)
        self.drafts.labels("rejected").inc(max(0, turn.spec_attempts - turn.spec_accepts))
        self.captures.set(turn.graph_capture_count)
        for phase in ("queued", "tokenize", "restore", "prefill", "first_delta", "decode"):
            elapsed_ms = getattr(turn, f"{phase}_ms")
            if elapsed_ms is not None:
                self.phases.labels(phase).observe(elapsed_ms / 1e3)
        if turn.parks:  # only then: most turns never are, and zeros would hide how long it takes
            self.phases.labels("parked").observe(turn.parked_ms / 1e3)


def line(turn: TurnMetrics) -> str:
    """One readable line: what happened, what was reused, what it cost."""
    first = "-" if turn.first_delta_ms is None else f"{turn.first_delta_ms:.0f} ms"
    rate = "-" if turn.decode_tok_per_s is None else f"{turn.decode_tok_per_s:.1f} tok/s"
    text = (
        f"{turn.request_id} {turn.terminal_state} {turn.prefix_action or '-'}"
        f" cached {turn.cached_tokens} new {turn.new_prefill_tokens} out {turn.output_tokens}"
        f" first {first} decode {rate} queued {turn.queued_ms:.0f} ms"
    )
    if turn.miss_reason is not None:
        text += f" miss {turn.miss_reason}"
    if turn.restored_from is not None:
        text += f" from {turn.restored_from}"
    if turn.parks:
        text += f" parked {turn.parks}x {turn.parked_ms:.0f} ms"
    if turn.session_id is not None:
        text += f" session {turn.session_id}"
    if turn.pin is not None:
        text += f" pin {turn.pin}"
    return text


def _percentile(ascending: Sequence[float], share: float) -> float | None:
    """Nearest rank; None without samples."""
    if not ascending:
        return None
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]
