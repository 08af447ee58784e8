"""What does a request to `POST /v1/responses` ask for, and what is kept of its answer?

The protocol's own memory is the store: what is asked for with `previous_response_id` is the same
conversation that a client would send that keeps it itself, down to its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from capserve.api import translate
from capserve.api.errors import UnsupportedValueError
from capserve.api.json_response import json_response
from capserve.api.middleware import caller_of
from capserve.api.named import best_record, subject
from capserve.api.relay import Prepared, Relay
from capserve.api.responses_events import (
    ResponseChunks,
    ResponseEvents,
    ResponseHead,
    body_of,
    new_id,
)
from capserve.api.responses_schema import ResponsesRequest, as_items, read_items
from capserve.api.responses_store import Json, ResponseStore, Stored, stored
from capserve.api.responses_tools import offered
from capserve.api.responses_translate import conversation, own_words, settings
from capserve.api.schemas import ChatRequest, quote
from capserve.api.state import ServerState
from capserve.api.strict_json import parse_object
from capserve.api.text_thread import TextThread
from capserve.api.validation import validated
from capserve.engine.seam import Sampling
from capserve.errors import InvalidRequestError
from capserve.serving.turn import TurnRequest
from capserve.text.grammar import Grammar

MAX_PAGE = 100
"""Items of one page, as the protocol has it."""

_ID_HEADS = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


@dataclass(frozen=True)
class Responses:
    """`relay.Prepare` for this protocol, over the app's own store."""

    store: ResponseStore

    def __call__(self, state: ServerState, body: bytes, request_id: str, caller: str) -> Prepared:
        raw = parse_object(body)
        request = validated(ResponsesRequest, raw)
        tools = offered(request.tools or ())
        chat = settings(request, raw, tools)
        name = translate.served_name(chat, state.model)
        sampling = translate.sampling(chat, state.model)
        previous, sent = self._sent(request, caller)
        if previous is not None:
            chat = _in_the_same_namespace(chat, previous)
        history = [] if previous is None else previous.items()
        items = [*read_items(history, "previous_response_id"), *read_items(sent)]
        asked = conversation(request.instructions, items, tools, chat, state.prompts)
        with own_words(tools):
            about = subject(chat, asked, caller, state.transcripts, state.prompts)
            translate.refuse_hopeless(asked, state.tokenizer, state.model)
            chain = state.prompts.chain(asked)
            record = best_record(about, chain, state.transcripts)
            prompt = state.prompts.build(asked, record, chain, state.model.max_model_len)
            room = translate.output_room(chat, len(prompt.tokens), state.model, state.limits)
            in_reasoning = prompt.starts_in_reasoning
            output = translate.output_spec(chat, asked.tools, in_reasoning)
            demanded = translate.constraint(chat, asked.tools, in_reasoning)
            has_form = demanded.demands()
            thinking = translate.thinking(chat, output, state.tokenizer)

        def demand() -> Grammar | None:
            with own_words(tools):
                return state.grammars.compile(demanded)

        turn = TurnRequest(
            request_id=request_id,
            namespace=about.namespace,
            prompt=prompt,
            sampling=sampling,
            max_output_tokens=room,
            output=output,
            pin=chat.flashrt_pin_prefix,
            thinking=thinking,
        )
        keeps = request.store is not False
        input_json = orjson.dumps([*history, *map(_listed, sent)]) if keeps else b""

        def keep(response: Json) -> None:
            if keeps:
                self.store.put(caller, stored(response, input_json))

        head = ResponseHead(
            id=new_id("resp"),
            echo=_echo(request, raw, chat, name, sampling),
            tools=tools,
            seed=sampling.seed,
            notes=(*prompt.notes, *tools.notes),
            finished=keep,
        )
        events = ResponseEvents(head)
        return Prepared(
            (turn,),
            bool(chat.stream),
            ResponseChunks(events),
            lambda replies: body_of(events, replies),
            demand if has_form else None,
        )

    def _sent(self, request: ResponsesRequest, caller: str) -> tuple[Stored | None, list[Any]]:
        """The stored reply that this one follows, and the items that are new."""
        items = as_items(request.input)
        if not items:
            missing = InvalidRequestError("input is required: at least 1 item.", param="input")
            missing.code = "missing_required_parameter"
            raise missing
        name = request.previous_response_id
        previous = None
        if name is not None:
            previous = self.store.get(caller, name, "previous_response_id")
        return previous, [self._found(item, i, caller) for i, item in enumerate(items)]

    def _found(self, item: object, i: int, caller: str) -> object:
        """`item` itself, or the output item that it refers to."""
        if not isinstance(item, dict) or not isinstance(item.get("id"), str):
            return item
        short = item.get("type") is None and "role" not in item
        if item.get("type") != "item_reference" and not short:
            return item
        return self.store.item(caller, item["id"], f"input[{i}].id")


def _in_the_same_namespace(chat: ChatRequest, previous: Stored) -> ChatRequest:
    """A reply that follows another one may share its state, unless it says with whom it does."""
    if chat.prompt_cache_key or chat.cache_salt:
        return chat
    return chat.model_copy(update={"prompt_cache_key": previous.body()["prompt_cache_key"]})


def _listed(item: Mapping[str, Any]) -> Json:
    """An input item as it is listed: with its type, an id, and content in parts."""
    kind = item.get("type") or "message"
    shown = {**item, "type": kind, "id": item.get("id") or new_id(_ID_HEADS[kind])}
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        shown["content"] = [{"type": part, "text": item["content"]}]
    return shown


def _echo(
    request: ResponsesRequest,
    raw: Mapping[str, Any],
    chat: ChatRequest,
    name: str,
    sampling: Sampling,
) -> Json:
    """The settings of the request, with what its silence meant."""
    reasoning, text = request.reasoning, request.text
    return {
        "model": name,
        "instructions": request.instructions,
        "previous_response_id": request.previous_response_id,
        "max_output_tokens": request.max_output_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "tools": raw.get("tools") or [],
        "tool_choice": request.tool_choice or "auto",
        "parallel_tool_calls": chat.parallel_tool_calls is not False,
        "reasoning": {
            "effort": reasoning and reasoning.effort,
            "summary": reasoning and reasoning.summary,
        },
        "text": {"format": (text and text.format) or {"type": "text"}},
        "truncation": request.truncation or "disabled",
        "store": request.store is not False,
        "metadata": chat.metadata or {},
        "prompt_cache_key": chat.prompt_cache_key,
        "safety_identifier": request.safety_identifier,
        "user": chat.user,
        "background": False,
    }


def router(relay: Relay, text: TextThread) -> APIRouter:
    """The routes, over the app's own relay and text thread, and a store of their own."""
    routes = APIRouter()
    store = ResponseStore()
    prepare = Responses(store)

    @routes.post("/v1/responses")
    async def create_response(request: Request) -> Response:
        return await relay.answer(request, prepare)

    @routes.get("/v1/responses/{response_id}")
    async def get_response(request: Request, response_id: str) -> Response:
        found = store.get(caller_of(request.scope), response_id)
        if request.query_params.get("stream") in ("true", "1"):
            raise UnsupportedValueError(
                "stream can't be true here: a stored response is whole.", param="stream"
            )
        return Response(found.body_json, media_type="application/json")

    @routes.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Response:
        store.delete(caller_of(request.scope), response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @routes.get("/v1/responses/{response_id}/input_items")
    async def list_input(request: Request, response_id: str) -> Response:
        found = store.get(caller_of(request.scope), response_id)
        query = dict(request.query_params)
        return json_response(await text.run(lambda: page(found, query)))

    return routes


def page(found: Stored, query: Mapping[str, str]) -> Json:
    """One page of a reply's input items, newest first unless `order` is `asc`."""
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    # The length first: turning a million digits into a number would take the thread.
    is_number = limit.isascii() and limit.isdigit() and len(limit) <= 10
    if not is_number or not 1 <= int(limit) <= MAX_PAGE:
        raise InvalidRequestError(
            f"limit must be 1 to {MAX_PAGE}, got {quote(limit)}.", param="limit"
        )
    if order not in ("asc", "desc"):
        raise InvalidRequestError(
            f"order must be 'asc' or 'desc', got {quote(order)}.", param="order"
        )
    items: Sequence[Json] = orjson.loads(found.input_json)
    if order == "desc":
        items = items[::-1]
    start = 0
    if (after := query.get("after")) is not None:
        places = [i for i, item in enumerate(items) if item["id"] == after]
        if not places:
            raise InvalidRequestError(f"after: there is no item {quote(after)}.", param="after")
        start = places[0] + 1
    data = items[start : start + int(limit)]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + len(data) < len(items),
    }
