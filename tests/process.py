"""A server as a person starts it: a process of its own, on the embedded model and a free port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

WAIT_S = 120.0
"""Longest that a busy machine may take for one thing."""


@dataclass(frozen=True)
class ServerProcess:
    process: subprocess.Popen[str]
    url: str
    """Without `/v1`."""
    http: httpx.Client

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=WAIT_S
        )

    def terminate(self) -> None:
        """As a person, or a supervisor, stops it."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(WAIT_S) == 0

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT_S)

    def wait_durable(self, session_id: str) -> None:
        """Until its newest state is on disk."""
        until = time.monotonic() + WAIT_S
        while True:
            session = self.http.get(f"/v1/sessions/{session_id}").json()
            if session["boundaries"] and session["boundaries"][-1]["durable"]:
                return
            assert time.monotonic() < until, f"never on disk: {session}"


@contextmanager
def server_process(capsules: Path, **flags: Any) -> Iterator[ServerProcess]:
    """`capserve serve` with its capsules below `capsules`; ended with the block, if not before.

    `flags`: more of them, with _ for -.
    """
    chosen: Mapping[str, Any] = {
        "port": 0,
        "capsule_dir": capsules,
        "threads": 1,
        "prefill_chunk": 64,
        "max_model_len": 2048,
        **flags,
    }
    words = [str(w) for name, v in chosen.items() for w in (f"--{name.replace('_', '-')}", v)]
    process = subprocess.Popen(
        [sys.executable, "-c", "from capserve.cli.main import main; main()", "serve", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    said: list[str] = []
    reader: threading.Thread | None = None
    try:
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"served at (http://[\d.]+:\d+)/v1", line):
                break
        else:
            pytest.fail("the server never listened:\n" + "".join(said))
        # A pipe that nobody empties would stop the server at its next log line.
        reader = threading.Thread(target=process.stdout.read, daemon=True)
        reader.start()
        with httpx.Client(base_url=found[1], timeout=WAIT_S) as client:
            yield ServerProcess(process, found[1], client)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(WAIT_S)
        if reader is not None:
            reader.join(WAIT_S)
        process.stdout.close()
