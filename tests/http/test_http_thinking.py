"""A thinking budget over the wire: in every dialect, and whatever befalls the turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from grammar_asks import FORM, PLACE, asked, call, calls_of, choices, tools
from harness import NAME, Replies, Served, fake_engine, serving, spelled, tokenizer, user
from jsonschema import Draft202012Validator

MARK_TOKENS = 2
"""Of `\\n</think>`: what a budget holds back."""
THOUGHT = "I think about this, and once more about that. " * 12
BROODS = "brood about it"


@pytest.fixture(scope="module")
def replies() -> Replies:
    made = Replies()
    made.say[BROODS] = f"{THOUGHT}\n</think>\n\nNow I know."
    return made


@pytest.fixture(scope="module")
def served(replies: Replies) -> Iterator[Served]:
    with serving(fake_engine(replies)) as running:
        yield running


def thought_tokens(usage: dict[str, Any]) -> int:
    found: int = usage["completion_tokens_details"]["reasoning_tokens"]
    return found


WAYS: list[dict[str, Any]] = [
    {"thinking_budget": 9},
    {"thinking_budget": 9, "flashrt_K": 0},
    {"thinking_budget": 9, "flashrt_K": 4},
    {"chat_template_kwargs": {"thinking_budget": 9}},
    {"chat_template_kwargs": {"thinking_budget": 9}, "thinking_budget": 70},
    {"thinking_budget": 9, "temperature": 1.0},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: json.dumps(way))
def test_a_thought_ends_at_its_budget_and_the_answer_follows(
    served: Served, way: dict[str, Any]
) -> None:
    reply = served.post(asked(BROODS, max_tokens=60, return_token_ids=True, **way)).json()
    message = reply["choices"][0]["message"]
    assert thought_tokens(reply["usage"]) == 9
    assert THOUGHT.startswith(message["reasoning_content"])
    assert 10 < len(message["reasoning_content"]) < len(THOUGHT) / 4
    assert message["content"]
    free = served.post(asked(BROODS, max_tokens=60, return_token_ids=True)).json()
    assert thought_tokens(free["usage"]) > 9
    # A budget is no part of the prompt: with and without one there is the same state to go on from.
    assert reply["prompt_token_ids"] == free["prompt_token_ids"]
    said = [each["choices"][0]["token_ids"] for each in (reply, free)]
    assert said[0][: 9 - MARK_TOKENS] == said[1][: 9 - MARK_TOKENS]


def test_drafts_choices_and_streams_change_nothing(served: Served) -> None:
    body = asked(BROODS, max_tokens=60, thinking_budget=9, temperature=1.0)
    plain = [
        choice["message"]["content"]
        for drafts in (0, 4)
        for choice in served.post({**body, "n": 2, "flashrt_K": drafts}).json()["choices"]
    ]
    assert plain[:2] == plain[2:]
    told = choices(served, {**body, "n": 2}, True)
    assert [choice["message"]["content"] for choice in told] == plain[:2]


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_budget_below_the_mark_leaves_the_mark(served: Served, most: int) -> None:
    reply = served.post(asked(BROODS, max_tokens=40, thinking_budget=most)).json()
    assert "reasoning_content" not in reply["choices"][0]["message"]
    assert thought_tokens(reply["usage"]) == MARK_TOKENS


@pytest.mark.parametrize("way", [{"thinking_budget": -1}, {"thinking_budget": None}, {}])
def test_no_budget_is_no_limit(served: Served, way: dict[str, Any]) -> None:
    reply = served.post(asked(BROODS, max_tokens=400, **way)).json()
    assert reply["choices"][0]["message"]["content"] == "Now I know."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking_budget": -2}, "thinking_budget"),
        ({"thinking_budget": 1.5}, "thinking_budget"),
        ({"thinking_budget": True}, "thinking_budget"),
        (
            {"chat_template_kwargs": {"thinking_budget": "9"}},
            "chat_template_kwargs.thinking_budget",
        ),
        ({"chat_template_kwargs": {"thinking_budget": -5}}, "chat_template_kwargs.thinking_budget"),
        (
            {"chat_template_kwargs": {"thinking_budget": True}},
            "chat_template_kwargs.thinking_budget",
        ),
    ],
    ids=lambda value: json.dumps(value),
)
def test_a_budget_that_is_none_is_refused_by_name(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    refused = served.post(asked(**fields))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


@pytest.mark.parametrize("resent", [True, False])
def test_the_next_turn_goes_on_from_a_thought_that_was_cut(
    served: Served, replies: Replies, resent: bool
) -> None:
    # What it would say from the tenth token on, the thought that the budget cuts or not.
    begun = spelled(tokenizer().encode(THOUGHT)[:10])
    replies.say["think, then paint"] = begun + call("paint", name="blue")
    body = asked(f"think, then paint, {resent=}", tools=tools(), thinking_budget=9)
    first = served.post(body).json()
    [choice] = first["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert thought_tokens(first["usage"]) == 9
    if not resent:
        del choice["message"]["reasoning_content"]
    body["messages"] += [choice["message"], {"role": "tool", "content": "done"}]
    second = served.post({**body, "max_tokens": 8}).json()
    assert second["capserve"]["prefix_action"] == "message_append"
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["total_tokens"] - 1


def test_a_turn_that_was_parked_keeps_its_budget(replies: Replies) -> None:
    engine = fake_engine(replies)
    body = asked(BROODS, max_tokens=80, thinking_budget=12, flashrt_K=1, return_token_ids=True)
    with serving(fake_engine(replies)) as alone:
        wanted = alone.post(body).json()
    for at in (2, 5, 9):
        engine = fake_engine(replies)
        with serving(engine, min_slice_ms=0.0) as served:
            gate = engine.hold("step", at)
            with served.raw(body) as sock:
                gate.wait_arrived()
                short = {**asked("hello", max_tokens=3)}
                with served.raw(short):
                    served.worker.wait_taken(2)
                    gate.open()
                    served.worker.wait_idle()
                sock.settimeout(20)
                data = b""
                while b'"capserve"' not in data or not data.rstrip().endswith(b"}"):
                    piece = sock.recv(65536)
                    assert piece
                    data += piece
            reply = json.loads(data.split(b"\r\n\r\n", 1)[1])
        assert reply["capserve"]["parks"] == 1, at
        assert reply["choices"][0]["token_ids"] == wanted["choices"][0]["token_ids"]
        assert thought_tokens(reply["usage"]) == 12


def test_a_form_holds_behind_a_thought_that_was_cut(served: Served) -> None:
    [choice] = choices(served, asked(BROODS, response_format=FORM, thinking_budget=7), False)
    Draft202012Validator(PLACE).validate(json.loads(choice["message"]["content"]))
    body = asked(
        BROODS,
        tools=tools(),
        tool_choice="required",
        parallel_tool_calls=False,
        thinking_budget=7,
    )
    reply = served.post(body).json()
    assert len(calls_of(reply["choices"][0])) == 1
    assert thought_tokens(reply["usage"]) == 7


@pytest.mark.parametrize("stream", [False, True])
def test_messages_keep_to_budget_tokens(served: Served, stream: bool) -> None:
    body = {
        "model": NAME,
        "max_tokens": 60,
        "messages": [user(BROODS)],
        "thinking": {"type": "enabled", "budget_tokens": 9},
        "stream": stream,
    }
    reply = served.http.post("/v1/messages", json=body)
    if stream:
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line[:5] == "data:"]
        usage = next(event["usage"] for event in events if event["type"] == "message_delta")
        kinds = [
            event["content_block"]["type"]
            for event in events
            if event["type"] == "content_block_start"
        ]
    else:
        usage = reply.json()["usage"]
        kinds = [block["type"] for block in reply.json()["content"]]
    assert usage["output_tokens_details"]["thinking_tokens"] == 9
    assert kinds == ["thinking", "text"]
    # Counting is of the prompt, which has no part in it.
    count = served.http.post("/v1/messages/count_tokens", json=body).json()
    del body["thinking"]["budget_tokens"]  # type: ignore[attr-defined]
    assert served.http.post("/v1/messages/count_tokens", json=body).json() == count


def test_responses_keep_to_a_budget(served: Served) -> None:
    body = {"model": NAME, "input": BROODS, "max_output_tokens": 60, "thinking_budget": 9}
    reply = served.http.post("/v1/responses", json=body).json()
    assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] == 9
    assert [item["type"] for item in reply["output"]] == ["reasoning", "message"]


def test_an_effort_changes_no_prompt_where_the_template_has_no_such_word(served: Served) -> None:
    prompts = {
        json.dumps(
            served.post(
                asked("hello", max_tokens=1, return_token_ids=True, reasoning_effort=effort)
            ).json()["prompt_token_ids"]
        )
        for effort in (None, "low", "high", "anything")
    }
    assert len(prompts) == 1
