"""What does a client's SDK make of a reply, if it forgives nothing?

Each event and each body is read by the type that the official package declares for it, strictly: no
coercion, no missing field, no unknown event. The order that the protocols promise is checked where
types can't say it. The same `Said` comes out of all three dialects, plain or streamed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import anthropic.types
import httpx
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

Json = dict[str, Any]


def _by_type(union: Any) -> dict[str, Any]:
    """Event classes of an SDK by the `type` that they are told apart by."""
    classes = get_args(get_args(union)[0])
    return {get_args(c.model_fields["type"].annotation)[0]: c for c in classes}


RESPONSE_EVENTS = _by_type(ResponseStreamEvent)
MESSAGE_EVENTS = _by_type(anthropic.types.RawMessageStreamEvent)


@dataclass(frozen=True)
class Call:
    id: str
    name: str
    arguments: str
    """JSON, or the text of a call of free text."""

    @property
    def value(self) -> Any:
        return json.loads(self.arguments)


@dataclass(frozen=True)
class Said:
    """A reply, as a client has understood it. Counts are tokens."""

    text: str
    reasoning: str
    calls: list[Call]
    reason: str
    prompt: int
    cached: int
    output: int
    record: Json
    """The `capserve` block."""
    parts: list[Json] = field(default_factory=list)
    """Output items or content blocks, as they came; of chat none."""
    ids: tuple[list[int], list[int]] | None = None
    """Tokens of prompt and reply, where they were asked for."""

    @property
    def read(self) -> int:
        """Prompt tokens that were computed for this turn."""
        return self.prompt - self.cached


def send(http: httpx.Client, path: str, body: Json) -> Said:
    """Post it and read the reply strictly; AssertionError when it isn't what was promised."""
    kind = path.partition("?")[0].rsplit("/", 1)[-1]
    reading = {"completions": _chat, "responses": _responses, "messages": _messages}[kind]
    headers = {"anthropic-version": "2023-06-01"} if kind == "messages" else {}
    if not body.get("stream"):
        reply = http.post(path, json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"] == "application/json"
        return reading(body, None, reply.content)
    with http.stream("POST", path, json=body, headers=headers) as reply:
        raw = reply.read()
        assert reply.status_code == 200, raw
        assert reply.headers["content-type"].startswith("text/event-stream")
    return reading(body, frames(raw.decode()), b"")


def frames(raw: str) -> list[tuple[str | None, str]]:
    """(event name, data) of every frame; comments are left out."""
    assert raw.endswith("\n\n"), "the stream breaks off"
    found = []
    for frame in raw.removesuffix("\n\n").split("\n\n"):
        name, data = None, []
        for line in frame.split("\n"):
            head, _, rest = line.partition(": ")
            if head == "event":
                name = rest
            elif head == "data":
                data.append(rest)
            else:
                assert line.startswith(":"), f"no line of an event stream: {line!r}"
        if data:
            found.append((name, "\n".join(data)))
    return found


def _chat(body: Json, events: Sequence[tuple[str | None, str]] | None, plain: bytes) -> Said:
    ids: tuple[list[int], list[int]] = ([], [])
    if events is None:
        whole = ChatCompletion.model_validate_json(plain, strict=True)
        extra = whole.model_extra or {}
        ids[0].extend(extra.get("prompt_token_ids") or ())
        ids[1].extend((whole.choices[0].model_extra or {}).get("token_ids") or ())
        record = extra["capserve"]
    else:
        whole, record = _chat_stream(body, events, ids)
    [choice] = whole.choices
    message, usage = choice.message, whole.usage
    calls = [Call(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or []]  # type: ignore[union-attr]
    assert choice.finish_reason in (("tool_calls",) if calls else ("stop", "length"))
    prompt, cached = record["prompt_tokens"], record["cached_tokens"]
    if usage is not None:
        assert usage.prompt_tokens_details is not None
        told = (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens)
        assert told == (prompt, cached)
        assert usage.completion_tokens == record["output_tokens"]
    reasoning = (message.model_extra or {}).get("reasoning_content") or ""
    return Said(
        message.content or "",
        reasoning,
        calls,
        choice.finish_reason,
        prompt,
        cached,
        record["output_tokens"],
        record,
        ids=ids if body.get("return_token_ids") else None,
    )


def _chat_stream(
    body: Json, events: Sequence[tuple[str | None, str]], ids: tuple[list[int], list[int]]
) -> tuple[ChatCompletion, Json]:
    """Folded by the SDK's own folding."""
    assert events[-1] == (None, "[DONE]")
    chunks = [ChatCompletionChunk.model_validate_json(d, strict=True) for _, d in events[:-1]]
    assert {name for name, _ in events} == {None}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    wanted = bool((body.get("stream_options") or {}).get("include_usage"))
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [wanted]
    said = chunks[:-1] if wanted else chunks
    assert all(len(chunk.choices) == 1 for chunk in said)
    assert wanted is not bool(chunks[-1].choices)
    assert [c.choices[0].delta.role for c in said] == ["assistant"] + [None] * (len(said) - 1)
    reasons = [chunk.choices[0].finish_reason for chunk in said]
    assert [reason is not None for reason in reasons] == [False] * (len(said) - 1) + [True]
    state: Any = ChatCompletionStreamState()
    record: Json = {}
    for chunk in chunks:
        state.handle_chunk(chunk)
        record = (chunk.model_extra or {}).get("capserve") or record
        ids[0].extend((chunk.model_extra or {}).get("prompt_token_ids") or ())
        for choice in chunk.choices:
            ids[1].extend((choice.model_extra or {}).get("token_ids") or ())
    snapshot = state.current_completion_snapshot.model_dump_json(exclude_unset=True)
    return ChatCompletion.model_validate_json(snapshot, strict=True), record


def _responses(body: Json, events: Sequence[tuple[str | None, str]] | None, plain: bytes) -> Said:
    if events is None:
        whole = Response.model_validate_json(plain, strict=True)
        raw = json.loads(plain)
    else:
        told = [json.loads(data) for _, data in events]
        assert [name for name, _ in events] == [event["type"] for event in told]
        assert [event["sequence_number"] for event in told] == list(range(len(told)))
        for event, (_, data) in zip(told, events, strict=True):
            RESPONSE_EVENTS[event["type"]].model_validate_json(data, strict=True)
        raw = told[-1]["response"]
        whole = Response.model_validate_json(json.dumps(raw), strict=True)
        assert told[-1]["type"] == f"response.{raw['status']}"
        done = [e["item"] for e in told if e["type"] == "response.output_item.done"]
        assert done == raw["output"]
    assert whole.usage is not None
    calls = [
        Call(
            item.call_id, item.name, item.arguments if item.type == "function_call" else item.input
        )
        for item in whole.output
        if item.type in ("function_call", "custom_tool_call")
    ]
    thoughts = [
        part.text
        for item in whole.output
        if item.type == "reasoning"
        for part in item.content or ()
    ]
    return Said(
        whole.output_text,
        "".join(thoughts),
        calls,
        raw["status"],
        whole.usage.input_tokens,
        whole.usage.input_tokens_details.cached_tokens,
        whole.usage.output_tokens,
        raw["capserve"],
        parts=raw["output"],
    )


def _messages(body: Json, events: Sequence[tuple[str | None, str]] | None, plain: bytes) -> Said:
    raw = json.loads(plain) if events is None else _message_of(events)
    message = anthropic.types.Message.model_validate_json(json.dumps(raw), strict=True)
    calls = [
        Call(b.id, b.name, json.dumps(b.input)) for b in message.content if b.type == "tool_use"
    ]
    texts = [block.text for block in message.content if block.type == "text"]
    thoughts = [block.thinking for block in message.content if block.type == "thinking"]
    assert message.stop_reason is not None
    assert (message.stop_reason == "tool_use") == bool(calls)
    usage = message.usage
    cached = usage.cache_read_input_tokens or 0
    prompt = usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0)
    return Said(
        "".join(texts),
        "".join(thoughts),
        calls,
        message.stop_reason,
        prompt,
        cached,
        usage.output_tokens,
        raw["capserve"],
        parts=raw["content"],
    )


def _message_of(events: Sequence[tuple[str | None, str]]) -> Json:
    """A streamed message, put together as its SDK does."""
    message: Json = {}
    written = ""
    for name, data in events:
        event = json.loads(data)
        assert name == event["type"]
        if name == "ping":
            continue
        MESSAGE_EVENTS[event["type"]].model_validate_json(data, strict=True)
        if name == "message_start":
            assert not message
            message = event["message"]
        elif name == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            written = ""
        elif name == "content_block_delta":
            block, delta = message["content"][-1], event["delta"]
            assert event["index"] == len(message["content"]) - 1
            [key] = [key for key in delta if key != "type"]
            if key == "partial_json":
                written += delta[key]
                block["input"] = json.loads(written)
            else:
                block[key] = (block.get(key) or "") + delta[key]
        elif name == "message_delta":
            told = {k: v for k, v in event["usage"].items() if v is not None}
            message |= event["delta"] | {"capserve": event["capserve"]}
            message["usage"] |= told
    assert events[-1][0] == "message_stop"
    return message
