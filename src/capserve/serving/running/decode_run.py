"""How does a turn decode, step by step, from its first token to its last?

In each step the order is the same: first the truth (the journal), then its reading (the output
machine), then the news (the sink). All that a decode knows lies here and in the journal, so that it
can rest between two steps while the engine works for another turn.
"""

from __future__ import annotations

import time

import numpy as np

from capserve.engine.seam import Chunk
from capserve.serving.journal import SpanKind
from capserve.serving.lifecycle import FinishReason, TurnState
from capserve.serving.running.bench import Bench, Done, OutputMachine, ReplyDelta, SinkError, Turn
from capserve.serving.sessions.registry import Session
from capserve.serving.turn import Delta, ToolCallDelta, merged
from capserve.text.channels import Text


class DecodeRun:
    """The engine must hold the whole prompt, and nothing more, when this is made."""

    def __init__(self, turn: Turn, session: Session, bench: Bench) -> None:
        self._turn = turn
        self._session = session
        self._bench = bench
        request = turn.item.request
        self.most = output_limit(turn, bench)
        """Tokens that the reply may have."""
        self._machine = bench.make_output(request.output)
        self._output: list[int] = []
        rule = None if request.grammar is None else request.grammar.matcher()
        self._constraint = rule if request.thinking is None else request.thinking.follow(rule)
        self._one_by_one = bool(request.output.stop) or request.output.max_calls is not None
        turn.life.to(TurnState.DECODE)
        self.begin()

    @property
    def said(self) -> int:
        """Tokens of the reply so far."""
        return len(self._output)

    def begin(self) -> None:
        """Start, or go on where the last step ended: `step` samples for this turn from now on."""
        request, prompt = self._turn.item.request, self._turn.item.request.prompt.tokens
        output = np.array(self._output, dtype=np.int32) if self._output else None
        self._bench.engine.begin(request.sampling, prompt, output, self._constraint)

    def step(self) -> Done | None:
        """Decide and deliver the next tokens; the end of the turn when these were the last."""
        bench, tally, machine = self._bench, self._turn.tally, self._machine
        room = self.most - self.said
        began = time.monotonic()
        chunk = bench.engine.step(room)
        assert len(chunk.tokens) <= room, f"{len(chunk.tokens)} tokens, {room} were asked for"
        self._session.journal.append(chunk.tokens, SpanKind.DECODE)
        self._turn.life.first_token()
        bench.meter.saw_decode(len(chunk.tokens), since_ms(began))
        tally.drafted += chunk.drafted
        tally.accepted += chunk.accepted
        if chunk.drafted:
            tally.draft_steps += 1
            tally.draft_step_tokens += len(chunk.tokens)
        delta = _read(chunk, machine, self._one_by_one)
        self._output += delta.tokens
        tally.output_tokens = self.said
        tally.decode_ms += since_ms(began)
        self._deliver(delta)
        at_end_token = chunk.stop is not None and not machine.stopped
        if machine.stopped or at_end_token:
            return self._finish(FinishReason.STOP, at_end_token)
        if self.said >= self.most or self._out_of_time():
            return self._finish(FinishReason.LENGTH, at_end_token)
        return None

    def _finish(self, reason: FinishReason, at_end_token: bool) -> Done:
        machine = self._machine
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
        output = tuple(self._output)
        return Done(
            reason,
            message,
            machine.reasoning_tokens,
            output,
            clean,
            at_end_token,
            machine.stop_string,
        )

    def _out_of_time(self) -> bool:
        most_ms = self._bench.limits.max_decode_ms
        return most_ms is not None and self._turn.tally.decode_ms >= most_ms

    def _deliver(self, delta: Delta) -> None:
        try:
            self._turn.item.sink.deliver(delta)
        except Exception as error:
            raise SinkError(repr(error)) from error


def output_limit(turn: Turn, bench: Bench) -> int:
    """Tokens that the turn's reply may have: what was asked for, allowed, and fits the context."""
    request = turn.item.request
    return min(
        request.max_output_tokens,
        bench.limits.max_output_tokens,
        bench.engine.limits.max_positions - len(request.prompt.tokens),
    )


def _read(chunk: Chunk, machine: OutputMachine, one_by_one: bool) -> Delta:
    """Read `chunk` as far as the turn goes: to its end, or to the token that stopped the reply.

    Where something may stop it, the tokens are read one by one, so that where the reply ends, and
    how many tokens it counts, does not depend on how many drafts a step happened to accept.
    """
    tokens = chunk.tokens
    pieces = [(token,) for token in tokens] if one_by_one else [tokens]
    said: list[Delta] = []
    count = 0
    for piece in pieces:
        said.append(_delta(machine.feed(piece)))
        count += len(piece)
        if machine.stopped:
            break
    return Delta(merged(said).parts, tokens[:count], chunk.logprobs[:count])


def _delta(read: ReplyDelta) -> Delta:
    return Delta(
        tuple(
            part
            if isinstance(part, Text)
            else ToolCallDelta(part.index, part.id, part.name, part.arguments)
            for part in read.parts
        )
    )


def since_ms(started: float) -> float:
    return (time.monotonic() - started) * 1e3
