"""The embedded model under a grammar, through the SDKs as their users call them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from benchmarks.scenarios.server import OwnServer

pytestmark = pytest.mark.slow

MODEL = "nano"


class Leg(BaseModel):
    to: Literal["Oslo", "Rome", "Bern"]
    hours: int = Field(ge=0, le=99)


class Trip(BaseModel):
    """What `parse` is to bring back."""

    title: str = Field(max_length=20)
    legs: list[Leg] = Field(max_length=2)
    paid: bool
    note: Literal["none", "late"] | None


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=9)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with OwnServer({"threads": 1, "max_model_len": 4096}) as server:
        yield server.url.removesuffix("/v1")


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Plan a trip to Rome and back."}],
    "max_tokens": 600,
    "seed": 3,
}


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("thinks", [False, True])
def test_parse_brings_back_what_it_asked_for(
    client: openai.OpenAI, drafts: int, thinks: bool
) -> None:
    extra = {"flashrt_K": drafts, "enable_thinking": thinks}
    reply = client.chat.completions.parse(
        **ASKED, response_format=Trip, temperature=1.0, extra_body=extra
    )
    [choice] = reply.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Trip)
    block = reply.model_extra["capserve"]  # type: ignore[index]
    assert (block["spec_attempts"] > 0) == (drafts > 0)


def test_a_parsed_stream_of_several_choices_is_valid_to_its_end(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        **ASKED, response_format=Trip, n=2, temperature=1.0
    ) as stream:
        reply = stream.get_final_completion()
    assert [isinstance(choice.message.parsed, Trip) for choice in reply.choices] == [True, True]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "Weather"}}]
)
def test_a_parsed_tool_call_is_made_when_it_is_demanded(client: openai.OpenAI, choice: Any) -> None:
    reply = client.chat.completions.parse(
        **ASKED,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice=choice,
        parallel_tool_calls=False,
    )
    [call] = reply.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)
    assert reply.choices[0].finish_reason == "tool_calls"


def test_responses_parse_and_messages_any(client: openai.OpenAI, url: str) -> None:
    parsed = client.responses.parse(
        model=MODEL, input="Plan a trip to Rome and back.", text_format=Trip, max_output_tokens=600
    )
    assert isinstance(parsed.output_parsed, Trip)
    other = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
    reply = other.messages.create(
        model=MODEL,
        max_tokens=600,
        messages=[{"role": "user", "content": "hello"}],
        tools=[{"name": "weather", "input_schema": Weather.model_json_schema()}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    [block] = [block for block in reply.content if block.type == "tool_use"]
    Weather.model_validate(block.input)


def test_a_turn_under_a_grammar_can_be_continued_from_its_state(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(
        **ASKED,
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "weather",
                "schema": Weather.model_json_schema(),
                "strict": True,
            },
        },
        extra_body={"enable_thinking": False},
    )
    said = first.choices[0].message.content
    assert said is not None
    Weather.model_validate(json.loads(said))
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And now?"},
    ]
    second = client.chat.completions.create(
        **{**ASKED, "messages": messages, "max_tokens": 5}, extra_body={"enable_thinking": False}
    )
    assert second.model_extra["capserve"]["prefix_action"] == "message_append"  # type: ignore[index]


def test_without_end_tokens_a_reply_has_all_the_tokens_that_it_may(url: str) -> None:
    for path, said in (
        ("chat/completions", {"messages": [{"role": "user", "content": "Say hello."}]}),
        ("completions", {"prompt": "<|im_start|>user\nSay hello.<|im_end|>\n"}),
    ):
        body = {"model": MODEL, "max_tokens": 200, "ignore_eos": True, **said}
        reply = httpx.post(f"{url}/v1/{path}", json=body, timeout=60).json()
        assert reply["usage"]["completion_tokens"] == 200
        assert reply["choices"][0]["finish_reason"] == "length"
