"""An agent framework and the embedded model: tools that it calls by itself, outputs that a grammar
makes it keep to."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal

import pytest
from agent_models import PROTOCOLS, model
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import ModelResponse, ToolReturnPart
from pydantic_ai.usage import UsageLimits

from benchmarks.scenarios.server import OwnServer

pytestmark = pytest.mark.slow

EVERY = pytest.mark.parametrize("protocol", PROTOCOLS)

BRIEF = {"chat_template_kwargs": {"enable_thinking": False}}


class Finding(BaseModel):
    line: Literal[1, 2, 3]
    kind: Literal["style", "bug"]


class Review(BaseModel):
    """What is wrong with a file. Without bounds, patterns and tuples: the framework takes them out
    for some protocols."""

    verdict: Literal["good", "bad"]
    first: Finding
    second: Finding | None
    topic: Literal["maths", "naming"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with OwnServer({"threads": 1, "max_model_len": 4096}) as server:
        yield server.url.removesuffix("/v1")


@EVERY
def test_the_model_calls_a_tool_and_the_run_goes_on_from_its_state(url: str, protocol: str) -> None:
    agent: Agent[None, str] = Agent(
        model(protocol, url, temperature=0.0, max_tokens=300),
        instructions="You are a coding agent. Use the tools.",
    )
    asked: list[str] = []

    @agent.tool_plain
    def run_shell(command: str) -> str:
        """Run a shell command and return what it prints."""
        asked.append(command)
        return "cli.py\nstats.py\n"

    result = agent.run_sync(
        "List the files in this folder.", usage_limits=UsageLimits(request_limit=6)
    )
    assert asked
    assert result.output
    said = [message for message in result.all_messages() if isinstance(message, ModelResponse)]
    returned = [
        part
        for message in result.all_messages()
        for part in message.parts
        if isinstance(part, ToolReturnPart)
    ]
    assert len(returned) == len(asked)
    # Each turn appends: all of the one before was read or written there, but for its end token.
    for before, after in pairwise(said):
        known = before.usage.input_tokens + before.usage.output_tokens
        assert after.usage.cache_read_tokens >= known - 1


@EVERY
@pytest.mark.parametrize("form", [ToolOutput, NativeOutput])
def test_every_output_at_temperature_one_is_of_its_type_at_the_first_try(
    url: str, protocol: str, form: Any
) -> None:
    """Three tries see three samples; none is asked for again."""
    agent: Agent[None, Any] = Agent(
        model(protocol, url, temperature=1.0, max_tokens=600, extra_body=BRIEF),
        output_type=form(Review),
        retries=0,
    )
    reviews = [agent.run_sync("Review stats.py: `return sum(xs) / (len(xs) - 1)`") for _ in "123"]
    assert all(isinstance(review.output, Review) for review in reviews)
    assert [review.usage.requests for review in reviews] == [1, 1, 1]
