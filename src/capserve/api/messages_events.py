"""How do a turn's events become the events of the Anthropic dialect, and those a whole message?

Pure folding, no I/O. A reply is a sequence of content blocks, one open at a time; the plain reply
is folded from the very events that a stream would have sent. The message's head goes out before
it is known what was reused: its usage counts the whole prompt, and `message_delta` has the true
split.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, assert_never

import orjson

from capserve.api.choices import ChoiceEvent
from capserve.api.messages_errors import messages_error_body
from capserve.errors import CapserveError
from capserve.serving.lifecycle import FinishReason
from capserve.serving.sinks import Reply
from capserve.serving.turn import Delta, Failed, Finished, ToolCallDelta
from capserve.text.channels import Channel, Text

Json = dict[str, Any]

_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}


def encode(event: Json) -> bytes:
    """One server-sent event, under its own type as name."""
    name: str = event["type"]
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"


PING = encode({"type": "ping"})


@dataclass(frozen=True, slots=True)
class MessageHead:
    """What is known of a reply before it begins."""

    id: str
    model: str
    request_id: str
    prompt_tokens: int
    marked_tokens: int = 0
    """End of the last message with a `cache_control`, in tokens; 0 when there is none."""
    seed: int = 0
    notes: tuple[str, ...] = ()


class MessageEvents:
    """Makes the events of one turn."""

    def __init__(self, head: MessageHead) -> None:
        self._head = head
        self._begun = False
        self._blocks = 0
        self._open: str | None = None
        """Kind of the block that is open: text or thinking. A call's is closed at once."""
        self._thought = blake2b(digest_size=32)

    def delta(self, event: Delta) -> Iterator[Json]:
        """Events that together add `event`; beyond the head none when its text is held back."""
        yield from self.opening()
        for part in event.parts:
            match part:
                case Text(Channel.REASONING, text):
                    yield from self._enter("thinking", {"thinking": "", "signature": ""})
                    self._thought.update(text.encode())
                    yield self._add({"type": "thinking_delta", "thinking": text})
                case Text(_, text):
                    yield from self._enter("text", {"text": ""})
                    yield self._add({"type": "text_delta", "text": text})
                case call:
                    yield from self._call(call)

    def _call(self, call: ToolCallDelta) -> Iterator[Json]:
        yield from self._leave()
        yield from self._enter("tool_use", {"id": wire_id(call), "name": call.name, "input": {}})
        yield self._add({"type": "input_json_delta", "partial_json": call.arguments})
        yield from self._leave()

    def finished(self, event: Finished) -> Iterator[Json]:
        yield from self.opening()
        yield from self._leave()
        reason, stop = _REASONS[event.reason], None
        if event.reason is FinishReason.STOP and event.stop_string is not None:
            reason, stop = "stop_sequence", event.stop_string
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": stop},
            "usage": self._usage(event),
            "capserve": self._metrics(event),
        }
        yield {"type": "message_stop"}

    def failed(self, event: Failed) -> Json:
        """The error event, with what the turn cost until then."""
        body = messages_error_body(event.error, self._head.request_id)
        return body | {"capserve": self._metrics(event)}

    def opening(self) -> Iterator[Json]:
        """The message's head, once."""
        if self._begun:
            return
        self._begun = True
        head = self._head
        yield {
            "type": "message_start",
            "message": {
                "id": head.id,
                "type": "message",
                "role": "assistant",
                "model": head.model,
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": _usage_object(head.prompt_tokens, 0, 0, 0),
            },
        }

    def _enter(self, kind: str, start: Json) -> Iterator[Json]:
        if self._open == kind:
            return
        yield from self._leave()
        self._open = kind
        block = {"type": kind} | start
        yield {"type": "content_block_start", "index": self._blocks, "content_block": block}

    def _leave(self) -> Iterator[Json]:
        if self._open is None:
            return
        if self._open == "thinking":
            # Ours to make and nobody's to check: thinking that comes back edited is read as sent.
            signature = base64.b64encode(self._thought.digest()).decode()
            yield self._add({"type": "signature_delta", "signature": signature})
        yield {"type": "content_block_stop", "index": self._blocks}
        self._open = None
        self._blocks += 1

    def _add(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._blocks, "delta": delta}

    def _usage(self, event: Finished) -> Json:
        """Cached, newly kept and other prompt tokens, which add up to the prompt."""
        cached = event.metrics.cached_tokens
        kept = max(0, self._head.marked_tokens - cached)
        fresh = event.prompt_tokens - cached - kept
        usage = _usage_object(fresh, kept, cached, event.output_tokens)
        return usage | {"output_tokens_details": {"thinking_tokens": event.reasoning_tokens}}

    def _metrics(self, event: Finished | Failed) -> Json:
        extras: Json = {"seed": self._head.seed, "notes": list(self._head.notes)}
        return event.metrics.as_dict() | extras


def wire_id(call: ToolCallDelta) -> str:
    """A call's id in this dialect's form."""
    return "toolu_" + call.id.removeprefix("call_")


def _usage_object(fresh: int, kept: int, cached: int, output: int) -> Json:
    return {
        "input_tokens": fresh,
        "cache_creation_input_tokens": kept,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


class MessageChunks:
    """The one choice of a request as a stream. As `stream.Chunks`."""

    def __init__(self, head: MessageHead) -> None:
        self._events = MessageEvents(head)
        self._request_id = head.request_id

    heartbeat = PING

    def opening(self) -> bytes:
        return b"".join(map(encode, self._events.opening()))

    def cut(self, error: CapserveError) -> bytes:
        return encode(messages_error_body(error, self._request_id))

    def written(self, event: ChoiceEvent) -> tuple[bytes, bool]:
        _, what = event
        match what:
            case Delta():
                return b"".join(map(encode, self._events.delta(what))), False
            case Finished():
                return b"".join(map(encode, self._events.finished(what))), True
            case Failed():
                return encode(self._events.failed(what)), True
            case _:
                assert_never(what)


class WholeMessage:
    """The plain reply, folded from the events that a stream would have sent."""

    def __init__(self) -> None:
        self._message: Json = {}
        self._parts: list[str] = []

    def add(self, event: Json) -> None:
        match event["type"]:
            case "message_start":
                self._message = event["message"]
            case "content_block_start":
                self._message["content"].append(event["content_block"])
                self._parts = []
            case "content_block_delta":
                self._grow(event["delta"])
            case "content_block_stop":
                self._close(self._message["content"][-1])
            case "message_delta":
                self._message |= event["delta"]
                self._message |= {key: event[key] for key in ("usage", "capserve")}

    def _grow(self, delta: Json) -> None:
        if delta["type"] == "signature_delta":
            self._message["content"][-1]["signature"] = delta["signature"]
        else:
            (text,) = (delta[key] for key in ("thinking", "text", "partial_json") if key in delta)
            self._parts.append(text)

    def _close(self, block: Json) -> None:
        text = "".join(self._parts)
        if block["type"] == "tool_use":
            # The model's own text, digit for digit: it is valid JSON, and reading it could only
            # lose what a number of ours can't hold.
            block["input"] = orjson.Fragment(text)
        else:
            block[block["type"]] = text

    def body(self) -> Json:
        assert self._message["stop_reason"] is not None, "a body is made after the last event"
        return self._message


def whole_message(events: MessageEvents, turn: Iterable[Delta | Finished]) -> Json:
    """The plain reply to a turn's events, the last of which is `Finished`."""
    whole = WholeMessage()
    for event in turn:
        for sent in events.delta(event) if isinstance(event, Delta) else events.finished(event):
            whole.add(sent)
    return whole.body()


def body_of(head: MessageHead, replies: Sequence[Reply]) -> Json:
    """The plain reply to the one choice of a request."""
    (reply,) = replies
    assert isinstance(reply.end, Finished), "a failed turn has no body"
    return whole_message(MessageEvents(head), [reply.delta, reply.end])
