"""Which fields does a request to `/v1/messages` have, and what may stand in them?

The form of the Anthropic dialect. Content comes in blocks of several kinds; what each of them says
is kept as a small value, and a block that this server can't read is refused by name. Unknown
fields are ignored, as everywhere. `messages_translate` gives the fields their sense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, PlainValidator, ValidationInfo

from capserve.api.schemas import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TOOLS,
    CacheMark,
    SamplingFields,
    Wire,
    quote,
    refuse,
)
from capserve.api.strict_json import type_name

MAX_BLOCKS = MAX_CALLS
"""Of one message: each may be a call."""


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    mark: bool = False
    """It has a `cache_control`; so have the other blocks."""


@dataclass(frozen=True, slots=True)
class Thinking:
    text: str


@dataclass(frozen=True, slots=True)
class ToolUse:
    id: str
    name: str
    input: Mapping[str, Any]
    mark: bool = False


@dataclass(frozen=True, slots=True)
class ToolReference:
    """In the result of a search for tools: one of the request's tools, shown from here on."""

    name: str
    mark: bool = False


@dataclass(frozen=True, slots=True)
class ToolResult:
    tool_use_id: str
    text: str
    is_error: bool = False
    mark: bool = False
    references: tuple[str, ...] = ()


Block = Text | Thinking | ToolUse | ToolReference | ToolResult

_KINDS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
_IN_RESULTS = ("text", "tool_reference")


def _content(value: object, info: ValidationInfo) -> tuple[Block, ...]:
    """A message's blocks; a string is one text block. What may stand there depends on the role."""
    role = info.data.get("role")
    if role not in _KINDS:
        return ()  # the role is refused already, and its field comes first
    return _blocks(value, _KINDS[role], "")


def _system(value: object) -> tuple[Block, ...]:
    return () if value is None else _blocks(value, _KINDS["system"], "")


def _blocks(value: object, kinds: tuple[str, ...], at: str) -> tuple[Block, ...]:
    if isinstance(value, str):
        return (Text(value),)
    if not isinstance(value, list):
        raise refuse(f"must be a string or an array of blocks, got {type_name(value)}", at)
    if len(value) > MAX_BLOCKS:
        raise refuse(f"must have at most {MAX_BLOCKS} items, got {len(value)}", at)
    blocks = (_block(block, kinds, f"{at}[{i}]") for i, block in enumerate(value))
    return tuple(block for block in blocks if block is not None)


def _block(block: object, kinds: tuple[str, ...], at: str) -> Block | None:
    """None for a block that says nothing to a model."""
    if not isinstance(block, dict):
        raise refuse(f"must be a content block (an object), got {type_name(block)}", at)
    kind = block.get("type")
    if kind not in kinds:
        known = ", ".join(repr(name) for name in kinds)
        raise refuse(
            f"must be one of {known} here: this model reads text only, got {quote(kind)}",
            f"{at}.type",
            kind="unsupported_value",
        )
    match kind:
        case "text":
            return Text(_string(block, "text", at), _mark(block, at))
        case "thinking":
            return Thinking(_string(block, "thinking", at))
        case "redacted_thinking":
            return None  # sealed for another server
        case "tool_use":
            value = block.get("input", {})
            if not isinstance(value, dict):
                raise refuse(f"must be an object, got {type_name(value)}", f"{at}.input")
            name, call_id = _string(block, "name", at), _string(block, "id", at)
            return ToolUse(call_id, name, value, _mark(block, at))
        case "tool_reference":
            return ToolReference(_string(block, "tool_name", at), _mark(block, at))
        case _:
            return _tool_result(block, at)


def _tool_result(block: dict[str, Any], at: str) -> ToolResult:
    content = block.get("content")
    inner = () if content is None else _blocks(content, _IN_RESULTS, f"{at}.content")
    is_error = block.get("is_error")
    if is_error is not None and not isinstance(is_error, bool):
        raise refuse(f"must be a boolean, got {quote(is_error)}", f"{at}.is_error")
    texts = [part for part in inner if isinstance(part, Text)]
    return ToolResult(
        _string(block, "tool_use_id", at),
        "".join(part.text for part in texts),
        bool(is_error),
        _mark(block, at) or any(part.mark for part in inner if not isinstance(part, Thinking)),
        tuple(part.name for part in inner if isinstance(part, ToolReference)),
    )


def _string(block: dict[str, Any], key: str, at: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise refuse(f"must be a string, got {type_name(value)}", f"{at}.{key}")
    return value


def _mark(block: dict[str, Any], at: str) -> bool:
    """If the block has a `cache_control`, whatever lifetime it asks for."""
    value = block.get("cache_control")
    if value is not None and not isinstance(value, dict):
        raise refuse(f"must be an object, got {type_name(value)}", f"{at}.cache_control")
    return value is not None


def _tool_type(value: object) -> str | None:
    if value is None or value == "custom":
        return None
    raise refuse(
        f"must be 'custom': this server has no tools of its own, got {quote(value)}",
        kind="unsupported_value",
    )


class Turn(Wire):
    """One message."""

    role: Literal["user", "assistant", "system"]
    """`system` stands among the messages of some agents, not only before them."""
    content: Annotated[tuple[Block, ...], PlainValidator(_content)]


class Tool(Wire):
    """A tool that the client runs."""

    type: Annotated[str | None, PlainValidator(_tool_type)] = None
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: bool | None = None
    """Not shown until the result of a tool refers to it."""
    cache_control: CacheMark = False


class ToolChoice(Wire):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Wire):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)


class OutputFormat(Wire):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Wire):
    format: OutputFormat | None = None
    effort: str | None = None


class Metadata(Wire):
    user_id: str | None = None


StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class CountRequest(SamplingFields):
    """`POST /v1/messages/count_tokens`: everything that decides the prompt."""

    model: str
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    system: Annotated[tuple[Block, ...], PlainValidator(_system)] = ()
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS), FailFast()] = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older name of `output_config.format`."""
    cache_control: CacheMark = False
    """On the request itself: at the end of its last message."""


class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[StopSequence] | None = Field(None, max_length=MAX_STOPS)
    stream: bool | None = None
    metadata: Metadata | None = None
