"""Which histories mean the same, although they are not spelled the same?

Clients echo a conversation with reasoning lost, argument keys sorted, ids renamed, whitespace
trimmed. Two conversations with equal digests render alike once the journal's own assistant messages
stand in for the echoed ones. `normalise` is the one place where anything is taken out of a request.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from capserve.errors import InvalidRequestError
from capserve.text.markup import THINK_CLOSE, THINK_OPEN
from capserve.text.messages import Conversation, Message, Role, ToolCall

DIGEST_BYTES = 16

_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode

MAX_ARGUMENT_DEPTH = 240
"""Levels of nesting in a call's arguments: as many as a request may have. Python's own recursion
ends somewhere below 1,000, a little elsewhere on each thread, and all must read them alike."""

BILLING_LINE = re.compile(
    r"\A\s*x-anthropic-billing-header:(?:[ \t]*[\w.-]+=[^;\s]*;?)*[ \t]*(?:\r?\n)*"
)
"""A line that one coding agent puts at the head of its system prompt, with a value that differs by
conversation: read as it stands, it would make every prefix after it new. Only `key=value` pairs are
taken, in case the client's next block was joined to it without a line break."""

BILLING_NOTE = "normalised: the x-anthropic-billing-header line of the system prompt was left out"


def normalise(conversation: Conversation) -> tuple[Conversation, tuple[str, ...]]:
    """The conversation as it is rendered, and a note for each thing that was taken out.

    Takes out a known nonce line at the head of the first system message. Moves a think block that
    stands at the head of an assistant's content to its reasoning, where the client sent none: some
    templates do so themselves, the others would show it twice.
    """
    messages = list(conversation.messages)
    notes: tuple[str, ...] = ()
    for i, message in enumerate(messages):
        if message.role == "system" and i == 0:
            content = BILLING_LINE.sub("", message.content, count=1)
            if content != message.content:
                messages[i] = replace(message, content=content)
                notes = (BILLING_NOTE,)
        elif message.role == "assistant" and message.reasoning is None:
            head = message.content.lstrip()
            if head.startswith(THINK_OPEN) and THINK_CLOSE in head:
                thought, _, content = head[len(THINK_OPEN) :].partition(THINK_CLOSE)
                messages[i] = replace(message, content=content.lstrip(), reasoning=thought.strip())
    return replace(conversation, messages=tuple(messages)), notes


def digests(conversation: Conversation, stripped: Collection[Role]) -> tuple[bytes, ...]:
    """One digest for each prefix of a normalised conversation, tools and switches in the first.

    `stripped`: roles whose content the template trims, so that whitespace around it means nothing.
    Raises InvalidRequestError for tools or switches that are nested too deeply to be written.
    """
    try:
        return tuple(_digests(conversation, stripped))
    except RecursionError:
        raise InvalidRequestError("tools: nested too deeply", param="tools") from None


def _digests(conversation: Conversation, stripped: Collection[Role]) -> Iterator[bytes]:
    # Tools keep their key order, because the template shows them as they are; switches have none.
    head = json.dumps(list(conversation.tools), ensure_ascii=False, default=str)
    switches = dict(conversation.template_kwargs or {})
    digest = _link(b"", [head, json.dumps(switches, sort_keys=True, default=str)])
    yield digest
    for message in conversation.messages:
        digest = _link(digest, _meaning(message, message.role in stripped))
        yield digest


def _link(previous: bytes, fields: list[str]) -> bytes:
    parts = [previous]
    for field in fields:
        data = field.encode("utf-8", errors="surrogatepass")
        parts += (b"%d:" % len(data), data)  # lengths keep ("ab", "c") apart from ("a", "bc")
    return hashlib.blake2b(b"".join(parts), digest_size=DIGEST_BYTES).digest()


def _meaning(message: Message, stripped: bool) -> list[str]:
    content = message.content.strip() if stripped else message.content
    fields = [message.role, content]
    if message.role == "assistant":
        # No reasoning, no ids, no name: clients lose or rename them.
        for call in message.tool_calls:
            fields += [call.name, _arguments_meaning(call)]
    elif message.role != "tool":
        fields.append(message.name)
    return fields


def _arguments_meaning(call: ToolCall) -> str:
    value = parse_arguments(call.arguments)
    if value is None:
        return "raw:" + call.arguments
    return "json:" + _CANONICAL(value)


def parse_arguments(text: str) -> dict[str, Any] | None:
    """The object that a call's arguments stand for, or None when they are none, or too deep.

    Nothing at all ("", whitespace, `null`) is a call without arguments. Whole floats become
    integers, as every JavaScript client writes them back.
    """
    if not text.strip():
        return {}
    try:
        value = json.loads(text, parse_float=_number)
        if "\\u" in text:
            # A lone surrogate ("\ud800") is legal in JSON but no text: only its escape can be told.
            _CANONICAL(value).encode("utf-8")
    except (ValueError, RecursionError):
        return None
    if value is None:
        return {}
    if not isinstance(value, dict):
        return None
    # Few arguments have as many brackets as that, and fewer are looked through.
    brackets = text.count("{") + text.count("[")
    deep = brackets > MAX_ARGUMENT_DEPTH and nests_deeper(value, MAX_ARGUMENT_DEPTH)
    return None if deep else value


def nests_deeper(value: object, levels: int) -> bool:
    """Whether JSON is nested more than `levels` deep. Without recursion: it may be any depth."""
    layer: list[Any] = [value]
    for _ in range(levels + 1):
        boxes = [box for box in layer if isinstance(box, dict | list)]
        if not boxes:
            return False
        layer = [v for box in boxes for v in (box.values() if isinstance(box, dict) else box)]
    return True


def _number(text: str) -> float | int:
    value = float(text)
    # Beyond 2**53 a float is not its integer any more.
    return int(value) if value.is_integer() and abs(value) < 2**53 else value
