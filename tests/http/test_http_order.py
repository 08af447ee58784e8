"""What a reply says behind a call stays behind it, in every dialect that has an order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from grammar_asks import SCHEMAS, asked, call, thought, tools
from harness import NAME, Replies, Served, fake_engine, serving, user

PAINT, ROME = call("paint", name="blue"), call("weather", city="Rome", days="3")
SAID = f"First.\n\n{PAINT}\n\nThen this.\n\n{ROME}\n\nAnd that."
KINDS = ["text", "tool_use", "text", "tool_use", "text"]
TEXTS = ["First.", "\n\n\n\nThen this.", "\n\n\n\nAnd that."]


@pytest.fixture(scope="module")
def replies() -> Replies:
    made = Replies()
    made.say["in order"] = thought(SAID)
    made.say["no thought"] = SAID
    return made


@pytest.fixture(scope="module")
def served(replies: Replies) -> Iterator[Served]:
    with serving(fake_engine(replies)) as running:
        yield running


def message_of(served: Served, stream: bool, messages: list[Any], drafts: int) -> Any:
    body = {
        "model": NAME,
        "max_tokens": 900,
        "messages": messages,
        "tools": [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()],
        "stream": stream,
        "flashrt_K": drafts,
    }
    reply = served.http.post("/v1/messages", json=body)
    if not stream:
        return reply.json()
    blocks: list[Any] = []
    for line in reply.text.splitlines():
        event = json.loads(line[6:]) if line.startswith("data: ") else {}
        match event.get("type"):
            case "content_block_start":
                blocks.append(event["content_block"])
            case "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "text_delta":
                    blocks[-1]["text"] += delta["text"]
                else:
                    blocks[-1]["input"] = json.loads(delta["partial_json"])
    return {"content": blocks}


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_blocks_of_messages_stand_in_the_order_in_which_they_were_said(
    served: Served, stream: bool, drafts: int
) -> None:
    content = message_of(served, stream, [user("no thought")], drafts)["content"]
    assert [block["type"] for block in content] == KINDS
    assert [block["text"] for block in content[::2]] == TEXTS
    assert [block["name"] for block in content[1::2]] == ["paint", "weather"]


def test_a_message_told_in_that_order_goes_on_from_its_own_state(served: Served) -> None:
    content = message_of(served, False, [user("no thought")], 3)["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "ok"}
        for block in content[1::2]
    ]
    history = [
        user("no thought"),
        {"role": "assistant", "content": content},
        {"role": "user", "content": results},
    ]
    again = message_of(served, False, history, 3)
    assert again["capserve"]["prefix_action"] == "message_append"


@pytest.mark.parametrize("stream", [False, True])
def test_items_of_responses_stand_in_the_order_in_which_they_were_said(
    served: Served, stream: bool
) -> None:
    body = {
        "model": NAME,
        "input": f"in order, {stream=}",
        "tools": [{"type": "function", **tool["function"]} for tool in tools()],
        "stream": stream,
    }
    reply = served.http.post("/v1/responses", json=body)
    if stream:
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line[:5] == "data:"]
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]
        output = done
    else:
        output = reply.json()["output"]
    kinds = ["reasoning", "message", "function_call", "message", "function_call", "message"]
    assert [item["type"] for item in output] == kinds
    texts = [item["content"][0]["text"] for item in output if item["type"] == "message"]
    assert texts == TEXTS
    calls = [item for item in output if item["type"] == "function_call"]
    answers = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
        for item in calls
    ]
    history = [{"role": "user", "content": body["input"]}, *output, *answers]
    again = served.http.post("/v1/responses", json={**body, "stream": False, "input": history})
    assert again.json()["capserve"]["prefix_action"] == "message_append"


def test_a_stream_of_chat_sends_words_and_calls_as_they_come(served: Served) -> None:
    _, chunks = served.events(asked("in order", tools=tools()))
    kinds = [key for chunk in chunks for key in chunk["choices"][0]["delta"]]
    order = [kind for i, kind in enumerate(kinds) if kind != kinds[i - 1]]
    assert order == [
        *("role", "content", "reasoning_content"),
        *("content", "tool_calls", "content", "tool_calls", "content"),
    ]
    plain = served.post(asked("in order", tools=tools())).json()["choices"][0]["message"]
    assert plain["content"] == "".join(TEXTS)
