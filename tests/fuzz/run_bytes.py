"""Which bytes break a parser? A long run over all targets, guided by coverage.

    python -m tests.fuzz.run_bytes --seconds 3600

Each target runs in a process of its own under atheris, which counts executions, keeps what reaches
new branches, and ends a run that hangs or eats the memory. What breaks the property is written to a
folder, once for each place, and the run goes on. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import subprocess
import sys
import time
import traceback
from hashlib import blake2b
from pathlib import Path
from typing import Any

WEIGHTS = {
    "chat": 5,
    "completions": 2,
    "responses": 5,
    "messages": 5,
    "tokens": 2,
    "json": 1,
    "output": 4,
    "detokenize": 1,
    "template": 3,
    "grammar": 5,
    "session_file": 4,
}
HANG_S = 60
"""Of one input, on a busy machine; `targets.clock` looks at processor time."""
MOST_MEMORY_MB = 3072


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=int, default=3600, help="of all targets together")
    options.add_argument("--rounds", type=int, default=2, help="times that each target gets a part")
    options.add_argument("--keep", type=Path, default=Path("build/fuzz"))
    options.add_argument("--only", choices=sorted(WEIGHTS), action="append")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--child", help=argparse.SUPPRESS)
    given = options.parse_args()
    given.keep.mkdir(parents=True, exist_ok=True)
    if given.child:
        return _child(given.child, given.seconds, given.keep, given.seed)
    weights = {name: WEIGHTS[name] for name in given.only or WEIGHTS}
    each = given.seconds / given.rounds / sum(weights.values())
    runs = []
    for number in range(given.rounds):
        for name, weight in weights.items():
            run = _run(name, max(1, round(each * weight)), given.keep, given.seed + number)
            print(json.dumps(run), flush=True)
            runs.append(run)
    findings = sorted(str(file.name) for file in given.keep.glob("*.txt"))
    print(json.dumps({"targets": _sums(runs), "findings": findings}))
    return 1 if findings else 0


def _run(name: str, seconds: int, keep: Path, seed: int) -> dict[str, Any]:
    """One target in a process of its own, begun again when it was ended by force."""
    until = time.monotonic() + seconds
    run: dict[str, Any] = {"target": name, "seconds": 0, "executions": 0, "coverage": 0}
    while (left := round(until - time.monotonic())) > 0:
        command = [
            sys.executable,
            "-X",
            "faulthandler",
            "-m",
            "tests.fuzz.run_bytes",
            "--child",
            name,
        ]
        command += ["--seconds", str(left), "--keep", str(keep), "--seed", str(seed)]
        began = time.monotonic()
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        text = done.stdout.decode(errors="replace")
        (keep / f"{name}.log").write_text(text[-200_000:])
        run["seconds"] += round(time.monotonic() - began)
        run["executions"] += _last(r"number_of_executed_units:\s+(\d+)", text)
        run["coverage"] = max(run["coverage"], _last(r"cov: (\d+)", text))
        run["features"] = max(run.get("features", 0), _last(r"ft: (\d+)", text))
        peak = _last(r"peak_rss_mb:\s+(\d+)", text)
        run["peak_rss_mb"] = max(run.get("peak_rss_mb", 0), peak)
        run["slowest_s"] = max(
            run.get("slowest_s", 0), _last(r"slowest_unit_time_sec:\s+(\d+)", text)
        )
        if done.returncode != 0:
            run["ended_by"] = [done.returncode, *text.strip().splitlines()[-3:]]
            (keep / f"{name}-{seed}-{left}.ended.txt").write_text(text[-20_000:])
            seed += 1000
    return run


def _last(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    return int(found[-1]) if found else 0


def _sums(runs: list[dict[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for run in runs:
        row = table.setdefault(run["target"], {"seconds": 0, "executions": 0, "coverage": 0})
        row["seconds"] += run["seconds"]
        row["executions"] += run["executions"]
        for key in ("coverage", "features", "peak_rss_mb", "slowest_s"):
            row[key] = max(row.get(key, 0), run.get(key, 0))
    return table


def _child(name: str, seconds: int, keep: Path, seed: int) -> int:
    import atheris

    with atheris.instrument_imports(include=["capserve"]):
        from tests.fuzz import targets

    with targets.stage() as stage:
        target = stage.targets()[name]
        corpus = keep / "corpus" / name
        corpus.mkdir(parents=True, exist_ok=True)
        for data in target.seeds():
            (corpus / blake2b(data, digest_size=10).hexdigest()).write_bytes(data)
        seen: set[str] = set()

        def one(data: bytes) -> None:
            try:
                target.run(data)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
                sign = signature(error)
                if sign not in seen:
                    seen.add(sign)
                    _note(keep, name, sign, data, error)

        def change(data: bytes, most: int, number: int) -> bytes:
            rng = random.Random(number)
            changed = (
                atheris.Mutate(data, most) if rng.random() < 0.05 else target.change(data, rng)
            )
            return changed if len(changed) <= most else changed[:most]

        arguments = [
            *(sys.argv[0], str(corpus), f"-max_total_time={seconds}", f"-timeout={HANG_S}"),
            *(f"-rss_limit_mb={MOST_MEMORY_MB}", f"-seed={seed}", "-print_final_stats=1"),
            *(f"-max_len={target.max_bytes}", "-len_control=0", f"-artifact_prefix={keep}/{name}-"),
        ]
        atheris.Setup(arguments, one, custom_mutator=change)
        atheris.Fuzz()
    return 0


def signature(error: BaseException) -> str:
    """The kind of a failure and where it came from: one finding for each."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "capserve" in f.filename] or frames
    cause = error.__cause__
    if isinstance(error, AssertionError) and cause is not None:
        return f"{type(error).__name__} {signature(cause)}"
    where = own[-1]
    first = re.sub(r"\d+", "N", str(error))[:60] if isinstance(error, AssertionError) else ""
    return f"{type(error).__name__} {Path(where.filename).name}:{where.lineno} {first}"


def _note(keep: Path, name: str, sign: str, data: bytes, error: BaseException) -> None:
    stem = f"{name}-{blake2b(sign.encode(), digest_size=5).hexdigest()}"
    text = keep / f"{stem}.txt"
    if text.exists() and (keep / f"{stem}.input").stat().st_size <= len(data):
        return
    (keep / f"{stem}.input").write_bytes(data)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    lines = "".join(traceback.format_exception(error))[-8000:]
    text.write_text(f"{sign}\npeak {memory} MB, {len(data)} bytes\n{lines}")


if __name__ == "__main__":
    sys.exit(main())
