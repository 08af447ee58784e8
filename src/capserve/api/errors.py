"""What does a client see when something goes wrong?

Always the OpenAI error body `{"error": {"message", "type", "param", "code"}}`, whatever failed:
a field, a route, a key, the queue, or our own code; below `/v1/messages` it is the body of that
dialect. Statuses come from the `CapserveError` tree; 429 and 503 always carry `Retry-After`, since
agent clients wait exactly that long.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from capserve.api.json_response import json_response
from capserve.api.messages_errors import messages_error_body, speaks_messages
from capserve.errors import CapserveError, InvalidRequestError, NotFoundError, UnavailableError

log = logging.getLogger("capserve.api")

RETRY_DEFAULT_S = 1.0
"""For a 429 or 503 whose origin gave no estimate: soon, but not a busy loop."""


class ModelNotFoundError(NotFoundError):
    """The request names a model that is not served here."""

    code = "model_not_found"


class MethodNotAllowedError(CapserveError):
    """The path exists, but not for this method."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class UnsupportedMediaError(CapserveError):
    """The body is not declared as JSON."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class UnsupportedValueError(InvalidRequestError):
    """A legal value that asks for something this server does not do (yet)."""

    code = "unsupported_value"


class ClientGoneError(CapserveError):
    """The client closed its connection; nobody reads this. 499 is for the log only."""

    status = 499
    type = "client_error"
    code = "client_disconnected"


def error_body(error: CapserveError) -> dict[str, Any]:
    """The OpenAI error object of `error`, also used inside a stream."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(
    error: CapserveError, scope: Scope, headers: Mapping[str, str] | None = None
) -> Response:
    """`error` as a whole HTTP response, in the dialect of the path that `scope` asks for."""
    sent = dict(headers or {})
    if error.status in (429, 503):
        wait_s = RETRY_DEFAULT_S if error.retry_after_s is None else error.retry_after_s
        sent["retry-after"] = str(max(1, math.ceil(wait_s)))
    if error.status == 401:
        sent["www-authenticate"] = "Bearer"
    if speaks_messages(scope["path"]):
        body = messages_error_body(error, scope["state"]["request_id"])
    else:
        body = error_body(error)
    return json_response(body, error.status, sent)


def unexpected(request_id: str) -> CapserveError:
    """Our own fault, told to the client without its inside: the id finds it in the log."""
    return CapserveError(
        f"The server failed on this request. Its log has the cause under id {request_id}."
    )


def shutting_down() -> UnavailableError:
    """What a turn hears whose time ran out because the server stops."""
    return UnavailableError("The server is shutting down.", retry_after_s=5.0)


async def _on_capserve(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, CapserveError)
    return error_response(exc, request.scope)


async def _on_http(request: Request, exc: Exception) -> Response:
    """Starlette's own 404 and 405, in our words."""
    assert isinstance(exc, HTTPException)
    what = f"{request.method} {request.url.path}"
    error: CapserveError
    match exc.status_code:
        case 404:
            error = NotFoundError(f"There is nothing at {what}.")
        case 405:
            allowed = (exc.headers or {}).get("Allow") or "another method"
            error = MethodNotAllowedError(f"{what} is not possible; this path takes {allowed}.")
        case status:
            error = InvalidRequestError(f"{what}: {exc.detail}")
            error.status = status
    return error_response(error, request.scope, exc.headers)


async def _on_client_gone(request: Request, _: Exception) -> Response:
    return error_response(ClientGoneError("The client closed the connection."), request.scope)


def install_handlers(app: FastAPI) -> None:
    """Route every expected exception of `app` to the error body."""
    app.add_exception_handler(CapserveError, _on_capserve)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
