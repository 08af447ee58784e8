"""The whole server, started as a person starts it, under the load that it promises to bear."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from harness import chat_body, end_tokens, tokenizer, user

pytestmark = pytest.mark.slow

HEALTH_P99_MS = 50.0
DECODE_TOKENS = 500
PREFILL_TOKENS = 8000
QUEUE = 64
PARKED = 2
"""The default of `max_parked_turns`."""
STALL_TIMEOUT_S = 1.0
WAIT_S = 120.0
"""Longest that a busy machine may take for what one test asks."""

ENDLESS = {"logit_bias": {str(token): -100 for token in end_tokens()}}
"""The reply runs to `max_tokens`."""


@dataclass(frozen=True)
class Server:
    host: str
    port: int
    http: httpx.Client

    def health(self) -> dict[str, Any]:
        report: dict[str, Any] = self.http.get("/health").json()
        return report

    def answers(self) -> None:
        """A normal request gets a normal answer."""
        body = chat_body([user("What is the capital of France?")])
        reply = self.http.post("/v1/chat/completions", json={**body, "max_tokens": 400})
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["finish_reason"] == "stop"
        assert "Paris" in reply.json()["choices"][0]["message"]["content"]

    def wait_idle(self) -> dict[str, Any]:
        until = time.monotonic() + WAIT_S
        while (report := self.health())["queue_depth"] or report["running"]:
            assert time.monotonic() < until, f"never idle: {report}"
        return report

    @contextmanager
    def raw(self, body: dict[str, Any], receive_buffer_bytes: int = 0) -> Iterator[socket.socket]:
        """A connection that has sent this request and read nothing; closed at the block's end."""
        content = json.dumps(body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self.host}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        with socket.socket() as sock:
            if receive_buffer_bytes:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
            sock.settimeout(WAIT_S)
            sock.connect((self.host, self.port))
            sock.sendall(head.encode() + content)
            yield sock


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`capserve serve` on the embedded model and a free port, in a process of its own."""
    flags = {
        "--port": 0,
        "--capsule-dir": tmp_path_factory.mktemp("capsules"),
        "--threads": 1,
        "--max-model-len": 16384,
        "--max-num-queued-reqs": QUEUE,
        "--stream-stall-timeout": STALL_TIMEOUT_S,
    }
    words = [str(word) for flag in flags.items() for word in flag]
    process = subprocess.Popen(
        [sys.executable, "-c", "from capserve.cli.main import main; main()", "serve", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    said: list[str] = []
    try:
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"served at http://([\d.]+):(\d+)/v1", line):
                break
        else:
            pytest.fail("the server never listened:\n" + "".join(said))
        # A pipe that nobody empties would stop the server at its next log line.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        host, port = found[1], int(found[2])
        with httpx.Client(base_url=f"http://{host}:{port}", timeout=WAIT_S) as client:
            yield Server(host, port, client)
        assert process.poll() is None, "the server is still alive"
    finally:
        process.terminate()
        process.wait(WAIT_S)


def streamed(words: str, **fields: Any) -> dict[str, Any]:
    return {**chat_body([user(words)]), "stream": True, **fields}


def long_words(tokens: int) -> str:
    """Text of at least that many tokens, no more than one line longer."""
    lines: list[str] = []
    count = 0
    while count < tokens:
        lines.append(f"{len(lines)}: the value of item {len(lines) * 7919 % 1009} is unknown.\n")
        count += len(tokenizer().encode(lines[-1]))
    return "".join(lines)


@contextmanager
def polling(server: Server, hz: float) -> Iterator[list[float]]:
    """Fills the list, when the block ends, with `/health` times in ms while the block ran."""
    script = Path(__file__).with_name("health_poller.py")
    times: list[float] = []
    with subprocess.Popen(
        [sys.executable, str(script), server.host, str(server.port), str(hz)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as poller:
        assert poller.stdout is not None
        assert poller.stdout.readline() == "polling\n"
        try:
            yield times
        finally:
            out, _ = poller.communicate(timeout=WAIT_S)  # closes its input, and so ends it
        times += json.loads(out)


def test_health_answers_in_milliseconds_while_one_client_decodes_and_another_prefills(
    server: Server,
) -> None:
    usages: dict[str, dict[str, int]] = {}
    decoding = threading.Event()

    def decode() -> None:
        body = streamed(
            "Tell me a story.",
            max_tokens=DECODE_TOKENS,
            stream_options={"include_usage": True},
            **ENDLESS,
        )
        with httpx.stream(
            "POST", f"{server.http.base_url}/v1/chat/completions", json=body, timeout=WAIT_S
        ) as response:
            for line in response.iter_lines():
                if '"delta"' in line:
                    decoding.set()
                if line.startswith("data: {") and (usage := json.loads(line[6:]).get("usage")):
                    usages["decode"] = usage

    def prefill() -> None:
        body = {**chat_body([user(long_words(PREFILL_TOKENS))]), "max_tokens": 4}
        reply = httpx.post(f"{server.http.base_url}/v1/chat/completions", json=body, timeout=WAIT_S)
        usages["prefill"] = reply.json()["usage"]

    clients = [threading.Thread(target=client) for client in (decode, prefill)]
    with polling(server, hz=50) as times:
        clients[0].start()
        assert decoding.wait(WAIT_S)
        clients[1].start()
        for client in clients:
            client.join(WAIT_S)
    assert usages["decode"]["completion_tokens"] == DECODE_TOKENS
    assert usages["prefill"]["prompt_tokens"] >= PREFILL_TOKENS
    assert usages["prefill"]["prompt_tokens_details"]["cached_tokens"] < 100
    p50, p95, p99 = np.percentile(times, (50, 95, 99))
    print(
        f"\n/health under load: p50 {p50:.1f} ms, p95 {p95:.1f} ms, p99 {p99:.1f} ms, "
        f"max {max(times):.1f} ms of {len(times)} polls"
    )
    assert len(times) > 100, "the load was over before anything was measured"
    assert p99 <= HEALTH_P99_MS


def test_sixty_streams_end_whole_behind_a_reader_that_stalls(server: Server) -> None:
    async def ask(client: httpx.AsyncClient, number: int) -> str:
        body = streamed(f"Say {number}.", max_tokens=8)
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            return (await response.aread()).decode()

    async def all_of_them() -> list[str]:
        limits = httpx.Limits(max_connections=60)
        base = server.http.base_url
        async with httpx.AsyncClient(base_url=base, timeout=WAIT_S, limits=limits) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(60)))

    cancelled = server.health()["turns"]["by_state"].get("cancelled", 0)
    # Twenty alternatives a token: more than any socket buffer takes.
    talk = streamed("Talk.", max_tokens=4000, logprobs=True, top_logprobs=20, **ENDLESS)
    with server.raw(talk, receive_buffer_bytes=4096):
        replies = asyncio.run(all_of_them())
        assert all(reply.endswith("data: [DONE]\n\n") for reply in replies)
        assert server.wait_idle()["turns"]["by_state"]["cancelled"] == cancelled + 1
    server.answers()


def test_fifty_random_disconnects_leave_a_server_that_answers(server: Server) -> None:
    rng = random.Random(50)
    for number in range(50):
        words = f"leaver {number} " * rng.randint(1, 60)
        body = streamed(words, max_tokens=rng.choice([5, 50]))
        body["stream"] = rng.random() < 0.7
        with server.raw(body) as sock:
            left = rng.choice([0, 0, 1, 400, 1500, 4000]) if body["stream"] else 0
            seen = b""
            while len(seen) < left and b"[DONE]" not in seen and (piece := sock.recv(left)):
                seen += piece
    report = server.wait_idle()
    assert report["faults"] == 0
    assert report["status"] == "green"
    server.answers()


def test_a_full_queue_is_a_429_that_says_when_to_come_back(server: Server) -> None:
    body = streamed("Talk.", max_tokens=10_000, **ENDLESS)
    most = QUEUE + 1 + PARKED  # these wait, one runs, and so many may be parked
    answered = 0
    with ExitStack() as streams:
        while True:
            sock = streams.enter_context(server.raw(body))
            head = sock.recv(4096)
            if not head.startswith(b"HTTP/1.1 200 "):
                break
            answered += 1
            assert answered <= most, f"{answered} turns at once, {most} are allowed"
        assert head.startswith(b"HTTP/1.1 429 ")
        fields, _, text = head.partition(b"\r\n\r\n")
        [wait] = re.findall(rb"(?i)^retry-after: (\d+)", fields, re.MULTILINE)
        assert int(wait) >= 1
        error = json.loads(text or sock.recv(4096))["error"]
        assert error["code"] == "queue_full"
        assert str(QUEUE) in error["message"]
        assert answered > QUEUE
    server.wait_idle()
    server.answers()
