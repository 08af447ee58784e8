"""What was measured, where, on which commit, and against which ceiling?

Every benchmark writes one JSON file with a card into benchmarks/results and prints its last line as
JSON too.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def card(threads: int) -> dict[str, Any]:
    """The machine, the commit and the command of this run."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
        "command": " ".join(["python", "-m", *_module(), *sys.argv[1:]]),
        "load_before": round(os.getloadavg()[0], 2),
    }


def matmul_gflops(rows: int = 512, inner: int = 1024, outer: int = 2048) -> float:
    """Float32 matmul rate of torch on this machine now: the ceiling of prefill."""
    a, b = torch.randn(rows, inner), torch.randn(inner, outer)
    best = min(_seconds(lambda: a @ b) for _ in range(20))
    return 2 * rows * inner * outer / best / 1e9


def read_gb_per_s(mebibytes: int = 256) -> float:
    """Bytes a second of a float32 copy that fits no cache, read and written counted."""
    a = torch.empty(mebibytes * 2**18)
    b = torch.empty_like(a)
    best = min(_seconds(lambda: b.copy_(a)) for _ in range(8))
    return 2 * a.nbytes / best / 1e9


def spread(samples: Sequence[float]) -> dict[str, float]:
    ordered = sorted(samples)
    return {
        "min": ordered[0],
        "p50": median(ordered),
        "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "max": ordered[-1],
        "n": len(ordered),
    }


def write(name: str, result: dict[str, Any]) -> None:
    """Keep the result beside its card, and make it the last line of the output."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(result, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(json.dumps(result))


def _seconds(call: Any) -> float:
    began = perf_counter()
    call()
    return perf_counter() - began


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def _module() -> list[str]:
    main = Path(sys.argv[0])
    return [f"benchmarks.{main.parent.name if main.stem == '__main__' else main.stem}"]
