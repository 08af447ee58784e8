"""What a request of the Anthropic dialect is as a chat request."""

from __future__ import annotations

from typing import Any

import pytest

from capserve.api.messages_schema import CountRequest, MessagesRequest
from capserve.api.messages_translate import chat_body
from capserve.api.validation import validated
from capserve.errors import InvalidRequestError

TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}
MARK = {"cache_control": {"type": "ephemeral"}}


def translated(**fields: Any) -> dict[str, Any]:
    asked = {"role": "user", "content": "hi"}
    raw = {"model": "m", "max_tokens": 9, "messages": [asked], **fields}
    return chat_body(validated(MessagesRequest, raw), raw)


def messages(*turns: Any, **fields: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = translated(messages=list(turns), **fields)["messages"]
    return found


def turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        (
            {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            {
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "parallel_tool_calls": False,
            },
        ),
    ],
)
def test_a_tool_choice_has_its_counterpart(choice, fields):
    body = translated(tools=[TOOL], tool_choice=choice)
    assert {key: body[key] for key in ("tool_choice", "parallel_tool_calls") if key in body} == (
        fields
    )


def test_a_tool_is_a_function_with_its_keys_in_the_usual_order():
    plain, strict = translated(tools=[TOOL, {**TOOL, "strict": True, **MARK}])["tools"]
    assert list(plain["function"]) == ["name", "description", "parameters"]
    assert list(plain["function"]["parameters"]) == ["type", "properties"]
    assert strict["function"]["strict"] is True
    assert "cache_control" not in strict


@pytest.mark.parametrize("where", ["output_config", "output_format"])
def test_an_output_format_is_a_response_format(where):
    form = {"type": "json_schema", "schema": {"type": "object"}}
    body = translated(**{where: form if where == "output_format" else {"format": form}})
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert body["response_format"]["type"] == "json_schema"


def test_thinking_is_off_unless_asked_for_and_left_to_the_template_when_adaptive():
    assert translated()["enable_thinking"] is False
    assert translated(thinking={"type": "disabled"})["enable_thinking"] is False
    assert translated(thinking={"type": "enabled", "budget_tokens": 5})["enable_thinking"] is True
    assert "enable_thinking" not in translated(thinking={"type": "adaptive"})


def test_results_and_texts_of_one_turn_keep_their_order():
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {"z": 1, "a": [2]}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text("x"), text("y")]}
    sent = messages(
        turn("assistant", text("one"), call, text("two"), {**call, "id": "b"}),
        turn("user", text("before"), result, {**result, "tool_use_id": "b"}, text("after")),
        turn("user"),
    )
    first, *rest = sent
    assert first["content"] == "onetwo"
    assert [call["id"] for call in first["tool_calls"]] == ["a", "b"]
    assert list(first["tool_calls"][0]["function"]["arguments"]) == ["z", "a"]
    shown = [(message["role"], message["content"]) for message in rest]
    assert shown == [
        ("user", "before"),
        ("tool", "xy"),
        ("tool", "xy"),
        ("user", "after"),
        ("user", ""),
    ]


def test_a_result_may_belong_to_any_earlier_call_and_not_to_a_later_one():
    call = turn("assistant", {"type": "tool_use", "id": "a", "name": "f"})
    result = turn("user", {"type": "tool_result", "tool_use_id": "a"})
    assert [m["role"] for m in messages(call, turn("user", text("wait")), result)][-1] == "tool"
    with pytest.raises(InvalidRequestError, match="'a'") as refusal:
        messages(result, call)
    assert refusal.value.param == "messages[0].content[0].tool_use_id"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("no such file", "Error: no such file"),
        ("", "Error: "),
        ("Error: no such file", "Error: no such file"),
        ("<tool_use_error>no such file</tool_use_error>", None),
    ],
)
def test_a_failed_result_says_so_once(words, shown):
    call = turn("assistant", {"type": "tool_use", "id": "a", "name": "f", "input": {}})
    result = {"type": "tool_result", "tool_use_id": "a", "content": words, "is_error": True}
    assert messages(call, turn("user", result))[-1]["content"] == (shown or words)


def test_a_mark_stands_at_the_end_of_its_message():
    sent = messages(
        turn("user", text("a", **MARK), text("b")),
        turn("assistant", text("c"), {"type": "tool_use", "id": "x", "name": "f", **MARK}),
        turn(
            "user",
            {"type": "tool_result", "tool_use_id": "x", "content": [text("d", **MARK)]},
            text("e"),
        ),
        system=[text("s", **MARK)],
        cache_control={"type": "ephemeral"},
    )
    assert ["cache_control" in message for message in sent] == [True] * 5
    assert sent[0]["role"] == "system"
    assert "cache_control" not in translated()["messages"][-1]


def test_thinking_blocks_are_the_reasoning_and_sealed_ones_say_nothing():
    (said,) = messages(
        turn(
            "assistant",
            {"type": "thinking", "thinking": "one ", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "thinking", "thinking": "two"},
            text("so"),
        )
    )
    assert said == {"role": "assistant", "content": "so", "reasoning_content": "one two"}


def test_fields_that_chat_does_not_have_here_are_not_handed_on():
    raw = {"model": "m", "messages": [{"role": "user", "content": "x"}], "n": 5, "seed": 3}
    assert chat_body(validated(CountRequest, raw), raw) == {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "seed": 3,
        "enable_thinking": False,
    }
