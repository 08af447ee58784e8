"""What can't be enforced is a 400 that names it, in bounded time, and never costs the next turn."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from grammar_asks import FORM, PLACE, asked, choices, tools
from harness import NAME, WAIT_S, Replies, Served, fake_engine, serving, user
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from capserve.errors import InvalidRequestError
from capserve.text.grammar import Grammar, GrammarCompiler
from capserve.text.grammar_rules import Constraint

SECONDS = 10.0
"""For a refusal that takes below one second on an idle machine."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(fake_engine()) as running:
        yield running


DEEP: Any = {"type": "string"}
for _ in range(200):
    DEEP = {"type": "array", "items": DEEP}

HOSTILE: dict[str, Any] = {
    "deep": DEEP,
    "wide": {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(20_000)}},
    "long": {"const": "x" * 100_000},
    "endless": {
        "$defs": {"n": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/n"}}},
        "$ref": "#/$defs/n",
    },
    "elsewhere": {"$ref": "https://example.com/schema"},
    "nothing": {"type": "string", "minLength": 3, "maxLength": 2},
    "unknown": {"not": {"type": "string"}},
    "broken": {"type": 5},
    "product": {
        "allOf": [
            {"anyOf": [{"type": "object", "properties": {f"a{i}_{j}": {}}} for j in range(4)]}
            for i in range(12)
        ]
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_a_400_in_bounded_time_and_the_next_request_works(
    served: Served, name: str
) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": HOSTILE[name], "strict": True}}
    began = time.monotonic()
    response = served.post(asked(response_format=form))
    assert time.monotonic() - began < SECONDS
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["type"]) == ("response_format", "invalid_request_error")
    assert len(error["message"]) < 600
    assert served.post(asked()).json()["choices"][0]["message"]["content"] == "I heard: hello"


KEYWORDS = [
    *("type", "properties", "required", "items", "enum", "const", "anyOf", "allOf", "oneOf"),
    *("pattern", "format", "minimum", "maxLength", "minItems", "$ref", "$defs", "not", "a"),
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["a", "string", "(", "^a$"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(VALUES, VALUES, st.sampled_from(["response_format", "json_schema", "schema", "choice", "f"]))
def test_no_value_anywhere_is_more_than_a_400(served: Served, one: Any, two: Any, at: str) -> None:
    schema = two if isinstance(two, dict) else {"type": two}
    fields: dict[str, Any] = {
        "response_format": {"response_format": one},
        "json_schema": {"response_format": {"type": "json_schema", "json_schema": one}},
        "schema": {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": schema, "strict": one is not None},
            }
        },
        "choice": {"tools": tools(), "tool_choice": one},
        "f": {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": schema, "strict": True},
                }
            ],
            "tool_choice": "required",
        },
    }[at]
    response = served.post(asked(**fields, max_tokens=12))
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["param"].split(".")[0].split("[")[0] in (
            "response_format",
            "tools",
            "tool_choice",
        )


def test_a_tool_that_can_not_be_kept_is_named(served: Served) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
    offered = [
        *tools(),
        {"type": "function", "function": {"name": "f", "parameters": bad, "strict": True}},
    ]
    response = served.post(asked(tools=offered))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools[2]"
    assert served.post(asked(tools=offered, tool_choice="none")).status_code == 200
    offered[2]["function"]["strict"] = False
    assert served.post(asked(tools=offered)).status_code == 200


def test_a_grammar_that_gives_up_in_mid_reply_is_an_error_event_and_the_next_turn_works() -> None:
    engine = fake_engine()
    with serving(engine) as served:
        error = InvalidRequestError(
            "response_format: can't be enforced any further", param="response_format"
        )
        engine.fail("step", at=3, error=error)
        lines, chunks = served.events(asked(response_format=FORM))
        assert "data: [DONE]" not in lines
        told = chunks[-1]["error"]
        assert (told["type"], told["param"]) == ("invalid_request_error", "response_format")
        engine.fail("step", at=3, error=error)
        assert served.post(asked(response_format=FORM)).status_code == 400
        [choice] = choices(served, asked(response_format=FORM), True)
        Draft202012Validator(PLACE).validate(json.loads(choice["message"]["content"]))


def test_while_a_large_schema_is_compiled_others_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also those that demand nothing but ask in the same moment, and those that count tokens."""
    reached, go_on = threading.Event(), threading.Event()
    compile_ = GrammarCompiler.compile

    def slow(compiler: GrammarCompiler, constraint: Constraint) -> Grammar | None:
        reached.set()
        assert go_on.wait(WAIT_S)
        return compile_(compiler, constraint)

    monkeypatch.setattr(GrammarCompiler, "compile", slow)
    with serving(fake_engine(Replies())) as served, ThreadPoolExecutor(1) as pool:
        first = pool.submit(served.post, asked(response_format=FORM))
        assert reached.wait(WAIT_S)
        try:
            assert served.post(asked("others", tools=tools())).status_code == 200
            count = {"model": NAME, "messages": [user("hello")]}
            assert served.http.post("/v1/messages/count_tokens", json=count).status_code == 200
            assert not first.done()
        finally:
            go_on.set()
        assert first.result(WAIT_S).status_code == 200


def test_a_client_that_leaves_while_its_schema_is_compiled_has_no_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        reached.set()
        assert go_on.wait(WAIT_S)

    monkeypatch.setattr(GrammarCompiler, "compile", slow)
    with serving(fake_engine(Replies())) as served:
        with served.raw(asked(response_format=FORM)):
            assert reached.wait(WAIT_S)
        assert served.post(asked("others")).status_code == 200
        go_on.set()
        assert served.post(asked("more")).status_code == 200
        assert len(served.worker.items) == 2
