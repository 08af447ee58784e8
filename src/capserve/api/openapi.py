"""What does this server take and answer, in a form that a machine reads? `GET /openapi.json`.

An OpenAPI document of every route: request bodies are told by the models that read them
(`openapi_requests`), answers in closed forms (`openapi_replies`), streams event by event
(`openapi_events`; version 3.1 has no word for these), refusals with the body of the path's own
dialect, and who may ask. Names, vocabulary and drafts are those of the served model.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.responses import Response

from capserve import __version__
from capserve.api import responses, sessions
from capserve.api.messages_errors import speaks_messages
from capserve.api.middleware import OPEN_PATHS
from capserve.api.openapi_events import STREAMS, event_schemas
from capserve.api.openapi_forms import STRING, Json, ref
from capserve.api.openapi_replies import reply_schemas
from capserve.api.openapi_requests import request_schemas
from capserve.api.sessions_file import TAR_TYPE
from capserve.api.state import ServerState

_REASONS = {
    400: "A field, the body, or what is asked for is not possible; the message names it.",
    401: "No API key, or a wrong one.",
    404: "No such model, session, stored reply, or path.",
    408: "The body came too slowly. The connection closes.",
    409: "A turn runs, or is parked, on the session.",
    413: "The body, the file, or the prompt is over a limit of admission.",
    415: "The body is not declared as what it has to be.",
    429: "The queue is full, or another file is on its way.",
    500: "The engine failed, and the turn may be sent again; or a fault of this server.",
    503: "Not ready, shutting down, or no room.",
}

_BODY = (400, 408, 413, 415, 503)
"""What any route may answer that reads a body."""
_TEXT = (*_BODY, 404, 429)
"""Also what a route may answer whose body is read on the text thread."""
_ORDER = (404, 503)
"""What any route may answer that asks the worker about a session."""


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    answer: str
    """Component of the answer's body; empty for one that is not JSON."""
    refusals: tuple[int, ...] = ()
    """Statuses beside 401 (where a key is needed) and 500, which are everywhere."""
    body: str = ""
    """Component of the request's body."""
    query: Sequence[Json] = ()
    status: int = 200
    takes: str = "application/json"
    gives: str = "application/json"
    extra: Json = field(default_factory=dict)
    """Answers of other statuses with a body that is no refusal: status -> component."""


def _query(name: str, schema: Json, about: str) -> Json:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": about}


def _number(least: int, most: int, default: int) -> Json:
    return {"type": "integer", "minimum": least, "maximum": most, "default": default}


_SALT = _query("cache_salt", STRING, "That of the sessions which were begun with one.")
_SPACE = (_SALT, _query("prompt_cache_key", STRING, "As in a request, for an imported session."))

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "post",
        "/v1/chat/completions",
        "A reply of the model, plain or as a stream.",
        "ChatCompletion",
        _TEXT,
        "ChatRequest",
    ),
    Operation(
        "post",
        "/v1/completions",
        "A raw text continued.",
        "Completion",
        _TEXT,
        "CompletionRequest",
    ),
    Operation(
        "post",
        "/v1/messages",
        "A reply in the Anthropic dialect.",
        "MessageReply",
        _TEXT,
        "MessagesRequest",
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "The tokens of the prompt that the same request would have.",
        "TokenCount",
        _TEXT,
        "CountRequest",
    ),
    Operation(
        "post",
        "/v1/responses",
        "A reply as a response, which may be kept.",
        "ResponseReply",
        _TEXT,
        "ResponsesRequest",
    ),
    Operation(
        "get",
        "/v1/responses/{response_id}",
        "A reply that was kept.",
        "ResponseReply",
        (400, 404),
        query=(_query("stream", {"enum": ["false", "0"]}, "A kept reply is whole."),),
    ),
    Operation(
        "delete",
        "/v1/responses/{response_id}",
        "Forget a reply.",
        "ResponseDeleted",
        (404,),
    ),
    Operation(
        "get",
        "/v1/responses/{response_id}/input_items",
        "What was read for a reply, item by item.",
        "ResponseItems",
        (400, 404, 429),
        query=(
            _query("limit", _number(1, responses.MAX_PAGE, 20), "Items of a page."),
            _query("order", {"enum": ["asc", "desc"]}, "Newest first by default."),
            _query("after", STRING, "The id of the last item of the page before."),
        ),
    ),
    Operation(
        "post", "/tokenize", "Count the tokens of a text.", "Tokens", _TEXT, "TokenizeRequest"
    ),
    Operation("post", "/detokenize", "Spell tokens.", "Spelling", _TEXT, "DetokenizeRequest"),
    Operation(
        "get",
        "/v1/sessions",
        "The caller's sessions.",
        "SessionList",
        (400, *_ORDER),
        query=(
            _query("limit", _number(1, sessions.MAX_PAGE, 100), "Sessions of a page."),
            _query("after", STRING, "The id of the last session of the page before."),
            *_SPACE,
        ),
    ),
    Operation(
        "post",
        "/v1/sessions/import",
        "A session from a file.",
        "SessionImported",
        (400, 408, 413, 415, 429, 503),
        "SessionFile",
        query=_SPACE,
        status=201,
        takes=TAR_TYPE,
    ),
    Operation(
        "get",
        "/v1/sessions/{session_id}",
        "A session and its boundaries.",
        "Session",
        _ORDER,
        query=_SPACE,
    ),
    Operation(
        "delete",
        "/v1/sessions/{session_id}",
        "Drop a session and what only it has.",
        "SessionDeleted",
        (409, *_ORDER),
        query=_SPACE,
    ),
    Operation(
        "post",
        "/v1/sessions/{session_id}/fork",
        "Sessions that go on from here.",
        "SessionForks",
        (*_BODY, 404),
        "ForkBody",
        query=_SPACE,
        status=201,
    ),
    Operation(
        "post",
        "/v1/sessions/{session_id}/undo",
        "Take turns back.",
        "SessionUndone",
        (*_BODY, 404, 409),
        "UndoBody",
        query=_SPACE,
    ),
    Operation(
        "post",
        "/v1/sessions/{session_id}/pin",
        "Keep, or release, a state.",
        "SessionPinned",
        (*_BODY, 404, 409),
        "PinBody",
        query=_SPACE,
    ),
    Operation(
        "get",
        "/v1/sessions/{session_id}/export",
        "A session as a file.",
        "",
        (400, 409, 429, *_ORDER),
        query=(
            _query("include", {"enum": ["newest", "all"]}, "Which of its states."),
            *_SPACE,
        ),
        gives=TAR_TYPE,
    ),
    Operation("get", "/v1/models", "The served names.", "ModelList"),
    Operation("get", "/v1/models/{name}", "One of them.", "Model", (404,)),
    Operation("get", "/health", "Is it well? 503 when not.", "Health", extra={"503": "Health"}),
    Operation("head", "/health", "The same without a body.", "", extra={"503": ""}),
    Operation("get", "/ready", "May turns come?", "Ready", (503,)),
    Operation("head", "/ready", "The same without a body.", "", extra={"503": ""}),
    Operation("get", "/metrics", "Prometheus text.", "", gives="text/plain"),
    Operation("get", "/openapi.json", "This document.", "Anything"),
)


def document(state: ServerState) -> Json:
    """The document of the server over `state`."""
    components = {
        **request_schemas(state.model),
        **reply_schemas(),
        **event_schemas(),
        "SessionFile": {"description": "A tar file, as an export gives it."},
        "Anything": {"type": "object"},
    }
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, state)
    return {
        "openapi": "3.2.0",
        "info": {
            "title": "capserve",
            "version": __version__,
            "description": "Unknown fields of a request are ignored. Integers are written without "
            "a decimal point. JSON is nested at most 240 levels deep.",
        },
        "paths": paths,
        "components": {
            "schemas": _used(paths, components),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(operation: Operation, state: ServerState) -> Json:
    told: Json = {
        "operationId": _name(operation),
        "summary": operation.summary,
        "security": _security(operation, state),
        "parameters": [*_path_parameters(operation), *operation.query],
        "responses": _answers(operation),
    }
    if operation.body:
        content = {operation.takes: {"schema": ref(operation.body)}}
        told["requestBody"] = {"required": True, "content": content}
    return told


def _name(operation: Operation) -> str:
    words = re.findall(r"[a-z_]+", operation.path.removeprefix("/v1"))
    return "_".join([operation.method, *words])


def _security(operation: Operation, state: ServerState) -> list[Json]:
    if operation.path in OPEN_PATHS:
        return []
    either: list[Json] = [{"bearer": []}, {"x-api-key": []}]
    return either if state.api_keys else [{}, *either]


def _path_parameters(operation: Operation) -> list[Json]:
    return [
        {"name": name, "in": "path", "required": True, "schema": STRING}
        for name in re.findall(r"\{(\w+)\}", operation.path)
    ]


def _answers(operation: Operation) -> Json:
    good: Json = {"description": "Done.", "headers": _headers(operation, operation.status)}
    if operation.method != "head":
        body = ref(operation.answer) if operation.answer else {}
        good["content"] = {operation.gives: {"schema": body}}
    if operation.body and operation.answer in STREAMS:
        good["content"]["text/event-stream"] = {"itemSchema": STREAMS[operation.answer]}
    answers = {str(operation.status): good}
    needs_key = () if operation.path in OPEN_PATHS else (401,)
    error = ref("MessagesError" if speaks_messages(operation.path) else "Error")
    for status in sorted({*operation.refusals, *needs_key, 500}):
        refusal: Json = {
            "description": _REASONS[status],
            "headers": _headers(operation, status),
        }
        if operation.method != "head":
            refusal["content"] = {"application/json": {"schema": error}}
        answers[str(status)] = refusal
    for status_text, name in operation.extra.items():
        other: Json = {"description": "Not well.", "headers": _headers(operation, 200)}
        if name:
            other["content"] = {"application/json": {"schema": ref(name)}}
        answers[status_text] = other
    return answers


def _headers(operation: Operation, status: int) -> Json:
    names = ["x-request-id"]
    if speaks_messages(operation.path):
        names.append("request-id")
    if status == 401:
        names.append("www-authenticate")
    headers: Json = {name: {"required": True, "schema": STRING} for name in names}
    if status in (429, 503):
        seconds = {"type": "integer", "minimum": 1}
        headers["retry-after"] = {"required": True, "schema": seconds}
    return headers


def _used(paths: Json, components: dict[str, Json]) -> dict[str, Json]:
    """Those that some operation leads to. KeyError for one that is not there."""
    found: dict[str, Json] = {}
    names = _names(paths)
    while names:
        name = names.pop()
        if name not in found:
            found[name] = components[name]
            names |= _names(components[name])
    return dict(sorted(found.items()))


def _names(value: Any) -> set[str]:
    return set(re.findall(r"#/components/schemas/(\w+)", json.dumps(value)))


def router(state: ServerState) -> APIRouter:
    """The route; the document is made when it is first asked for, off the event loop."""
    routes = APIRouter()

    @functools.cache
    def written() -> bytes:
        return orjson.dumps(document(state))

    @routes.get("/openapi.json")
    async def openapi() -> Response:
        return Response(await asyncio.to_thread(written), media_type="application/json")

    return routes
