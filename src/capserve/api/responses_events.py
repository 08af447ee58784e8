"""How do a turn's events become the events of a response, and how do these become its body?

Pure folding, no I/O. Items follow one another: what opens one closes the one before it. The plain
reply is the response that the last event carries.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from capserve.api.choices import ChoiceEvent
from capserve.api.responses_tools import Offered, free_text
from capserve.api.sse import HEARTBEAT, Json
from capserve.errors import CapserveError
from capserve.serving.lifecycle import FinishReason
from capserve.serving.sinks import Reply
from capserve.serving.turn import Delta, Failed, Finished, ToolCallDelta
from capserve.text.channels import Channel, Text

Kind = Literal["reasoning", "message"]

_PARTS: dict[Kind, tuple[str, str]] = {
    "reasoning": ("rs", "reasoning_text"),
    "message": ("msg", "output_text"),
}
"""Item -> the head of its id, and the type of its one part."""


_KINDS: dict[Channel, Kind] = {Channel.REASONING: "reasoning", Channel.CONTENT: "message"}


def new_id(head: str) -> str:
    return f"{head}_{secrets.token_hex(16)}"


@dataclass(frozen=True)
class ResponseHead:
    """What is the same in every response object of one reply."""

    id: str
    echo: Json
    """The request's own settings, as they are shown back."""
    tools: Offered
    seed: int = 0
    notes: tuple[str, ...] = ()
    finished: Callable[[Json], None] = lambda _: None
    """Told of the whole response when it is complete or incomplete: it may be kept."""
    created_at: int = field(default_factory=lambda: int(time.time()))
    """Unix seconds."""


class ResponseEvents:
    """Makes the events of one turn. One use."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._sequence = 0
        self._opened = False
        self._output: list[Json] = []
        self._open: _OpenItem | None = None

    def delta(self, event: Delta) -> Iterator[Json]:
        """Events that together add `event`."""
        yield from self.opening()
        for part in event.parts:
            match part:
                case Text(channel, text):
                    yield from self._say(_KINDS[channel], text)
                case call:
                    yield from self._call(call)

    def finished(self, event: Finished) -> Iterator[Json]:
        """The end of the last item, and of the response."""
        yield from self.opening()
        whole = event.reason is not FinishReason.LENGTH
        status = "completed" if whole else "incomplete"
        said = any(item["type"] != "reasoning" for item in self._output)
        speaks = self._open is not None and self._open.kind == "message"
        # An empty answer is an answer, too; but one that was cut while it thought has none.
        if not said and not speaks and (whole or self._open is None):
            yield from self._start("message")
        yield from self._close(status)
        body = self._response(status)
        body["completed_at"] = int(time.time()) if whole else None
        body["incomplete_details"] = None if whole else {"reason": "max_output_tokens"}
        body["usage"] = usage(event)
        body["capserve"] = self._metrics(event)
        self._head.finished(body)
        yield self._event(f"response.{status}", response=body)

    def failed(self, error: CapserveError, event: Failed | None = None) -> Iterator[Json]:
        """The end of a response that has no good one."""
        yield from self.opening()
        yield from self._close("incomplete")
        body = self._response("failed")
        body["error"] = {"code": _error_code(error), "message": error.message}
        if event is not None:
            body["capserve"] = self._metrics(event)
        yield self._event("response.failed", response=body)

    # -- items -------------------------------------------------------------------------------

    def _say(self, kind: Kind, text: str) -> Iterator[Json]:
        if self._open is None or self._open.kind != kind:
            yield from self._start(kind)
        assert self._open is not None
        self._open.texts.append(text)
        fields: Json = {"delta": text}
        if kind == "message":
            fields["logprobs"] = []
        yield self._part_event(self._open, f"{_PARTS[kind][1]}.delta", **fields)

    def _start(self, kind: Kind) -> Iterator[Json]:
        yield from self._close("completed")
        item = self._open = _OpenItem(kind, new_id(_PARTS[kind][0]))
        yield self._event(
            "response.output_item.added",
            output_index=len(self._output),
            item=item.shown("in_progress"),
        )
        yield self._part_event(item, "content_part.added", part=item.part())

    def _close(self, status: str) -> Iterator[Json]:
        item, self._open = self._open, None
        if item is None:
            return
        fields: Json = {"text": item.text}
        if item.kind == "message":
            fields["logprobs"] = []
        yield self._part_event(item, f"{_PARTS[item.kind][1]}.done", **fields)
        yield self._part_event(item, "content_part.done", part=item.part())
        yield from self._done(item.shown(status))

    def _call(self, call: ToolCallDelta) -> Iterator[Json]:
        yield from self._close("completed")
        name = self._head.tools.wire(call.name)
        kind, key, head, text = "function_call", "arguments", "fc", call.arguments
        if name.custom:
            kind, key, head, text = "custom_tool_call", "input", "ctc", free_text(call.arguments)
        item: Json = {
            "id": new_id(head),
            "type": kind,
            "status": "in_progress",
            "call_id": call.id,
            "name": name.name,
            key: "",
        }
        if name.namespace is not None:
            item["namespace"] = name.namespace
        index = len(self._output)
        yield self._event("response.output_item.added", output_index=index, item=item)
        event = f"response.{kind}_{key}"
        about: Json = {"output_index": index, "item_id": item["id"]}
        yield self._event(f"{event}.delta", **about, delta=text)
        named = {} if name.custom else {"name": name.name}
        yield self._event(f"{event}.done", **about, **named, **{key: text})
        yield from self._done(item | {"status": "completed", key: text})

    def _done(self, item: Json) -> Iterator[Json]:
        self._output.append(item)
        index = len(self._output) - 1
        yield self._event("response.output_item.done", output_index=index, item=item)

    # -- the response ------------------------------------------------------------------------

    def opening(self) -> Iterator[Json]:
        """The response before it has any output, once."""
        if self._opened:
            return
        self._opened = True
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))

    def _response(self, status: str) -> Json:
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created_at,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            **self._head.echo,
            "output": list(self._output),
            "usage": None,
        }

    def _metrics(self, event: Finished | Failed) -> Json:
        extras: Json = {"seed": self._head.seed, "notes": list(self._head.notes)}
        return event.metrics.as_dict() | extras

    def _part_event(self, item: _OpenItem, name: str, /, **fields: Any) -> Json:
        return self._event(
            f"response.{name}",
            output_index=len(self._output),
            item_id=item.id,
            content_index=0,
            **fields,
        )

    def _event(self, name: str, /, **fields: Any) -> Json:
        event = {"type": name, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event


@dataclass
class _OpenItem:
    """An item with text that is being written."""

    kind: Kind
    id: str
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self) -> Json:
        part: Json = {"type": _PARTS[self.kind][1], "text": self.text}
        if self.kind == "message":
            part |= {"annotations": [], "logprobs": []}
        return part

    def shown(self, status: str) -> Json:
        content = [] if status == "in_progress" else [self.part()]
        item: Json = {"id": self.id, "type": self.kind, "status": status, "content": content}
        extra: Json = {"summary": []} if self.kind == "reasoning" else {"role": "assistant"}
        return item | extra


class ResponseChunks:
    """The events of a response as they go into a stream."""

    def __init__(self, events: ResponseEvents) -> None:
        self._events = events

    heartbeat = HEARTBEAT

    def opening(self) -> bytes:
        return b"".join(map(encode, self._events.opening()))

    def cut(self, error: CapserveError) -> bytes:
        return b"".join(map(encode, self._events.failed(error)))

    def written(self, event: ChoiceEvent) -> tuple[bytes, bool]:
        match event[1]:
            case Delta() as what:
                return b"".join(map(encode, self._events.delta(what))), False
            case Failed() as what:
                return b"".join(map(encode, self._events.failed(what.error, what))), True
            case Finished() as what:
                return b"".join(map(encode, self._events.finished(what))), True


def encode(event: Json) -> bytes:
    """One server-sent event, under its own name."""
    name: str = event["type"]
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"


def body_of(events: ResponseEvents, replies: Sequence[Reply]) -> Json:
    """The plain reply: the response of the last event."""
    [reply] = replies
    assert isinstance(reply.end, Finished), "a failed turn has no body"
    *_, last = [*events.delta(reply.delta), *events.finished(reply.end)]
    body: Json = last["response"]
    return body


def usage(event: Finished) -> Json:
    """Everything that was not found is written: the state of this turn has it."""
    metrics = event.metrics
    return {
        "input_tokens": event.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": metrics.cached_tokens,
            "cache_write_tokens": metrics.new_prefill_tokens,
        },
        "output_tokens": event.output_tokens,
        "output_tokens_details": {"reasoning_tokens": event.reasoning_tokens},
        "total_tokens": event.prompt_tokens + event.output_tokens,
    }


def _error_code(error: CapserveError) -> str:
    """The protocol has words of its own for two kinds; clients retry on both."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else error.code or "invalid_prompt"
