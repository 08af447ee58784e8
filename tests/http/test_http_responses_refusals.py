"""What `/v1/responses` and its neighbours refuse: one clear 4xx, whatever comes in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from harness import Served, end_tokens, fake_engine, serving, tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capserve.testing.fake_engine import FakeEngine, fake_limits

PATH = "/v1/responses"
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(fake_engine()) as running:
        yield running


@pytest.fixture(scope="module")
def short() -> Iterator[Served]:
    """A server that answers anything with two words: prompts of token ids need be no text."""
    reply = [*tokenizer().encode("Well, yes.").tolist(), end_tokens()[0]]
    limits = fake_limits(vocab_size=tokenizer().vocab_size, max_positions=4096)
    with serving(FakeEngine(limits, lambda prompt: reply)) as running:
        yield running


def message(content: Any, role: str = "user") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "missing_required_parameter"),
        ({"input": 5}, "input", "invalid_value"),
        ({"input": {"role": "user"}}, "input", "invalid_value"),
        ({"input": ["words"]}, "input[0]", "invalid_value"),
        ({"input": [{"type": "dream"}]}, "input[0].type", "unsupported_value"),
        ({"input": [{"type": []}]}, "input[0].type", "unsupported_value"),
        ({"input": [{"type": "message"}]}, "input[0].role", "missing_required_parameter"),
        ({"input": [message("a", "nobody")]}, "input[0].role", "invalid_value"),
        ({"input": [message(7)]}, "input[0].content", "invalid_value"),
        (
            {"input": [message([{"type": "input_image", "image_url": "x"}])]},
            "input[0].content[0].type",
            "unsupported_value",
        ),
        (
            {"input": [message([{"type": "input_text", "text": 1}])]},
            "input[0].content[0].text",
            "invalid_value",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c"}]},
            "input[0].name",
            "missing_required_parameter",
        ),
        (
            {"input": [{"type": "function_call_output", "output": "o"}]},
            "input[0].call_id",
            "missing_required_parameter",
        ),
        ({"input": "a", "tools": ["look"]}, "tools[0]", "invalid_value"),
        ({"input": "a", "tools": [{"type": "functoin"}]}, "tools[0].type", "invalid_value"),
        (
            {"input": "a", "tools": [{"type": "function"}]},
            "tools[0].name",
            "missing_required_parameter",
        ),
        (
            {"input": "a", "tools": [{"type": "namespace", "name": "n", "tools": [{}]}]},
            "tools[0].tools[0].type",
            "invalid_value",
        ),
        (
            {"input": "a", "tools": [LOOK], "tool_choice": {"type": "web_search"}},
            "tool_choice.type",
            "unsupported_value",
        ),
        ({"input": "a", "text": {"format": {"type": "poem"}}}, "text.format.type", "invalid_value"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"input": "a", "temperature": "hot"}, "temperature", "invalid_value"),
        ({"input": "a", "store": 1}, "store", "invalid_value"),
        ({"input": "a", "reasoning": {"effort": 3}}, "reasoning.effort", "invalid_value"),
        ({"input": "a", "truncation": "some"}, "truncation", "invalid_value"),
        ({"input": "a", "background": True}, "background", "unsupported_value"),
        ({"input": "a", "conversation": "conv_1"}, "conversation", "unsupported_value"),
        ({"input": "a", "prompt": {"id": "p"}}, "prompt", "unsupported_value"),
        (
            {"input": "a", "include": ["message.output_text.logprobs"]},
            "include[0]",
            "unsupported_value",
        ),
        ({"input": "word " * 9000}, "input", "context_length_exceeded"),
    ],
)
def test_a_wrong_field_is_named(
    served: Served, body: dict[str, Any], param: str, code: str
) -> None:
    response = served.http.post(PATH, json=body)
    assert response.status_code == 400, response.text[:500]
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error
    assert served.http.post(PATH, json={"input": "still here?"}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"input": "a", "previous_response_id": "resp_none"},
        {"input": [{"type": "item_reference", "id": "msg_none"}]},
        {"input": [{"type": None, "id": "msg_none"}]},
        {"input": "a", "model": "other"},
    ],
)
def test_what_does_not_exist_is_a_404(served: Served, body: dict[str, Any]) -> None:
    assert served.http.post(PATH, json=body).status_code == 404


def test_a_broken_call_in_the_history_is_taken_as_it_is(served: Served) -> None:
    items = [
        message("a"),
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"path": '},
        {"type": "function_call_output", "call_id": "c", "output": "bad JSON"},
    ]
    assert served.http.post(PATH, json={"input": items, "tools": [LOOK]}).status_code == 200


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
TYPES = st.sampled_from(
    [
        *("message", "reasoning", "function_call", "function_call_output", "item_reference"),
        *("custom_tool_call", "function", "custom", "namespace"),
        *("input_text", "json_schema", "text"),
    ]
)
KEYS = st.sampled_from(
    [
        *("type", "role", "content", "text", "name", "call_id", "arguments", "output", "id"),
        *("summary", "tools", "parameters", "namespace", "input", "format", "schema", "effort"),
    ]
)


def plausible(depth: int) -> st.SearchStrategy[Any]:
    """Objects with the protocol's own keys, and anything under them."""
    if not depth:
        return JSON_VALUES | TYPES | st.sampled_from(["user", "assistant", "system"])
    below = plausible(depth - 1)
    return below | st.lists(below, max_size=3) | st.dictionaries(KEYS, below, max_size=5)


BODIES = st.fixed_dictionaries(
    {"input": plausible(3)},
    optional={
        "tools": plausible(3),
        "tool_choice": plausible(2),
        "text": plausible(2),
        "reasoning": plausible(1),
        "instructions": plausible(0),
        "previous_response_id": plausible(0),
        "include": plausible(1),
        "metadata": plausible(1),
        "store": plausible(0),
        "stream": st.booleans() | plausible(0),
        "max_output_tokens": st.integers(1, 9) | plausible(0),
    },
)
PROMPTS = st.fixed_dictionaries(
    {"prompt": plausible(2) | st.lists(st.integers(-2, 9000), max_size=4)},
    optional={
        "messages": plausible(2),
        "tokens": st.lists(st.integers(-2, 9000), max_size=4) | plausible(1),
        "echo": plausible(0),
        "logprobs": st.integers(-1, 3) | plausible(0),
        "n": st.integers(-1, 3) | plausible(0),
        "stop": plausible(1),
        "suffix": plausible(0),
        "stream": st.booleans(),
        "max_tokens": st.integers(-1, 4),
    },
)


@pytest.mark.parametrize(
    ("path", "bodies"),
    [
        (PATH, BODIES),
        ("/v1/completions", PROMPTS),
        ("/tokenize", PROMPTS),
        ("/detokenize", PROMPTS),
    ],
)
def test_no_json_makes_the_server_fail(
    short: Served, path: str, bodies: st.SearchStrategy[dict[str, Any]]
) -> None:
    @settings(
        max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(body=bodies)
    def send(body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        response = short.http.post(path, content=content, headers=headers)
        assert response.status_code < 500, (body, response.text)
        if response.status_code >= 400:
            error = response.json()["error"]
            assert error["message"]
            assert error["type"]
        else:
            assert "response.failed" not in response.text

    send()
    assert short.http.post(PATH, json={"input": "still here?"}).status_code == 200
