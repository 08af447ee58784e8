"""What happens to `POST /v1/chat/completions`, from bytes to bytes?

Read (event loop), prepare (text thread), submit (the worker's queue), relay (event loop). Every
refusal up to and including `submit` is a real HTTP status; only what fails later is told inside the
stream. While any of it runs, a client that leaves cancels its turn.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from capserve.api import translate
from capserve.api.auth import namespace
from capserve.api.body import Bodies
from capserve.api.errors import ClientGoneError
from capserve.api.middleware import caller_of, request_id_of
from capserve.api.responses import json_response
from capserve.api.schemas import ChatRequest
from capserve.api.sse import ChatChunks, ReplyHead, whole_body
from capserve.api.state import ServerState
from capserve.api.stream import Departure, EventStream
from capserve.api.strict_json import parse_object
from capserve.api.text_thread import TextThread
from capserve.api.validation import validated
from capserve.errors import CapserveError, InvalidRequestError
from capserve.serving.metrics import rejected_before_submit
from capserve.serving.sinks import FutureSink, StreamSink
from capserve.serving.turn import CancelToken, Delta, Failed, Finished, TurnRequest, WorkItem


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request after the text thread: ready to be submitted."""

    turn: TurnRequest
    head: ReplyHead
    stream: bool
    tokenize_ms: float


def prepare(state: ServerState, body: bytes, request_id: str, caller: str) -> Prepared:
    """Everything heavy about a request, on the text thread.

    Raises the `CapserveError` that the client is to see; bad input never raises anything else.
    """
    started = time.perf_counter()
    try:
        turn, head, stream = _prepare(state, body, request_id, caller)
    except RecursionError:
        # The parser's own bound on depth is above what rendering and comparing can follow.
        raise InvalidRequestError("The request body has JSON that is nested too deeply.") from None
    return Prepared(turn, head, stream, (time.perf_counter() - started) * 1000)


def _prepare(
    state: ServerState, body: bytes, request_id: str, caller: str
) -> tuple[TurnRequest, ReplyHead, bool]:
    raw = parse_object(body)
    request = validated(ChatRequest, raw)
    name = translate.served_name(request, state.model)
    sampling = translate.sampling(request, state.model)
    conversation = translate.conversation(request, raw)

    space = namespace(caller, request.prompt_cache_key, request.cache_salt)
    translate.refuse_hopeless(conversation, state.tokenizer, state.model)
    chain = state.prompts.chain(conversation)
    record = state.transcripts.longest(space, chain)
    prompt = state.prompts.build(conversation, record, chain, state.model.max_model_len)

    room = translate.output_room(request, len(prompt.tokens), state.model, state.limits)
    turn = TurnRequest(
        request_id=request_id,
        namespace=space,
        prompt=prompt,
        sampling=sampling,
        max_output_tokens=room,
        output=translate.output_spec(request, conversation.tools, prompt.starts_in_reasoning),
        pin=request.flashrt_pin_prefix,
    )
    options = request.stream_options
    shows_ids = bool(request.return_token_ids)
    head = ReplyHead(
        id=f"chatcmpl-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=name,
        fingerprint=state.model.fingerprint,
        include_usage=bool(options and options.include_usage),
        logprobs=bool(request.logprobs),
        token_ids=shows_ids,
        prompt_token_ids=tuple(prompt.tokens.tolist()) if shows_ids else (),
        seed=sampling.seed,
        notes=prompt.notes,
    )
    return turn, head, bool(request.stream)


def router(state: ServerState, bodies: Bodies, text: TextThread) -> APIRouter:
    """The route, over the app's own body counter and text thread."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        request_id, caller = request_id_of(request.scope), caller_of(request.scope)
        async with bodies.read(request) as body:
            arrived_at = time.monotonic()
            departure = Departure(request.receive)
            try:
                job = text.run(lambda: prepare(state, body, request_id, caller))
                ready = await departure.or_result(job)
            except BaseException as error:
                departure.close()
                if isinstance(error, CapserveError) and not isinstance(error, ClientGoneError):
                    elapsed_ms = (time.monotonic() - arrived_at) * 1000
                    state.metrics.record(rejected_before_submit(request_id, elapsed_ms))
                raise
        if ready.stream:
            return _streamed(state, ready, arrived_at, departure)
        return await _whole(state, ready, arrived_at, departure)

    return routes


def _streamed(
    state: ServerState, ready: Prepared, arrived_at: float, departure: Departure
) -> Response:
    """Submit, then relay events as they come. `departure` is closed by the response."""
    cancel = CancelToken()
    departure.cancels(cancel)
    stall_timeout_s = state.limits.stream_stall_timeout_s
    sink = StreamSink(cancel, stall_timeout_s)
    try:
        state.worker.submit(WorkItem(ready.turn, arrived_at, sink, cancel, ready.tokenize_ms))
    except BaseException:
        departure.close()
        raise
    return EventStream(
        sink,
        ChatChunks(ready.head, state.tokenizer.token_bytes),
        departure,
        heartbeat_s=state.heartbeat_s,
        stall_timeout_s=stall_timeout_s,
    )


async def _whole(
    state: ServerState, ready: Prepared, arrived_at: float, departure: Departure
) -> Response:
    """Submit, wait for the end, and fold the events that a stream would have relayed."""
    cancel = CancelToken()
    departure.cancels(cancel)
    sink = FutureSink()
    try:
        state.worker.submit(WorkItem(ready.turn, arrived_at, sink, cancel, ready.tokenize_ms))
        reply = await sink.reply()
    finally:
        departure.close()
    if isinstance(reply.end, Failed):
        raise reply.end.error
    events: list[Delta | Finished] = [reply.delta, reply.end]
    chunks = ChatChunks(ready.head, state.tokenizer.token_bytes)
    # Off the loop: with 20 logprobs a token, a long reply is a million small objects. Not on the
    # text thread, whose line may be full: a finished reply is never refused.
    return await asyncio.to_thread(lambda: json_response(whole_body(chunks, events)))
