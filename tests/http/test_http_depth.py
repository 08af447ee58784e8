"""How deep may JSON be? As deep as everything that reads it later can follow, and no deeper."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import NAME, Served, chat_body, fake_engine, serving, user

from capserve.api.strict_json import MAX_DEPTH, parse_object
from capserve.errors import InvalidRequestError
from capserve.text.equivalence import MAX_ARGUMENT_DEPTH, nests_deeper, parse_arguments
from tests.fuzz.mutate import read_tar, write_tar

HI = [user("hi")]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("capsules")
    with serving(fake_engine(), capsule_dir=folder) as running:
        yield running


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def send(served: Served, path: str, body: dict[str, Any], deep: str) -> httpx.Response:
    """`body` with `deep` at its place."""
    content = json.dumps(body).replace('"DEEP"', deep)
    return served.http.post(path, content=content, headers={"content-type": "application/json"})


FREE: dict[str, tuple[str, dict[str, Any], int]] = {
    "switches": (
        "/v1/chat/completions",
        {**chat_body(HI), "chat_template_kwargs": "DEEP"},
        1,
    ),
    "metadata": ("/v1/chat/completions", {**chat_body(HI), "metadata": "DEEP"}, 1),
    "an unknown field": ("/v1/chat/completions", {**chat_body(HI), "x": "DEEP"}, 1),
    "a tool": (
        "/v1/responses",
        {"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": "DEEP"}]},
        3,
    ),
    "an item": ("/v1/responses", {"input": [{**user("hi"), "x": "DEEP"}]}, 3),
    "a text": ("/v1/completions", {"prompt": "hi", "max_tokens": 1, "x": "DEEP"}, 1),
    "a message": (
        "/v1/messages",
        {"model": NAME, "max_tokens": 4, "messages": HI, "x": "DEEP"},
        1,
    ),
}
"""Where a body goes, one that has room for any JSON, and how deep that stands."""


@pytest.mark.parametrize("where", FREE)
def test_json_is_taken_to_the_bound_and_refused_beyond_it(served: Served, where: str):
    path, body, above = FREE[where]
    reply = send(served, path, body, nested(MAX_DEPTH - above))
    assert reply.status_code == 200, reply.text
    refused = send(served, path, body, nested(MAX_DEPTH - above + 1))
    assert refused.status_code == 400
    assert f"{MAX_DEPTH} levels" in refused.json()["error"]["message"]
    assert served.http.get("/health").json()["status"] == "green"


def test_what_was_taken_can_be_shown_again(served: Served):
    path, body, above = FREE["an item"]
    reply = send(served, path, body, nested(MAX_DEPTH - above)).json()
    at = f"/v1/responses/{reply['id']}"
    assert served.http.get(at).json()["id"] == reply["id"]
    assert served.http.get(f"{at}/input_items").json()["data"]
    path, body, above = FREE["a tool"]
    body = {**body, "stream": True}
    events = send(served, path, body, nested(MAX_DEPTH - above)).text
    assert "event: response.completed" in events


EDGE = range(940, 1024)
"""Somewhere here a thread's own recursion ends: between two such depths the engine's thread failed
on what the text thread had let through, and with it every turn that waited."""


def test_switches_never_reach_a_depth_that_only_one_thread_follows(served: Served):
    path, body, _ = FREE["switches"]
    for levels in EDGE:
        reply = send(served, path, body | {"max_tokens": 1}, nested(levels))
        assert reply.status_code == 400, f"{levels}: {reply.text}"


def test_a_session_file_has_the_same_bound(served: Served):
    name = served.post(chat_body(HI)).json()["capserve"]["session_id"]
    file = served.http.get(f"/v1/sessions/{name}/export").content
    # The field of the request that the session would begin with is one level deep there, too.
    for levels, status in ((MAX_DEPTH - 1, 201), (MAX_DEPTH, 400), (980, 400)):
        members = read_tar(file)
        session = json.loads(members["session.json"])
        talk = session["conversation"].replace(
            '"template_kwargs":null', f'"template_kwargs":{nested(levels)}'
        )
        assert talk != session["conversation"]
        members["session.json"] = json.dumps(session | {"conversation": talk}).encode()
        headers = {"content-type": "application/x-tar"}
        came = served.http.post("/v1/sessions/import", content=write_tar(members), headers=headers)
        assert came.status_code == status, came.text
    assert served.http.get("/health").json()["status"] == "green"


def test_the_bound_names_itself():
    parse_object(nested(MAX_DEPTH).encode())
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_DEPTH} levels"):
        parse_object(nested(MAX_DEPTH + 1).encode())


def test_levels_are_counted_without_recursion():
    assert not nests_deeper(5, 0)
    assert nests_deeper([], 0)
    assert not nests_deeper([{}, []], 2)
    assert nests_deeper([{"a": []}], 2)
    value: Any = []
    for _ in range(100_000):
        value = [value]
    assert nests_deeper(value, 99_999)
    while value:  # taken apart by hand: to drop it whole would be a recursion
        value = value.pop()


def at_depth(frames: int, call: Callable[[], Any]) -> Any:
    return call() if frames == 0 else at_depth(frames - 1, call)


def test_arguments_mean_the_same_however_deep_the_reader_stands():
    for levels in (1, MAX_ARGUMENT_DEPTH, MAX_ARGUMENT_DEPTH + 1, 600, 900, 980, 50_000):
        text = nested(levels)
        found = [
            at_depth(frames, lambda text=text: parse_arguments(text) is None)  # type: ignore[misc]
            for frames in (0, 100, 400)
        ]
        assert found == [levels > MAX_ARGUMENT_DEPTH] * 3
