"""What a request demands of its reply's form is kept, whatever the model would rather say.

The fake engine says what it is told where its grammar lets it, and else anything that is allowed:
so each reply here wants to break its form, and must not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from grammar_asks import CHATTER, FORM, PLACE, asked, call, calls_of, choices, thought, tools
from harness import NAME, Replies, Served, end_tokens, fake_engine, serving, tokenizer
from jsonschema import Draft202012Validator


@pytest.fixture(scope="module")
def replies() -> Replies:
    return Replies()


@pytest.fixture(scope="module")
def served(replies: Replies) -> Iterator[Served]:
    with serving(fake_engine(replies)) as running:
        yield running


# -- calls ---------------------------------------------------------------------------------------

EVERY_WAY = pytest.mark.parametrize(
    "way",
    [
        {"flashrt_K": 0},
        {"flashrt_K": 4},
        {"flashrt_K": 4, "stream": True},
        {"n": 2, "temperature": 1.0},
        {"n": 2, "temperature": 1.0, "stream": True},
        {"enable_thinking": False},
    ],
    ids=lambda way: " ".join(f"{key}={value}" for key, value in way.items()),
)


@EVERY_WAY
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "paint"}),
        ({"type": "function", "function": {"name": "paint"}}, {"paint"}),
    ],
    ids=["required", "named"],
)
@pytest.mark.parametrize("strict", [None, True])
def test_a_demanded_call_is_made(
    served: Served, way: dict[str, Any], choice: Any, names: set[str], strict: bool | None
) -> None:
    body = asked(tools=tools(strict), tool_choice=choice, parallel_tool_calls=False, **way)
    found = choices(served, body, bool(way.get("stream")))
    assert len(found) == way.get("n", 1)
    for one in found:
        [(name, _)] = calls_of(one)
        assert name in names
        assert not one["message"]["content"]
        assert one["finish_reason"] == "tool_calls"


def test_drafts_do_not_change_what_is_said_under_a_grammar(served: Served) -> None:
    said = [
        choices(
            served,
            asked(tools=tools(), tool_choice="required", temperature=1.0, flashrt_K=k),
            False,
        )[0]
        for k in (0, 1, 4)
    ]
    assert calls_of(said[0])
    assert calls_of(said[0]) == calls_of(said[1]) == calls_of(said[2])


def test_a_demanded_call_that_the_model_makes_itself_is_as_it_made_it(
    served: Served, replies: Replies
) -> None:
    replies.say["plan both"] = thought(
        call("weather", city="Rome", days="3") + "\n" + call("paint", name="blue")
    )
    body = asked("plan both", tools=tools(), tool_choice="required")
    [choice] = choices(served, body, False)
    assert calls_of(choice) == [
        ("weather", {"city": "Rome", "days": 3}),
        ("paint", {"name": "blue"}),
    ]


def test_without_parallel_calls_the_reply_ends_with_its_first_and_can_be_continued(
    served: Served, replies: Replies
) -> None:
    replies.say["one or two"] = thought(
        call("weather", city="Rome", days="3") + "\n" + call("paint", name="blue")
    )
    body = asked("one or two", tools=tools(), parallel_tool_calls=False)
    first = served.post(body).json()
    [choice] = first["choices"]
    assert calls_of(choice) == [("weather", {"city": "Rome", "days": 3})]
    assert choice["finish_reason"] == "tool_calls"
    body["messages"] += [choice["message"], {"role": "tool", "content": "sunny"}]
    second = served.post(body).json()
    assert second["capserve"]["prefix_action"] == "message_append"


def test_a_strict_tool_gets_arguments_of_its_schema_only(served: Served, replies: Replies) -> None:
    replies.say["odd"] = thought(call("weather", city="Atlantis", days="many", more="x"))
    for strict, valid in ((True, True), (None, False)):
        [choice] = choices(served, asked("odd", tools=tools(strict)), False)
        [made] = choice["message"]["tool_calls"]
        assert made["function"]["name"] == "weather"
        arguments = json.loads(made["function"]["arguments"])
        assert Draft202012Validator(PLACE).is_valid(arguments) == valid
    # It demands no call.
    [choice] = choices(served, asked("hello there", tools=tools(True)), False)
    assert choice["message"]["content"] == "I heard: hello there"


def test_no_choice_of_tools_keeps_the_prompt_and_makes_no_call(
    served: Served, replies: Replies
) -> None:
    replies.say["call anyway"] = thought(call("paint", name="blue"))
    prompts = []
    for choice in ("auto", "none"):
        body = asked("call anyway", tools=tools(True), tool_choice=choice, return_token_ids=True)
        reply = served.post(body).json()
        prompts.append(reply["prompt_token_ids"])
        message = reply["choices"][0]["message"]
        assert bool(message.get("tool_calls")) == (choice == "auto")
        assert ("<tool_call>" in (message["content"] or "")) == (choice == "none")
    assert prompts[0] == prompts[1]


# -- JSON ----------------------------------------------------------------------------------------


@EVERY_WAY
@pytest.mark.parametrize(
    "offers", [{}, {"tools": tools(), "tool_choice": "none"}], ids=["", "tools"]
)
def test_the_content_is_what_its_schema_says(
    served: Served, replies: Replies, way: dict[str, Any], offers: dict[str, Any]
) -> None:
    thinks = way.get("enable_thinking") is not False
    replies.say["where to"] = thought(CHATTER) if thinks else CHATTER
    body = asked("where to", response_format=FORM, **offers, **way)
    found = choices(served, body, bool(way.get("stream")))
    assert len(found) == way.get("n", 1)
    for one in found:
        Draft202012Validator(PLACE).validate(json.loads(one["message"]["content"]))
        assert one["finish_reason"] == "stop"


def test_json_is_an_object_of_any_kind(served: Served, replies: Replies) -> None:
    replies.say["an object"] = thought('{"a": [1, {"b": null}], "<tool_call>": "</think>"}')
    body = asked("an object", response_format={"type": "json_object"})
    [choice] = choices(served, body, False)
    assert json.loads(choice["message"]["content"]) == {
        "a": [1, {"b": None}],
        "<tool_call>": "</think>",
    }
    replies.say["no object"] = thought("[1, 2]")
    body = asked("no object", response_format={"type": "json_object"})
    [choice] = choices(served, body, False)
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    else:
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"].startswith("{")


def test_with_tools_the_reply_is_json_or_calls(served: Served, replies: Replies) -> None:
    replies.say["rather call"] = thought(call("paint", name="red"))
    replies.say["rather talk"] = thought(CHATTER)
    called, told = (
        choices(served, asked(word, tools=tools(True), response_format=FORM), False)[0]
        for word in ("rather call", "rather talk")
    )
    assert calls_of(called) == [("paint", {"name": "red"})]
    if not calls_of(told):
        Draft202012Validator(PLACE).validate(json.loads(told["message"]["content"]))


def test_json_that_the_limit_cuts_says_so(served: Served) -> None:
    [choice] = choices(
        served, asked(response_format=FORM, enable_thinking=False, max_tokens=3), False
    )
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("{")


# -- ignore_eos ----------------------------------------------------------------------------------


def test_without_end_tokens_a_reply_that_needs_one_still_ends(served: Served) -> None:
    body = asked(response_format=FORM, enable_thinking=False, ignore_eos=True)
    [choice] = choices(served, body, False)
    assert choice["finish_reason"] == "stop"
    Draft202012Validator(PLACE).validate(json.loads(choice["message"]["content"]))


def test_without_end_tokens_none_of_them_can_be_chosen_whatever_the_bias(served: Served) -> None:
    bias = {str(end_tokens()[0]): 100, str(tokenizer().encode("a")[0]): 5}
    served.post(asked(ignore_eos=True, logit_bias=bias, max_tokens=2))
    sampling = served.worker.items[-1].request.sampling
    told = dict(sampling.logit_bias)
    assert all(told[token] == float("-inf") for token in end_tokens())
    assert told[int(tokenizer().encode("a")[0])] == 5
    assert sampling.end_tokens == end_tokens()
    body = {"model": NAME, "prompt": "a", "max_tokens": 2, "ignore_eos": True}
    assert served.http.post("/v1/completions", json=body).status_code == 200
    told = dict(served.worker.items[-1].request.sampling.logit_bias)
    assert all(told[token] == float("-inf") for token in end_tokens())
