"""`/tokenize` counts what a request would be read as, and `/detokenize` spells it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from harness import NAME, Served, chat_body, fake_engine, serving, tokenizer, user

TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(fake_engine()) as running:
        yield running


def post(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = served.http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("text", ["", "Hello, world", "naïve 🦉\n\n\tcode", "<|im_start|>user\nhi"])
def test_a_text_comes_back_from_its_tokens(served: Served, text: str) -> None:
    answer = post(served, "/tokenize", {"prompt": text, "return_token_strs": True})
    assert answer["tokens"] == tokenizer().encode(text).tolist()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 4096
    assert post(served, "/detokenize", {"tokens": answer["tokens"]}) == {"prompt": text}


def test_messages_are_counted_as_a_chat_request_reads_them(served: Served) -> None:
    body = {**chat_body([user("count me, 🦉")]), "tools": [TOOL]}
    answer = post(served, "/tokenize", body)
    served.post(body)
    assert served.worker.items[-1].request.prompt.tokens.tolist() == answer["tokens"]


def test_without_its_generation_prompt_a_conversation_is_shorter(served: Served) -> None:
    body = chat_body([user("count me")])
    whole = post(served, "/tokenize", body)["tokens"]
    bare = post(served, "/tokenize", {**body, "add_generation_prompt": False})["tokens"]
    assert whole[: len(bare)] == bare
    rest = post(served, "/detokenize", {"tokens": whole[len(bare) :]})["prompt"]
    assert rest.startswith("<|im_start|>assistant")


def test_counting_touches_no_engine(served: Served) -> None:
    before = len(served.worker.items)
    post(served, "/tokenize", {"prompt": "no turn", "model": NAME})
    assert len(served.worker.items) == before


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [user("b")]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "nobody"}]}, "messages[0].role"),
        ("/tokenize", {"prompt": "word " * 40_000}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "12"}, "tokens"),
        ("/detokenize", {"tokens": [1, True]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, 2.0]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [0, 10**6]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1], "model": 7}, "model"),
    ],
)
def test_a_wrong_field_is_named(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    response = served.http.post(path, json=body)
    assert response.status_code == 400, response.text[:500]
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_another_model_is_not_found(served: Served, path: str) -> None:
    body = {"prompt": "a", "tokens": [1], "model": "other"}
    response = served.http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_a_lone_surrogate_is_named(served: Served) -> None:
    headers = {"content-type": "application/json"}
    body = json.dumps({"prompt": "\ud800"}).encode()
    response = served.http.post("/tokenize", content=body, headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_nesting_without_end_is_a_400(served: Served) -> None:
    deep = '{"messages": [{"role": "user", "content": ' + "[" * 5000 + "]" * 5000 + "}]}"
    headers = {"content-type": "application/json"}
    response = served.http.post("/tokenize", content=deep.encode(), headers=headers)
    assert response.status_code == 400
