"""Many clients, clients that leave, clients that stall, and an engine that is slow or fails."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import httpx
import openai
import pytest
from harness import (
    NAME,
    WAIT_S,
    Replies,
    Served,
    chat_body,
    fake_engine,
    serving,
    small_buffers,
    user,
)

from capserve.api.server import _config, base_url, bind, running
from capserve.errors import StartupError


def streamed(word: str, **fields: object) -> dict:
    return {**chat_body([user(word)]), "stream": True, **fields}


def answered(served: Served, word: str = "still there?") -> None:
    body = served.post(chat_body([user(word)])).json()
    assert body["choices"][0]["message"]["content"] == f"I heard: {word}"


def test_sixty_streams_at_once_each_get_their_own_whole_reply():
    async def ask(client: httpx.AsyncClient, word: str) -> str:
        text = []
        async with client.stream("POST", "/v1/chat/completions", json=streamed(word)) as response:
            assert response.status_code == 200, await response.aread()
            lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
        assert lines.pop() == "data: [DONE]"
        for line in lines:
            delta = json.loads(line[6:])["choices"][0]["delta"]
            text.append(delta.get("content", ""))
        return "".join(text)

    async def all_of(url: str) -> list[str]:
        limits = httpx.Limits(max_connections=60)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            return await asyncio.gather(*(ask(client, f"word {i}") for i in range(60)))

    with serving(fake_engine()) as served:
        assert asyncio.run(all_of(served.url)) == [f"I heard: word {i}" for i in range(60)]
        answered(served)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_turn(stream: bool):
    engine = fake_engine()
    with serving(engine) as served:
        gate = engine.hold("step", at=2)
        with served.raw({**chat_body([user("a long good bye " * 9)]), "stream": stream}):
            gate.wait_arrived()
            [item] = served.worker.items
            assert not item.cancel.cancelled
        served.worker.wait_cancelled(item)
        gate.open()
        served.worker.wait_idle()
        assert engine.calls("step") == 2, "the step that was under way is the last"
        assert served.worker.ends[0].metrics.terminal_state == "cancelled"
        answered(served)


def test_a_client_that_leaves_while_queued_frees_its_place():
    engine = fake_engine()
    with serving(engine, max_queue_depth=1) as served:
        gate = engine.hold("step")
        with served.stream("running") as first:
            gate.wait_arrived()
            with served.raw(streamed("queued")):
                item = served.worker.wait_taken(2)
            served.worker.wait_cancelled(item)
            with served.stream("next") as third:
                assert third.status_code == 200
                gate.open()
                assert "[DONE]" in third.read().decode()
            first.read()


def test_a_reader_that_stalls_is_cancelled_and_holds_up_nobody():
    replies = Replies()
    replies.say["talk"] = "\n</think>\n\n" + "many words " * 1500
    engine = fake_engine(replies, max_positions=8192)
    with serving(engine, stream_stall_timeout_s=0.4, listener=small_buffers()) as served:
        gate = engine.hold("step", at=300)
        request = streamed("talk", logprobs=True, top_logprobs=20)
        with served.raw(request, receive_buffer_bytes=4096):
            gate.wait_arrived()
            [item] = served.worker.items
            served.worker.wait_cancelled(item)
            gate.open()
            answered(served)


def test_fifty_random_disconnects_leave_a_server_that_answers():
    rng = random.Random(50)
    with serving(fake_engine(), max_queue_depth=64) as served:
        for i in range(50):
            request = {**chat_body([user(f"leaver {i} " * rng.randint(1, 200))])}
            request["stream"] = rng.random() < 0.7
            with served.raw(request) as sock:
                nbytes = rng.choice([0, 0, 1, 40, 400, 1500])
                while nbytes > 0 and (piece := sock.recv(nbytes)):
                    nbytes -= len(piece)
        answered(served)
        served.worker.wait_idle()
        report = served.http.get("/health").json()
        assert report["status"] == "green"
        assert report["queue_depth"] == 0


def test_a_full_queue_is_a_429_that_says_when_to_come_back():
    engine = fake_engine()
    with serving(engine, max_queue_depth=2) as served:
        gate = engine.hold("step")
        with (
            served.stream("one") as one,
            served.stream("two") as two,
            served.stream("three") as three,
        ):
            gate.wait_arrived()
            # Headers are here, so the turns were taken: one runs and two wait.
            assert [r.status_code for r in (one, two, three)] == [200, 200, 200]
            for stream in (True, False):
                refused = served.post({**streamed("four"), "stream": stream})
                assert refused.status_code == 429
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"]["code"] == "queue_full"
                assert "2" in refused.json()["error"]["message"]
            gate.open()
            for response in (one, two, three):
                assert response.read().decode().endswith("data: [DONE]\n\n")
        answered(served)


def test_heartbeats_come_while_queued_and_during_prefill():
    engine = fake_engine()
    with serving(engine, heartbeat_s=0.05) as served:
        gate = engine.hold("extend")
        with (
            served.stream("prefill") as prefill,
            served.stream("queued") as queued,
        ):
            gate.wait_arrived()
            for response in (prefill, queued):
                lines = response.iter_lines()
                opening, *beats = [line for line in (next(lines) for _ in range(8)) if line]
                assert '"role":"assistant"' in opening
                assert beats == [": keep-alive"] * 3
                if response is prefill:
                    rest = lines
            gate.open()
            assert [line for line in rest if line][-1] == "data: [DONE]"


def test_a_large_body_does_not_freeze_health():
    waits_s: list[float] = []
    over = threading.Event()

    def poll(url: str) -> None:
        with httpx.Client(base_url=url, timeout=30) as client:
            while not over.wait(0.05):  # the polling rate, about 20 Hz
                began = time.perf_counter()
                assert client.get("/health").status_code == 200
                waits_s.append(time.perf_counter() - began)

    # A context for which the text is not too long by its characters, only by its tokens.
    with serving(fake_engine(max_positions=1_300_000)) as served:
        poller = threading.Thread(target=poll, args=(served.url,))
        poller.start()
        text = "The quick brown fox, 42 jumps; über den Zaun.\n" * (5_000_000 // 46)
        tool = {"type": "function", "function": {"name": "f", "description": text}}
        response = served.post(chat_body([user("hi")]) | {"tools": [tool]})  # read to its end
        over.set()
        poller.join(30)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert len(waits_s) >= 5
    assert max(waits_s) < 1.0, f"worst of {len(waits_s)}: {max(waits_s) * 1e3:.0f} ms"


def test_a_text_that_can_not_fit_is_refused_by_its_length_before_it_is_read():
    with serving(fake_engine()) as served:
        before = served.state.tokenizer.counters.bytes_encoded
        response = served.post(chat_body([user("word " * 1_000_000)]))
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "5000000 characters" in error["message"]
        assert served.state.tokenizer.counters.bytes_encoded == before


def test_a_failure_after_the_headers_is_an_error_event_and_no_done():
    engine = fake_engine()
    with serving(engine) as served:
        engine.fail("step", at=2)
        with served.stream("fail") as response:
            assert response.status_code == 200
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        last = json.loads(lines[-1][6:])
        assert last["error"]["code"] == "engine_error"
        assert last["capserve"]["terminal_state"] == "error"
        assert last["capserve"]["prompt_tokens"] > 0
        assert "data: [DONE]" not in lines
        served.wait_ready()
        answered(served)

        engine.fail("step", at=2)
        with served.openai() as client, pytest.raises(openai.APIError) as raised:
            for _ in client.chat.completions.create(**streamed("fail again")):
                pass
        assert raised.value.code == "engine_error"
        served.wait_ready()

        engine.fail("step", at=2)
        plain = served.post(chat_body([user("fail plainly")]))
        assert plain.status_code == 500
        assert plain.json()["error"]["code"] == "engine_error"
        served.wait_ready()
        answered(served)


def test_an_engine_that_stays_broken_shows_in_health_ready_and_every_answer():
    engine = fake_engine()
    with serving(engine) as served:
        engine.fail("step")
        engine.fail("reset", at=2)  # the first clears the state for the new conversation
        assert served.post(chat_body([user("break")])).status_code == 500
        health = served.http.get("/health")
        assert health.status_code == 503
        report = health.json()
        assert report["status"] == "red"
        assert "planted fault" in report["reason"]
        for refused in (served.http.get("/ready"), served.post(chat_body([user("hi")]))):
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "unavailable"


def test_a_server_told_to_stop_returns_to_its_caller():
    program = (
        "import sys\n"
        "from capserve.api.server import serve\n"
        "async def app(scope, receive, send):\n"
        "    while scope['type'] == 'lifespan':\n"
        "        kind = (await receive())['type']\n"
        "        await send({'type': kind + '.complete'})\n"
        "        if kind == 'lifespan.shutdown': return\n"
        "serve(app, port=0, on_started=lambda url: print(url, flush=True))\n"
        "print('cleaned up', flush=True)\n"
    )
    for sig in (signal.SIGTERM, signal.SIGINT):
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("http://127.0.0.1:")
            process.send_signal(sig)
            rest, _ = process.communicate(timeout=WAIT_S)
        assert (rest, process.returncode) == ("cleaned up\n", 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_server_that_stops_cancels_what_still_runs_and_says_so(stream: bool):
    engine = fake_engine()
    with ExitStack() as connections:
        with serving(engine) as served:
            gate = engine.hold("step")
            request = {**streamed("cut"), "stream": stream}
            sock = connections.enter_context(served.raw(request))
            gate.wait_arrived()
            [item] = served.worker.items

            def open_when_cancelled() -> None:
                served.worker.wait_cancelled(item)
                gate.open()

            opener = threading.Thread(target=open_when_cancelled)
            opener.start()
        opener.join(WAIT_S)
        assert item.cancel.cancelled
        received = b""
        while piece := sock.recv(65536):
            received += piece
        assert received.startswith(b"HTTP/1.1 200" if stream else b"HTTP/1.1 503")
        assert b"shutting down" in received
        assert b"[DONE]" not in received


def test_a_taken_port_is_one_clear_error_before_anything_starts():
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        assert base_url(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(StartupError, match=str(port)) as raised:
            bind("127.0.0.1", port)
        assert raised.value.param == "port"
        with pytest.raises(StartupError, match=str(port)), running(None, port=port):  # type: ignore[arg-type]
            pass
    with pytest.raises(StartupError, match=r"no\.such\.host\.invalid"):
        bind("no.such.host.invalid", 0)


def test_a_connection_is_kept_longer_than_pools_keep_theirs():
    assert _config(None, 1).timeout_keep_alive >= 75  # type: ignore[arg-type]


def test_a_half_sent_request_takes_no_place():
    with serving(fake_engine(), max_queue_depth=1) as served:
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
                b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
            )
            answered(served)
        answered(served)
        assert NAME in served.http.get("/v1/models").text
