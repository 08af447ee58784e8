"""How does one turn run on the engine, from its plan to its last committed token?

Plan, take up a state, prefill chunk by chunk, then step. Cancellation is looked at between chunks
and at accept boundaries. In the step loop the order is always the same: first the truth (the
journal), then its reading (the output machine), then the news (the sink).

A run returns how the turn ended, or raises; it never delivers the terminal event itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from capserve.engine.seam import Chunk, Engine, TokenArray
from capserve.serving.journal import SpanKind
from capserve.serving.keeper import Keeper
from capserve.serving.lifecycle import FinishReason, Lifecycle, TurnState
from capserve.serving.limits import Limits
from capserve.serving.prefix import AutoPrefixPolicy, CapsuleIndex
from capserve.serving.rates import RateMeter
from capserve.serving.sessions import Session, SessionRegistry
from capserve.serving.tally import Tally
from capserve.serving.transcripts import Transcripts
from capserve.serving.turn import Delta, ToolCallDelta, WorkItem
from capserve.text.messages import Conversation, Message
from capserve.text.output import OutputSpec
from capserve.text.prompt import Prompt, TurnRecord


class ReplyCall(Protocol):
    """A complete tool call as the text layer parsed it."""

    @property
    def index(self) -> int: ...
    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> str: ...


class ReplyDelta(Protocol):
    @property
    def content(self) -> str: ...
    @property
    def reasoning(self) -> str: ...
    @property
    def calls(self) -> Sequence[ReplyCall]: ...


class OutputMachine(Protocol):
    """Committed tokens in, parts of the reply out: `capserve.text.output.TurnOutput`."""

    def feed(self, tokens: Sequence[int], /) -> ReplyDelta: ...
    def finish(self) -> ReplyDelta: ...
    def message(self) -> Message: ...
    @property
    def stopped(self) -> bool:
        """Nothing more is read: a stop string matched, or all calls are there and more came."""
        ...

    @property
    def calls_are_full(self) -> bool: ...
    @property
    def reasoning_tokens(self) -> int: ...


class MakeOutput(Protocol):
    def __call__(self, spec: OutputSpec, /) -> OutputMachine: ...


class Records(Protocol):
    """Finished turns as records and as digests: `capserve.text.prompt.PromptBuilder`."""

    def make_record(
        self, prompt: Prompt, reply: Message, tokens: TokenArray, /
    ) -> TurnRecord | None: ...
    def chain(self, conversation: Conversation, /) -> tuple[bytes, ...]: ...


class SinkError(Exception):
    """The sink itself failed: this turn has nobody to deliver to, the engine is fine."""


@dataclass(frozen=True)
class Done:
    """The turn came to its own end; `clean` when the state is what the client has seen."""

    reason: FinishReason
    message: Message
    reasoning_tokens: int
    output: tuple[int, ...]
    clean: bool
    at_end_token: bool


@dataclass(frozen=True)
class Cancelled:
    pass


Ending = Done | Cancelled


@dataclass(eq=False)
class Turn:
    """A work item on its way; equality is identity, so that a queue can find it."""

    item: WorkItem
    life: Lifecycle
    tally: Tally


@dataclass(frozen=True)
class Bench:
    """What every run works with; all of it belongs to the worker thread."""

    engine: Engine
    limits: Limits
    policy: AutoPrefixPolicy
    index: CapsuleIndex
    sessions: SessionRegistry
    keeper: Keeper
    transcripts: Transcripts
    meter: RateMeter
    make_output: MakeOutput
    records: Records


class TurnRun:
    """One use: `run` once."""

    def __init__(self, turn: Turn, bench: Bench) -> None:
        self._turn = turn
        self._bench = bench
        self._request = turn.item.request
        self._prompt = turn.item.request.prompt
        self._tally = turn.tally
        self._pin: int | None = None
        """Where a requested pin lies; None when none was asked for, or none is possible."""

    def run(self) -> Ending:
        """Raises `SinkError`, or what the engine or the text layer raised."""
        self._turn.life.to(TurnState.PREFILL)
        if self._cancelled:
            return Cancelled()
        session = self._take_up()
        ending = self._prefill(session) or self._decode(session)
        session.journal.assert_in_step(self._bench.engine.position)
        if isinstance(ending, Done) and ending.clean:
            self._commit(session, ending)
        return ending

    @property
    def _cancelled(self) -> bool:
        return self._turn.item.cancel.cancelled

    # -- from the plan to the end of the prompt ----------------------------------------------

    def _take_up(self) -> Session:
        bench, prompt, namespace = self._bench, self._prompt, self._request.namespace
        self._pin = bench.policy.pin_position(prompt, self._request.pin)
        at_most = None
        if self._pin == 0:
            self._tally.pin = "refused: shorter than one grid step"
            self._pin = None
        if self._pin is not None:
            self._tally.pin = bench.keeper.find_pin(namespace, prompt, self._pin)
            if self._tally.pin is None:
                # A state beyond the pin can't be cut back to it: pass the pin on the way.
                at_most = self._pin - 1
        hot = bench.sessions.hot_view(bench.engine.limits.grid)
        rates = bench.meter.rates
        views = bench.sessions.views()
        plan = bench.policy.plan(prompt, namespace, hot, views, bench.index, rates, at_most)
        self._tally.plan = plan
        started = time.monotonic()
        session, moved_bytes = bench.keeper.take_up(plan, namespace, prompt)
        self._tally.restore_ms = _since_ms(started)
        bench.meter.saw_restore(moved_bytes, self._tally.restore_ms)
        return session

    def _prefill(self, session: Session) -> Cancelled | None:
        bench, tokens = self._bench, self._prompt.tokens
        engine, journal = bench.engine, session.journal
        start = position = engine.position
        ahead = list(bench.policy.boundaries(self._prompt, start, self._pin))
        while position < len(tokens):
            if self._cancelled:
                self._keep_finished_chunks(session, start)
                return Cancelled()
            end = engine.limits.chunk_end(position, ahead[0] if ahead else len(tokens))
            began = time.monotonic()
            engine.extend(tokens[position:end])
            elapsed_ms = _since_ms(began)
            journal.append(tokens[position:end], SpanKind.PREFILL)
            self._tally.prefill_ms += elapsed_ms
            self._tally.new_prefill_tokens += end - position
            bench.meter.saw_prefill(end - position, elapsed_ms)
            position = end
            if ahead and position == ahead[0]:
                ahead.pop(0)
                self._keep_boundary(session, position)
        if self._cancelled:
            self._keep_finished_chunks(session, start)
            return Cancelled()
        # Only a prompt that was absorbed whole says where its messages end.
        journal.mark(self._prompt.prompt_end, len(self._prompt.chain) - 1)
        return None

    def _keep_boundary(self, session: Session, position: int) -> None:
        pin = position == self._pin
        refusal = self._bench.keeper.keep(session, pin=pin)
        if pin:
            self._tally.pin = "pinned" if refusal is None else f"refused: {refusal}"

    def _keep_finished_chunks(self, session: Session, start: int) -> None:
        """An impatient client's retry resumes here instead of reading all of it again."""
        bench, position = self._bench, self._bench.engine.position
        exact = session.journal.bit_exact(position, bench.engine.limits.grid)
        if position > start and bench.policy.on_commit(position, bit_exact=exact):
            bench.keeper.keep(session)

    # -- from the first token to the last ----------------------------------------------------

    def _decode(self, session: Session) -> Ending:
        bench, request, life = self._bench, self._request, self._turn.life
        engine, tally = bench.engine, self._tally
        most = min(
            request.max_output_tokens,
            bench.limits.max_output_tokens,
            engine.limits.max_positions - len(self._prompt.tokens),
        )
        machine = bench.make_output(request.output)
        output: list[int] = []
        one_by_one = bool(request.output.stop) or request.output.max_calls is not None
        life.to(TurnState.DECODE)
        began = time.monotonic()
        engine.begin(request.sampling, self._prompt.tokens)
        while not self._cancelled:
            room = most - len(output)
            chunk = engine.step(room)
            assert len(chunk.tokens) <= room, f"{len(chunk.tokens)} tokens, {room} were asked for"
            session.journal.append(chunk.tokens, SpanKind.DECODE)
            life.first_token()
            tally.drafted += chunk.drafted
            tally.accepted += chunk.accepted
            if chunk.drafted:
                tally.draft_steps += 1
                tally.draft_step_tokens += len(chunk.tokens)
            delta = _read(chunk, machine, one_by_one)
            output += delta.tokens
            tally.output_tokens = len(output)
            tally.decode_ms = _since_ms(began)
            self._deliver(delta)
            at_end_token = chunk.stop is not None and not machine.stopped
            if machine.stopped or at_end_token:
                reason = FinishReason.STOP
            elif len(output) >= most or self._out_of_time():
                reason = FinishReason.LENGTH
            else:
                continue
            return self._finish(machine, reason, tuple(output), at_end_token)
        return Cancelled()

    def _finish(
        self,
        machine: OutputMachine,
        reason: FinishReason,
        output: tuple[int, ...],
        at_end_token: bool,
    ) -> Done:
        last = _delta(machine.finish())
        if last != Delta():
            self._deliver(last)
        # A stop string was matched, perhaps in what was held back until now: the state holds what
        # the client will never see (P3).
        clean = not machine.stopped
        if machine.stopped:
            reason, at_end_token = FinishReason.STOP, False
        message = machine.message()
        if message.tool_calls and (at_end_token or (machine.stopped and machine.calls_are_full)):
            reason = FinishReason.TOOL_CALLS
        return Done(reason, message, machine.reasoning_tokens, output, clean, at_end_token)

    def _out_of_time(self) -> bool:
        most_ms = self._bench.limits.max_decode_ms
        return most_ms is not None and self._tally.decode_ms >= most_ms

    def _deliver(self, delta: Delta) -> None:
        try:
            self._turn.item.sink.deliver(delta)
        except Exception as error:
            raise SinkError(repr(error)) from error

    # -- a clean end -------------------------------------------------------------------------

    def _commit(self, session: Session, done: Done) -> None:
        """Before the terminal event: the client may send its next turn the moment it sees it."""
        bench, position = self._bench, self._bench.engine.position
        exact = session.journal.bit_exact(position, bench.engine.limits.grid)
        if bench.policy.on_commit(position, bit_exact=exact):
            bench.keeper.keep(session)
        if done.at_end_token:
            self._publish(session, done)
        bench.sessions.mark_hot(session, position)

    def _publish(self, session: Session, done: Done) -> None:
        bench, prompt = self._bench, self._prompt
        whole = np.array(session.journal.tokens)  # prompt and reply, the end token included
        record = bench.records.make_record(prompt, done.message, whole)
        if record is None:
            return
        asked = prompt.conversation
        chain = bench.records.chain(
            Conversation(record.messages, asked.tools, asked.template_kwargs)
        )
        known = prompt.spliced_messages
        supersedes = prompt.chain[known] if known else None
        bench.transcripts.publish(self._request.namespace, chain[-1], record, supersedes)
        session.journal.chain = chain


def _read(chunk: Chunk, machine: OutputMachine, one_by_one: bool) -> Delta:
    """Read `chunk` as far as the turn goes: to its end, or to the token that stopped the reply.

    Where something may stop it, the tokens are read one by one, so that where the reply ends, and
    how many tokens it counts, does not depend on how many drafts a step happened to accept.
    """
    tokens = chunk.tokens
    pieces = [(token,) for token in tokens] if one_by_one else [tokens]
    content, reasoning, count = "", "", 0
    calls: tuple[ToolCallDelta, ...] = ()
    for piece in pieces:
        part = _delta(machine.feed(piece))
        content += part.content
        reasoning += part.reasoning
        calls += part.tool_calls
        count += len(piece)
        if machine.stopped:
            break
    return Delta(content, reasoning, calls, tokens[:count], chunk.logprobs[:count])


def _delta(part: ReplyDelta) -> Delta:
    calls = tuple(ToolCallDelta(c.index, c.id, c.name, c.arguments) for c in part.calls)
    return Delta(part.content, part.reasoning, calls)


def _since_ms(started: float) -> float:
    return (time.monotonic() - started) * 1e3
