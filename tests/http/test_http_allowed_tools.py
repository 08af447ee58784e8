"""`allowed_tools`: the prompt has every tool, and the reply calls none but those that are named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from grammar_asks import asked, call, calls_of, choices, thought, tools
from harness import NAME, Replies, Served, fake_engine, serving

BOTH = call("weather", city="Rome", days="3") + "\n" + call("paint", name="blue")


@pytest.fixture(scope="module")
def replies() -> Replies:
    made = Replies()
    made.say["plan both"] = thought(BOTH)
    made.say["in thought"] = f"I do {BOTH}"
    made.say["only talk"] = thought("Just words.")
    return made


@pytest.fixture(scope="module")
def served(replies: Replies) -> Iterator[Served]:
    with serving(fake_engine(replies)) as running:
        yield running


def allowing(*names: str, mode: str = "auto") -> dict[str, Any]:
    named = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("word", ["plan both", "in thought"])
def test_no_tool_is_called_that_is_not_allowed(
    served: Served, stream: bool, strict: bool | None, word: str
) -> None:
    body = asked(word, tools=tools(strict), tool_choice=allowing("paint"), max_tokens=200)
    [choice] = choices(served, body, stream)
    # What it wanted to be the other call became this one, or text without any call.
    made = choice["message"].get("tool_calls") or []
    assert {one["function"]["name"] for one in made} <= {"paint"}
    assert "<function=weather" not in (choice["message"]["content"] or "")


def test_no_call_is_demanded_in_mode_auto(served: Served) -> None:
    body = asked("only talk", tools=tools(), tool_choice=allowing("paint"))
    [choice] = choices(served, body, False)
    assert choice["message"]["content"] == "Just words."


@pytest.mark.parametrize("stream", [False, True])
def test_one_of_the_allowed_is_called_in_mode_required(served: Served, stream: bool) -> None:
    body = asked(
        "only talk",
        tools=tools(),
        tool_choice=allowing("paint", mode="required"),
        parallel_tool_calls=False,
    )
    [choice] = choices(served, body, stream)
    [(name, _)] = calls_of(choice)
    assert name == "paint"


def test_all_tools_stay_in_the_prompt_so_that_its_state_is_shared(served: Served) -> None:
    found = []
    for choice in ("auto", allowing("weather"), allowing("paint", mode="required")):
        body = asked("only talk", tools=tools(), tool_choice=choice, return_token_ids=True)
        found.append(served.post(body).json())
    assert found[0]["prompt_token_ids"] == found[1]["prompt_token_ids"]
    assert found[0]["prompt_token_ids"] == found[2]["prompt_token_ids"]
    for reply in found[1:]:
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= reply["usage"]["prompt_tokens"] - 16


def test_all_allowed_is_no_limit(served: Served) -> None:
    body = asked("plan both", tools=tools(), tool_choice=allowing("weather", "paint"))
    [choice] = choices(served, body, False)
    assert [name for name, _ in calls_of(choice)] == ["weather", "paint"]
    assert served.worker.items[-1].request.grammar is None


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (allowing("nobody"), "tool_choice.allowed_tools.tools[0].function.name"),
        (allowing("paint", "nobody"), "tool_choice.allowed_tools.tools[1].function.name"),
        (allowing(), "tool_choice.allowed_tools.tools"),
        (allowing("paint", mode="none"), "tool_choice.allowed_tools.mode"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["paint"]}},
            "tool_choice.allowed_tools.tools[0]",
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "mcp", "server_label": "x"}]},
            },
            "tool_choice.allowed_tools.tools[0].type",
        ),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_choice_that_is_none_is_refused_by_name(
    served: Served, choice: dict[str, Any], param: str
) -> None:
    refused = served.post(asked(tools=tools(), tool_choice=choice))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert served.post(asked(max_tokens=1)).status_code == 200


FLAT = [{"type": "function", **tool["function"]} for tool in tools()]
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
GO = {"type": "function", "name": "go", "parameters": NOTHING}
SPACE = {"type": "namespace", "name": "far", "tools": [GO]}


def responses(served: Served, word: str, **fields: Any) -> Any:
    body = {"model": NAME, "input": word, "tools": [*FLAT, {"type": "web_search"}, SPACE], **fields}
    return served.http.post("/v1/responses", json=body)


def flat(*allowed: dict[str, Any], mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": list(allowed)}


def test_responses_call_none_but_the_allowed(served: Served) -> None:
    paint = {"type": "function", "name": "paint"}
    sent = flat(paint, {"type": "web_search"}, mode="required")
    reply = responses(served, "only talk", tool_choice=sent, parallel_tool_calls=False).json()
    made = [item["name"] for item in reply["output"] if item["type"] == "function_call"]
    assert made == ["paint"]
    assert reply["tool_choice"] == sent
    reply = responses(served, "plan both", tool_choice=flat(paint), max_output_tokens=200).json()
    made = [item["name"] for item in reply["output"] if item["type"] == "function_call"]
    assert set(made) <= {"paint"}
    far = {"type": "function", "name": "go", "namespace": "far"}
    sent = flat(far, mode="required")
    reply = responses(served, "only talk", tool_choice=sent, parallel_tool_calls=False).json()
    [item] = [item for item in reply["output"] if item["type"] == "function_call"]
    assert (item["name"], item["namespace"]) == ("go", "far")


def test_where_nothing_runs_an_allowed_tool_none_is_called(served: Served) -> None:
    reply = responses(served, "plan both", tool_choice=flat({"type": "web_search"})).json()
    assert {item["type"] for item in reply["output"]} == {"reasoning", "message"}
    refused = responses(
        served, "plan both", tool_choice=flat({"type": "web_search"}, mode="required")
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tool_choice.tools"


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (flat({"type": "function", "name": "nobody"}), "tool_choice.tools[0]"),
        (flat({"type": "function"}), "tool_choice.tools[0]"),
        (flat({"type": "never"}), "tool_choice.tools[0]"),
        (flat(), "tool_choice.tools"),
        (flat({"type": "function", "name": "paint"}, mode="any"), "tool_choice.mode"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_responses_refuse_in_their_own_words(
    served: Served, choice: dict[str, Any], param: str
) -> None:
    refused = responses(served, "only talk", tool_choice=choice)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert refused.json()["error"]["message"].startswith(param)
