"""A stream says at once that it is there: before the engine does anything for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from harness import NAME, Replies, Served, chat_body, fake_engine, serving, user

ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat_body([user("hello")]),
    "/v1/messages": {"model": NAME, "max_tokens": 20, "messages": [user("hello")]},
    "/v1/responses": {"model": NAME, "input": "hello"},
}
OPENINGS = {
    "/v1/chat/completions": [None],
    "/v1/messages": ["message_start"],
    "/v1/responses": ["response.created", "response.in_progress"],
}


@contextmanager
def stream(served: Served, path: str, **fields: Any) -> Iterator[Iterator[dict[str, Any]]]:
    body = {**ASKS[path], "stream": True, **fields}
    with served.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        yield (
            json.loads(line[6:])
            for line in lines
            if line.startswith("data: ") and line != "data: [DONE]"
        )


@pytest.mark.parametrize("held", ["extend", "queue"])
@pytest.mark.parametrize("path", ASKS)
def test_a_stream_opens_while_its_turn_waits_or_reads_its_prompt(path: str, held: Any) -> None:
    engine = fake_engine(Replies())
    with serving(engine, heartbeat_s=30.0) as served:
        gate = engine.hold("extend")
        first = {**chat_body([user("the one before")]), "stream": True}
        with served.raw(first):
            if held == "queue":
                gate.wait_arrived()
            with stream(served, path) as events:
                opening = [next(events) for _ in OPENINGS[path]]
                assert [event.get("type") for event in opening] == OPENINGS[path]
                assert not served.worker.ends
                gate.open()
                *_, last = events
    if path == "/v1/chat/completions":
        assert opening[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert last["choices"][0]["finish_reason"] == "stop"
    else:
        assert last["type"] in ("message_stop", "response.completed")


@pytest.mark.parametrize("path", ASKS)
def test_it_is_said_once(path: str) -> None:
    with serving(fake_engine(Replies())) as served, stream(served, path) as events:
        kinds = [event.get("type") or list(event["choices"][0]["delta"]) for event in events]
    for kind in OPENINGS[path]:
        assert kinds.count(kind or ["role", "content"]) == 1


def test_each_of_several_choices_is_opened() -> None:
    with (
        serving(fake_engine(Replies())) as served,
        stream(served, "/v1/chat/completions", n=3) as events,
    ):
        first = [next(events)["choices"][0] for _ in range(3)]
    assert [choice["index"] for choice in first] == [0, 1, 2]
    assert all(choice["delta"]["role"] == "assistant" for choice in first)


@pytest.mark.parametrize("path", ASKS)
def test_what_is_refused_is_a_status_and_opens_nothing(path: str) -> None:
    engine = fake_engine(Replies())
    with serving(engine, max_queue_depth=1) as served:
        gate = engine.hold("extend")
        waiting = {**chat_body([user("before")]), "stream": True}
        with served.raw(waiting):
            gate.wait_arrived()
            with served.raw(waiting):
                served.worker.wait_taken(2)
                reply: httpx.Response = served.http.post(path, json={**ASKS[path], "stream": True})
                gate.open()
    assert reply.status_code == 429
    assert reply.headers["content-type"] == "application/json"
