"""What does a request to `POST /v1/chat/completions` ask for, and in which form is it answered?"""

from __future__ import annotations

import secrets
import time
from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from capserve.api import translate
from capserve.api.choices import ChoiceChunks, body_of
from capserve.api.named import best_record, subject
from capserve.api.relay import Prepared, Relay
from capserve.api.schemas import ChatRequest
from capserve.api.sse import ReplyHead
from capserve.api.state import ServerState
from capserve.api.strict_json import parse_object
from capserve.api.validation import validated
from capserve.serving.turn import TurnRequest


def prepare(state: ServerState, body: bytes, request_id: str, caller: str) -> Prepared:
    """As `relay.Prepare`."""
    raw = parse_object(body)
    request = validated(ChatRequest, raw)
    name = translate.served_name(request, state.model)
    sampling = translate.sampling(request, state.model)
    sent = translate.conversation(request, raw, state.prompts)
    about = subject(request, sent, caller, state.transcripts, state.prompts)
    conversation = about.conversation
    translate.refuse_hopeless(conversation, state.tokenizer, state.model)
    chain = state.prompts.chain(conversation)
    record = best_record(about, chain, state.transcripts)
    prompt = state.prompts.build(conversation, record, chain, state.model.max_model_len)
    room = translate.output_room(request, len(prompt.tokens), state.model, state.limits)
    tools = tuple(raw.get("tools") or conversation.tools)  # those that are loaded later, too
    in_reasoning = prompt.starts_in_reasoning
    demanded = translate.constraint(request, tools, in_reasoning)
    has_form = demanded.demands()
    output = translate.output_spec(request, tools, in_reasoning)
    turn = TurnRequest(
        request_id=request_id,
        namespace=about.namespace,
        prompt=prompt,
        sampling=translate.without_end(request, sampling, has_form=has_form),
        max_output_tokens=room,
        output=output,
        pin=request.flashrt_pin_prefix,
        session_id=request.session_id,
        thinking=translate.thinking(request, output, state.tokenizer),
    )
    options = request.stream_options
    shows_ids = bool(request.return_token_ids)
    head = ReplyHead(
        id=f"chatcmpl-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=name,
        fingerprint=state.model.fingerprint,
        include_usage=bool(options and options.include_usage),
        logprobs=bool(request.logprobs),
        token_ids=shows_ids,
        prompt_token_ids=tuple(prompt.tokens.tolist()) if shows_ids else (),
        seed=sampling.seed,
        notes=prompt.notes,
    )
    turns = choices(turn, request.n or 1)
    token_bytes = state.tokenizer.token_bytes
    return Prepared(
        turns,
        bool(request.stream),
        ChoiceChunks(head, token_bytes, len(turns)),
        lambda replies: body_of(head, token_bytes, replies),
        (lambda: state.grammars.compile(demanded)) if has_form else None,
    )


def choices(turn: TurnRequest, count: int) -> tuple[TurnRequest, ...]:
    """`count` turns of one prompt. The first reads it, the others begin where it was read."""
    sampling = turn.sampling
    others = (
        replace(
            turn,
            request_id=f"{turn.request_id}/{index}",
            sampling=replace(sampling, seed=(sampling.seed + index) % 2**64),
            pin=False,
        )
        for index in range(1, count)
    )
    return (turn, *others)


def router(relay: Relay) -> APIRouter:
    """The route, over the app's own relay."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await relay.answer(request, prepare)

    return routes
