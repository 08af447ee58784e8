"""How does one agent do the tasks, and what came of it?

`play` gives it a new home and a new project, starts its program once a task, and reads what the
relay saw. The program gets an environment without anything of the user's. Its way to other hosts
leads to the relay, which refuses.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from benchmarks.clients.agents import Agent
from benchmarks.clients.reading import Reading, read
from benchmarks.clients.relay import recorded
from capserve.cli.workbench import PROJECT

TASKS = ("Please run `cat config.toml`.", "Please run `ls`.")
"""In one conversation. Plain enough for nano: it finds the agent's shell, whatever its name."""

PROOFS = ("port = 8080", "test_stats.py")
"""Stands in the result of the task's tool call only if it ran: `config.toml` is in no prompt."""

TASK_TIMEOUT_S = 300.0

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Turn:
    """One start of the agent's program."""

    command: str
    exit_code: int | None
    """None: it did not end in time."""
    seconds: float
    printed: str
    worked: bool
    """The tool ran, and its result came back to the server."""
    requests: tuple[Reading, ...]


@dataclass(frozen=True)
class Account:
    agent: str
    version: str
    dialect: str
    turns: tuple[Turn, ...]
    elsewhere: tuple[str, ...]
    """What it wanted from other hosts, and didn't get."""

    @property
    def requests(self) -> list[Reading]:
        return [request for turn in self.turns for request in turn.requests]

    @property
    def complaints(self) -> list[str]:
        wrong = [r.complaint for r in self.requests if r.complaint]
        other = sorted({r.dialect for r in self.requests if r.dialect} - {self.dialect})
        late = [
            f"not done within {TASK_TIMEOUT_S:g} s: {t.command}"
            for t in self.turns
            if t.exit_code is None
        ]
        return [*wrong, *late, *(f"speaks {dialect}" for dialect in other)]

    @property
    def worked(self) -> bool:
        return all(turn.worked and turn.exit_code == 0 for turn in self.turns)


def play(agent: Agent, programs: Path, server: str, folder: Path) -> Account:
    """All tasks, in a new home and a new project below `folder`."""
    home, project, scratch = (folder / name for name in ("home", "project", "tmp"))
    for each in (home, project, scratch):
        each.mkdir(parents=True)
    for name, text in PROJECT.items():
        (project / name).write_text(text, encoding="utf-8")
    turns = []
    with recorded(server) as (relay, url):
        agent.prepare(home, url)
        env = {
            **_private(home, scratch),
            **_refused_elsewhere(url),
            "PATH": os.pathsep.join([str(programs), os.defpath]),
            **agent.variables(url),
        }
        for number, (task, proof) in enumerate(zip(TASKS, PROOFS, strict=True)):
            seen = len(relay.exchanges)
            command = agent.command(task, go_on=number > 0)
            began = perf_counter()
            code, printed = _run(command, project, env)
            requests = [read(exchange) for exchange in relay.exchanges[seen:]]
            results = [result for request in requests for result in request.results]
            turns.append(
                Turn(
                    command=shlex.join(command),
                    exit_code=code,
                    seconds=round(perf_counter() - began, 1),
                    printed=_plain(
                        printed, {str(folder): "", str(programs.parent): "", url: "http://server"}
                    ),
                    worked=any(proof in result for result in results),
                    requests=tuple(replace(request, results=()) for request in requests),
                )
            )
    wanted = tuple(sorted(set(relay.elsewhere)))
    return Account(agent.title, agent.version, agent.dialect, tuple(turns), wanted)


def _plain(printed: str, places: Mapping[str, str]) -> str:
    """Without colours, and without the names of folders that differ from run to run."""
    for place, name in places.items():
        printed = printed.replace(place, name)
    return COLOURS.sub("", printed)


def _private(home: Path, scratch: Path) -> dict[str, str]:
    """Nothing of the user's environment, files or configuration."""
    return {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_DATA_HOME": str(home / ".local" / "share"),
        "XDG_STATE_HOME": str(home / ".local" / "state"),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "TMPDIR": str(scratch),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_COLOR": "1",
    }


def _refused_elsewhere(url: str) -> dict[str, str]:
    names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
    here = "127.0.0.1,localhost"
    return {**dict.fromkeys(names, url), "NO_PROXY": here, "no_proxy": here}


def _run(command: Sequence[str], folder: Path, env: dict[str, str]) -> tuple[int | None, str]:
    """Exit code, or None when the time was over, and what was printed. Leaves no child behind."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    code: int | None = None
    try:
        printed, _ = process.communicate(timeout=TASK_TIMEOUT_S)
        code = process.returncode
    except subprocess.TimeoutExpired:
        _end_group(process.pid)
        printed, _ = process.communicate()
    finally:
        _end_group(process.pid)
    return code, printed


def _end_group(leader: int) -> None:
    """The agent's own session: itself and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
