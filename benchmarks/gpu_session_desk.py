"""How does the served session ask, and what is noted of each request?

`Seam` times every call between server and engine, `Desk` asks by the openai SDK and writes a row
for each request: both clocks are this process's, so that a request's time can be cut at the seam.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
from openai import OpenAI

from benchmarks.scenarios.material import TOOLS
from capserve.cli.compose import Assembly
from capserve.engine.runtime import TorchEngine

REPLY_TOKENS = 64
POLL_S = 0.05
SEAM = ("restore", "reset", "extend", "begin", "step", "snapshot", "move")

SCHEMA = {"type": "string", "pattern": f"^[0-9]{{{REPLY_TOKENS - 3}}}$"}
"""Digits are a token each in the family's vocabulary; with quotes and end token `REPLY_TOKENS`."""


# ---- what is watched ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    began: float
    ended: float
    value: Any

    @property
    def ms(self) -> float:
        return (self.ended - self.began) * 1e3


class Seam:
    """Every call of one engine, with the time that its caller waited for it."""

    def __init__(self, engine: TorchEngine) -> None:
        self.calls: list[Call] = []
        for name in SEAM:
            setattr(engine, name, self._timed(name, getattr(engine, name)))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = perf_counter()
            value = method(*args, **kwargs)
            kept = value if name in ("restore", "step") else None  # not a capsule: it has memory
            self.calls.append(Call(name, began, perf_counter(), kept))
            return value

        return timed


@contextmanager
def polling(url: str) -> Iterator[list[float]]:
    """`/health` every `POLL_S` while the block runs; the list fills with milliseconds."""
    taken: list[float] = []
    over = threading.Event()

    def poll() -> None:
        with httpx.Client(timeout=60) as client:
            client.get(url)
            while not over.wait(POLL_S):
                began = perf_counter()
                client.get(url).raise_for_status()
                taken.append((perf_counter() - began) * 1e3)

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield taken
    finally:
        over.set()
        thread.join()


# ---- one request --------------------------------------------------------------------------------


@dataclass
class Reply:
    text: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    record: dict[str, Any] = field(default_factory=dict)
    sent: float = 0.0
    first: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True)
class Row:
    label: str
    gap: str
    """What stood between this turn and the one before."""
    prompt_tokens: int
    action: str
    cached_tokens: int
    new_tokens: int
    tier: str | None
    restored_bytes: int
    ttft_ms: float
    in_ms: float
    engine_ms: float
    out_ms: float
    restore_ms: float
    prefill_ms: float
    first_step_ms: float
    first_delta_ms: float
    """The server's own: from arrival to the first committed token."""
    output_tokens: int
    steps: int
    step_ms: float
    """Median wait for one step at the seam, the first left out."""
    period_ms: float
    """Median from one step's end to the next one's: with it all that the server does between."""
    tokens_per_s: float
    accept_length: float | None
    keep_ms: float
    """In snapshots and moves between tiers, the whole request long."""
    finish: str | None
    miss: str | None
    """Why not more was reused."""


class Desk:
    """Sends requests, and writes a row for each."""

    def __init__(self, url: str, assembly: Assembly, seam: Seam) -> None:
        self._client = OpenAI(base_url=url, api_key="-", max_retries=0, timeout=300)
        self._model, self._seam = assembly.name, seam
        state = assembly.state
        closing = state.prompts.marks and state.tokenizer.specials[state.prompts.marks.end]
        self._other_ends = {str(t): -100 for t in state.model.end_tokens if t != closing}
        """A trained model ends a turn with the token that closes it; chance takes any."""
        self.salt = uuid4().hex
        self.rows: list[Row] = []

    def ask(
        self, messages: Sequence[Any], *, agent: bool, free: bool, salt: str = "", **more: Any
    ) -> Reply:
        """agent: with the tools. free: text to the limit, else what `SCHEMA` demands."""
        form: dict[str, Any] = {"max_tokens": REPLY_TOKENS}
        extra: dict[str, Any] = {
            "cache_salt": salt or self.salt,
            # A history that is rendered anew reads as the one that was decoded, so that a cold
            # request has the very tokens of the warm one.
            "chat_template_kwargs": {"enable_thinking": False, "preserve_thinking": True},
            "return_token_ids": True,
        }
        if free:
            extra["ignore_eos"] = True
        else:
            form["max_tokens"] = 2 * REPLY_TOKENS  # the schema ends it before
            schema = {"name": "reply", "strict": True, "schema": SCHEMA}
            form["response_format"] = {"type": "json_schema", "json_schema": schema}
            form["logit_bias"] = self._other_ends
        if agent:
            form["tools"] = TOOLS
            form["tool_choice"] = "none"
        reply = Reply(sent=perf_counter())
        for chunk in self._client.chat.completions.create(
            model=self._model,
            messages=list(messages),
            stream=True,
            temperature=0,
            extra_body=extra,
            **form,
            **more,
        ):
            self._take(reply, chunk)
        reply.ended = perf_counter()
        return reply

    def _take(self, reply: Reply, chunk: Any) -> None:
        reply.prompt_ids += (chunk.model_extra or {}).get("prompt_token_ids") or ()
        for choice in chunk.choices:
            ids = (choice.model_extra or {}).get("token_ids") or ()
            if ids and not reply.first:
                reply.first = perf_counter()
            reply.ids += ids
            reply.text += choice.delta.content or ""
            reply.finish = choice.finish_reason or reply.finish
            if choice.logprobs is not None:
                reply.logprobs += [entry.logprob for entry in choice.logprobs.content or ()]
        reply.record = (chunk.model_extra or {}).get("capserve") or reply.record

    def note(self, label: str, gap: str, reply: Reply) -> None:
        record = reply.record
        calls = [c for c in self._seam.calls if reply.sent <= c.began <= reply.ended]
        steps = [call for call in calls if call.name == "step"]
        began, first = calls[0].began, steps[0]
        ends = [step.ended for step in steps]
        decided = sum(len(step.value.tokens) for step in steps[1:])
        row = Row(
            label=label,
            gap=gap,
            prompt_tokens=record["prompt_tokens"],
            action=record["prefix_action"],
            cached_tokens=record["cached_tokens"],
            new_tokens=record["new_prefill_tokens"],
            tier=record["restored_from"],
            restored_bytes=sum(call.value for call in calls if call.name == "restore"),
            ttft_ms=(reply.first - reply.sent) * 1e3,
            in_ms=(began - reply.sent) * 1e3,
            engine_ms=(first.ended - began) * 1e3,
            out_ms=(reply.first - first.ended) * 1e3,
            restore_ms=record["restore_ms"],
            prefill_ms=record["prefill_ms"],
            first_step_ms=first.ms,
            first_delta_ms=record["first_delta_ms"],
            output_tokens=record["output_tokens"],
            steps=len(steps),
            step_ms=median(step.ms for step in steps[1:]),
            period_ms=median(np.diff(ends).tolist()) * 1e3,
            tokens_per_s=decided / (ends[-1] - ends[0]),
            accept_length=record["accept_length"],
            keep_ms=sum(call.ms for call in calls if call.name in ("snapshot", "move")),
            finish=reply.finish,
            miss=record["miss_reason"],
        )
        self.rows.append(row)
        print(line_of(row), flush=True)


# ---- what is printed ----------------------------------------------------------------------------

HEADER = (
    "| request | between | prompt | action | cached | new | from | MB moved | TTFT ms "
    "| in / engine / out | restore / prefill / first step | first_delta | out tokens "
    "| step / period ms | tok/s | keep ms | miss |"
)


def line_of(row: Row) -> str:
    return (
        f"| {row.label} | {row.gap} | {row.prompt_tokens:,} | {row.action} "
        f"| {row.cached_tokens:,} | {row.new_tokens:,} | {row.tier or '-'} "
        f"| {row.restored_bytes / 1e6:,.1f} | {row.ttft_ms:,.1f} "
        f"| {row.in_ms:.1f} / {row.engine_ms:,.1f} / {row.out_ms:.1f} "
        f"| {row.restore_ms:.1f} / {row.prefill_ms:,.1f} / {row.first_step_ms:,.1f} "
        f"| {row.first_delta_ms:,.1f} | {row.output_tokens} {row.finish} "
        f"| {row.step_ms:.2f} / {row.period_ms:.2f} | {row.tokens_per_s:.1f} | {row.keep_ms:.1f} "
        f"| {row.miss or '-'} |"
    )
