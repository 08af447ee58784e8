"""Does `python -m benchmarks.clients` see what happens between an agent and the server?

A small program plays the agent. The server is real, the engine a fake that speaks chosen replies.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import NAME, Replies, fake_engine, serving

from benchmarks.clients import trial
from benchmarks.clients.__main__ import verdict
from benchmarks.clients.agents import CHAT, Agent
from benchmarks.clients.reading import read
from benchmarks.clients.relay import Exchange, recorded
from benchmarks.clients.trial import Account, play

CALL = "<tool_call>\n<function=shell>\n<parameter=cmd>\nls\n</parameter>\n</function>\n</tool_call>"
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}

AGENT = """
import json, sys, urllib.request
url, task = sys.argv[1:]
shell = {"name": "shell", "parameters": SCHEMA}
messages = [{"role": "user", "content": task}]
for _ in range(2):
    body = {"model": "nano", "messages": messages, "enable_thinking": False,
            "tools": [{"type": "function", "function": shell}]}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages.append(message)
    for call in message.get("tool_calls", ()):
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": ANSWER})
    if not message.get("tool_calls"):
        break
print(messages[-1]["content"])
"""


class Script(Agent):
    name, package, version = "script", "none", "0"

    def __init__(self, text: str) -> None:
        super().__init__(CHAT)
        self.text = text
        self.url = ""

    def prepare(self, home: Path, url: str) -> None:
        self.url = url

    def command(self, task: str, *, go_on: bool) -> list[str]:
        return [sys.executable, "-c", self.text, self.url, task]


@pytest.fixture
def server() -> Iterator[str]:
    replies = Replies()
    replies.say = {"Please run": CALL, "tool_response": "Done."}
    with serving(fake_engine(replies)) as running:
        yield running.url


def played(text: str, server: str, folder: Path) -> Account:
    return play(Script(text), folder, server, folder)


def working(answer: str) -> str:
    return AGENT.replace("SCHEMA", repr(SCHEMA)).replace("ANSWER", repr(answer))


def test_a_tool_that_ran_is_seen_with_its_requests_and_tokens(server: str, tmp_path: Path) -> None:
    account = played(working(f"{trial.PROOFS[0]} {trial.PROOFS[1]}"), server, tmp_path)
    assert verdict([account]) == []
    assert [turn.printed for turn in account.turns] == ["Done.\n", "Done.\n"]
    for turn in account.turns:
        first, second = turn.requests
        assert (first.calls, second.calls) == (("shell",), ())
        assert (first.status, first.dialect, first.left) == (200, "chat", False)
        assert second.cached_tokens > first.cached_tokens >= 0
        assert second.written_tokens > 0


def test_a_call_whose_tool_did_not_run_is_not_enough(server: str, tmp_path: Path) -> None:
    account = played(working("no such tool"), server, tmp_path)
    assert account.requests
    assert verdict([account]) == ["script: no tool ran in every task"]


def test_a_refused_request_is_a_complaint_even_if_the_program_is_content(
    server: str, tmp_path: Path
) -> None:
    text = working(" ".join(trial.PROOFS))
    extra = """
try:
    urllib.request.urlopen(urllib.request.Request(url + "/v1/chat/completions", b"{}",
                                                  {"content-type": "application/json"}))
except OSError as error:
    print(error)
"""
    account = played(text + extra, server, tmp_path)
    assert account.worked
    complaints = verdict([account])
    assert len(complaints) == 2  # one a task
    assert all(c.startswith("script: 400: ") and "messages" in c for c in complaints)


def test_a_program_that_sends_nothing_does_not_pass(server: str, tmp_path: Path) -> None:
    account = played("print('port = 8080 test_stats.py')", server, tmp_path)
    assert verdict([account]) == [
        "script: sent no request",
        "script: no tool ran in every task",
    ]


def test_a_program_that_hangs_is_ended_together_with_what_it_started(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "TASK_TIMEOUT_S", 1.0)
    # The child has the program's output: reading that would never end if the child lived on.
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'], stdin=0)"
    hang = "import os; r, w = os.pipe(); os.dup2(r, 0); print('begun', flush=True); " + child
    account = played(hang, server, tmp_path)
    assert [turn.exit_code for turn in account.turns] == [None, None]
    assert all(turn.printed == "begun\n" for turn in account.turns)
    assert any("not done within 1 s" in complaint for complaint in account.complaints)


def test_other_hosts_are_refused_and_remembered(server: str, tmp_path: Path) -> None:
    text = """
import urllib.error, urllib.request
for url in ("http://example.com/a", "https://example.com/b"):
    try:
        urllib.request.urlopen(url, timeout=10)
    except OSError as error:
        print(error)
"""
    account = played(text, server, tmp_path)
    assert account.elsewhere == ("CONNECT example.com:443", "GET http://example.com/a")
    assert account.turns[0].printed.count("403") == 2


def test_nothing_of_the_users_environment_reaches_the_program(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the user's")
    text = "import os; print(os.environ.get('OPENAI_API_KEY'), os.path.expanduser('~'))"
    account = played(text, server, tmp_path)
    assert account.turns[0].printed == "None /home\n"  # the folder's name is left out


TURNS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Please run ls"}],
        "tools": [{"type": "function", "function": {"name": "shell", "parameters": SCHEMA}}],
        "enable_thinking": False,
    },
    "/v1/responses": {
        "input": "Please run ls",
        "tools": [{"type": "function", "name": "shell", "parameters": SCHEMA}],
        "enable_thinking": False,
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": "Please run ls"}],
        "max_tokens": 100,
        "tools": [{"name": "shell", "input_schema": SCHEMA}],
    },
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", TURNS)
def test_each_dialect_is_read_and_a_stream_without_its_last_event_is_a_complaint(
    server: str, path: str, stream: bool
) -> None:
    with recorded(server) as (relay, url):
        body = {"model": NAME, "stream": stream, **TURNS[path]}
        assert httpx.post(url + path, json=body).status_code == 200
    (exchange,) = relay.exchanges
    reading = read(exchange)
    assert (reading.complaint, reading.calls, reading.left) == (None, ("shell",), False)
    assert reading.read_tokens + reading.cached_tokens > 0
    assert reading.written_tokens > 0
    if stream:
        cut = exchange.reply[: exchange.reply.rindex(b"data: ")]
        shorter = Exchange("POST", path, exchange.body, 200, bytearray(cut), whole=True)
        assert str(read(shorter).complaint).startswith("no last event")
        left = Exchange("POST", path, exchange.body, 200, exchange.reply[:-20])
        assert (read(left).complaint, read(left).left) == (None, True)


@pytest.mark.parametrize("path", TURNS)
def test_an_error_event_in_a_stream_is_a_complaint(path: str) -> None:
    event = {"type": "error", "error": {"message": "out of luck"}}
    reply = f"event: error\ndata: {json.dumps(event)}\n\n".encode()
    exchange = Exchange("POST", path, b"{}", 200, bytearray(reply), whole=True)
    assert "out of luck" in str(read(exchange).complaint)


def test_a_server_that_is_gone_is_a_complaint() -> None:
    with recorded("http://127.0.0.1:9") as (relay, url):
        assert httpx.post(url + "/v1/messages", json={}).status_code == 502
    assert "502" in str(read(relay.exchanges[0]).complaint)
