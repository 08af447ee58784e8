"""Runs the kernel benchmarks; see the package's docstring."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import pkgutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

import benchmarks.kernels as package
from benchmarks.card import card
from benchmarks.kernels import Case, Launch

GRAPH_SECONDS = 0.003
"""Length of one replay: long against the start of a graph, short against a benchmark."""

REPLAYS = 15
COMPILERS = 12


def seconds_of(graph: torch.cuda.CUDAGraph) -> float:
    event: Any = torch.cuda.Event
    began, ended = event(enable_timing=True), event(enable_timing=True)
    began.record()
    graph.replay()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def captured(launches: Sequence[Launch], count: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            launches[i % len(launches)]()
    return graph


def microseconds(launches: Sequence[Launch], replays: int = REPLAYS) -> tuple[float, float]:
    """Median and spread (largest - smallest) of one launch over graph replays."""
    for launch in launches[:2]:
        launch()  # compiles
    torch.cuda.synchronize()
    count = len(launches)
    once = seconds_of(captured(launches, count)) / count
    count = len(launches) * max(1, round(GRAPH_SECONDS / once / len(launches)))
    graph = captured(launches, count)
    seconds_of(graph)
    taken = [seconds_of(graph) / count * 1e6 for _ in range(replays)]
    return median(taken), max(taken) - min(taken)


def copy_gb_per_s() -> float:
    """Bytes read and written a second by a copy of 1 GiB on this card now: the ceiling."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    us, _ = microseconds([lambda: target.copy_(source)])
    return 2 * source.nbytes / us / 1e3


def row_of(case: Case, us: float, spread: float, ceiling: float) -> dict[str, Any]:
    rate = case.floor_bytes / us / 1e3
    return {
        "case": case.name,
        "rows": case.rows,
        "us": round(us, 2),
        "spread_us": round(spread, 2),
        "megabytes": round(case.floor_bytes / 1e6, 3),
        "gb_per_s": round(rate),
        "of_copy": round(rate / ceiling, 3),
    }


def measure(op: str, cases: Iterable[Case], ceiling: float) -> list[dict[str, Any]]:
    rows = []
    for case in cases:
        row = {"op": op} | row_of(case, *microseconds(case.build(None)), ceiling)
        _clear()
        if case.peer is not None:
            row["peer_us"] = round(microseconds(case.peer())[0], 2)
            _clear()
        rows.append(row)
        peer = f"{row['peer_us']:10.1f}" if "peer_us" in row else " " * 10
        print(
            f"{op:14s} {case.name:34s} {case.rows:5d} {row['us']:10.1f} {row['gb_per_s']:7d} "
            f"{row['of_copy']:6.2f} {peer}",
            flush=True,
        )
    return rows


def tune(op: str, cases: Sequence[Case], ceiling: float, seconds: float) -> list[dict[str, Any]]:
    """The best config of every case within `seconds`, shared evenly among the cases."""
    rows: list[dict[str, Any]] = []
    ends = perf_counter() + seconds
    cases = [case for case in cases if case.configs]
    for left, case in zip(range(len(cases), 0, -1), cases, strict=True):
        share = max(1.0, (ends - perf_counter()) / left)
        began = perf_counter()
        tried = _tried(case, case.configs, began + share * (0.6 if case.near else 1.0))
        while case.near and tried and perf_counter() < began + share:
            seen = {repr(entry[2]) for entry in tried}
            best = min(tried, key=lambda entry: entry[0])[2]
            fresh = [config for config in case.near(best) if repr(config) not in seen]
            more = _tried(case, fresh, began + share)
            tried += more
            if not more:
                break
        if not tried:
            continue
        tried.sort(key=lambda entry: entry[0])
        us, spread, best = tried[0]
        row = {"op": op, "config": repr(best), "tried": len(tried)}
        row |= row_of(case, us, spread, ceiling)
        row["all"] = [(round(entry[0], 2), repr(entry[2])) for entry in tried[:12]]
        rows.append(row)
        second = f"then {tried[1][0]:.1f} {tried[1][2]!r}" if len(tried) > 1 else ""
        print(
            f"    {case.table_key or case.name}: {best!r},  # {case.name}, {case.rows} rows: "
            f"{us:.1f} us, {row['gb_per_s']} GB/s, {row['of_copy']:.2f} of copy; "
            f"{len(tried)} tried; {second}",
            flush=True,
        )
    return rows


def _tried(case: Case, configs: Sequence[Any], until: float) -> list[tuple[float, float, Any]]:
    """Microseconds, spread and config of those that compile and fit. Compiling is what takes time:
    it goes on in threads, a batch at a time."""
    tried: list[tuple[float, float, Any]] = []
    for first in range(0, len(configs), COMPILERS):
        if perf_counter() > until:
            break
        batch = configs[first : first + COMPILERS]
        launches = [case.build(config) for config in batch]
        with ThreadPoolExecutor(COMPILERS) as pool:
            fit = list(pool.map(_runs, [each[0] for each in launches]))
        torch.cuda.synchronize()
        for i, config in enumerate(batch):
            if fit[i]:
                us, spread = microseconds(launches[i], replays=5)
                tried.append((us, spread, config))
        launches.clear()
        _clear()
    return tried


def _runs(launch: Launch) -> bool:
    failures = importlib.import_module("triton.errors").TritonError, RuntimeError
    # a new thread has no context until the runtime gives it one, and a kernel that is compiled
    # already loads nothing that would: making its descriptor then fails
    torch.cuda.synchronize()
    try:
        launch()
    except failures as error:
        print(
            f"    left out: {type(error).__name__}: {' '.join(str(error).split())[:200]}",
            flush=True,
        )
        return False
    return True


def _clear() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    found = sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name != "__main__")
    parser = argparse.ArgumentParser(description=package.__doc__)
    parser.add_argument("op", nargs="*", help=f"of {', '.join(found)}; all when left out")
    parser.add_argument("--tune", action="store_true", help="sweep block sizes; print the best")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the sweep of one op")
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--rows", type=int, nargs="*", help="only cases of these rows")
    parser.add_argument("--json", type=Path, help="where to keep the result")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    device = torch.device("cuda")
    ceiling = copy_gb_per_s()
    _clear()
    print(f"copy bandwidth {ceiling:.0f} GB/s on {torch.cuda.get_device_name(device)}")
    print(f"{'op':14s} {'case':34s}  rows         us    GB/s of copy    peer us")
    rows: list[dict[str, Any]] = []
    for op in options.op or found:
        module = importlib.import_module(f"benchmarks.kernels.{op}")
        cases = [
            case
            for case in module.cases(device)
            if options.match in case.name and (not options.rows or case.rows in options.rows)
        ]
        if options.tune:
            rows += tune(op, cases, ceiling, options.seconds)
        else:
            rows += measure(op, cases, ceiling)
    result = {
        "card": card(threads=1) | {"gpu": torch.cuda.get_device_name(device)},
        "copy_gb_per_s": round(ceiling),
        "cases": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"copy_gb_per_s": round(ceiling), "cases": len(rows)}))


if __name__ == "__main__":
    main()
