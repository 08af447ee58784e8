"""Which server is asked, and how does it come back after an end?

`OwnServer` is capserve on the embedded model in a process of its own, with a capsule directory that
outlives it. `ForeignServer` is any base URL; a command of the user's may restart it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import httpx

from capserve.config import Settings, flag_name

START_TIMEOUT_S = 120.0
SETTLE_TIMEOUT_S = 20.0
"""A kill waits this long for writes that `/health` says are under way."""


class Server(Protocol):
    """Something with a base URL, `/v1` included."""

    @property
    def url(self) -> str: ...
    @property
    def can_restart(self) -> bool: ...
    def restart(self, *, kill: bool) -> None:
        """End the server, at once when `kill`, and wait until it answers again."""
        ...


class ForeignServer:
    def __init__(self, url: str, command: str | None) -> None:
        self.url = url.rstrip("/")
        self._command = command

    @property
    def can_restart(self) -> bool:
        return self._command is not None

    def restart(self, *, kill: bool) -> None:
        """The command sees CAPSERVE_BENCH_SIGNAL: TERM or KILL."""
        assert self._command is not None
        env = {**os.environ, "CAPSERVE_BENCH_SIGNAL": "KILL" if kill else "TERM"}
        subprocess.run(self._command, shell=True, check=True, env=env)
        wait_until_answers(f"{self.url}/models")


class OwnServer:
    """Settings by field name; those that this version of capserve does not have are left out."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="capserve-bench-")
        wanted = {"capsule_dir": str(Path(self._folder.name) / "capsules"), **settings}
        self._settings = {k: v for k, v in wanted.items() if k in Settings.model_fields}
        self._port = 0
        self._process: subprocess.Popen[str] | None = None
        self.log: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    @property
    def can_restart(self) -> bool:
        return True

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(signal.SIGTERM)
        self._folder.cleanup()

    def restart(self, *, kill: bool) -> None:
        if kill:
            self._wait_written()
        self._end(signal.SIGKILL if kill else signal.SIGTERM)
        self._start()

    def _start(self) -> None:
        flags = {flag_name(name): value for name, value in self._settings.items()}
        words = [str(word) for flag in flags.items() for word in flag]
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", "from capserve.cli.main import main; main()"),
                *("serve", "--port", str(self._port), *words),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._process = process
        assert process.stdout is not None
        for line in process.stdout:
            self.log.append(line)
            if found := re.search(r"served at http://[\d.]+:(\d+)/v1", line):
                self._port = int(found[1])
                break
        else:
            raise RuntimeError("the server never listened:\n" + "".join(self.log[-20:]))
        # A pipe that nobody empties would stop the server at its next log line.
        threading.Thread(target=self.log.extend, args=(process.stdout,), daemon=True).start()
        wait_until_answers(f"{self.url}/models")

    def _end(self, with_signal: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(with_signal)
        self._process.wait(60)

    def _wait_written(self) -> None:
        """What is promised of a kill is about what was written: let pending writes end first."""
        until = time.monotonic() + SETTLE_TIMEOUT_S
        while time.monotonic() < until:
            report = httpx.get(self.url.removesuffix("/v1") + "/health", timeout=10).json()
            if not find_field(report, "pending_bytes"):
                return
            time.sleep(0.05)


def leave_no_server_behind() -> None:
    """For a command's main: SIGTERM ends it as an error does, and with it the servers it made."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def wait_until_answers(url: str) -> None:
    until = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            if httpx.get(url, timeout=5).status_code < 500:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > until:
            raise RuntimeError(f"{url} did not answer within {START_TIMEOUT_S:.0f} s")
        time.sleep(0.1)


def find_field(report: Any, name: str) -> Any:
    """The first value of a key `name` anywhere in nested objects; None without one."""
    if not isinstance(report, dict):
        return None
    if name in report:
        return report[name]
    found = (find_field(value, name) for value in report.values())
    return next((value for value in found if value is not None), None)
