"""What does a request to `/v1/responses` mean, in the words that text and serving speak?

Pure functions. Items become messages: what an assistant thought, said and called between two
answers of its surroundings is one message, however many items it was told in. Settings become those
of a chat request, so that both protocols check and mean the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from capserve.api import translate
from capserve.api.responses_schema import (
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    Item,
    ItemReference,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
)
from capserve.api.responses_tools import Offered, as_arguments, choice
from capserve.api.schemas import ChatRequest
from capserve.api.validation import validated
from capserve.errors import InvalidRequestError
from capserve.text.messages import Conversation, Message, ToolCall
from capserve.text.prompt import PromptBuilder

Json = dict[str, Any]

SHARED = (
    "cache_salt",
    "enable_thinking",
    "chat_template_kwargs",
    "flashrt_K",
    "flashrt_pin_prefix",
    "frequency_penalty",
    "logit_bias",
    "metadata",
    "min_p",
    "model",
    "parallel_tool_calls",
    "presence_penalty",
    "prompt_cache_key",
    "repetition_penalty",
    "seed",
    "stop",
    "store",
    "stream",
    "temperature",
    "thinking_budget",
    "top_k",
    "top_p",
    "user",
)
"""Fields that mean what they mean in a chat request."""

_NO_MESSAGES = ({"role": "user", "content": ""},)
"""Settings have none of their own, and a chat request needs one."""

_PARAMS = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "tool_choice.function": "tool_choice",
    "messages": "input",
}
"""Fields that have another name in a chat request; what begins alike, the longest first."""


def settings(request: ResponsesRequest, body: Mapping[str, Any], tools: Offered) -> ChatRequest:
    """Everything but the conversation, as a chat request would say it.

    Raises InvalidRequestError in the words of this protocol.
    """
    chat: Json = {key: body[key] for key in SHARED if key in body}
    chat["messages"] = list(_NO_MESSAGES)
    chat["max_tokens"] = request.max_output_tokens
    chat["reasoning_effort"] = request.reasoning and request.reasoning.effort
    chat["tools"] = tools.tools or None
    chat["tool_choice"] = choice(request.tool_choice, tools)
    if request.text is not None:
        chat["response_format"] = _response_format(request.text.format)
    with own_words(tools):
        return validated(ChatRequest, chat)


def _response_format(sent: Json | None) -> Json | None:
    """A schema lies flat in this protocol, and one level deeper in chat's."""
    if sent is None or sent.get("type") != "json_schema":
        return sent
    schema = {key: value for key, value in sent.items() if key != "type"}
    return {"type": "json_schema", "json_schema": schema}


@contextmanager
def own_words(tools: Offered) -> Iterator[None]:
    """A refusal by what both protocols share names the field as this one calls it."""
    try:
        yield
    except InvalidRequestError as error:
        places = {f"tools[{i}]": place for i, place in enumerate(tools.places)}
        for chat_name, own_name in (_PARAMS | places).items():
            if error.param is not None and error.param.startswith(chat_name):
                error.param = own_name + error.param.removeprefix(chat_name)
                if error.message.startswith(chat_name):
                    error.message = own_name + error.message.removeprefix(chat_name)
                break
        raise


@dataclass
class _Reply:
    """An assistant's message while its items are put together."""

    reasoning: list[str] | None = None
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        return Message(
            "assistant",
            "".join(self.texts),
            reasoning=None if self.reasoning is None else "\n\n".join(self.reasoning),
            tool_calls=tuple(self.calls),
        )


def conversation(
    instructions: str | None,
    items: Iterable[Item],
    tools: Offered,
    chat: ChatRequest,
    prompts: PromptBuilder,
) -> Conversation:
    """The conversation to render. `instructions` are its first system message."""
    messages = [Message("system", instructions)] if instructions else []
    reply: _Reply | None = None

    def close() -> None:
        nonlocal reply
        if reply is not None:
            messages.append(reply.message())
        reply = None

    for item in items:
        match item:
            case ReasoningItem():
                # Thinking comes first: what follows words or calls belongs to another reply.
                if reply is not None and (reply.texts or reply.calls):
                    close()
                reply = reply or _Reply()
                reply.reasoning = (reply.reasoning or []) + [item.content or item.summary]
            case MessageItem(role="assistant"):
                # Words behind a call that nobody has answered yet are still the same reply's.
                if reply is not None and reply.texts and not reply.calls:
                    close()
                reply = reply or _Reply()
                reply.texts.append(item.content)
            case FunctionCallItem() | CustomCallItem():
                reply = reply or _Reply()
                reply.calls.append(_call(item, tools))
            case MessageItem():
                close()
                messages.append(Message("user" if item.role == "user" else "system", item.content))
            case CallOutputItem():
                close()
                messages.append(Message("tool", item.output, tool_call_id=item.call_id))
            case ItemReference():
                raise AssertionError("references are replaced before")
    close()
    # Tools and switches as chat has them, whose one message only stood in for these.
    stand_in = {"messages": list(_NO_MESSAGES), "tools": tools.tools}
    frame = translate.conversation(chat, stand_in, prompts)
    return replace(frame, messages=tuple(messages))


def _call(item: FunctionCallItem | CustomCallItem, tools: Offered) -> ToolCall:
    name = tools.shown(item.name, item.namespace)
    if isinstance(item, CustomCallItem):
        return ToolCall(name, as_arguments(item.input), item.call_id)
    return ToolCall(name, item.arguments, item.call_id)
