"""Demands in the words of the other protocols are the same demands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from grammar_asks import CHATTER, PLACE, SCHEMAS, call, thought, tools
from harness import NAME, Replies, Served, fake_engine, serving, user
from jsonschema import Draft202012Validator


@pytest.fixture(scope="module")
def replies() -> Replies:
    return Replies()


@pytest.fixture(scope="module")
def served(replies: Replies) -> Iterator[Served]:
    with serving(fake_engine(replies)) as running:
        yield running


FLAT = [{"type": "function", **tool["function"]} for tool in tools(True)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "paint"}), ({"type": "function", "name": "paint"}, {"paint"})],
    ids=["required", "named"],
)
def test_responses_make_the_demanded_call(
    served: Served, stream: bool, choice: Any, names: set[str]
) -> None:
    fields: dict[str, Any] = {
        "model": NAME,
        "input": "hello",
        "tools": FLAT,
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    if stream:
        *_, last = served.openai().responses.create(**fields, stream=True)
        assert last.type == "response.completed"
        reply = last.response
    else:
        reply = served.openai().responses.create(**fields)
    [made] = [item for item in reply.output if item.type == "function_call"]
    assert made.name in names
    Draft202012Validator(SCHEMAS[made.name]).validate(json.loads(made.arguments))


def test_a_free_text_tool_of_responses_can_be_demanded(served: Served, replies: Replies) -> None:
    replies.say["patch it"] = thought(call("patch", input="a line"))
    reply = served.openai().responses.create(
        model=NAME,
        input="patch it",
        tools=[{"type": "custom", "name": "patch"}],
        tool_choice={"type": "custom", "name": "patch"},
        parallel_tool_calls=False,
    )
    [made] = [item for item in reply.output if item.type == "custom_tool_call"]
    assert (made.name, made.input) == ("patch", "a line")


def test_a_text_format_of_responses_is_kept_and_refused_by_its_own_name(
    served: Served, replies: Replies
) -> None:
    replies.say["where to"] = thought(CHATTER)
    form = {"type": "json_schema", "name": "p", "schema": PLACE, "strict": True}
    body = {"model": NAME, "input": "where to", "text": {"format": form}}
    reply = served.http.post("/v1/responses", json=body).json()
    [message] = [item for item in reply["output"] if item["type"] == "message"]
    Draft202012Validator(PLACE).validate(json.loads(message["content"][0]["text"]))
    assert reply["text"]["format"] == form
    form["schema"] = {"type": "string", "minLength": 3, "maxLength": 2}
    refused = served.http.post("/v1/responses", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "text.format"
    assert refused.json()["error"]["message"].startswith("text.format: ")
    del form["schema"]
    refused = served.http.post("/v1/responses", json=body)
    assert refused.json()["error"]["param"] == "text.format.schema"


def test_responses_name_a_tool_by_its_own_place(served: Served) -> None:
    bad = {
        "type": "function",
        "name": "f",
        "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"not": {}}}},
    }
    for offered, place in (
        ([{"type": "web_search"}, FLAT[0], bad], "tools[2]"),
        ([{"type": "namespace", "name": "n", "tools": [FLAT[1], bad]}], "tools[0].tools[1]"),
    ):
        body = {"model": NAME, "input": "hello", "tools": offered}
        refused = served.http.post("/v1/responses", json=body)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == place
        assert refused.json()["error"]["message"].startswith(f"{place}: ")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "any"}, {"weather", "paint"}), ({"type": "tool", "name": "paint"}, {"paint"})],
    ids=["any", "tool"],
)
def test_messages_make_the_demanded_call(
    served: Served, stream: bool, choice: dict[str, Any], names: set[str]
) -> None:
    client = anthropic.Anthropic(base_url=served.url, api_key="any", max_retries=0)
    fields: Any = {
        "model": NAME,
        "max_tokens": 900,
        "messages": [user("hello")],
        "tools": [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()],
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
    }
    if stream:
        with client.messages.stream(**fields) as events:
            reply = events.get_final_message()
    else:
        reply = client.messages.create(**fields)
    [block] = reply.content
    assert block.type == "tool_use"
    assert block.name in names
    Draft202012Validator(SCHEMAS[block.name]).validate(block.input)
    assert reply.stop_reason == "tool_use"


@pytest.mark.parametrize("where", ["output_config.format", "output_format"])
def test_an_output_format_of_messages_is_kept_and_refused_by_its_own_name(
    served: Served, replies: Replies, where: str
) -> None:
    replies.say["talk to me"] = CHATTER
    good, bad = ({"type": "json_schema", "schema": schema} for schema in (PLACE, {"not": {}}))
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for form in (good, bad):
            fields = {"output_format": form}
            if where == "output_config.format":
                fields = {"output_config": {"format": form}}
            body = {"model": NAME, "max_tokens": 900, "messages": [user("talk to me")], **fields}
            reply = served.http.post(path, json=body)
            if form is bad:
                assert reply.status_code == 400
                assert reply.json()["error"]["message"].startswith(f"{where}: ")
            elif path == "/v1/messages":
                [block] = reply.json()["content"]
                Draft202012Validator(PLACE).validate(json.loads(block["text"]))
