"""What does a chat request mean, once its spelling is gone?

Pure functions from the validated request to the values that text and serving speak: a
`Conversation`, a `Sampling`, an `OutputSpec`, a `Constraint`. What needs the model's numbers
(served names, vocabulary, K, context) is checked here, with both numbers in the refusal.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

from capserve.api.errors import ModelNotFoundError
from capserve.api.schemas import (
    AllowedTools,
    AssistantMessage,
    ChatMessage,
    ChatRequest,
    NamedFunction,
    SystemMessage,
    ToolMessage,
    UserMessage,
    quote,
)
from capserve.api.state import ModelInfo
from capserve.engine.seam import Sampling
from capserve.errors import ContextLengthError, InvalidRequestError
from capserve.serving.limits import Limits
from capserve.text.grammar_rules import Constraint
from capserve.text.messages import Conversation, Message, ToolCall
from capserve.text.output import OutputSpec
from capserve.text.prompt import PromptBuilder
from capserve.text.thinking import ThinkingBudget
from capserve.text.tokenizer import Tokenizer

T = TypeVar("T")

BUDGET = "thinking_budget"
"""The name of the field, and of the switch by which some clients send it."""

LEAST_TEMPERATURE = 1e-5
"""Below it a choice is greedy: scores over such a temperature lose what tells them apart."""


def conversation(
    request: ChatRequest, body: Mapping[str, Any], prompts: PromptBuilder
) -> Conversation:
    """The conversation to render. Tool definitions come from `body`, exactly as sent."""
    tools = tuple(tool for tool in body.get("tools") or () if not tool.get("defer_loading"))
    messages = tuple(
        _marked(_message(message), message.cache_control or _has_marked_part(sent))
        for message, sent in zip(request.messages, body["messages"], strict=True)
    )
    return Conversation(messages, tools, _template_kwargs(request, prompts))


def _has_marked_part(sent: Mapping[str, Any]) -> bool:
    """Some content part has a `cache_control`: the end of its message is what can be kept."""
    content = sent.get("content")
    return isinstance(content, list) and any(part.get("cache_control") for part in content)


def _marked(message: Message, mark: bool) -> Message:
    return replace(message, breakpoint=True) if mark else message


def _message(message: ChatMessage) -> Message:
    match message:
        case SystemMessage():  # and developer, its newer name
            return Message("system", message.content, name=message.name or "")
        case UserMessage():
            return Message("user", message.content, name=message.name or "")
        case ToolMessage():
            call_id = message.tool_call_id or ""
            return Message("tool", message.content, tool_call_id=call_id, name=message.name or "")
        case AssistantMessage():
            reasoning = message.reasoning_content
            calls = tuple(
                ToolCall(call.function.name, call.function.arguments, call.id or "")
                for call in message.tool_calls or ()
            )
            return Message(
                "assistant",
                message.content,
                reasoning=message.reasoning if reasoning is None else reasoning,
                tool_calls=calls,
                name=message.name or "",
            )


def _template_kwargs(request: ChatRequest, prompts: PromptBuilder) -> dict[str, Any] | None:
    """`chat_template_kwargs` wins over `enable_thinking`, which wins over `reasoning_effort`.

    A budget is no switch, unless the template asks for it: it must not keep apart histories that
    are rendered alike.
    """
    kwargs: dict[str, Any] = {}
    if request.reasoning_effort == "none":
        kwargs["enable_thinking"] = False
    if request.enable_thinking is not None:
        kwargs["enable_thinking"] = request.enable_thinking
    if request.thinking_budget is not None and prompts.knows(BUDGET):
        kwargs[BUDGET] = request.thinking_budget
    kwargs |= request.chat_template_kwargs or {}
    if not prompts.knows(BUDGET):
        kwargs.pop(BUDGET, None)
    return prompts.switches(kwargs, request.reasoning_effort) or None


def thinking(request: ChatRequest, spec: OutputSpec, tokenizer: Tokenizer) -> ThinkingBudget | None:
    """How long the reply may think; None: as long as it likes. Raises InvalidRequestError."""
    sent = request.chat_template_kwargs or {}
    most = request.thinking_budget
    if (switch := sent.get(BUDGET)) is not None:
        if isinstance(switch, bool) or not isinstance(switch, int) or switch < -1:
            raise InvalidRequestError(
                f"chat_template_kwargs.{BUDGET} must be an integer of at least -1, "
                f"got {quote(switch)}.",
                param=f"chat_template_kwargs.{BUDGET}",
            )
        most = switch
    return None if most is None or most < 0 else ThinkingBudget(tokenizer, spec, most)


def output_spec(
    request: ChatRequest, tools: tuple[Mapping[str, Any], ...], in_reasoning: bool
) -> OutputSpec:
    """How the reply is to be read.

    `tool_choice: none` keeps the tools in the prompt, so that the prefix stays shared with the
    turns around it, but the reply has no calls: markup, should the model write some, is content.
    """
    readable = () if request.tool_choice == "none" else tools
    max_calls = 1 if readable and request.parallel_tool_calls is False else None
    return OutputSpec(readable, request.stop, in_reasoning, max_calls)


def constraint(
    request: ChatRequest, tools: tuple[Mapping[str, Any], ...], in_reasoning: bool
) -> Constraint:
    """What the reply's form has to keep to. `tools` are the conversation's own.

    Raises InvalidRequestError for a demanded call that no tool can answer.
    """
    choice = request.tool_choice
    named: str | None = None
    allowed: tuple[str, ...] | None = None
    mode: Literal["none", "auto", "required"] = "auto"
    match choice:
        case NamedFunction(name):
            named = name
        case AllowedTools():
            _check_names(choice, tools)
            mode, allowed = choice.mode, choice.names
        case str():
            mode = choice
    if mode == "required" and not tools:
        raise InvalidRequestError(
            "tool_choice demands a call, and the request has 0 tools.", param="tool_choice"
        )
    if named is not None and named not in map(_function_name, tools):
        raise InvalidRequestError(
            f"tool_choice.function.name must be the name of one of the {len(tools)} tools, "
            f"got {quote(named)}.",
            param="tool_choice.function.name",
        )
    return Constraint(
        tools=tools,
        choice=mode,
        function=named,
        allowed=allowed,
        parallel=request.parallel_tool_calls is not False,
        response_format=request.response_format,
        starts_in_reasoning=in_reasoning,
    )


def _check_names(allowed: AllowedTools, tools: tuple[Mapping[str, Any], ...]) -> None:
    known = set(map(_function_name, tools))
    for i, name in enumerate(allowed.names):
        if name not in known:
            param = f"tool_choice.allowed_tools.tools[{i}].function.name"
            raise InvalidRequestError(
                f"{param} must be the name of one of the {len(tools)} tools, got {quote(name)}.",
                param=param,
            )


def _function_name(tool: Mapping[str, Any]) -> object:
    """None where there is none: the tools of an imported session were not checked by a request."""
    function = tool.get("function", tool)
    return function.get("name") if isinstance(function, Mapping) else None


def served_name(request: ChatRequest, model: ModelInfo) -> str:
    """The name that the reply carries. Raises `ModelNotFoundError` naming both."""
    if request.model is None:
        return model.served_names[0]
    if request.model not in model.served_names:
        served = ", ".join(repr(name) for name in model.served_names)
        raise ModelNotFoundError(
            f"The model {quote(request.model, 200)} is not served here; {served} is.",
            param="model",
        )
    return request.model


def sampling(request: ChatRequest, model: ModelInfo) -> Sampling:
    """How tokens are chosen: the request's own fields over the checkpoint's defaults."""
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
    drafts = request.flashrt_K
    if drafts is None:
        drafts = min(model.default_drafts, model.max_drafts)
    elif drafts > model.max_drafts:
        raise InvalidRequestError(
            f"flashrt_K must be at most {model.max_drafts} with this model, got {drafts}.",
            param="flashrt_K",
        )
    defaults = model.defaults
    temperature = _first(request.temperature, defaults.temperature)
    seed = _first(request.seed, model.seed)
    if seed is None:
        seed = secrets.randbits(53)
    return Sampling(
        temperature=0.0 if temperature < LEAST_TEMPERATURE else temperature,
        top_k=max(0, _first(request.top_k, defaults.top_k)),
        top_p=_first(request.top_p, defaults.top_p),
        min_p=_first(request.min_p, defaults.min_p),
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_logit_bias(request.logit_bias or {}, model.vocab_size),
        seed=seed % 2**64,  # clients send signed numbers, the noise is keyed by unsigned ones
        drafts=drafts,
        end_tokens=model.end_tokens,
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )


def without_end(request: ChatRequest, sampling: Sampling, *, has_form: bool) -> Sampling:
    """`sampling` with what `ignore_eos` changes: no end token is ever chosen.

    Where a form is demanded nothing changes: when it is complete, an end token is all that may
    follow.
    """
    if not request.ignore_eos or has_form:
        return sampling
    bias = dict(sampling.logit_bias) | dict.fromkeys(sampling.end_tokens, -math.inf)
    return replace(sampling, logit_bias=tuple(sorted(bias.items())))


def _logit_bias(bias: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs: dict[int, float] = {}
    for key, value in bias.items():
        # The length first: turning a million digits into a number would take the thread.
        is_id = key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size
        if not is_id:
            raise InvalidRequestError(
                f"logit_bias has the key {quote(key)}; keys must be token ids "
                f"from 0 to {vocab_size - 1}.",
                param="logit_bias",
            )
        pairs[int(key)] = value
    return tuple(sorted(pairs.items()))


def refuse_hopeless(conversation: Conversation, tokenizer: Tokenizer, model: ModelInfo) -> None:
    """Refuse by its length alone a text that can't fit the context, however it tokenizes.

    Reading megabytes that will be refused anyway would hold up everybody behind them.
    Raises `ContextLengthError`.
    """
    chars = sum(len(message.content) for message in conversation.messages)
    least = tokenizer.least_tokens(chars)
    if least > model.max_model_len:
        raise ContextLengthError(
            f"The maximum context length is {model.max_model_len} tokens; "
            f"the messages have at least {least} tokens ({chars} characters).",
            param="messages",
        )


def output_room(request: ChatRequest, prompt_tokens: int, model: ModelInfo, limits: Limits) -> int:
    """Most tokens that the reply may have, at least 1.

    A `max_tokens` beyond what is left of the context is lowered: agents send the model's nominal
    maximum with every request. Raises `ContextLengthError` when nothing is left.
    """
    room = model.max_model_len - prompt_tokens
    if room < 1:
        # Clients look for "maximum context length" in the text before they compact a conversation.
        raise ContextLengthError(
            f"The maximum context length is {model.max_model_len} tokens; "
            f"the prompt has {prompt_tokens} tokens and the reply needs at least 1.",
            param="messages",
        )
    wanted = _first(
        request.max_completion_tokens,
        _first(request.max_tokens, _first(model.defaults.max_new_tokens, room)),
    )
    return min(wanted, room, limits.max_output_tokens)


def _first(value: T | None, default: T) -> T:
    return default if value is None else value
