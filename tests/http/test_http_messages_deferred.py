"""Tools that the model looks up before it sees them, as one agent declares most of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from harness import NAME, Replies, Served, fake_engine, serving, spelled

SEARCH = {
    "name": "ToolSearch",
    "input_schema": {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    },
}
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
    "defer_loading": True,
}
PLACEHOLDER = {"name": "Placeholder", "input_schema": {"type": "object"}, "defer_loading": True}

LOOK_UP = (
    "<tool_call>\n<function=ToolSearch>\n<parameter=query>\nselect:get_weather\n</parameter>\n"
    "</function>\n</tool_call>"
)
CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nGent\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)


@pytest.fixture
def served() -> Iterator[Served]:
    replies = Replies()
    replies.say = {"tool_response": CALL, "weather": LOOK_UP}
    with serving(fake_engine(replies)) as running:
        yield running


def body(messages: list[dict[str, Any]], *tools: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": NAME, "max_tokens": 200, "messages": messages, "tools": list(tools), **more}


def asked() -> list[dict[str, Any]]:
    return [{"role": "user", "content": "How is the weather in Gent?"}]


def looked_up(served: Served, *references: str) -> list[dict[str, Any]]:
    """The conversation up to the result of the search."""
    reply = served.http.post("/v1/messages", json=body(asked(), SEARCH, PLACEHOLDER)).json()
    call = reply["content"][-1]
    assert call["name"] == "ToolSearch"
    found = [{"type": "tool_reference", "tool_name": name} for name in references]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": found}
    answer = {"role": "assistant", "content": reply["content"]}
    return [*asked(), answer, {"role": "user", "content": [result]}]


def test_a_deferred_tool_is_not_shown_before_it_is_found(served: Served) -> None:
    def count(*tools: dict[str, Any]) -> int:
        counted = served.http.post("/v1/messages/count_tokens", json=body(asked(), *tools))
        return int(counted.json()["input_tokens"])

    assert count(SEARCH, PLACEHOLDER, WEATHER) == count(SEARCH)
    assert count(SEARCH, {**WEATHER, "defer_loading": False}) > count(SEARCH)


def test_a_found_tool_is_shown_in_the_result_and_can_be_called(served: Served) -> None:
    request = body(looked_up(served, "get_weather"), SEARCH, WEATHER, PLACEHOLDER)
    reply = served.http.post("/v1/messages", json=request)
    assert reply.status_code == 200, reply.text
    call = reply.json()["content"][-1]
    assert (call["name"], call["input"]) == ("get_weather", {"city": "Gent", "days": 2})
    # The head did not change, so the turn before is gone on from.
    assert reply.json()["capserve"]["prefix_action"] == "message_append"
    head, found = spelled(served.worker.wait_taken(2).request.prompt.tokens).split("Gent?")
    assert "get_weather" not in head
    assert '"description": "The weather of a city."' in found
    assert "defer_loading" not in found


def test_a_found_tool_that_is_gone_does_not_spoil_the_conversation(served: Served) -> None:
    request = body(looked_up(served, "get_weather"), SEARCH)
    assert served.http.post("/v1/messages", json=request).status_code == 200
    prompt = spelled(served.worker.wait_taken(2).request.prompt.tokens)
    assert "get_weather is not available any more." in prompt


def test_only_a_found_tool_can_be_demanded(served: Served) -> None:
    choice = {"type": "tool", "name": "get_weather"}
    early = body(asked(), SEARCH, WEATHER, tool_choice=choice)
    refused = served.http.post("/v1/messages", json=early)
    assert refused.status_code == 400
    assert "tool_choice.name" in refused.json()["error"]["message"]
    found = body(looked_up(served, "get_weather"), SEARCH, WEATHER, tool_choice=choice)
    reply = served.http.post("/v1/messages", json=found)
    assert reply.status_code == 200, reply.text
    assert [block["name"] for block in reply.json()["content"] if block["type"] == "tool_use"]


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "tool_reference"}, "tool_name"),
        ({"type": "tool_reference", "tool_name": 1}, "tool_name"),
    ],
)
def test_a_broken_reference_is_named(served: Served, part: dict[str, Any], field: str) -> None:
    messages = looked_up(served, "get_weather")
    messages[-1]["content"][0]["content"] = [part]
    refused = served.http.post("/v1/messages", json=body(messages, SEARCH, WEATHER))
    assert refused.status_code == 400
    assert f"messages[2].content[0].content[0].{field}" in refused.json()["error"]["message"]


def test_a_refused_tool_is_named_by_its_place_among_all_that_were_sent(served: Served) -> None:
    broken = {
        "name": "broken",
        "strict": True,
        "input_schema": {"type": "object", "properties": {"x": {"not": {"type": "string"}}}},
    }
    tools = (PLACEHOLDER, SEARCH, broken)
    reply = served.http.post("/v1/messages", json=body(asked(), *tools))
    assert reply.status_code == 400
    assert "tools[2]" in reply.json()["error"]["message"]
