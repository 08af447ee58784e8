"""How do the official SDKs ask for the same things, with and without asyncio, in each protocol?

One small class a protocol, with the calls that its users make: words as they come, a turn with
tools through the stream helper, a parsed reply. Both kinds of client go through the same lines:
`settled`, `each` and `opened` do for a blocking client what `await`, `async for` and `async with`
do for the other.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import anthropic
import openai
from harness import NAME
from pydantic import BaseModel

Json = dict[str, Any]


class Leg(BaseModel):
    """One way of a trip."""

    to: Literal["Oslo", "Rome"]
    hours: Literal[2, 5]


class Trip(BaseModel):
    """What a parsed reply brings back. Without bounds: the anthropic SDK takes them out of the
    schema and tells them in words."""

    out: Leg
    back: Leg | None
    paid: bool


async def settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def each(stream: Any) -> AsyncIterator[Any]:
    if hasattr(stream, "__aiter__"):
        async for one in stream:
            yield one
    else:
        for one in stream:
            yield one


@asynccontextmanager
async def opened(manager: Any) -> AsyncIterator[Any]:
    if hasattr(manager, "__aenter__"):
        async with manager as inside:
            yield inside
    else:
        with manager as inside:
            yield inside


@dataclass(frozen=True)
class Turn:
    text: str
    calls: list[tuple[str, str, Any]]
    """Id, name and arguments."""
    history: list[Any]
    """The reply, as it is sent back."""
    record: Json
    """The `capserve` block."""
    pieces: int
    """Events that brought a piece of something."""


class Sdk(Protocol):
    def words(self, asked: str) -> AsyncIterator[str]:
        """Pieces of the reply's text; the stream is closed when the iterator is."""
        ...

    async def says(self, asked: str, timeout: float = 60.0) -> str: ...
    async def turn(self, history: list[Any]) -> Turn:
        """With a tool, through the stream helper."""
        ...

    def result(self, calls: list[tuple[str, str, Any]], texts: list[str]) -> list[Any]: ...
    async def parsed(self, asked: str, stream: bool) -> Any: ...


PARAMETERS = Leg.model_json_schema()
THINKING: Json = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 3000}
TOOL = {"name": "travel", "description": "Go there."}


def _openai(url: str, waits: bool) -> Any:
    made = openai.AsyncOpenAI if waits else openai.OpenAI
    return made(base_url=f"{url}/v1", api_key="any", max_retries=0)


class ChatSdk:
    def __init__(self, url: str, waits: bool) -> None:
        self._api = _openai(url, waits).chat.completions

    async def words(self, asked: str) -> AsyncIterator[str]:
        messages = [{"role": "user", "content": asked}]
        made = self._api.create(model=NAME, messages=messages, stream=True)
        async with opened(await settled(made)) as stream:
            async for chunk in each(stream):
                if chunk.choices and (text := chunk.choices[0].delta.content):
                    yield text

    async def says(self, asked: str, timeout: float = 60.0) -> str:
        messages = [{"role": "user", "content": asked}]
        made = self._api.create(model=NAME, messages=messages, timeout=timeout)
        return str((await settled(made)).choices[0].message.content)

    async def turn(self, history: list[Any]) -> Turn:
        tools = [{"type": "function", "function": {**TOOL, "parameters": PARAMETERS}}]
        pieces = 0
        made = self._api.stream(model=NAME, messages=history, tools=tools)
        async with opened(made) as stream:
            async for event in each(stream):
                pieces += event.type.endswith(".delta")
                if event.type == "chunk":
                    record = (event.chunk.model_extra or {}).get("capserve", {})
            final = await settled(stream.get_final_completion())
        message = final.choices[0].message
        calls = [
            (call.id, call.function.name, json.loads(call.function.arguments))
            for call in message.tool_calls or ()
        ]
        said = [message.model_dump(exclude_none=True)]
        return Turn(message.content or "", calls, said, record, pieces)

    def result(self, calls: list[tuple[str, str, Any]], texts: list[str]) -> list[Any]:
        return [
            {"role": "tool", "tool_call_id": call[0], "content": text}
            for call, text in zip(calls, texts, strict=True)
        ]

    async def parsed(self, asked: str, stream: bool) -> Any:
        fields: Json = {
            "model": NAME,
            "messages": [{"role": "user", "content": asked}],
            "response_format": Trip,
            "max_tokens": 900,
        }
        if not stream:
            reply = await settled(self._api.parse(**fields))
        else:
            async with opened(self._api.stream(**fields)) as events:
                reply = await settled(events.get_final_completion())
        return reply.choices[0].message.parsed


class ResponsesSdk:
    def __init__(self, url: str, waits: bool) -> None:
        self._api = _openai(url, waits).responses

    async def words(self, asked: str) -> AsyncIterator[str]:
        made = self._api.create(model=NAME, input=asked, stream=True)
        async with opened(await settled(made)) as stream:
            async for event in each(stream):
                if event.type == "response.output_text.delta":
                    yield event.delta

    async def says(self, asked: str, timeout: float = 60.0) -> str:
        made = self._api.create(model=NAME, input=asked, timeout=timeout)
        return str((await settled(made)).output_text)

    async def turn(self, history: list[Any]) -> Turn:
        tools = [{"type": "function", **TOOL, "parameters": PARAMETERS, "strict": False}]
        pieces = 0
        async with opened(self._api.stream(model=NAME, input=history, tools=tools)) as stream:
            async for event in each(stream):
                pieces += event.type.endswith(".delta")
            final = await settled(stream.get_final_response())
        calls = [
            (item.call_id, item.name, json.loads(item.arguments))
            for item in final.output
            if item.type == "function_call"
        ]
        said = [item.model_dump(exclude_none=True) for item in final.output]
        for item in said:  # the helper's own view of the arguments
            item.pop("parsed_arguments", None)
        return Turn(final.output_text, calls, said, final.model_extra["capserve"], pieces)

    def result(self, calls: list[tuple[str, str, Any]], texts: list[str]) -> list[Any]:
        return [
            {"type": "function_call_output", "call_id": call[0], "output": text}
            for call, text in zip(calls, texts, strict=True)
        ]

    async def parsed(self, asked: str, stream: bool) -> Any:
        fields: Json = {"model": NAME, "input": asked, "text_format": Trip}
        if not stream:
            reply = await settled(self._api.parse(**fields, max_output_tokens=900))
        else:
            async with opened(self._api.stream(**fields, max_output_tokens=900)) as events:
                reply = await settled(events.get_final_response())
        return reply.output_parsed


class MessagesSdk:
    def __init__(self, url: str, waits: bool) -> None:
        made: Any = anthropic.AsyncAnthropic if waits else anthropic.Anthropic
        self._api = made(base_url=url, api_key="any", max_retries=0).messages

    def _asked(self, asked: str) -> Json:
        return {"model": NAME, "messages": [{"role": "user", "content": asked}], **THINKING}

    async def words(self, asked: str) -> AsyncIterator[str]:
        made = self._api.create(**self._asked(asked), stream=True)
        async with opened(await settled(made)) as stream:
            async for event in each(stream):
                if event.type == "content_block_delta" and event.delta.type == "text_delta":
                    yield event.delta.text

    async def says(self, asked: str, timeout: float = 60.0) -> str:
        reply = await settled(self._api.create(**self._asked(asked), timeout=timeout))
        return "".join(block.text for block in reply.content if block.type == "text")

    async def turn(self, history: list[Any]) -> Turn:
        tools = [{**TOOL, "input_schema": PARAMETERS}]
        pieces = 0
        made = self._api.stream(model=NAME, messages=history, tools=tools, **THINKING)
        async with opened(made) as stream:
            async for event in each(stream):
                pieces += event.type == "content_block_delta"
                if event.type == "message_delta":
                    record = event.model_extra["capserve"]
            final = await settled(stream.get_final_message())
        calls = [(b.id, b.name, b.input) for b in final.content if b.type == "tool_use"]
        text = "".join(block.text for block in final.content if block.type == "text")
        said = [{"role": "assistant", "content": final.content}]
        return Turn(text, calls, said, record, pieces)

    def result(self, calls: list[tuple[str, str, Any]], texts: list[str]) -> list[Any]:
        blocks = [
            {"type": "tool_result", "tool_use_id": call[0], "content": text}
            for call, text in zip(calls, texts, strict=True)
        ]
        return [{"role": "user", "content": blocks}]

    async def parsed(self, asked: str, stream: bool) -> Any:
        fields = {**self._asked(asked), "output_format": Trip}
        if not stream:
            return (await settled(self._api.parse(**fields))).parsed_output
        async with opened(self._api.stream(**fields)) as events:
            return (await settled(events.get_final_message())).parsed_output
