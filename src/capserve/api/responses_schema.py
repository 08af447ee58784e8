"""Which fields does a request to `POST /v1/responses` have that a chat request has not?

What both protocols share (sampling, streaming, keys of reuse) is declared once, in `schemas`. The
items of `input` and the tools are read one by one here, since each names its own form in `type`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from capserve.api.errors import UnsupportedValueError
from capserve.api.schemas import MAX_MESSAGES, MAX_TOOLS, Wire, quote, refuse
from capserve.api.strict_json import type_name
from capserve.api.validation import validated
from capserve.errors import InvalidRequestError

W = TypeVar("W", bound=BaseModel)

TEXT_PARTS = frozenset(
    {"input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"}
)

HOSTED_TOOLS = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
"""Tools that their own server runs. An agent that offers one beside its functions still works
without it, so they are left out of the prompt, and the reply's notes say so."""


def text_of(value: object) -> str:
    """One string from a string, null, or an array of text parts."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refuse(f"must be a string or an array of parts, got {type_name(value)}")
    return "".join(_part_text(part, i) for i, part in enumerate(value))


def _part_text(part: object, i: int) -> str:
    if not isinstance(part, dict):
        raise refuse(f"must be a content part (an object), got {type_name(part)}", f"[{i}]")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise refuse(
            f"must be 'input_text' or 'output_text': this model reads text only, got {quote(kind)}",
            f"[{i}].type",
            kind="unsupported_value",
        )
    key = "refusal" if kind == "refusal" else "text"
    text = part.get(key)
    if not isinstance(text, str):
        raise refuse(f"must be a string, got {type_name(text)}", f"[{i}].{key}")
    return text


PartsText = Annotated[str, BeforeValidator(text_of)]


class MessageItem(Wire):
    role: Literal["user", "assistant", "system", "developer"]
    content: PartsText = ""


class ReasoningItem(Wire):
    content: PartsText = ""
    summary: PartsText = ""


class FunctionCallItem(Wire):
    name: str
    arguments: str = ""
    call_id: str
    namespace: str | None = None


class CustomCallItem(Wire):
    name: str
    input: str = ""
    call_id: str
    namespace: str | None = None


class CallOutputItem(Wire):
    call_id: str
    output: PartsText = ""


class ItemReference(Wire):
    id: str


Item = (
    MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | CallOutputItem | ItemReference
)

ITEMS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": FunctionCallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CallOutputItem,
    "item_reference": ItemReference,
}


class FunctionTool(Wire):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(Wire):
    """A tool whose call is free text."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None


class NamespaceTool(Wire):
    name: str = Field(min_length=1, max_length=256)
    tools: list[Any] = Field(max_length=MAX_TOOLS)


class ReasoningOptions(Wire):
    effort: str | None = None
    summary: str | None = None


class TextOptions(Wire):
    format: dict[str, Any] | None = None
    """A `response_format` under another name: chat's own check reads it."""
    verbosity: str | None = None


def _input(value: object) -> object:
    if value is None or isinstance(value, str | list):
        return value
    raise refuse(f"must be a string or an array of items, got {type_name(value)}")


def _include(names: list[str] | None) -> list[str] | None:
    """What is not there to be included is left out, but for what a client would count on."""
    for i, name in enumerate(names or ()):
        if name == "message.output_text.logprobs":
            raise refuse(
                f"can't be {name!r}: chat completions have log probabilities",
                f"[{i}]",
                kind="unsupported_value",
            )
    return names


def _never(what: str) -> BeforeValidator:
    def check(value: object) -> object:
        if value is None or value is False or value == 0:
            return None
        raise refuse(f"is not possible here: {what}", kind="unsupported_value")

    return BeforeValidator(check)


class ResponsesRequest(Wire):
    """`POST /v1/responses`, but for what it shares with chat."""

    input: Annotated[str | list[Any] | None, BeforeValidator(_input)] = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Any] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Any = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: Annotated[None, _never("chat completions have log probabilities")] = None
    store: bool | None = None
    """Absent is true, as the protocol has it."""
    include: Annotated[list[str] | None, AfterValidator(_include)] = None
    truncation: Literal["auto", "disabled"] | None = None
    safety_identifier: str | None = None

    background: Annotated[
        None, _never("a reply is made while its client waits; leave it out, or stream")
    ] = None
    conversation: Annotated[
        None, _never("conversations live in previous_response_id, or in what the client sends")
    ] = None
    prompt: Annotated[None, _never("this server keeps no prompt templates")] = None


def within(error: InvalidRequestError, at: str) -> InvalidRequestError:
    """`error` about a field of the value that stands at `at`."""
    inside = type(error)(f"{at}.{error.message}", param=f"{at}.{error.param}")
    inside.code = error.code
    return inside


def read(model: type[W], raw: object, at: str) -> W:
    """`raw`, which stands at `at`, as a `model`."""
    if not isinstance(raw, dict):
        raise InvalidRequestError(f"{at} must be an object, got {type_name(raw)}.", param=at)
    try:
        return validated(model, raw)
    except InvalidRequestError as error:
        raise within(error, at) from None


def as_items(sent: str | list[Any] | None) -> list[Any]:
    """The items that `input` stands for; a string is what the user says."""
    if sent is None:
        return []
    if isinstance(sent, str):
        return [{"type": "message", "role": "user", "content": sent}]
    if len(sent) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"input must have at most {MAX_MESSAGES} items, got {len(sent)}.", param="input"
        )
    return sent


def read_items(sent: Sequence[Any], at: str = "input") -> list[Item]:
    """Every item by its own form. Raises `InvalidRequestError` naming `input[i].field`."""
    return [_read_item(raw, f"{at}[{i}]") for i, raw in enumerate(sent)]


def _read_item(raw: object, at: str) -> Item:
    if not isinstance(raw, dict):
        raise InvalidRequestError(f"{at} must be an object, got {type_name(raw)}.", param=at)
    kind = raw.get("type")
    if kind is None:  # the short form of a message has a role alone
        kind = "message" if "role" in raw or "id" not in raw else "item_reference"
    if not isinstance(kind, str) or kind not in ITEMS:
        known = ", ".join(ITEMS)
        raise UnsupportedValueError(
            f"{at}.type must be one of {known}; got {quote(kind)}.", param=f"{at}.type"
        )
    return read(ITEMS[kind], raw, at)
