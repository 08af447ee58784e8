"""What would a request to `/v1/messages` be as a chat request?

The dialects say the same in two spellings, so one becomes the other and the rest of the way is
shared: the prompt, and with it every capsule, is the same for both. A pure function of the
validated request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from capserve.api.messages_errors import ThreadUnsupportedError
from capserve.api.messages_schema import (
    Block,
    CountRequest,
    MessagesRequest,
    OutputFormat,
    Text,
    Thinking,
    Tool,
    ToolChoice,
    ToolResult,
    ToolUse,
    Turn,
)
from capserve.api.schemas import quote
from capserve.errors import InvalidRequestError

Json = dict[str, Any]

SHARED_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_tokens",
    "stream",
    "seed",
    "session_id",
    "prompt_cache_key",
    "cache_salt",
    "flashrt_pin_prefix",
    "flashrt_K",
    "chat_template_kwargs",
)
"""Handed on as they are: both dialects, or this server's extensions of them, have these."""

_MARK = {"type": "ephemeral"}


def chat_body(request: CountRequest, raw: Mapping[str, Any]) -> Json:
    """The chat request that means the same. `raw` is the body that `request` was read from.

    Raises `InvalidRequestError` for a result that belongs to no call, for a tool choice that names
    no tool, and for a conversation that the server is to hold.
    """
    if raw.get("thread") is not None:
        raise ThreadUnsupportedError(
            "thread is not possible here: send the whole conversation. What of it is known is not "
            "read again.",
            param="thread",
        )
    body: Json = {key: raw[key] for key in SHARED_FIELDS if key in raw}
    body["model"] = request.model
    body["messages"] = _messages(request)
    tools = _callable(request)
    if tools:
        body["tools"] = [_tool(tool) for tool in tools]
    if request.tool_choice is not None:
        body |= _tool_choice(request.tool_choice, tools)
    # Without the field there is no thinking: a client that did not ask would not know the block.
    # An adaptive model decides for itself, as far as its template lets it.
    thinking = request.thinking
    if thinking is None or thinking.type != "adaptive":
        body["enable_thinking"] = thinking is not None and thinking.type == "enabled"
    if thinking is not None and thinking.budget_tokens is not None:
        body["thinking_budget"] = thinking.budget_tokens
    config = request.output_config
    if config is not None and config.effort != "none":  # `thinking` alone turns it off here
        body["reasoning_effort"] = config.effort
    form = (config.format if config else None) or request.output_format
    if form is not None:
        body["response_format"] = _response_format(form)
    if isinstance(request, MessagesRequest) and request.stop_sequences:
        body["stop"] = request.stop_sequences
    return body


@contextmanager
def own_words(request: CountRequest) -> Iterator[None]:
    """A refusal of the reply's format names the field as this dialect calls it."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param is not None and error.param.startswith("response_format"):
            old = request.output_config is None or request.output_config.format is None
            error.param = "output_format" if old else "output_config.format"
            error.message = error.message.replace("response_format", error.param, 1)
        elif error.param is not None and error.param.startswith("tools["):
            _at_home(error, request)
        raise


def _at_home(error: InvalidRequestError, request: CountRequest) -> None:
    """Names the tool by its place in the request, where tools stand that nobody looked up yet."""
    assert error.param is not None
    place, behind = error.param.removeprefix("tools[").split("]", 1)
    tool = _callable(request)[int(place)]
    at = next(i for i, sent in enumerate(request.tools or ()) if sent is tool)
    named = f"tools[{at}]{behind}"
    error.message = error.message.replace(error.param, named, 1)
    error.param = named


def _callable(request: CountRequest) -> list[Tool]:
    """The tools without those that nobody has looked up yet."""
    results = (b for turn in request.messages for b in turn.content if isinstance(b, ToolResult))
    found = {name for result in results for name in result.references}
    return [tool for tool in request.tools or () if not tool.defer_loading or tool.name in found]


def _messages(request: CountRequest) -> list[Json]:
    messages: list[Json] = []
    tools = {tool.name: tool for tool in request.tools or ()}
    if request.system:
        messages.append(_text("system", request.system))
    calls: set[str] = set()
    for i, turn in enumerate(request.messages):
        messages += _turn(turn, calls, tools, f"messages[{i}]")
    if request.cache_control:
        messages[-1]["cache_control"] = _MARK
    return messages


def _turn(turn: Turn, calls: set[str], tools: Mapping[str, Tool], at: str) -> list[Json]:
    """The chat messages of one turn. `calls`: the ids of all calls before it, to which its own
    are added."""
    if turn.role == "assistant":
        calls.update(block.id for block in turn.content if isinstance(block, ToolUse))
        return [_assistant(turn.content)]
    messages: list[Json] = []
    texts: list[Block] = []
    for j, block in enumerate(turn.content):
        if not isinstance(block, ToolResult):
            texts.append(block)
            continue
        if block.tool_use_id not in calls:
            param = f"{at}.content[{j}].tool_use_id"
            raise InvalidRequestError(
                f"{param} must be the id of a 'tool_use' block in an earlier message, "
                f"got {quote(block.tool_use_id)}.",
                param=param,
            )
        if texts:
            messages.append(_text(turn.role, texts))
            texts = []
        messages.append(_result(block, tools))
    if texts or not messages:
        messages.append(_text(turn.role, texts))
    return messages


def _text(role: str, blocks: Sequence[Block]) -> Json:
    texts = [block for block in blocks if isinstance(block, Text)]
    return _marked({"role": role, "content": "".join(block.text for block in texts)}, texts)


def _assistant(blocks: Sequence[Block]) -> Json:
    message = _text("assistant", blocks)
    thoughts = [block.text for block in blocks if isinstance(block, Thinking)]
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    calls = [block for block in blocks if isinstance(block, ToolUse)]
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.input},
            }
            for call in calls
        ]
    return _marked(message, calls)


def _result(block: ToolResult, tools: Mapping[str, Tool]) -> Json:
    """A reference becomes the definition that it stands for, in the words of a tool list: shown
    here and not in the list, it leaves all that was read before as it is."""
    text = block.text
    if block.references:
        shown = [_definition(tools.get(name), name) for name in block.references]
        text += "\n".join(["<tools>", *shown, "</tools>"])
    if block.is_error and not text.lstrip("<").lower().startswith(("error", "tool_use_error")):
        # The template has no word for it; most agents say it in the text as well.
        text = f"Error: {text}"
    message = {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
    return _marked(message, [block])


def _marked(message: Json, blocks: Sequence[Text | ToolUse | ToolResult]) -> Json:
    """A mark inside a message is one at its end: that is where a state can be kept."""
    if any(block.mark for block in blocks):
        message["cache_control"] = _MARK
    return message


def _definition(tool: Tool | None, name: str) -> str:
    """A tool that has gone since it was found must not spoil the conversation."""
    if tool is None:
        return f"{name} is not available any more."
    shown = {**_tool(tool)}
    shown.pop("defer_loading", None)
    return json.dumps(shown, ensure_ascii=False)


def _tool(tool: Tool) -> Json:
    function: Json = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    deferred = {"defer_loading": True} if tool.defer_loading else {}
    return {"type": "function", "function": function, **deferred}


def _tool_choice(choice: ToolChoice, tools: Sequence[Tool]) -> Json:
    body: Json = {}
    match choice.type:
        case "auto" | "none":
            body["tool_choice"] = choice.type
        case "any":
            body["tool_choice"] = "required"
        case "tool":
            if choice.name not in {tool.name for tool in tools}:
                raise InvalidRequestError(
                    f"tool_choice.name must be the name of one of the {len(tools)} tools, "
                    f"got {quote(choice.name)}.",
                    param="tool_choice.name",
                )
            body["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if choice.disable_parallel_tool_use:
        body["parallel_tool_calls"] = False
    return body


def _response_format(form: OutputFormat) -> Json:
    schema = {"name": "reply", "schema": form.schema_, "strict": True}
    return {"type": "json_schema", "json_schema": schema}
