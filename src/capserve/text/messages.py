"""What is a message, once the wire's many spellings of it are gone?

Every protocol module of the api translates its own JSON into these frozen values; templates,
transcripts and output speak of nothing else. Content is one string (text parts joined, null and
absent are ""), tool arguments stay the string that the client sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of an assistant message. `arguments` is JSON text, byte-exact as given."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str = ""
    reasoning: str | None = None
    """None when the client sent none (it may have lost it), "" when there was none."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    breakpoint: bool = field(default=False, compare=False)
    """The client marked the end of this message as worth coming back to (`cache_control`). It says
    nothing about what the message means."""


@dataclass(frozen=True)
class Conversation:
    """Everything that decides a rendered prompt."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Definitions exactly as sent, key order kept: `{"type": "function", "function": {..}}`."""
    template_kwargs: Mapping[str, Any] | None = None
    """`enable_thinking`, `preserve_thinking`, ...: handed to the template as they are."""
