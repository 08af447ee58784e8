"""What does a request to `POST /v1/messages` ask for, and in which form is it answered?

The Anthropic dialect: translated into the chat request that means the same, prepared as that, and
answered in this dialect's own events. `count_tokens` prepares alike and submits nothing.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from capserve.api import chat
from capserve.api.body import Bodies
from capserve.api.json_response import json_response
from capserve.api.messages_events import MessageChunks, MessageHead, body_of
from capserve.api.messages_schema import CountRequest, MessagesRequest
from capserve.api.messages_translate import chat_body, own_words
from capserve.api.middleware import caller_of, request_id_of
from capserve.api.relay import Prepared, Relay
from capserve.api.state import ServerState
from capserve.api.strict_json import parse_object
from capserve.api.text_thread import TextThread
from capserve.api.validation import validated
from capserve.errors import InvalidRequestError


def prepare(state: ServerState, body: bytes, request_id: str, caller: str) -> Prepared:
    """As `relay.Prepare`."""
    raw = parse_object(body)
    request = validated(MessagesRequest, raw)
    with own_words(request):
        ready = chat.prepare(state, _written(chat_body(request, raw)), request_id, caller)
    (turn,) = ready.turns
    prompt = turn.prompt
    head = MessageHead(
        id=f"msg_{secrets.token_hex(12)}",
        model=request.model,
        request_id=request_id,
        prompt_tokens=len(prompt.tokens),
        marked_tokens=max(prompt.breakpoints, default=0),
        seed=turn.sampling.seed,
        notes=prompt.notes,
    )
    return replace(ready, chunks=MessageChunks(head), body=lambda replies: body_of(head, replies))


def count(state: ServerState, body: bytes, request_id: str, caller: str) -> int:
    """Tokens of the prompt that the same request to `/v1/messages` would have."""
    raw = parse_object(body)
    request = validated(CountRequest, raw)
    asked = chat_body(request, raw)
    asked.pop("max_tokens", None)  # not a field of this request, and so not to be checked
    try:
        with own_words(request):
            ready = chat.prepare(state, _written(asked), request_id, caller)
    except RecursionError:
        raise _too_deep() from None
    return len(ready.turns[0].prompt.tokens)


def _written(body: dict[str, object]) -> bytes:
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError:
        # Everything in it came out of JSON: only its depth can be wrong.
        raise _too_deep() from None


def _too_deep() -> InvalidRequestError:
    return InvalidRequestError("The request body has JSON that is nested too deeply.")


def router(state: ServerState, bodies: Bodies, text: TextThread) -> APIRouter:
    """The routes, over the app's own body counter and text thread."""
    routes = APIRouter()
    relay = Relay(state, bodies, text)

    @routes.post("/v1/messages")
    async def messages(request: Request) -> Response:
        return await relay.answer(request, prepare)

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        request_id, caller = request_id_of(request.scope), caller_of(request.scope)
        async with bodies.read(request) as body:
            tokens = await text.run(lambda: count(state, body, request_id, caller))
        return json_response({"input_tokens": tokens})

    return routes
