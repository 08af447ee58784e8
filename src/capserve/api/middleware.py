"""What holds for every request, whatever its route?

It has an id, which comes back as `x-request-id` and stands in the log; it shows a key where keys
are configured; and if our own code fails, the client still gets an error body with that id. Plain
ASGI, because the framework's own base class for middleware would buffer streams and hide
disconnects.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from capserve.api.auth import KeyRing
from capserve.api.errors import error_response, shutting_down, unexpected
from capserve.api.messages_errors import speaks_messages
from capserve.errors import AuthenticationError

log = logging.getLogger("capserve.api")

_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")
"""Safe in a header, a log line and a metrics label; anything else is replaced by our own id."""

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Probes of supervisors carry no key. `/metrics` does need one: it tells what others do."""


def request_id_of(scope: Scope) -> str:
    """The id that `RequestIds` gave this request."""
    return str(scope["state"]["request_id"])


def caller_of(scope: Scope) -> str:
    """The caller that `RequireKey` let through."""
    return str(scope["state"]["caller"])


class RequestIds:
    """Outermost: names the request and answers for what nobody else caught."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if speaks_messages(scope["path"]):
                    headers["request-id"] = request_id  # where that dialect's clients look
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            # The one place that may catch everything: past it there is only the HTTP server.
            log.exception("request %s failed: %s %s", request_id, scope["method"], scope["path"])
            if started:
                raise  # too late for a status; the server closes the connection
            await error_response(unexpected(request_id), scope)(scope, receive, send_with_id)
        except asyncio.CancelledError:
            # Only the server's own shutdown cancels a request; its client is told, if it still can.
            if started:
                raise
            await error_response(shutting_down(), scope)(scope, receive, send_with_id)


class RequireKey:
    """Lets a request through when it shows a configured key, or needs none."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            exempt = scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS"
            if not exempt:
                try:
                    headers = Headers(scope=scope)
                    shown = headers.get("authorization"), headers.get("x-api-key")
                    caller = self._keys.caller(*shown)
                except AuthenticationError as error:
                    await error_response(error, scope)(scope, receive, send)
                    return
                scope["state"]["caller"] = caller
        await self._app(scope, receive, send)
