"""What does a request to `POST /v1/completions` ask for: which text, continued how often?

The text is read as it stands, without a template; the names of added tokens in it are these tokens.
Each prompt and each choice of it is a turn of its own.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from capserve.api import translate
from capserve.api.auth import namespace
from capserve.api.completions_chunks import CompletionChunks, CompletionHead, body_of
from capserve.api.errors import UnsupportedValueError
from capserve.api.relay import Prepared, Relay
from capserve.api.schemas import MAX_CHOICES, ChatRequest, Wire, refuse
from capserve.api.state import ServerState
from capserve.api.strict_json import parse_object, type_name
from capserve.api.tokens import check_ids
from capserve.api.validation import validated
from capserve.engine.seam import MAX_TOP_LOGPROBS
from capserve.errors import ContextLengthError, InvalidRequestError
from capserve.serving.turn import TurnRequest
from capserve.text.output import OutputSpec
from capserve.text.prompt import Prompt
from capserve.text.raw_prompt import raw_prompt

Json = dict[str, Any]

SHARED = (
    "cache_salt",
    "flashrt_K",
    "flashrt_pin_prefix",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "max_tokens",
    "min_p",
    "model",
    "n",
    "presence_penalty",
    "prompt_cache_key",
    "repetition_penalty",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_k",
    "top_p",
    "user",
)
"""Fields that mean what they mean in a chat request."""

_NO_MESSAGES = ({"role": "user", "content": ""},)
"""A chat request needs one; only its settings are used."""

Text = str | tuple[int, ...]
"""One prompt: words, or token ids."""


def _prompts(value: object) -> tuple[Text, ...]:
    """All spellings: a string, token ids, or an array of either."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise refuse(f"must be a string, token ids, or an array of these; got {type_name(value)}")
    if not value:
        raise refuse("must have at least 1 item, got 0")
    if _is_id(value[0]):
        return (_ids(value, ""),)
    if len(value) > MAX_CHOICES:
        raise refuse(f"must have at most {MAX_CHOICES} prompts, got {len(value)}")
    return tuple(
        one if isinstance(one, str) else _ids(one, f"[{i}]") for i, one in enumerate(value)
    )


def _ids(value: object, at: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise refuse(f"must be a string or an array of token ids, got {type_name(value)}", at)
    for i, one in enumerate(value):
        if not _is_id(one):
            raise refuse(f"must be a token id, got {type_name(one)}", f"{at}[{i}]")
    return tuple(value)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _suffix(value: object) -> object:
    if value is None or value == "":
        return None
    raise refuse("is not possible: this model can't fill a gap", kind="unsupported_value")


class CompletionRequest(Wire):
    """`POST /v1/completions`, but for what it shares with chat."""

    prompt: Annotated[Any, BeforeValidator(_prompts)]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    """That many alternatives beside each token; a number, as this protocol has it."""
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    suffix: Annotated[None, BeforeValidator(_suffix)] = None


def prepare(state: ServerState, body: bytes, request_id: str, caller: str) -> Prepared:
    """As `relay.Prepare`."""
    raw = parse_object(body)
    request = validated(CompletionRequest, raw)
    chat = _settings(request, raw)
    name = translate.served_name(chat, state.model)
    sampling = translate.without_end(chat, translate.sampling(chat, state.model), has_form=False)
    texts: tuple[Text, ...] = request.prompt
    count = _choices(request, chat, len(texts))
    space = namespace(caller, chat.prompt_cache_key, chat.cache_salt)
    spec = OutputSpec(stop=chat.stop, plain=True)
    turns: list[TurnRequest] = []
    for i, text in enumerate(texts):
        prompt = _prompt(text, "prompt" if len(texts) == 1 else f"prompt[{i}]", state)
        room = translate.output_room(chat, len(prompt.tokens), state.model, state.limits)
        first = TurnRequest(
            request_id, space, prompt, sampling, room, spec, pin=chat.flashrt_pin_prefix
        )
        for j in range(count):
            number = len(turns)
            turns.append(
                replace(
                    first,
                    request_id=f"{request_id}/{number}" if number else request_id,
                    sampling=replace(sampling, seed=(sampling.seed + j) % 2**64),
                    pin=first.pin if j == 0 else False,
                )
            )
    options = chat.stream_options
    head = CompletionHead(
        id=f"cmpl-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=name,
        fingerprint=state.model.fingerprint,
        token_bytes=state.tokenizer.token_bytes,
        seeds=tuple(turn.sampling.seed for turn in turns),
        include_usage=bool(options and options.include_usage),
        logprobs=request.logprobs is not None,
        echoes=tuple(_said(turn.prompt) if request.echo else "" for turn in turns),
        choices_per_prompt=count,
    )
    return Prepared(
        tuple(turns),
        bool(chat.stream),
        CompletionChunks(head),
        lambda replies: body_of(head, replies),
    )


def _settings(request: CompletionRequest, raw: Mapping[str, Any]) -> ChatRequest:
    chat: Json = {key: raw[key] for key in SHARED if key in raw}
    chat["messages"] = list(_NO_MESSAGES)
    chat["logprobs"] = request.logprobs is not None
    chat["top_logprobs"] = request.logprobs
    return validated(ChatRequest, chat)


def _choices(request: CompletionRequest, chat: ChatRequest, prompts: int) -> int:
    """Choices of each prompt. Raises InvalidRequestError for too many, or for what is not done."""
    count = chat.n or 1
    if request.best_of is not None and request.best_of != count:
        raise UnsupportedValueError(
            f"best_of must be n ({count}), got {request.best_of}: choices are not ranked here.",
            param="best_of",
        )
    if prompts * count > MAX_CHOICES:
        raise InvalidRequestError(
            f"prompt and n make {prompts * count} choices; {MAX_CHOICES} are the most.",
            param="n",
        )
    if request.echo and request.logprobs is not None:
        raise UnsupportedValueError(
            "echo can't be true with logprobs: the tokens of a prompt have none here.",
            param="echo",
        )
    return count


def _prompt(text: Text, at: str, state: ServerState) -> Prompt:
    model = state.model
    if isinstance(text, str):
        if state.tokenizer.surely_exceeds(text, model.max_model_len):
            raise ContextLengthError(
                f"The maximum context length is {model.max_model_len} tokens; "
                f"{at} has more ({len(text)} characters).",
                param=at,
            )
        tokens = state.tokenizer.encode(text)
    else:
        check_ids(text, model.vocab_size, at)
        tokens = np.array(text, dtype=np.int32)
        raw = b"".join(map(state.tokenizer.token_bytes, text))
        text = raw.decode(errors="replace")
    if not len(tokens):
        raise InvalidRequestError(f"{at} must have at least 1 token, got 0.", param=at)
    if len(tokens) >= model.max_model_len:
        raise ContextLengthError(
            f"The maximum context length is {model.max_model_len} tokens; {at} has "
            f"{len(tokens)} tokens and the reply needs at least 1.",
            param=at,
        )
    return raw_prompt(tokens, text, state.prompts)


def _said(prompt: Prompt) -> str:
    [message] = prompt.conversation.messages
    return message.content


def router(relay: Relay) -> APIRouter:
    """The route, over the app's own relay."""
    routes = APIRouter()

    @routes.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await relay.answer(request, prepare)

    return routes
