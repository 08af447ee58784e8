"""Do agent clients' conversations hold with a model that says what it likes?

The embedded model answers, seldom what was recorded: the talk goes on with its own thoughts, words
and calls, in the client's form (`live_talks.py`). Nothing may be read twice all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from client_shapes import SHAPES
from harness import NANO, Served, serving
from live_talks import Chat, Dialect, Messages, Responses, talks
from replay import Replay
from test_http_traces import NONE, RECORDINGS, recorded

from capserve.engine.runtime import TorchEngine

pytestmark = pytest.mark.slow

INTERVAL = 256
MOST_TOKENS = 160
"""A reply that rambles is cut there; what is cut is history too."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    torch.set_num_threads(1)
    engine = TorchEngine.load(NANO, max_model_len=8192, prefill_chunk=128)
    with serving(engine, checkpoint_interval=INTERVAL) as running:
        yield running


def limited(name: str) -> Any:
    """Greedy, cut, and apart from all other talks."""
    most = dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), MOST_TOKENS)

    def fields(number: int) -> dict[str, Any]:
        return {**most, "temperature": 0, "prompt_cache_key": name}

    return fields


def tell(served: Served, name: str, records: list[Any], dialect: Dialect) -> None:
    telling = Replay(served, dialect, INTERVAL, fields=limited(name))
    replies = [said for talk in talks(records) for said in telling.tell(talk)]
    assert len(replies) == len(records)
    read, prompts = sum(said.read for said in replies), sum(said.prompt for said in replies)
    print(f"\n{name}: {prompts} tokens of prompts, {telling.new} new, {read} read")
    assert read < prompts / 2, "a conversation that is read once"


@pytest.mark.parametrize(
    ("name", "dialect"),
    [
        ("opencode", Chat()),
        ("pi", Chat()),
        ("pydantic-ai", Chat()),
        ("openai-sdk", Chat()),
        ("claude-code", Messages()),
        ("qwen-code", Messages()),
        ("codex", Responses()),
        ("openai-sdk-responses", Responses()),
        ("openai-sdk-responses plain", Responses()),
    ],
)
def test_a_clients_conversation_with_the_models_own_replies(
    served: Served, name: str, dialect: Dialect
) -> None:
    tell(served, f"{name} {type(dialect).__name__}", SHAPES[name].records(), dialect)


SMALL = ("openai-sdk-stream/", "mini-swe-agent/", "openai-sdk-responses/", "pi/")


@pytest.mark.parametrize("name", [n for n in RECORDINGS if n.startswith(SMALL)] or [NONE])
def test_a_recorded_conversation_with_the_models_own_replies(served: Served, name: str) -> None:
    records = recorded(name)
    dialect = Responses() if records[0]["path"].endswith("/responses") else Chat()
    tell(served, name, records, dialect)
