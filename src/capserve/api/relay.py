"""What happens to a request that asks for a turn, from bytes to bytes, whatever its protocol?

Read (event loop), prepare (text thread), compile what the reply has to keep to (grammar thread), if
anything, submit (the worker's queue), relay (event loop). Every
refusal up to and including `submit` is a real HTTP status; only what fails later is told inside the
stream. While any of it runs, a client that leaves cancels its turn.

A protocol is one function, `Prepare`, that makes turns of a body and says what their events are on
the wire.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from capserve.api.body import Bodies
from capserve.api.choices import ChoiceEvent, ChoiceEvents
from capserve.api.errors import ClientGoneError
from capserve.api.json_response import json_response
from capserve.api.middleware import caller_of, request_id_of
from capserve.api.sse import Json
from capserve.api.state import ServerState
from capserve.api.stream import Chunks, Departure, EventStream
from capserve.api.text_thread import TextThread
from capserve.errors import CapserveError, InvalidRequestError
from capserve.serving.metrics import rejected_before_submit
from capserve.serving.sinks import FutureSink, Reply, StreamSink
from capserve.serving.turn import CancelToken, Failed, ResultSink, TurnRequest, WorkItem
from capserve.text.grammar import Grammar

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """A request after the text thread: ready to be submitted."""

    turns: tuple[TurnRequest, ...]
    """One for each choice: the same prompt with seeds that count up."""
    stream: bool
    chunks: Chunks[ChoiceEvent]
    """The events of all choices as they go into a stream. One use."""
    body: Callable[[Sequence[Reply]], Json]
    """The plain reply, from every choice's own."""
    demand: Callable[[], Grammar | None] | None = None
    """Compiles the form that is demanded of every choice, and raises as `Prepare`; None when none
    is. Large schemas take long: not on the text thread, where everybody waits."""

    def under(self, grammar: Grammar | None) -> Prepared:
        """With that done."""
        turns = tuple(replace(turn, grammar=grammar) for turn in self.turns)
        return replace(self, turns=turns, demand=None)


class Prepare(Protocol):
    """Everything heavy about a request, on the text thread.

    Raises the `CapserveError` that the client is to see; bad input never raises anything else.
    """

    def __call__(
        self, state: ServerState, body: bytes, request_id: str, caller: str, /
    ) -> Prepared: ...


class Relay:
    """Answers requests over the app's own body counter and text thread."""

    def __init__(
        self, state: ServerState, bodies: Bodies, text: TextThread, grammars: TextThread
    ) -> None:
        self._state = state
        self._bodies = bodies
        self._text = text
        self._grammars = grammars

    async def answer(self, request: Request, prepare: Prepare) -> Response:
        request_id, caller = request_id_of(request.scope), caller_of(request.scope)
        async with self._bodies.read(request) as body:
            arrived_at = time.monotonic()
            departure = Departure(request.receive)
            try:
                job = self.prepared(prepare, body, request_id, caller)
                ready, tokenize_ms = await departure.or_result(job)
            except BaseException as error:
                departure.close()
                if isinstance(error, CapserveError) and not isinstance(error, ClientGoneError):
                    elapsed_ms = (time.monotonic() - arrived_at) * 1000
                    self._state.metrics.record(rejected_before_submit(request_id, elapsed_ms))
                raise
        ask = _Ask(self._state, ready, arrived_at, tokenize_ms, departure)
        return ask.streamed() if ready.stream else await ask.whole()

    async def prepared(
        self, prepare: Prepare, body: bytes, request_id: str, caller: str
    ) -> tuple[Prepared, float]:
        """A request that is ready to be submitted, and the milliseconds that were worked on it."""
        ready, ms = await self._text.run(
            lambda: _timed(lambda: prepare(self._state, body, request_id, caller))
        )
        if (demand := ready.demand) is not None:
            grammar, more_ms = await self._grammars.run(lambda: _timed(demand))
            ready, ms = ready.under(grammar), ms + more_ms
        return ready, ms


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """What `work` made, and the milliseconds that it took."""
    started = time.perf_counter()
    try:
        result = work()
    except RecursionError:
        # The parser's own bound on depth is above what rendering and comparing can follow.
        raise InvalidRequestError("The request body has JSON that is nested too deeply.") from None
    return result, (time.perf_counter() - started) * 1000


@dataclass(frozen=True)
class _Ask:
    """One request on its way to the worker and back."""

    state: ServerState
    ready: Prepared
    arrived_at: float
    """`time.monotonic()` seconds."""
    tokenize_ms: float
    departure: Departure

    def streamed(self) -> Response:
        """Submit, then relay events as they come. `departure` is closed by the response."""
        stall_timeout_s = self.state.limits.stream_stall_timeout_s
        cancels = [CancelToken() for _ in self.ready.turns]
        sinks = [StreamSink(cancel, stall_timeout_s) for cancel in cancels]
        self._submit(list(zip(cancels, sinks, strict=True)))
        events = ChoiceEvents(sinks)
        self.departure.afterwards(events.close)
        return EventStream(
            events,
            self.ready.chunks,
            self.departure,
            heartbeat_s=self.state.heartbeat_s,
            stall_timeout_s=stall_timeout_s,
        )

    async def whole(self) -> Response:
        """Submit, wait for the end, and fold the events that a stream would have relayed."""
        sinks = [FutureSink() for _ in self.ready.turns]
        cancels = [CancelToken() for _ in self.ready.turns]
        try:
            self._submit(list(zip(cancels, sinks, strict=True)))
            replies = await _replies(sinks)
        finally:
            self.departure.close()
        # Off the loop: with 20 logprobs a token, a long reply is a million small objects. Not on
        # the text thread, whose line may be full: a finished reply is never refused.
        return await asyncio.to_thread(lambda: json_response(self.ready.body(replies)))

    def _submit(self, sinks: Sequence[tuple[CancelToken, ResultSink]]) -> None:
        """All choices or none: when one is refused, those before it are cancelled."""
        for cancel, _ in sinks:
            self.departure.cancels(cancel)
        tokenize_ms = self.tokenize_ms
        try:
            for turn, (cancel, sink) in zip(self.ready.turns, sinks, strict=True):
                item = WorkItem(turn, self.arrived_at, sink, cancel, tokenize_ms)
                self.state.worker.submit(item)
                tokenize_ms = 0.0  # spent once for all of them
        except BaseException:
            # Here and now: the departure's own callbacks come a moment after the refusal is sent.
            for cancel, _ in sinks:
                cancel.cancel("refused")
            self.departure.close()
            raise


async def _replies(sinks: Sequence[FutureSink]) -> list[Reply]:
    """Every choice's reply. Raises the error of the first one that failed, as soon as it has."""
    for coming in asyncio.as_completed([sink.reply() for sink in sinks]):
        reply = await coming
        if isinstance(reply.end, Failed):
            raise reply.end.error
    return [sink.future.result() for sink in sinks]
