"""A server that is stopped, watched, called from web pages and locked."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import NAME, chat_body, end_tokens, fake_engine, serving, user

from capserve.serving.watch import FIRST_TIMES, Watch

START_S = 120.0
WAIT_S = 60.0
"""Longest that a busy machine may take for what one test asks."""

ENDLESS = {"logit_bias": {str(token): -100 for token in end_tokens()}}
"""The reply runs to `max_tokens`."""


# -- a real process, and its end ---------------------------------------------------------------


@dataclass
class Process:
    """`capserve serve` on the embedded model, in a process of its own."""

    process: subprocess.Popen[str]
    http: httpx.Client
    said: list[str]

    def stream(self, max_tokens: int) -> Talk:
        body = {**chat_body([user("Tell me a story.")]), "stream": True, "max_tokens": max_tokens}
        return Talk(self.http, {**body, **ENDLESS})

    def stop(self, sig: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal, and wait until the server says that it has heard it."""
        self.process.send_signal(sig)
        until = time.monotonic() + WAIT_S
        while self.http.get("/ready").status_code == 200:
            assert time.monotonic() < until, "the signal changed nothing"

    def ended(self) -> int:
        return self.process.wait(WAIT_S)


class Talk:
    """A stream that a thread reads; made once its first delta is there."""

    def __init__(self, http: httpx.Client, body: dict[str, Any]) -> None:
        self._begun = threading.Event()
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, args=(http, body), daemon=True)
        self._thread.start()
        assert self._begun.wait(WAIT_S), "the stream never began"

    def _read(self, http: httpx.Client, body: dict[str, Any]) -> None:
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self.lines.append(line[6:])
                    if '"content"' in line or '"reasoning' in line:
                        self._begun.set()

    def whole(self) -> list[str]:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the stream never ended"
        return self.lines


@contextmanager
def process(folder: Path, *flags: str) -> Iterator[Process]:
    started = subprocess.Popen(
        [
            *(sys.executable, "-c", "from capserve.cli.main import main; main()"),
            *("serve", "--port", "0", "--threads", "1", "--capsule-dir", str(folder), *flags),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert started.stdout is not None
    said: list[str] = []
    found = None
    try:
        for line in started.stdout:
            said.append(line)
            if found := re.search(r"served at (http://[\d.]+:\d+)/v1", line):
                break
        assert found is not None, "the server never listened:\n" + "".join(said)
        # A pipe that nobody empties would stop the server at its next log line.
        threading.Thread(target=said.extend, args=(started.stdout,), daemon=True).start()
        with httpx.Client(base_url=found[1], timeout=WAIT_S) as client:
            yield Process(started, client, said)
    finally:
        started.kill()  # a test that went well has seen it end
        started.wait(WAIT_S)


@pytest.mark.slow
def test_a_signal_lets_turns_finish_refuses_new_ones_and_the_next_server_resumes(
    tmp_path: Path,
) -> None:
    prompt = {**chat_body([user("What is the capital of France? " * 40)]), "temperature": 0}
    with process(tmp_path) as server:
        talk = server.stream(max_tokens=600)
        waiting: list[httpx.Response] = []
        asked = threading.Thread(
            target=lambda: waiting.append(
                server.http.post("/v1/chat/completions", json={**prompt, "max_tokens": 5})
            )
        )
        asked.start()
        until = time.monotonic() + WAIT_S
        while not _taken(server, 2):
            assert time.monotonic() < until, "the second turn was never taken"
        server.stop(signal.SIGTERM)
        refused = server.http.post("/v1/chat/completions", json=prompt)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert "shutting down" in refused.json()["error"]["message"]
        health = server.http.get("/health")
        assert health.status_code == 503
        assert health.json()["reason"] == "draining"
        assert int(server.http.get("/ready").headers["retry-after"]) >= 1
        lines = talk.whole()
        assert lines[-1] == "[DONE]"
        assert any('"finish_reason":"length"' in line for line in lines)
        asked.join(WAIT_S)
        assert waiting[0].status_code == 200, waiting[0].text
        assert server.ended() == 0
    with process(tmp_path) as server:
        again = server.http.post("/v1/chat/completions", json={**prompt, "max_tokens": 5})
        assert again.json()["capserve"]["restored_from"] == "disk"
        assert again.json()["choices"] == waiting[0].json()["choices"]
        server.process.send_signal(signal.SIGINT)  # idle: nothing to wait for
        assert server.ended() == 0


def _taken(server: Process, count: int) -> bool:
    """So many turns run, are parked, wait or have ended."""
    report = server.http.get("/health").json()
    begun = (report["running"] is not None) + report["parked"] + report["queue_depth"]
    return bool(begun + sum(report["turns"]["by_state"].values()) >= count)


@pytest.mark.slow
def test_at_the_deadline_what_still_runs_is_cancelled_and_told_and_the_exit_is_clean(
    tmp_path: Path,
) -> None:
    with process(tmp_path, "--drain-timeout", "0.5") as server:
        talk = server.stream(max_tokens=8000)
        server.process.send_signal(signal.SIGTERM)
        last = talk.whole()[-1]
        assert "shutting down" in json.loads(last)["error"]["message"]
        assert server.ended() == 0


@pytest.mark.slow
def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    with process(tmp_path, "--drain-timeout", "600") as server:
        talk = server.stream(max_tokens=8000)
        server.stop(signal.SIGTERM)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert server.ended() == 128 + signal.SIGINT
        assert "[DONE]" not in talk.whole()
        assert any("another signal stops at once" in line for line in server.said)


@pytest.mark.slow
def test_keys_of_flag_and_file_open_a_server_and_stand_in_nothing_that_it_prints(
    tmp_path: Path,
) -> None:
    file = tmp_path / "keys"
    file.write_text("# two of three\nfile-key-1\nfile-key-2\n")
    file.chmod(0o644)
    flags = ("--api-key", "flag-key", "--api-key-file", str(file), "--log-level", "debug")
    with process(tmp_path / "capsules", *flags) as server:
        for key, status in {
            "flag-key": 200,
            "file-key-1": 200,
            "file-key-2": 200,
            "# two": 401,
        }.items():
            reply = server.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert reply.status_code == status, key
            assert "-key" not in reply.text
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0
    said = "".join(server.said)
    assert "mode 0644" in said
    assert not re.search(r"(flag|file)-key", said)


# -- the watchdog ------------------------------------------------------------------------------


def test_health_is_red_with_both_numbers_while_a_unit_hangs_and_green_when_it_ends() -> None:
    now = [0.0]
    engine = fake_engine()
    with serving(engine, watch=Watch(60.0, lambda: now[0])) as served:
        gate = engine.hold("step")
        with served.stream("slow") as response:
            gate.wait_arrived()
            assert served.http.get("/health").status_code == 200
            now[0] += 60.0 * FIRST_TIMES + 1
            health = served.http.get("/health")
            assert health.status_code == 503
            assert health.json()["status"] == "red"
            assert health.json()["reason"] == "decode has taken 301.0 s; the watchdog allows 300 s"
            assert served.http.get("/ready").status_code == 503
            assert "capserve_stuck 1.0" in served.http.get("/metrics").text
            gate.open()
            assert "[DONE]" in response.read().decode()
        assert served.http.get("/health").status_code == 200
        assert served.http.get("/ready").status_code == 200


# -- web pages ---------------------------------------------------------------------------------

PAGE = "https://app.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-lang",
}
ALLOW = "access-control-allow-origin"


def test_without_the_option_no_page_is_let_in() -> None:
    with serving(fake_engine()) as served:
        preflight = served.http.options("/v1/chat/completions", headers=PREFLIGHT)
        assert ALLOW not in preflight.headers
        assert ALLOW not in served.http.get("/v1/models", headers={"origin": PAGE}).headers


def test_a_preflight_of_a_listed_origin_needs_no_key_and_the_call_does() -> None:
    with serving(fake_engine(), api_keys=("alpha",), cors_origins=(PAGE,)) as served:
        preflight = served.http.options("/v1/chat/completions", headers=PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers[ALLOW] == PAGE
        allowed = preflight.headers["access-control-allow-headers"]
        assert all(name in allowed for name in ("authorization", "x-stainless-lang"))
        refused = served.post(chat_body([user("hello")]), {"origin": PAGE})
        assert refused.status_code == 401
        assert refused.headers[ALLOW] == PAGE, "the page may read why"
        called = served.post(
            chat_body([user("hello")]), {"origin": PAGE, "authorization": "Bearer alpha"}
        )
        assert called.status_code == 200
        assert called.headers[ALLOW] == PAGE
        assert "x-request-id" in called.headers["access-control-expose-headers"].lower()


def test_an_origin_that_is_not_listed_is_refused_and_a_client_without_one_is_served() -> None:
    with serving(fake_engine(), cors_origins=(PAGE,)) as served:
        stranger = {**PREFLIGHT, "origin": "https://other.example"}
        assert served.http.options("/v1/chat/completions", headers=stranger).status_code == 400
        assert (
            ALLOW
            not in served.http.get(
                "/v1/models", headers={"origin": "https://other.example"}
            ).headers
        )
        assert NAME in served.http.get("/v1/models").text


def test_every_origin_is_let_in_with_a_star_and_streams_still_stream() -> None:
    with serving(fake_engine(), cors_origins=("*",)) as served:
        body = {**chat_body([user("hello")]), "stream": True}
        with served.http.stream(
            "POST", "/v1/chat/completions", json=body, headers={"origin": PAGE}
        ) as response:
            assert response.headers[ALLOW] == "*"
            assert "access-control-allow-credentials" not in response.headers
            assert "[DONE]" in response.read().decode()
