"""How does a conversation stand in JSON, so that exactly the same one comes back?

The one codec of everything that outlives the process: session rows, turn records, exported files.
No reasoning is not empty reasoning, arguments stay the text that they were, key order stays, and
lone surrogates survive. Reading believes nothing: a value that no `message_row` can have written
is a ValueError, whatever it is, never another error and never half a message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from capserve.text.messages import Conversation, Message, Role, ToolCall

_ROLES: dict[object, Role] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_FIELDS = frozenset(
    {"role", "content", "reasoning", "tool_calls", "tool_call_id", "name", "breakpoint"}
)


def message_row(message: Message) -> dict[str, Any]:
    """`message` as values of JSON; `message_of` gives back an equal one, its mark included."""
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        row["reasoning"] = message.reasoning
    if message.tool_calls:
        row["tool_calls"] = [[c.name, c.arguments, c.id] for c in message.tool_calls]
    if message.tool_call_id:
        row["tool_call_id"] = message.tool_call_id
    if message.name:
        row["name"] = message.name
    if message.breakpoint:
        row["breakpoint"] = True
    return row


def message_of(row: object) -> Message:
    """The message of a row. Raises ValueError for anything that is none."""
    if not isinstance(row, dict) or not row.keys() <= _FIELDS:
        raise ValueError("a message is no object, or has a field that no message has")
    role, mark = row.get("role"), row.get("breakpoint", False)
    known = _ROLES.get(role) if isinstance(role, str) else None
    if known is None:
        raise ValueError(f"{str(role)[:40]!r} is no role")
    if not isinstance(mark, bool):
        raise ValueError("breakpoint is neither true nor false")
    reasoning = row.get("reasoning")
    calls = row.get("tool_calls", [])
    if not isinstance(calls, list):
        raise ValueError("tool_calls is no list")
    return Message(
        known,
        _text(row.get("content"), "content"),
        reasoning=None if reasoning is None else _text(reasoning, "reasoning"),
        tool_calls=tuple(map(_call, calls)),
        tool_call_id=_text(row.get("tool_call_id", ""), "tool_call_id"),
        name=_text(row.get("name", ""), "name"),
        breakpoint=mark,
    )


def tools_of(value: object) -> tuple[Mapping[str, Any], ...]:
    """Definitions as they were sent. Raises ValueError."""
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError("tools is no list of objects")
    return tuple(value)


def switches_of(value: object) -> Mapping[str, Any] | None:
    """Template switches, or None. Raises ValueError."""
    if not (value is None or isinstance(value, dict)):
        raise ValueError("template_kwargs is no object")
    return value


def conversation_json(conversation: Conversation | None) -> str:
    """`conversation` as JSON text, or "" for none. `conversation_of` gives back an equal one."""
    if conversation is None:
        return ""
    switches = conversation.template_kwargs
    value = {
        "messages": list(map(message_row, conversation.messages)),
        "tools": list(conversation.tools),
        "template_kwargs": None if switches is None else dict(switches),
    }
    return json.dumps(value, separators=(",", ":"))


def conversation_of(text: object) -> Conversation | None:
    """The conversation that `conversation_json` wrote. Raises ValueError for anything else."""
    if not isinstance(text, str):
        raise ValueError("a conversation is no text")
    if not text:
        return None
    try:
        # Not orjson: a client may have sent lone surrogates, which it refuses.
        value = json.loads(text)
    except RecursionError:
        raise ValueError("a conversation is nested too deeply") from None
    if not isinstance(value, dict) or value.keys() != {"messages", "tools", "template_kwargs"}:
        raise ValueError("a conversation is no object with messages, tools and template_kwargs")
    if not isinstance(value["messages"], list):
        raise ValueError("messages is no list")
    return Conversation(
        tuple(map(message_of, value["messages"])),
        tools_of(value["tools"]),
        switches_of(value["template_kwargs"]),
    )


def _call(value: object) -> ToolCall:
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError("a tool call has not its three fields")
    name, arguments, call_id = (_text(field, "a field of a tool call") for field in value)
    return ToolCall(name, arguments, call_id)


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is no text")
    return value
