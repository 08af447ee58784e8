"""How do a turn's events become chat chunks, and chunks a whole reply?

Pure folding, no I/O. A stream sends the chunks; the plain reply is made from the very same chunks
by `WholeReply`, so the two can't disagree. One chunk carries one kind of thing (reasoning, content,
or one call): clients that look at only one key of a delta lose nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from capserve.api.errors import error_body
from capserve.engine.seam import TokenLogprob
from capserve.serving.turn import Delta, Failed, Finished, ToolCallDelta
from capserve.text.channels import Channel, Text

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"
"""Says that the reply is complete; never sent after an error event."""

HEARTBEAT = b": keep-alive\n\n"
"""A comment: no client sees a chunk that it did not expect."""


def encode(chunk: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What is the same in every chunk of a reply, and what the request wants to see."""

    id: str
    created: int
    """Unix seconds."""
    model: str
    fingerprint: str
    include_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    prompt_token_ids: tuple[int, ...] = ()
    """Sent with the first chunk when `token_ids` is set."""
    seed: int = 0
    """Of the sampling of choice 0, the client's or ours; choice i has `seed + i`. Shown with the
    metrics."""
    notes: tuple[str, ...] = ()
    """What was changed in the request before it was rendered: shown with the metrics."""


TokenBytes = Callable[[int], bytes]
"""A token's exact bytes."""


class ChatChunks:
    """Makes chunks of one turn's events: of choice `index`."""

    def __init__(self, head: ReplyHead, token_bytes: TokenBytes, index: int = 0) -> None:
        self._head = head
        self._token_bytes = token_bytes
        self._index = index
        self._opened = False

    def delta(self, event: Delta) -> Iterator[Json]:
        """Chunks that together add `event`; none when all of its text is held back."""
        yield from self.opening()
        parts = [_part(part) for part in event.parts]
        extras: Json = {}
        if self._head.logprobs and event.logprobs:
            content = [self._logprob(entry) for entry in event.logprobs]
            extras["logprobs"] = {"content": content, "refusal": None}
        if self._head.token_ids and event.tokens:
            extras["token_ids"] = list(event.tokens)
        if extras and not parts:
            parts.append({})  # tokens whose text is held back still have their logprobs
        for part in parts:
            yield self._chunk(part, **extras)
            extras = {}

    def finished(self, event: Finished) -> Iterator[Json]:
        """The finish chunk, with the turn's metrics, and the usage chunk if it was asked for."""
        yield from self.closing(event)
        yield from self.used(usage(event))

    def closing(self, event: Finished) -> Iterator[Json]:
        """The finish chunk alone."""
        yield from self.opening()
        last = self._chunk({}, finish_reason=event.reason.value)
        last["capserve"] = self._metrics(event)
        yield last

    def used(self, total: Json) -> Iterator[Json]:
        """The usage chunk, if it was asked for."""
        if self._head.include_usage:
            yield self._frame([]) | {"usage": total}

    def failed(self, event: Failed) -> Json:
        """The error event: the error body, with what the turn cost until then."""
        return error_body(event.error) | {"capserve": self._metrics(event)}

    def _metrics(self, event: Finished | Failed) -> Json:
        seed = (self._head.seed + self._index) % 2**64
        extras: Json = {"seed": seed, "notes": list(self._head.notes)}
        return event.metrics.as_dict() | extras

    def opening(self) -> Iterator[Json]:
        """The role chunk, once."""
        if self._opened:
            return
        self._opened = True
        first = self._chunk({"role": "assistant", "content": ""})
        if self._head.token_ids and self._index == 0:
            first["prompt_token_ids"] = list(self._head.prompt_token_ids)
        yield first

    def _chunk(self, delta: Json, *, finish_reason: str | None = None, **extras: Any) -> Json:
        choice: Json = {
            "index": self._index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        return self._frame([choice | extras])

    def _frame(self, choices: list[Json]) -> Json:
        frame: Json = {
            "id": self._head.id,
            "object": "chat.completion.chunk",
            "created": self._head.created,
            "model": self._head.model,
            "system_fingerprint": self._head.fingerprint,
            "choices": choices,
        }
        if self._head.include_usage:
            frame["usage"] = None
        return frame

    def _logprob(self, entry: TokenLogprob) -> Json:
        top = [self._token(token, logprob) for token, logprob in entry.top]
        return self._token(entry.token, entry.logprob) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float) -> Json:
        raw = self._token_bytes(token)
        # JSON has no -inf; a token that can't be chosen gets the wire's customary floor.
        return {
            "token": raw.decode(errors="replace"),
            "logprob": max(logprob, -9999.0),
            "bytes": list(raw),
        }


def _part(part: Text | ToolCallDelta) -> Json:
    match part:
        case Text(Channel.REASONING, text):
            return {"reasoning_content": text}
        case Text(_, text):
            return {"content": text}
        case call:
            function = {"name": call.name, "arguments": call.arguments}
            whole = {"index": call.index, "id": call.id, "type": "function", "function": function}
            return {"tool_calls": [whole]}


def usage(first: Finished, *others: Finished) -> Json:
    """OpenAI's usage object; `cached_tokens` is always there.

    The prompt of several choices counts once, as the first of them found it.
    """
    output = sum(event.output_tokens for event in (first, *others))
    reasoning = sum(event.reasoning_tokens for event in (first, *others))
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": output,
        "total_tokens": first.prompt_tokens + output,
        "prompt_tokens_details": {"cached_tokens": first.metrics.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


class WholeReply:
    """The plain reply, folded from the chunks that a stream would have sent."""

    def __init__(self) -> None:
        self._first: Json = {}
        self._index = 0
        self._texts: dict[str, list[str]] = {"content": [], "reasoning_content": []}
        self._calls: list[Json] = []
        self._logprobs: list[Json] = []
        self._token_ids: list[int] = []
        self._finish_reason: str | None = None
        self._metrics: Json = {}

    def add(self, chunk: Json) -> None:
        self._first = self._first or chunk
        self._metrics = chunk.get("capserve", self._metrics)
        for choice in chunk["choices"]:
            self._index, delta = choice["index"], choice["delta"]
            for key, texts in self._texts.items():
                if key in delta:
                    texts.append(delta[key])
            for call in delta.get("tool_calls", ()):
                assert call["index"] == len(self._calls), "calls come whole and in order"
                self._calls.append({key: call[key] for key in ("id", "type", "function")})
            if choice["logprobs"] is not None:
                self._logprobs.extend(choice["logprobs"]["content"])
            self._token_ids.extend(choice.get("token_ids", ()))
            self._finish_reason = choice["finish_reason"] or self._finish_reason

    def message(self) -> Json:
        """The assistant message; `content` is null only when there is nothing but calls."""
        content = "".join(self._texts["content"])
        message: Json = {"role": "assistant", "content": content}
        if self._calls and not content:
            message["content"] = None
        reasoning = "".join(self._texts["reasoning_content"])
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def body(self, used: Json) -> Json:
        """The `chat.completion` object, with `used` as its usage."""
        assert self._finish_reason is not None, "a body is made after the finish chunk"
        choice: Json = {
            "index": self._index,
            "message": self.message(),
            "logprobs": None,
            "finish_reason": self._finish_reason,
        }
        if self._logprobs:
            choice["logprobs"] = {"content": self._logprobs, "refusal": None}
        body: Json = {key: self._first[key] for key in ("id", "created", "model")}
        body["object"] = "chat.completion"
        body["system_fingerprint"] = self._first["system_fingerprint"]
        body["choices"] = [choice]
        body["usage"] = used
        if "prompt_token_ids" in self._first:
            body["prompt_token_ids"] = self._first["prompt_token_ids"]
        if "prompt_token_ids" in self._first or self._token_ids:
            choice["token_ids"] = self._token_ids
        body["capserve"] = self._metrics
        return body


def whole_body(chunks: ChatChunks, events: Iterable[Delta | Finished]) -> Json:
    """The plain reply to a turn's `events`, the last of which is `Finished`."""
    whole = WholeReply()
    used: Json = {}
    for event in events:
        if isinstance(event, Finished):
            used = usage(event)
        for chunk in chunks.delta(event) if isinstance(event, Delta) else chunks.finished(event):
            whole.add(chunk)
    return whole.body(used)
