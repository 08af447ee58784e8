"""How many tokens is this, and which?

`POST /tokenize` counts a text, or a conversation as a chat request would have it rendered;
`POST /detokenize` spells tokens. Neither touches the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from capserve.api import translate
from capserve.api.body import Bodies
from capserve.api.json_response import json_response
from capserve.api.schemas import ChatRequest, Wire
from capserve.api.state import ServerState
from capserve.api.strict_json import parse_object
from capserve.api.text_thread import TextThread
from capserve.api.validation import validated
from capserve.errors import ContextLengthError, InvalidRequestError
from capserve.text.prompt import TokenArray

Json = dict[str, Any]

MOST_CONTEXTS = 4
"""A text that is longer than so many contexts is not counted to its end."""

MAX_TOKENS = 4_000_000
"""Of a body to be spelled."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class TokenizeRequest(Wire):
    """A `prompt`, or what a chat request has."""

    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None
    """No text of this family has tokens put before it: both values mean the same."""
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Wire):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS)]


def tokenized(state: ServerState, body: bytes) -> Json:
    """The answer of `/tokenize`. Raises InvalidRequestError."""
    raw = parse_object(body)
    request = validated(TokenizeRequest, raw)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("Give either prompt or messages.", param="prompt")
    if request.prompt is not None:
        check_model(state, raw.get("model"))
        tokens = counted(state, request.prompt, "prompt").tolist()
    else:
        chat = validated(ChatRequest, raw)
        translate.served_name(chat, state.model)
        most = MOST_CONTEXTS * state.model.max_model_len
        prompt = state.prompts.build(
            translate.conversation(chat, raw, state.prompts), most_tokens=most
        )
        tokens = prompt.tokens.tolist()
        if request.add_generation_prompt is False and not prompt.continues_reply:
            tokens = tokens[: prompt.prompt_end]
    answer: Json = {
        "count": len(tokens),
        "max_model_len": state.model.max_model_len,
        "tokens": tokens,
    }
    if request.return_token_strs:
        answer["token_strs"] = [
            state.tokenizer.token_bytes(token).decode(errors="replace") for token in tokens
        ]
    return answer


def counted(state: ServerState, text: str, param: str) -> TokenArray:
    """The tokens of `text`, int32. Raises ContextLengthError for one that is far too long."""
    most = MOST_CONTEXTS * state.model.max_model_len
    if state.tokenizer.surely_exceeds(text, most):
        raise ContextLengthError(
            f"The maximum context length is {state.model.max_model_len} tokens; {param} has more "
            f"than {most} ({len(text)} characters).",
            param=param,
        )
    return state.tokenizer.encode(text)


def check_model(state: ServerState, name: object) -> None:
    """Raises ModelNotFoundError, or InvalidRequestError for what is no name."""
    stand_in = {"messages": [{"role": "user", "content": ""}], "model": name}
    translate.served_name(validated(ChatRequest, stand_in), state.model)


def spelled(state: ServerState, body: bytes) -> Json:
    """The answer of `/detokenize`. Raises InvalidRequestError."""
    request = validated(DetokenizeRequest, parse_object(body))
    check_model(state, request.model)
    check_ids(request.tokens, state.model.vocab_size, "tokens")
    raw = b"".join(map(state.tokenizer.token_bytes, request.tokens))
    return {"prompt": raw.decode(errors="replace")}


def check_ids(tokens: Sequence[int], vocab_size: int, at: str) -> None:
    """Raises InvalidRequestError for the first one that the vocabulary does not have."""
    for i, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"{at}[{i}] must be a token id from 0 to {vocab_size - 1}, got {token}.",
                param=f"{at}[{i}]",
            )


def _shallow(answer: Callable[[ServerState, bytes], Json], state: ServerState, body: bytes) -> Json:
    try:
        return answer(state, body)
    except RecursionError:
        # The parser's own bound on depth is above what rendering can follow.
        raise InvalidRequestError("The request body has JSON that is nested too deeply.") from None


def router(state: ServerState, bodies: Bodies, text: TextThread) -> APIRouter:
    """The routes, over the app's own body counter and text thread."""
    routes = APIRouter()

    @routes.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        async with bodies.read(request) as body:
            return json_response(await text.run(lambda: _shallow(tokenized, state, body)))

    @routes.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        async with bodies.read(request) as body:
            return json_response(await text.run(lambda: _shallow(spelled, state, body)))

    return routes
