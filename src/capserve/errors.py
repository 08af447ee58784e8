"""What can go wrong, and what does the client see of it?

One tree. `status`, `type` and `code` are the hints from which the api layer makes an OpenAI error
body; nothing below api knows HTTP beyond these numbers. Raise these for what comes from outside;
our own promises are `assert`ed instead. A message names the field and both numbers.
"""

from __future__ import annotations


class CapserveError(Exception):
    """Base of every error that a caller is meant to see."""

    status = 500
    type = "server_error"
    code: str | None = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequestError(CapserveError):
    """A field has a wrong type, a wrong range, or the template refuses the messages."""

    status = 400
    type = "invalid_request_error"
    code: str | None = "invalid_value"


class ContextLengthError(InvalidRequestError):
    """The prompt (plus what was asked for) is longer than the context; the message has both."""

    code = "context_length_exceeded"


class AuthenticationError(CapserveError):
    """No API key, or a wrong one."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NotFoundError(CapserveError):
    """A model, path or session that does not exist."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class TooLargeError(CapserveError):
    """A body or a prompt over its admission limit."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class QueueFullError(CapserveError):
    """`max_queue_depth` turns already wait. Carries Retry-After."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class UnavailableError(CapserveError):
    """Not ready, over budget, or draining. Carries Retry-After."""

    status = 503
    type = "service_unavailable"
    code = "unavailable"


class EngineError(CapserveError):
    """The engine failed in a way no request may cause; health turns red."""

    status = 500
    type = "server_error"
    code = "engine_error"


class CapsuleError(CapserveError):
    """A packed capsule can't be taken: torn, corrupt, or another engine's."""

    status = 400
    type = "invalid_request_error"
    code = "bad_capsule"


class ConflictError(CapserveError):
    """What was asked for can't be done while something else holds it, such as a running turn."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class StartupError(CapserveError):
    """The server can't start: bad checkpoint, no memory, port taken. The CLI exits with 2."""

    code = "startup_error"


class CheckpointError(StartupError):
    """A tensor is missing or misshapen, or the configuration is not of this family."""

    code = "bad_checkpoint"


class MemoryBudgetError(StartupError):
    """The plan needs more bytes than there are; the message has both."""

    code = "does_not_fit"
