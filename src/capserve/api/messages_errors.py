"""What does a client of the Anthropic dialect see when something goes wrong?

The same refusals as everywhere, in this dialect's body: `{"type": "error", "error": {"type",
"message"}, "request_id"}`. The error types follow from the status; a prompt that does not fit says
so in the words by which these clients know that they have to compact the conversation.
"""

from __future__ import annotations

from typing import Any, ClassVar

from capserve.errors import CapserveError, ContextLengthError, InvalidRequestError

PATH = "/v1/messages"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ThreadUnsupportedError(InvalidRequestError):
    """The request wants its conversation to be held here, and next time to send what is new.

    To ignore that would lose the conversation. Clients know these details, and send it whole.
    """

    code = "unsupported_value"
    details: ClassVar = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def speaks_messages(path: str) -> bool:
    """If what goes wrong at `path` is told in this dialect."""
    return path == PATH or path.startswith(PATH + "/")


def messages_error_body(error: CapserveError, request_id: str) -> dict[str, Any]:
    """The error object of `error`, also used inside a stream."""
    fallback = "invalid_request_error" if 400 <= error.status < 499 else "api_error"
    message = error.message
    if isinstance(error, ContextLengthError):
        message = f"prompt is too long: {message}"
    told: dict[str, Any] = {"type": _TYPES.get(error.status, fallback), "message": message}
    if isinstance(error, ThreadUnsupportedError):
        told["details"] = error.details
    return {"type": "error", "error": told, "request_id": request_id}
