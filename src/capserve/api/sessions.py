"""What may a client ask about its sessions? `/v1/sessions` and below.

Each route makes one frozen order, hands it to the worker, and shows the result as JSON. A caller's
sessions are its own: another's id is a 404. Export and import are streams, packed, read and checked
in other threads than the engine's and the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from capserve.api.auth import namespace
from capserve.api.body import Bodies
from capserve.api.file_stream import FileExports
from capserve.api.json_response import json_response
from capserve.api.middleware import caller_of
from capserve.api.schemas import Wire, quote
from capserve.api.sessions_file import FileImports
from capserve.api.state import ServerState
from capserve.api.strict_json import parse_object
from capserve.api.validation import validated
from capserve.errors import CapserveError, InvalidRequestError
from capserve.serving.misses import owner_of
from capserve.serving.sessions.orders import (
    MAX_FORKS,
    Deleted,
    DeleteSession,
    Exported,
    ExportSession,
    Forked,
    ForkSession,
    Imported,
    ListSessions,
    Pinned,
    PinSession,
    SessionInfo,
    SessionOrder,
    SessionPage,
    SessionResult,
    ShowSession,
    Undone,
    UndoSession,
)

MAX_PAGE = 1000

R = TypeVar("R", bound=SessionResult)
B = TypeVar("B", bound=Wire)


class ForkBody(Wire):
    n: int | None = Field(None, ge=1, le=MAX_FORKS)
    boundary: int | None = Field(None, ge=0)
    turns: int | None = Field(None, ge=0)
    """Turns ago; 0 is the end of the last one."""


class UndoBody(Wire):
    turns: int | None = Field(None, ge=1)
    boundary: int | None = Field(None, ge=0)


class PinBody(Wire):
    boundary: int | None = Field(None, ge=0)
    pinned: bool | None = None


def router(state: ServerState, bodies: Bodies) -> APIRouter:
    """The routes over the app's own body counter."""
    routes = APIRouter()
    imports = FileImports(state)
    exports = FileExports(state.limits.stream_stall_timeout_s)

    async def done_by_the_desk(order: SessionOrder) -> Any:
        return await asyncio.shield(asyncio.wrap_future(state.worker.order(order)))

    async def ask(order: SessionOrder, kind: type[R]) -> R:
        result = await done_by_the_desk(order)
        assert isinstance(result, kind)
        return result

    async def carried_out(orders: Generator[SessionOrder, Any, Imported]) -> Imported:
        try:
            order = next(orders)
            while True:
                try:
                    result = await done_by_the_desk(order)
                except CapserveError as error:
                    order = orders.throw(error)
                else:
                    order = orders.send(result)
        except StopIteration as end:
            done: Imported = end.value
            return done

    async def read(request: Request, model: type[B]) -> B:
        async with bodies.read(request) as body:
            # On the loop: the bounds of these bodies are a handful of numbers.
            return validated(model, parse_object(body))

    # Before the routes with an id, which would take it for one.
    @routes.post("/v1/sessions/import")
    async def import_session(request: Request) -> Response:
        async with imports.read(request, _namespace(request)) as orders:
            done = await carried_out(orders)
        counts = {"capsules": done.capsules, "known": done.known, "refused": done.refused}
        return json_response(_shown(done.session) | counts, 201)

    @routes.get("/v1/sessions")
    async def list_sessions(request: Request) -> Response:
        query = request.query_params
        limit = _limit(query.get("limit"))
        page = await ask(ListSessions(_owner(request), limit, query.get("after")), SessionPage)
        data = [_shown(info) for info in page.sessions]
        return json_response({"object": "list", "data": data, "has_more": page.has_more})

    @routes.get("/v1/sessions/{session_id}")
    async def show_session(request: Request, session_id: str) -> Response:
        info = await ask(ShowSession(_owner(request), session_id), SessionInfo)
        return json_response(_shown(info))

    @routes.delete("/v1/sessions/{session_id}")
    async def delete_session(request: Request, session_id: str) -> Response:
        done = await ask(DeleteSession(_owner(request), session_id), Deleted)
        body = {"object": "session.deleted", "id": done.id, "deleted": True}
        return json_response(body | {"capsules": done.capsules})

    @routes.post("/v1/sessions/{session_id}/fork")
    async def fork_session(request: Request, session_id: str) -> Response:
        body = await read(request, ForkBody)
        order = ForkSession(_owner(request), session_id, body.n or 1, body.boundary, body.turns)
        done = await ask(order, Forked)
        data = [_shown(info) for info in done.sessions]
        return json_response({"object": "list", "data": data}, 201)

    @routes.post("/v1/sessions/{session_id}/undo")
    async def undo_session(request: Request, session_id: str) -> Response:
        body = await read(request, UndoBody)
        order = UndoSession(_owner(request), session_id, body.turns, body.boundary)
        done = await ask(order, Undone)
        removed = {"removed_turns": done.removed_turns, "removed_tokens": done.removed_tokens}
        return json_response(_shown(done.session) | removed)

    @routes.post("/v1/sessions/{session_id}/pin")
    async def pin_session(request: Request, session_id: str) -> Response:
        body = await read(request, PinBody)
        pinned = body.pinned is not False
        order = PinSession(_owner(request), session_id, body.boundary, pinned)
        done = await ask(order, Pinned)
        return json_response({"id": session_id, "position": done.position, "pinned": done.pinned})

    @routes.get("/v1/sessions/{session_id}/export")
    async def export_session(request: Request, session_id: str) -> Response:
        include = request.query_params.get("include", "newest")
        if include not in ("newest", "all"):
            raise InvalidRequestError(
                f"include must be 'newest' or 'all', got {quote(include)}.", param="include"
            )
        order = ExportSession(_owner(request), session_id, include == "all")
        return await exports.file(ask(order, Exported))

    return routes


def _namespace(request: Request) -> str:
    """A salt is part of who asks: sessions that were begun with one need it here, too."""
    query = request.query_params
    return namespace(
        caller_of(request.scope), query.get("prompt_cache_key"), query.get("cache_salt")
    )


def _owner(request: Request) -> str:
    return owner_of(_namespace(request))


def _limit(given: str | None) -> int:
    if given is None:
        return 100
    # The length first: turning a million digits into a number would take the loop.
    is_number = given.isascii() and given.isdigit() and len(given) <= 10
    if not is_number or not 1 <= int(given) <= MAX_PAGE:
        raise InvalidRequestError(
            f"limit must be 1 to {MAX_PAGE}, got {quote(given)}.", param="limit"
        )
    return int(given)


def _shown(info: SessionInfo) -> dict[str, Any]:
    body: dict[str, Any] = {"object": "session"} | asdict(info)
    if body["boundaries"] is None:
        del body["boundaries"]
    else:
        body["boundaries"] = [
            {"bytes" if key == "nbytes" else key: value for key, value in boundary.items()}
            for boundary in body["boundaries"]
        ]
    return body
