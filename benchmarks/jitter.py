"""What do 1 MB requests cost everybody else, while they are parsed, rendered and tokenized?

From outside, on a server process: round trips of `/health` every 5 ms and the time between two
deltas of a stream (a decode step, and its way out), in three kinds of phases that alternate: quiet;
with 1 MB histories that are new; with one that is resent. The model is the embedded one, told to
have a context that such a history fits; `--max-prompt-tokens` refuses it once it is prepared, so
that the engine has no part in it. A lone client sends them one after the other.

From inside, in this process: a ticker of 5 ms, as the event loop is one, and decode steps of the
engine, each beside a thread that prepares the same bodies; and the time of each stage of that.

`net` leaves out the time that a thread waited for a processor, as Linux counts it: what remains is
the interpreter's lock, and the work itself. The limit is 2 ms at p99, with nothing left out: of the
ticker, and of what a decode step is longer than in the quiet. Both numbers are told; `net` alone
decides nothing, it only says how much of the other one the machine was busy with something else.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from benchmarks.card import card, write
from benchmarks.scenarios.material import source
from benchmarks.scenarios.server import OwnServer, leave_no_server_behind
from capserve.api import translate
from capserve.api.schemas import ChatRequest
from capserve.api.strict_json import parse_object
from capserve.api.validation import validated
from capserve.cli.compose import load_engine
from capserve.cli.serve import SWITCH_INTERVAL_S
from capserve.config import load_settings
from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import Sampling
from capserve.nano import checkpoint_dir
from capserve.text.prompt import PromptBuilder
from capserve.text.template import ChatTemplate
from capserve.text.tokenizer import Tokenizer

BODY_CHARS, MESSAGES = 1_000_000, 400
CONTEXT = 400_000
TICK_S = 0.005
LIMIT_MS = 2.0
KINDS = ("quiet", "new", "resent")
STAGES = ("parse", "validate", "translate", "digests", "render and tokenize")
RUNS = 6
STEPS = 2000
"""Of one reply; then the next begins, so that the context stays short."""
STEPS = 2000
"""Of one reply; then the next begins, so that the context stays short."""
NOTICED_S = 0.0001
"""A shorter wait of a thread that spins is none."""


def big_body(seed: int) -> bytes:
    """A request of at least `BODY_CHARS` in `MESSAGES` messages that no other seed gives."""
    size = BODY_CHARS // MESSAGES
    messages = [
        {
            "role": ("user", "assistant")[index % 2],
            "content": source(seed * MESSAGES + index, size),
        }
        for index in range(MESSAGES)
    ]
    messages.append({"role": "user", "content": "Go on."})
    return json.dumps({"model": "nano", "messages": messages}).encode()


# -- from outside ------------------------------------------------------------------------------


@contextmanager
def probing(kind: str, url: str, first_line: str = "") -> Iterator[list[float]]:
    """Fills the list, when the block ends, with what the probe measured meanwhile."""
    where = urlsplit(url)
    script = str(Path(__file__).with_name("probe.py"))
    taken: list[float] = []
    with subprocess.Popen(
        [sys.executable, script, kind, str(where.hostname), str(where.port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as probe:
        assert probe.stdin is not None
        assert probe.stdout is not None
        if first_line:
            probe.stdin.write(first_line + "\n")
            probe.stdin.flush()
        if probe.stdout.readline() != "ready\n":
            raise RuntimeError(f"the {kind} probe could not measure")
        try:
            yield taken
        finally:
            out, _ = probe.communicate(timeout=60)  # closes its input, and so ends it
        taken += json.loads(out)


def roomy_model(folder: Path) -> Path:
    """The embedded checkpoint with a context of `CONTEXT` tokens."""
    copy = folder / "model"
    shutil.copytree(checkpoint_dir(), copy)
    file = copy / "config.json"
    config = json.loads(file.read_text())
    for part in (config, config.get("text_config", {})):
        if "max_position_embeddings" in part:
            part["max_position_embeddings"] = CONTEXT
    file.write_text(json.dumps(config))
    return copy


def endless() -> str:
    config = json.loads((checkpoint_dir() / "generation_config.json").read_text())
    return json.dumps(
        {
            "model": "nano",
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "stream": True,
            "temperature": 0,
            "max_tokens": 20_000,
            "logit_bias": {str(token): -100 for token in config["eos_token_id"]},
        }
    )


def phase(kind: str, url: str, seconds: float, seeds: Iterator[int]) -> dict[str, list[float]]:
    """`/health` round trips, gaps between deltas, and times of the big requests, in ms."""
    fixed = big_body(0)
    # Made before the clock starts: the generator shares this machine's processors.
    fresh = [big_body(next(seeds)) for _ in range(int(seconds * 2))] if kind == "new" else []
    requests: list[float] = []
    with (
        httpx.Client(base_url=url, timeout=120) as client,
        probing("deltas", url, endless()) as gaps,
        probing("health", url) as polls,
    ):
        until = perf_counter() + seconds
        while (began := perf_counter()) < until:
            if kind == "quiet":
                time.sleep(until - began)
                continue
            body = fixed if kind == "resent" else fresh.pop()
            reply = client.post(
                "/chat/completions", content=body, headers={"content-type": "application/json"}
            )
            if reply.status_code != 413:
                raise RuntimeError(f"not prepared whole: {reply.text[:200]}")
            requests.append((perf_counter() - began) * 1e3)
            if kind == "new" and not fresh:
                break
    return {"health_ms": polls, "gap_ms": gaps, "request_ms": requests}


def outside(rounds: int, seconds: float) -> dict[str, Any]:
    taken: dict[str, list[dict[str, list[float]]]] = {kind: [] for kind in KINDS}
    seeds = iter(range(1, 10_000))
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="capserve-jitter-"))
        model = roomy_model(Path(folder))
        settings = {"model": str(model), "served_model_name": "nano", "threads": 1}
        bounds = {"disk_budget_bytes": 0, "max_prompt_tokens": 30_000}
        server = stack.enter_context(OwnServer({**settings, **bounds}))
        phase("resent", server.url, 1.0, seeds)  # warm-up, and the history is known from now on
        for turn in range(rounds):
            for kind in KINDS if turn % 2 == 0 else KINDS[::-1]:
                taken[kind].append(phase(kind, server.url, seconds, seeds))
    return {kind: _phases(phases) for kind, phases in taken.items()}


def _phases(phases: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Per series: the median over phases of each percentile, which one bad phase does not move."""
    row: dict[str, Any] = {}
    for name in ("health_ms", "gap_ms"):
        series = [each[name] for each in phases]
        row[name] = {
            **{f"p{p}": median(float(np.percentile(s, p)) for s in series) for p in (50, 95, 99)},
            "max": max(map(max, series)),
            "p99_of_each": [round(float(np.percentile(s, 99)), 2) for s in series],
            "n": sum(map(len, series)),
        }
    requests = [ms for each in phases for ms in each["request_ms"]]
    row["requests"] = len(requests)
    row["request_ms"] = median(requests) if requests else None
    return row


# -- from inside -------------------------------------------------------------------------------


class Beside:
    """A thread beside the work; `late` has a pair of milliseconds, gross and net, per wait."""

    def __init__(self, watch: Callable[[Beside], None], *, for_lock: bool = True) -> None:
        """`watch` runs in the thread until `ended`, and calls `note` for each wait.

        `for_lock`: what it waits for is the lock alone, so that net leaves out the time in which
        the working thread, which has it, waits for a processor.
        """
        self._watch = watch
        self._looks = threading.Event()
        self._queued_s = 0.0
        self._files: list[int] = []
        self._others = [threading.get_native_id()] if for_lock else []
        self.ended = False
        self.late: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Beside:
        self._thread.start()
        self._looks.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = True
        self._thread.join()

    def _run(self) -> None:
        for thread in (threading.get_native_id(), *self._others):
            self._files.append(os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY))
        self._waited_for_processor_s()
        self._looks.set()
        self._watch(self)
        for file in self._files:
            os.close(file)

    def note(self, late_s: float) -> None:
        queued_s = self._waited_for_processor_s()
        self.late.append((late_s * 1e3, max(0.0, late_s - queued_s) * 1e3))

    def _waited_for_processor_s(self) -> float:
        """Since it was last asked."""
        before = self._queued_s
        self._queued_s = sum(int(os.pread(file, 99, 0).split()[1]) for file in self._files) / 1e9
        return self._queued_s - before


def tick(beside: Beside) -> None:
    """Sleeps of `TICK_S`, as an event loop's timer."""
    while not beside.ended:
        began = perf_counter()
        time.sleep(TICK_S)
        beside.note(perf_counter() - began - TICK_S)


def steps(engine: TorchEngine) -> Callable[[Beside], None]:
    """Decode steps without drafts, one after the other; notes how long each took."""
    prompt = np.arange(100, 164, dtype=np.int32)

    def decode(beside: Beside) -> None:
        while not beside.ended:
            engine.reset()
            engine.extend(prompt)
            engine.begin(Sampling(drafts=0), prompt)
            for _ in range(STEPS):
                began = perf_counter()
                engine.step()
                beside.note(perf_counter() - began)
                if beside.ended:
                    break

    return decode


def inside() -> dict[str, Any]:
    """The ticker and the engine per kind of body, and each stage with its cost."""
    path = checkpoint_dir()
    tokenizer = Tokenizer.from_dir(path)
    prompts = PromptBuilder(tokenizer, ChatTemplate.from_dir(path))
    fixed = big_body(0)
    run_stages(fixed, prompts, lambda _, work: work())
    bodies = {"new": [big_body(seed) for seed in range(20_000, 20_000 + 2 * RUNS)]}
    bodies["resent"] = [fixed] * (60 * RUNS)
    gc.collect()
    gc.freeze()  # as the server does: a full collection would be measured else
    with Beside(tick) as quiet:
        time.sleep(2.0)
    ticker = {"quiet": _late_row(quiet)}
    engine = load_engine(load_settings({"threads": 1}), path, tokenizer.vocab_size)
    with Beside(steps(engine), for_lock=False):
        time.sleep(2.0)  # kernels are compiled
    with Beside(steps(engine), for_lock=False) as quiet:
        time.sleep(2.0)
    step = {"quiet": _late_row(quiet)}
    stages = {}
    for kind in ("new", "resent"):
        first = bodies[kind][: len(bodies[kind]) // 2]
        with Beside(tick) as beside:
            rows = _costs(first, prompts)
        ticker[kind] = _late_row(beside)
        with Beside(steps(engine), for_lock=False) as beside:
            _costs(bodies[kind][len(first) :], prompts)
        step[kind] = _late_row(beside)
        stages[kind] = rows
    return {"ticker": ticker, "step": step, "stages": stages}


def _late_row(beside: Beside) -> dict[str, Any]:
    columns = zip(*beside.late, strict=True)
    row: dict[str, Any] = {"n": len(beside.late)}
    for name, late in zip(("gross_ms", "net_ms"), columns, strict=True):
        row[name] = {f"p{p}": float(np.percentile(late, p)) for p in (50, 95, 99)}
        row[name]["max"] = max(late)
    return row


def _costs(bodies: list[bytes], prompts: PromptBuilder) -> list[dict[str, Any]]:
    wall: dict[str, list[float]] = {stage: [] for stage in STAGES}
    busy: dict[str, list[float]] = {stage: [] for stage in STAGES}

    def timed(stage: str, work: Callable[[], Any]) -> Any:
        began, began_busy = perf_counter(), time.thread_time()
        result = work()
        wall[stage].append((perf_counter() - began) * 1e3)
        busy[stage].append((time.thread_time() - began_busy) * 1e3)
        return result

    for body in bodies:
        run_stages(body, prompts, timed)
    return [
        {"stage": stage, "ms": median(wall[stage]), "thread_cpu_ms": median(busy[stage])}
        for stage in STAGES
    ]


def run_stages(
    body: bytes, prompts: PromptBuilder, run: Callable[[str, Callable[[], Any]], Any]
) -> None:
    """What `api/chat.py` does to a body, stage by stage, each by way of `run`."""
    raw = run("parse", lambda: parse_object(body))
    request = run("validate", lambda: validated(ChatRequest, raw))
    conversation = run("translate", lambda: translate.conversation(request, raw, prompts))
    chain = run("digests", lambda: prompts.chain(conversation))
    run("render and tokenize", lambda: prompts.build(conversation, None, chain, 10_000_000))


# -- all of it ---------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> str:
    lines = [
        "| 1 MB requests | /health ms p50 / p95 / p99 / max | delta gap ms p50 / p95 / p99 / max "
        "| requests | ms each |",
        "|---|---|---|---|---|",
    ]
    for kind, row in result["outside"].items():
        cells = [
            " / ".join(f"{row[name][p]:.1f}" for p in ("p50", "p95", "p99", "max"))
            for name in ("health_ms", "gap_ms")
        ]
        each = "-" if row["request_ms"] is None else f"{row['request_ms']:.0f}"
        lines.append(f"| {kind} | {cells[0]} | {cells[1]} | {row['requests']} | {each} |")
    for what, key in (("5 ms ticker, ms late", "ticker"), ("decode step, ms", "step")):
        lines += ["", f"| 1 MB requests | {what}, net: p50 / p95 / p99 / max | gross |"]
        lines.append("|---|---|---|")
        for kind, row in result["inside"][key].items():
            net, gross = (
                " / ".join(f"{row[name][p]:.2f}" for p in ("p50", "p95", "p99", "max"))
                for name in ("net_ms", "gross_ms")
            )
            lines.append(f"| {kind} | {net} | {gross} |")
    lines += ["", "| history | stage | ms | thread CPU ms |", "|---|---|---|---|"]
    for kind, rows in result["inside"]["stages"].items():
        lines += [
            f"| {kind} | {row['stage']} | {row['ms']:.1f} | {row['thread_cpu_ms']:.1f} |"
            for row in rows
        ]
    return "\n".join(lines)


def verdict(inside: dict[str, Any]) -> dict[str, Any]:
    """What the two threads lose at p99, in ms, gross and net; `holds` is of the gross numbers."""
    p99 = {
        name: {
            "event loop": {kind: inside["ticker"][kind][name]["p99"] for kind in KINDS},
            "decode step": {
                kind: inside["step"][kind][name]["p99"] - inside["step"]["quiet"][name]["p99"]
                for kind in KINDS
            },
        }
        for name in ("gross_ms", "net_ms")
    }
    lost = [ms for row in p99["gross_ms"].values() for ms in row.values()]
    return {"p99": p99, "holds": all(ms <= LIMIT_MS for ms in lost)}


def told(result: dict[str, Any]) -> str:
    """The verdict in one line."""
    parts = [
        f"{thread} "
        + ", ".join(
            f"{kind} {row[kind]:.2f} (net {result['p99']['net_ms'][thread][kind]:.2f})"
            for kind in KINDS
        )
        for thread, row in result["p99"]["gross_ms"].items()
    ]
    holds = "yes" if result["holds"] else "no"
    return f"within {LIMIT_MS:g} ms at p99: {holds} (ms lost: {'; '.join(parts)})"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0, help="of one phase")
    parser.add_argument("--inside", action="store_true", help="leave the server out; write nothing")
    parser.add_argument("--switch-interval", type=float, default=SWITCH_INTERVAL_S)
    options = parser.parse_args()
    leave_no_server_behind()
    sys.setswitchinterval(options.switch_interval)  # the server sets its own
    result: dict[str, Any] = {"card": card(threads=1), "limit_ms": LIMIT_MS}
    result["body_bytes"] = len(big_body(0))
    result["switch_interval_s"] = options.switch_interval
    result["inside"] = inside()
    result["outside"] = {} if options.inside else outside(options.rounds, options.seconds)
    result |= verdict(result["inside"])
    print(json.dumps(result["card"]))
    print(table(result))
    print(told(result))
    if not options.inside:
        write("jitter", result)
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
