"""What does a request to `POST /v1/messages` ask for, and in which form is it answered?

The Anthropic dialect: translated into the chat request that means the same, prepared as that, and
answered in this dialect's own events. `count_tokens` prepares alike and submits nothing.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

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
from capserve.api.validation import validated
from capserve.text.grammar import Grammar


def prepare(state: ServerState, body: bytes, request_id: str, caller: str) -> Prepared:
    """As `relay.Prepare`."""
    raw = parse_object(body)
    request = validated(MessagesRequest, raw)
    ready = _prepared_as_chat(request, raw, state, request_id, caller)
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


def prepare_count(state: ServerState, body: bytes, request_id: str, caller: str) -> Prepared:
    """The same request to `/v1/messages`, whose prompt is to be counted."""
    raw = parse_object(body)
    raw.pop("max_tokens", None)  # not a field of this request, and so not to be checked
    return _prepared_as_chat(validated(CountRequest, raw), raw, state, request_id, caller)


def _prepared_as_chat(
    request: CountRequest, raw: dict[str, Any], state: ServerState, request_id: str, caller: str
) -> Prepared:
    with own_words(request):
        ready = chat.prepare(state, orjson.dumps(chat_body(request, raw)), request_id, caller)
    compiled = ready.demand
    if compiled is None:
        return ready

    def demand() -> Grammar | None:
        with own_words(request):
            return compiled()

    return replace(ready, demand=demand)


def router(relay: Relay, bodies: Bodies) -> APIRouter:
    """The routes, over the app's own relay and body counter."""
    routes = APIRouter()

    @routes.post("/v1/messages")
    async def messages(request: Request) -> Response:
        return await relay.answer(request, prepare)

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        request_id, caller = request_id_of(request.scope), caller_of(request.scope)
        async with bodies.read(request) as body:
            ready, _ = await relay.prepared(prepare_count, body, request_id, caller)
        return json_response({"input_tokens": len(ready.turns[0].prompt.tokens)})

    return routes
