"""Five thousand requests that the document allows, or nearly: what does the server answer?

    python -m tests.fuzz.run_api --cases 5000
    python -m tests.fuzz.run_api --cases 500 --nano

The server is a process of its own on loopback, over the fake engine, or as it is started for the
embedded model. Prints a line for each operation and every failure once; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fuzz.api import Run, Tally, failures


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--cases", type=int, default=5000)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--nano", action="store_true", help="the embedded model, not the fake")
    options.add_argument("--only", default="/", help="paths that begin with this")
    given = options.parse_args()
    began = time.monotonic()
    with _nano() if given.nano else _fake() as (url, process_id):
        run = Run(url, given.seed)
        before = _resident_mb(process_id)
        tallies = run.all(given.cases, given.only)
        after = _resident_mb(process_id)
    for name, tally in tallies.items():
        statuses = ", ".join(f"{status}: {n}" for status, n in sorted(tally.statuses.items()))
        print(f"{name:46} {tally.cases:5}   {statuses:44} slowest {tally.slowest_ms:7.0f} ms")
    found = list(failures(tallies))
    for failure in found:
        print(f"--- {failure}")
    print(json.dumps(_summary(given, tallies, len(found), before, after, began)))
    return 1 if found else 0


def _summary(
    given: argparse.Namespace,
    tallies: dict[str, Tally],
    found: int,
    before_mb: int,
    after_mb: int,
    began: float,
) -> dict[str, Any]:
    return {
        "engine": "nano" if given.nano else "fake",
        "seed": given.seed,
        "cases": sum(tally.cases for tally in tallies.values()),
        "failures": found,
        "server_faults": sum(
            n for t in tallies.values() for s, n in t.statuses.items() if s >= 500
        ),
        "slowest_ms": round(max(tally.slowest_ms for tally in tallies.values())),
        "server_mb_before": before_mb,
        "server_mb_after": after_mb,
        "seconds": round(time.monotonic() - began),
    }


@contextmanager
def _fake() -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "tests.fuzz.serve"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        url = process.stdout.readline().strip()
        assert url, "the server did not start"
        yield url, process.pid
        process.stdin.close()


@contextmanager
def _nano() -> Iterator[tuple[str, int]]:
    from tests.process import server_process

    with (
        tempfile.TemporaryDirectory() as folder,
        server_process(Path(folder), max_output_tokens=12) as server,
    ):
        yield server.url, server.process.pid


def _resident_mb(process_id: int) -> int:
    """Memory that the process has now."""
    text = Path(f"/proc/{process_id}/status").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) // 1024


if __name__ == "__main__":
    sys.exit(main())
