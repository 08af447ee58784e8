"""May this request enter the queue? Every refusal names the field and both numbers."""

from __future__ import annotations

from capserve.engine.seam import EngineLimits
from capserve.errors import ContextLengthError, InvalidRequestError, TooLargeError
from capserve.serving.limits import Limits
from capserve.serving.turn import TurnRequest


def admit(request: TurnRequest, limits: Limits, engine: EngineLimits) -> None:
    """Raises `ContextLengthError`, `TooLargeError` or `InvalidRequestError`; returns when fine."""
    tokens = len(request.prompt.tokens)
    if tokens == 0:
        raise InvalidRequestError("messages: the prompt has 0 tokens, 1 is needed.")
    if tokens + 1 > engine.max_positions:
        raise ContextLengthError(
            f"messages: the prompt has {tokens} tokens and needs room for 1 more, the context "
            f"length is {engine.max_positions}.",
            param="messages",
        )
    if tokens > limits.max_prompt_tokens:
        raise TooLargeError(
            f"messages: the prompt has {tokens} tokens, max_prompt_tokens is "
            f"{limits.max_prompt_tokens}.",
            param="messages",
        )
    if request.max_output_tokens < 1:
        raise InvalidRequestError(
            f"max_tokens: {request.max_output_tokens} is below 1.", param="max_tokens"
        )
    if not 0 <= request.pin <= tokens:
        raise InvalidRequestError(
            f"flashrt_pin_prefix: {request.pin} is not in 0..{tokens}, the prompt's tokens.",
            param="flashrt_pin_prefix",
        )
    if not 0 <= request.sampling.drafts <= engine.max_drafts:
        raise InvalidRequestError(
            f"flashrt_K: {request.sampling.drafts} is not in 0..{engine.max_drafts}.",
            param="flashrt_K",
        )
