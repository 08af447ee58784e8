"""What does a recorded exchange say: is it well-formed, which calls and results, how many tokens?

`read` knows the three dialects. A complaint is what the protocol forbids: a status of 400 and more,
an error event, a reply that is no JSON, a stream whose last event is missing although it ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.clients.agents import CHAT, MESSAGES, RESPONSES
from benchmarks.clients.relay import Exchange
from benchmarks.scenarios.server import find_field

DIALECTS = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}


@dataclass(frozen=True)
class Reading:
    path: str
    status: int
    dialect: str | None
    """None for a path that is no turn."""
    complaint: str | None
    left: bool
    """The client closed the connection before the end of the reply."""
    calls: tuple[str, ...]
    """Names, in the reply."""
    results: tuple[str, ...]
    """What tools answered, in the request: that of the whole history."""
    cached_tokens: int
    read_tokens: int
    written_tokens: int
    action: str | None


def read(exchange: Exchange) -> Reading:
    dialect = DIALECTS.get(exchange.path)
    reply = exchange.reply.decode(errors="replace")
    complaint = None
    events: list[dict[str, Any]] = []
    ended = True
    try:
        events = _events(reply)
        ended = _has_end(dialect, reply, events)
    except ValueError as error:
        complaint = f"no JSON: {error}"
    if exchange.status >= 400:
        complaint = f"{exchange.status}: {reply[:300]}"
    elif exchange.broken is not None:
        complaint = f"the server broke off: {exchange.broken}"
    elif failed := [event for event in events if _is_error(event)]:
        complaint = json.dumps(failed[0])[:300]
    elif exchange.whole and not ended:
        complaint = f"no last event: ...{reply[-100:]!r}"
    used: dict[str, Any] = next((block for e in events if (block := find_field(e, "capserve"))), {})
    return Reading(
        path=exchange.path,
        status=exchange.status,
        dialect=dialect,
        complaint=complaint,
        left=not exchange.whole and not ended,
        calls=tuple(name for event in events for name in _calls(event)),
        results=tuple(_results(json.loads(exchange.body))) if dialect else (),
        cached_tokens=used.get("cached_tokens", 0),
        read_tokens=used.get("new_prefill_tokens", 0),
        written_tokens=used.get("output_tokens", 0),
        action=used.get("prefix_action"),
    )


def _data(reply: str) -> list[str]:
    """The data lines of a stream; one that was cut within is left out."""
    lines = reply.split("\n")[:-1]
    return [line.removeprefix("data: ").strip() for line in lines if line.startswith("data: ")]


def _events(reply: str) -> list[dict[str, Any]]:
    """Of a stream, or the one of a plain reply. Raises ValueError for what is no JSON object."""
    texts = _data(reply) if _is_stream(reply) else [reply]
    return [_object(text) for text in texts if text != "[DONE]"]


def _is_stream(reply: str) -> bool:
    return reply.startswith(("data:", "event:", ":"))


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{text[:60]!r} is no object")
    return value


def _has_end(dialect: str | None, reply: str, events: Sequence[dict[str, Any]]) -> bool:
    if not _is_stream(reply) or dialect is None:
        return True
    if dialect == CHAT:
        return _data(reply)[-1:] == ["[DONE]"]
    last = events[-1].get("type") if events else None
    if dialect == RESPONSES:
        return last in ("response.completed", "response.incomplete", "response.failed")
    return last == "message_stop"


def _is_error(event: dict[str, Any]) -> bool:
    """`error` is null in a good `response` object."""
    return bool(event.get("error")) or event.get("type") in ("error", "response.failed")


def _calls(event: dict[str, Any]) -> Iterator[str]:
    for choice in event.get("choices") or ():
        for call in (choice.get("delta") or choice.get("message") or {}).get("tool_calls") or ():
            if name := (call.get("function") or {}).get("name"):
                yield str(name)
    if event.get("type") == "response.output_item.done":
        yield from _called([event["item"]])
    elif event.get("type") == "content_block_start":
        yield from _called([event["content_block"]])
    elif event.get("object") == "response":
        yield from _called(event["output"])
    elif event.get("type") == "message":
        yield from _called(event["content"])


def _called(items: Iterable[dict[str, Any]]) -> Iterator[str]:
    for item in items:
        if item["type"] in ("function_call", "custom_tool_call", "tool_use"):
            yield str(item["name"])


def _results(body: dict[str, Any]) -> Iterator[str]:
    for message in body.get("messages") or ():
        if message["role"] == "tool":
            yield _text(message["content"])
        elif isinstance(message["content"], list):
            for block in message["content"]:
                if block["type"] == "tool_result":
                    yield _text(block.get("content"))
    items = body.get("input")
    for item in items if isinstance(items, list) else ():
        if str(item.get("type")).endswith("_output"):
            yield _text(item["output"])


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return str(content or "")
