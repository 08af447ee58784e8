"""Which fields does a chat request have, and what may stand in them?

Declared here once, strictly: no number from a string, no boolean as a number, no infinity. A field
that is absent and one that is null mean the same. Unknown fields are ignored, since every client
sends some. `validation` turns a refusal into words, `translate` gives the fields their sense.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, PlainValidator
from pydantic_core import PydanticCustomError

from capserve.api.strict_json import type_name
from capserve.engine.seam import MAX_TOP_LOGPROBS

MAX_MESSAGES = 100_000
MAX_TOOLS = 10_000
MAX_CALLS = 10_000
"""Of one message."""
MAX_BIASES = 300_000
"""As many as a large vocabulary has tokens."""
MAX_CHOICES = 16
"""Of one request: each is a turn of its own in the queue."""
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
"""Text is held back while it could begin a stop string: this bounds how much."""


class Wire(BaseModel):
    """Base of everything that comes in."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """A `tool_choice` that names the function to be called."""

    name: str


@dataclass(frozen=True, slots=True)
class AllowedTools:
    """A `tool_choice` that names the functions that may be called."""

    mode: Literal["auto", "required"]
    names: tuple[str, ...]


def refuse(message: str, at: str = "", *, kind: str = "invalid_value") -> PydanticCustomError:
    """A refusal in our own words. `at` is appended to the field's path (`[1]`, `.type`).

    The text goes through as a value, never as a template: it may quote what the client sent.
    """
    return PydanticCustomError(kind, "{text}", {"text": message, "at": at})


def join_text(value: object) -> str:
    """One string from all spellings of content: null, a string, or a list of text parts."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refuse(f"must be a string, an array of parts or null, got {type_name(value)}")
    texts = []
    for i, part in enumerate(value):
        if not isinstance(part, dict):
            raise refuse(f"must be a content part (an object), got {type_name(part)}", f"[{i}]")
        kind = part.get("type")
        if kind not in ("text", "refusal"):
            raise refuse(
                f"must be 'text': this model reads text only, got {quote(kind)}",
                f"[{i}].type",
                kind="unsupported_value",
            )
        text = part.get(kind)
        if not isinstance(text, str):
            raise refuse(f"must be a string, got {type_name(text)}", f"[{i}].{kind}")
        _cache_control(part.get("cache_control"), f"[{i}].cache_control")
        texts.append(text)
    return "".join(texts)


def _cache_control(value: object, at: str = "") -> object:
    """A mark at the end of a message; what else it says (a lifetime) is not for us."""
    if value is None:
        return False
    if not isinstance(value, dict):
        raise refuse(f"must be an object, got {type_name(value)}", at)
    kind = value.get("type")
    if kind != "ephemeral":
        raise refuse(f"must be 'ephemeral', got {quote(kind)}", f"{at}.type")
    return True


def quote(value: object, max_chars: int = 60) -> str:
    """`value` as a client can recognise it, at most about `max_chars` long."""
    if isinstance(value, str):
        shown = repr(value[: max_chars + 1])
    elif isinstance(value, dict | list):
        return type_name(value)
    else:
        shown = json.dumps(value)
    return shown if len(shown) <= max_chars + 2 else shown[:max_chars] + "..."


def _arguments(value: object) -> str:
    """Arguments are JSON text, byte for byte as sent; some clients send the object itself."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _stops(value: object) -> object:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise refuse(f"must be a string or an array of strings, got {type_name(value)}")
    if len(stops) > MAX_STOPS:
        raise refuse(f"must have at most {MAX_STOPS} strings, got {len(stops)}")
    for i, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise refuse(f"must be a string, got {type_name(stop)}", f"[{i}]")
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            at = f"[{i}]" if isinstance(value, list) else ""
            raise refuse(f"must have 1 to {MAX_STOP_CHARS} characters, got {len(stop)}", at)
    return tuple(stops)


def _tool_choice(value: object) -> object:
    if value is None or value in ("auto", "none", "required"):
        return value
    if not isinstance(value, dict):
        raise refuse(
            "must be 'auto', 'none', 'required' or an object that names a function, "
            f"got {quote(value)}"
        )
    if (kind := value.get("type")) == "allowed_tools":
        return _allowed_tools(value.get("allowed_tools"))
    if kind != "function":
        raise refuse(
            f"must be 'function' or 'allowed_tools', got {quote(kind)}",
            ".type",
            kind="unsupported_value" if kind == "custom" else "invalid_value",
        )
    return NamedFunction(_function_name(value, ""))


def _function_name(value: dict[str, Any], at: str) -> str:
    function = value.get("function")
    if not isinstance(function, dict):
        raise refuse(f"must be an object, got {type_name(function)}", f"{at}.function")
    name = function.get("name")
    if not isinstance(name, str):
        raise refuse(f"must be a string, got {type_name(name)}", f"{at}.function.name")
    return name


def _allowed_tools(value: object) -> AllowedTools:
    at = ".allowed_tools"
    if not isinstance(value, dict):
        raise refuse(f"must be an object, got {type_name(value)}", at)
    mode, tools = value.get("mode"), value.get("tools")
    if mode not in ("auto", "required"):
        raise refuse(f"must be 'auto' or 'required', got {quote(mode)}", f"{at}.mode")
    if not isinstance(tools, list):
        raise refuse(f"must be an array, got {type_name(tools)}", f"{at}.tools")
    if not 1 <= len(tools) <= MAX_TOOLS:
        raise refuse(f"must have 1 to {MAX_TOOLS} items, got {len(tools)}", f"{at}.tools")
    names = []
    for i, tool in enumerate(tools):
        place = f"{at}.tools[{i}]"
        if not isinstance(tool, dict):
            raise refuse(f"must be an object, got {type_name(tool)}", place)
        if tool.get("type") != "function":
            raise refuse(f"must be 'function', got {quote(tool.get('type'))}", f"{place}.type")
        names.append(_function_name(tool, place))
    return AllowedTools("required" if mode == "required" else "auto", tuple(names))


def _response_format(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise refuse(f"must be an object or null, got {type_name(value)}")
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return {"type": "json_object"}
        case "json_schema":
            return {"type": "json_schema", "json_schema": _schema(value.get("json_schema"))}
        case kind:
            raise refuse(
                f"must be 'text', 'json_object' or 'json_schema', got {quote(kind)}", ".type"
            )


def _schema(value: object) -> object:
    """A named schema. What stands in it is the grammar's to judge."""
    at = ".json_schema"
    if value is None:
        raise refuse("is required", at)
    if not isinstance(value, dict):
        raise refuse(f"must be an object, got {type_name(value)}", at)
    name, strict, schema = value.get("name"), value.get("strict"), value.get("schema")
    if name is not None and not isinstance(name, str):
        raise refuse(f"must be a string, got {type_name(name)}", f"{at}.name")
    if strict is not None and not isinstance(strict, bool):
        raise refuse(f"must be a boolean, got {quote(strict)}", f"{at}.strict")
    if schema is None:
        raise refuse("is required", f"{at}.schema")
    if not isinstance(schema, dict):
        raise refuse(f"must be an object, got {type_name(schema)}", f"{at}.schema")
    return {"schema": schema, "strict": bool(strict)}


def _pin(value: object) -> object:
    """True, or a number of tokens: a boolean is no number here, and a number no boolean."""
    if value is None or isinstance(value, bool):
        return bool(value)
    if not isinstance(value, int):
        raise refuse(f"must be a boolean or a number of tokens, got {quote(value)}")
    if value < 1:
        raise refuse(f"must be at least 1 token, got {value}")
    return value


def _at_most(most: int) -> BeforeValidator:
    """Counts before a value is looked into: each item costs an object, or an error, of its own."""

    def check(value: object) -> object:
        if isinstance(value, list | dict) and len(value) > most:
            raise refuse(f"must have at most {most} items, got {len(value)}")
        return value

    return BeforeValidator(check)


Content = Annotated[str, BeforeValidator(join_text)]
CacheMark = Annotated[bool, BeforeValidator(_cache_control)]
"""On a message itself; on one of its parts it is checked with the content."""


class FunctionCall(Wire):
    name: str
    arguments: Annotated[str, BeforeValidator(_arguments)] = ""


class Call(Wire):
    """A tool call of an earlier assistant turn."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class SystemMessage(Wire):
    role: Literal["system", "developer"]
    content: Content = ""
    cache_control: CacheMark = False
    name: str | None = None


class UserMessage(Wire):
    role: Literal["user"]
    content: Content = ""
    cache_control: CacheMark = False
    name: str | None = None


class AssistantMessage(Wire):
    role: Literal["assistant"]
    content: Content = ""
    cache_control: CacheMark = False
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same under the name that some clients send; `reasoning_content` wins."""
    tool_calls: Annotated[list[Call] | None, FailFast(), _at_most(MAX_CALLS)] = None


class ToolMessage(Wire):
    role: Literal["tool"]
    content: Content = ""
    cache_control: CacheMark = False
    name: str | None = None
    tool_call_id: str | None = None


ChatMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class ToolFunction(Wire):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Wire):
    """Checked here, but rendered from the body itself: the model sees it exactly as sent."""

    type: Literal["function"]
    function: ToolFunction
    defer_loading: bool | None = None
    """It may be called, but is not in the list that the model is shown."""


class StreamOptions(Wire):
    include_usage: bool | None = None


class SamplingFields(Wire):
    """What a request may set, and a checkpoint's `generation_config.json` by default."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    """0 and -1 keep all."""
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    """Nearer to 0 the scores it divides leave float32."""


class GenerationConfig(SamplingFields):
    """A checkpoint's `generation_config.json`."""

    do_sample: bool | None = None
    max_new_tokens: int | None = Field(None, ge=1)


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`."""

    model: str | None = None
    """None is the served model: local clients often leave it out."""
    messages: Annotated[list[ChatMessage], Field(min_length=1), FailFast(), _at_most(MAX_MESSAGES)]
    tools: Annotated[list[Tool] | None, FailFast(), _at_most(MAX_TOOLS)] = None
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | NamedFunction | AllowedTools | None,
        PlainValidator(_tool_choice),
    ] = None
    parallel_tool_calls: bool | None = None
    """False: the reply has one call at most, and ends with it."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    ignore_eos: bool | None = None
    """The reply goes on to its limit: end tokens are never chosen, unless a grammar needs them."""
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    """Choices: turns of one prompt, with the seeds `seed`, `seed + 1`, ..."""

    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]] | None, _at_most(MAX_BIASES)
    ] = None
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    response_format: Annotated[dict[str, Any] | None, PlainValidator(_response_format)] = None
    """None for text; a schema has `schema` and `strict`."""
    reasoning_effort: str | None = None
    """'none' turns thinking off; others are for templates that know them."""
    thinking_budget: int | None = Field(None, ge=-1)
    """Most reasoning tokens of a reply; -1 is as many as it likes."""
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None

    session_id: str | None = Field(None, min_length=1, max_length=128)
    """Go on with this session; then `messages` may be the new ones alone."""
    prompt_cache_key: str | None = Field(None, max_length=1024)
    cache_salt: str | None = Field(None, max_length=1024)
    flashrt_pin_prefix: Annotated[int | bool, BeforeValidator(_pin)] = False
    flashrt_K: int | None = Field(None, ge=0)
    return_token_ids: bool | None = None
