"""A client that breaks the rules of HTTP, on purpose or by its age, costs nobody else anything."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from harness import WAIT_S, Served, chat_body, fake_engine, serving, user
from starlette.requests import Request

import capserve.api.app
from capserve.api.body import HELD_BODIES, Bodies, RequestTimeoutError
from capserve.api.server import MAX_HEADER_BYTES


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(fake_engine()) as running:
        yield running


def connected(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def everything(sock: socket.socket) -> bytes:
    """All that comes until the server closes; a server that never does fails the test."""
    pieces = []
    try:
        while piece := sock.recv(65536):
            pieces.append(piece)
    except ConnectionError:
        pass  # it closed while bytes of ours were on their way
    return b"".join(pieces)


def post(
    body: dict[str, Any], *, version: str = "1.1", headers: str = "", nbytes: int | None = None
) -> bytes:
    """A raw chat request; `nbytes` is a content-length that need not be true."""
    content = json.dumps(body).encode()
    length = len(content) if nbytes is None else nbytes
    head = (
        f"POST /v1/chat/completions HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n{headers}\r\n"
    )
    return head.encode() + content


def test_an_endless_header_is_cut_off_while_health_stays_fast(served: Served):
    ended = threading.Event()
    sent = 0

    def attack() -> None:
        nonlocal sent
        try:
            while sent < 256 << 20:
                sent += sock.send(b"a" * (1 << 20))
        except ConnectionError:
            pass
        finally:
            ended.set()

    with connected(served) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nX: ")
        attacker = threading.Thread(target=attack)
        attacker.start()
        slowest_s = 0.0
        while True:
            last = ended.is_set()
            asked_at = time.monotonic()
            assert served.http.get("/health").status_code == 200
            slowest_s = max(slowest_s, time.monotonic() - asked_at)
            if last:
                break
        attacker.join()
    assert sent < 256 << 20, "the server took all of it"
    assert slowest_s < 2.0


def test_a_header_over_the_limit_is_a_400_and_the_connection_closes(served: Served):
    with connected(served) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nX: " + b"a" * MAX_HEADER_BYTES)
        assert everything(sock).startswith(b"HTTP/1.1 400 ")


def test_a_long_header_below_the_limit_is_answered(served: Served):
    name = "a" * (MAX_HEADER_BYTES - 1024)
    assert served.http.get("/health", headers={"x-long": name}).status_code == 200


def test_a_post_that_offers_another_protocol_keeps_its_body(served: Served):
    offer = (
        "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
        "http2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
    )
    with connected(served) as sock:
        sock.sendall(post(chat_body([user("pebble")]), headers=offer + "connection: close\r\n"))
        answer = everything(sock)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"I heard: pebble" in answer


def test_a_stream_to_an_http_1_0_client_is_not_chunked(served: Served):
    body = {**chat_body([user("pebble")]), "stream": True}
    with connected(served) as sock:
        sock.sendall(post(body, version="1.0"))
        head, _, content = everything(sock).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert content.startswith(b"data: {")
    assert content.endswith(b"data: [DONE]\n\n")


def test_bodies_that_stall_end_in_a_408_and_lock_nobody_out(monkeypatch: pytest.MonkeyPatch):
    quick = functools.partial(Bodies, stall_timeout_s=0.5)
    monkeypatch.setattr(capserve.api.app, "Bodies", quick)
    with serving(fake_engine()) as served, ExitStack() as stack:
        stalled = [stack.enter_context(connected(served)) for _ in range(2 * HELD_BODIES)]
        for sock in stalled:
            sock.sendall(post(chat_body([user("a")]), nbytes=served.state.limits.max_body_bytes))
        assert served.post(chat_body([user("between")])).status_code == 200
        for sock in stalled:
            head, _, content = everything(sock).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408 ")
            assert b"connection: close" in head.lower()
            error = json.loads(content)["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "request_timeout")
            assert str(served.state.limits.max_body_bytes) in error["message"]
        assert served.post(chat_body([user("after")])).status_code == 200


@pytest.mark.parametrize("timeout", ["stall_timeout_s", "body_timeout_s"])
def test_a_body_that_is_given_up_gives_its_bytes_back(timeout: str):
    """A silent one falls to the stall timeout, one that trickles to that of the whole body."""

    async def scenario() -> None:
        bodies = Bodies(1000, **{timeout: 0.1})
        come = 0

        async def receive() -> dict[str, Any]:
            nonlocal come
            if come == 3 and timeout == "stall_timeout_s":
                await asyncio.Event().wait()
            await asyncio.sleep(0.001)
            come += 1
            assert bodies.held_bytes == come - 1
            return {"type": "http.request", "body": b"x", "more_body": True}

        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
        with pytest.raises(RequestTimeoutError, match=r"0\.1 s"):
            async with bodies.read(Request(scope, receive)):
                pytest.fail("half a body was taken for a whole one")
        assert come >= 3
        assert bodies.held_bytes == 0

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))


def test_the_time_that_a_whole_body_waits_for_its_turn_is_not_counted():
    async def scenario() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
        bodies = Bodies(10, stall_timeout_s=0.01, body_timeout_s=0.01)
        async with bodies.read(Request(scope, receive)) as body:
            await asyncio.sleep(0.05)
            assert (body, bodies.held_bytes) == (b"{}", 2)

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["self", "args", "kwargs"])
def test_a_template_switch_may_have_any_name(served: Served, name: str):
    """Names of our own parameters once clashed with it."""
    plain = served.post(chat_body([user("pebble")]))
    given = served.post({**chat_body([user("pebble")]), "chat_template_kwargs": {name: 1}})
    assert given.status_code == 200, given.text
    assert given.json()["choices"] == plain.json()["choices"]
