"""The Anthropic SDK and the embedded model: a conversation is read once, in whichever dialect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from benchmarks.scenarios.server import OwnServer

pytestmark = pytest.mark.slow

MODEL = "nano"
SHELL: Any = {
    "name": "run_shell",
    "description": "Run a shell command and return what it prints.",
    "input_schema": {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
    },
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with OwnServer({"threads": 1, "max_model_len": 4096}) as server:
        yield server.url.removesuffix("/v1")


@pytest.fixture(scope="module")
def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)


def prompt_of(usage: Any) -> int:
    kept = usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    return int(usage.input_tokens + kept)


def test_an_agents_loop_appends_and_its_stream_is_a_whole_message(client):
    fields: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 300,
        "tools": [SHELL],
        "system": [{"type": "text", "text": "You are a coding agent. Use the tools."}],
        "thinking": {"type": "adaptive"},
    }
    history: list[Any] = [{"role": "user", "content": "List the files in this folder."}]
    counting = {key: value for key, value in fields.items() if key != "max_tokens"}
    counted = client.messages.count_tokens(messages=history, **counting)
    with client.messages.stream(messages=history, **fields) as stream:
        first = stream.get_final_message()
    assert prompt_of(first.usage) == counted.input_tokens
    calls = [block for block in first.content if block.type == "tool_use"]
    assert calls, first
    assert first.stop_reason == "tool_use"
    assert calls[0].input["command"]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "stats.py"} for call in calls
    ]
    history += [
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": results},
    ]
    second = client.messages.create(messages=history, **fields)
    assert second.model_extra["capserve"]["prefix_action"] == "message_append"
    known = prompt_of(first.usage) + first.usage.output_tokens
    assert second.usage.cache_read_input_tokens >= known - 1


def test_a_conversation_goes_on_in_the_other_dialect(url, client):
    ask: Any = {"role": "user", "content": "What is the capital of France?"}
    chat = openai.OpenAI(base_url=f"{url}/v1", api_key="any")
    first = chat.chat.completions.create(
        model=MODEL, messages=[ask], max_tokens=200, extra_body={"enable_thinking": False}
    )
    said: Any = {"role": "assistant", "content": first.choices[0].message.content}
    more: Any = {"role": "user", "content": "And what is 7 times 8?"}
    second = client.messages.create(model=MODEL, max_tokens=200, messages=[ask, said, more])
    assert second.usage.cache_read_input_tokens >= first.usage.total_tokens - 1
    assert second.content[0].type == "text"
