"""How long does a short request wait behind a long one, and what does the long one lose?

Two servers on the embedded model, one for each schedule, alternate in one session. A short request
(about 30 tokens, 16 to write) comes while the other turn reads 16k tokens, or while it writes 500.
Each disturbed turn stands beside an undisturbed one of the same prompt, read cold under a fresh
`cache_salt`, in turns first and second. Rounds alternate between greedy and sampled with a fixed
seed; the long turn's token ids must be the undisturbed ones.

The limit of the short one's first token is three times the time of one prefill chunk, measured on
the long undisturbed prefill of the same round. The long turn's loss is its time against the
undisturbed one's: gross, and net of the short turn's own engine time when that ran inside it.
Exit code 1: `fair` broke a limit, or either schedule changed a token.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any
from uuid import uuid4

import httpx

from benchmarks.card import card, spread, write
from benchmarks.scenarios.material import source
from benchmarks.scenarios.server import OwnServer, leave_no_server_behind
from capserve.config import Settings
from capserve.nano import checkpoint_dir

CHUNK_TOKENS = 512
LONG_CHARS = 56_000
"""Some 16k tokens of the embedded model."""
DECODE_TOKENS, DISTURB_AT = 500, 100
SHORT_TOKENS = 16
CHUNKS_ALLOWED = 3
LOSS_ALLOWED = 0.10
SHORT = "Write one short title for this: the tests fail, and the port in config.toml is wrong."
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "seed": 7},
}


@dataclass
class Taken:
    """One streamed turn, in seconds after it was sent."""

    ids: list[int] = field(default_factory=list)
    first_s: float | None = None
    elapsed_s: float = 0.0
    ended_at: float = 0.0
    """On the clock that both turns share."""
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def engine_s(self) -> float:
        """Its own work: restore, prefill and decode."""
        spent: list[float] = [self.record[k] for k in ("restore_ms", "prefill_ms", "decode_ms")]
        return sum(spent) / 1e3


@dataclass(frozen=True)
class Sample:
    """A disturbed long turn beside its undisturbed twin."""

    first_token_ms: float
    chunk_ms: float
    gross_loss: float
    net_loss: float
    same_tokens: bool
    short_prompt_tokens: int
    long_prompt_tokens: int
    sampling: str


class Client:
    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=600)
        config = json.loads((checkpoint_dir() / "generation_config.json").read_text())
        self._endless = {str(token): -100 for token in config["eos_token_id"]}

    def close(self) -> None:
        self._http.close()

    def turn(
        self,
        text: str,
        tokens: int,
        sampling: dict[str, Any],
        on_ids: Callable[[int], None] = lambda _: None,
    ) -> Taken:
        """Read cold, write exactly `tokens`; `on_ids` hears how many have come so far."""
        body = {
            "model": "nano",
            "messages": [{"role": "user", "content": text}],
            "stream": True,
            "max_tokens": tokens,
            "logit_bias": self._endless,
            "chat_template_kwargs": {"enable_thinking": False},
            "cache_salt": uuid4().hex,
            "return_token_ids": True,
            **sampling,
        }
        taken = Taken()
        began = perf_counter()
        with self._http.stream("POST", "/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(str(chunk["error"]))
                taken.record = chunk.get("capserve") or taken.record
                for choice in chunk["choices"]:
                    taken.ids += choice.get("token_ids") or ()
                if taken.ids and taken.first_s is None:
                    taken.first_s = perf_counter() - began
                on_ids(len(taken.ids))
        taken.ended_at = perf_counter()
        taken.elapsed_s = taken.ended_at - began
        if not taken.record:
            raise RuntimeError("the stream ended without a record")
        return taken


def during_prefill(client: Client, sampling: dict[str, Any], alone: Taken) -> tuple[Taken, Taken]:
    """The long turn, and the short one that comes at a third of its prefill."""
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(long_prefill, client, sampling)
        time.sleep(alone.record["prefill_ms"] / 3e3)
        short = client.turn(SHORT, SHORT_TOKENS, sampling)
        return long.result(), short


def during_decode(client: Client, sampling: dict[str, Any], alone: Taken) -> tuple[Taken, Taken]:
    """The long turn, and the short one that comes after its first hundred tokens."""
    there = threading.Event()

    def heard(count: int) -> None:
        if count >= DISTURB_AT:
            there.set()

    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(long_decode, client, sampling, heard)
        long.add_done_callback(lambda _: there.set())  # also when it failed
        there.wait()
        short = client.turn(SHORT, SHORT_TOKENS, sampling)
        return long.result(), short


def long_prefill(client: Client, sampling: dict[str, Any]) -> Taken:
    text = f"Here is a file.\n\n{source(3, LONG_CHARS)}\n\nWhat is it about?"
    return client.turn(text, 32, sampling)


def long_decode(
    client: Client, sampling: dict[str, Any], on_ids: Callable[[int], None] = lambda _: None
) -> Taken:
    text = f"Here is a file.\n\n{source(4, 1_500)}\n\nWrite more of it."
    return client.turn(text, DECODE_TOKENS, sampling, on_ids)


def sample(client: Client, kind: str, sampling: str, chunk_ms: float | None, turn: int) -> Sample:
    """One pair; `chunk_ms` when this kind has no long prefill to measure it on."""
    fields = SAMPLINGS[sampling]
    alone_of = long_prefill if kind == "prefill" else long_decode
    disturbed_of = during_prefill if kind == "prefill" else during_decode
    first = alone_of(client, fields)
    long, short = disturbed_of(client, fields, first)
    # Odd rounds take their undisturbed twin from after the disturbed one: drift hits both ways.
    alone = alone_of(client, fields) if turn % 2 else first
    own_s = short.engine_s if short.ended_at < long.ended_at else 0.0
    assert short.first_s is not None
    rate = alone.record["prefill_ms"] / alone.record["new_prefill_tokens"]
    return Sample(
        first_token_ms=short.first_s * 1e3,
        chunk_ms=rate * CHUNK_TOKENS if chunk_ms is None else chunk_ms,
        gross_loss=long.elapsed_s / alone.elapsed_s - 1,
        net_loss=(long.elapsed_s - own_s) / alone.elapsed_s - 1,
        same_tokens=long.ids == alone.ids == first.ids,
        short_prompt_tokens=short.record["prompt_tokens"],
        long_prompt_tokens=long.record["prompt_tokens"],
        sampling=sampling,
    )


def measure(rounds: int, threads: int) -> dict[str, Any]:
    known = "schedule" in Settings.model_fields
    schedules = ("fifo", "fair") if known else ("fifo",)
    samples: dict[tuple[str, str], list[Sample]] = {}
    with ExitStack() as stack:
        clients = {}
        for schedule in schedules:
            server = stack.enter_context(OwnServer({"schedule": schedule, "threads": threads}))
            clients[schedule] = client = Client(server.url)
            stack.callback(client.close)
            for fields in SAMPLINGS.values():
                client.turn(SHORT, SHORT_TOKENS, fields)  # warm-up
        for turn in range(rounds):
            sampling = list(SAMPLINGS)[turn % len(SAMPLINGS)]
            for schedule in schedules if turn % 4 < 2 else schedules[::-1]:
                client = clients[schedule]
                first = sample(client, "prefill", sampling, None, turn)
                second = sample(client, "decode", sampling, first.chunk_ms, turn)
                samples.setdefault((schedule, "prefill"), []).append(first)
                samples.setdefault((schedule, "decode"), []).append(second)
    rows = [_row(schedule, kind, taken) for (schedule, kind), taken in samples.items()]
    rows.sort(key=lambda row: (row["during"] != "prefill", row["schedule"] != "fifo"))
    return {"card": card(threads), "rows": rows}


def _row(schedule: str, kind: str, taken: list[Sample]) -> dict[str, Any]:
    limits = [CHUNKS_ALLOWED * each.chunk_ms for each in taken]
    row = {
        "schedule": schedule,
        "during": kind,
        "first_token_ms": spread([each.first_token_ms for each in taken]),
        "limit_ms": spread(limits),
        "net_loss": spread([each.net_loss for each in taken]),
        "gross_loss": spread([each.gross_loss for each in taken]),
        "same_tokens": {
            name: all(each.same_tokens for each in taken if each.sampling == name)
            for name in {each.sampling for each in taken}
        },
        "short_prompt_tokens": taken[0].short_prompt_tokens,
        "long_prompt_tokens": taken[0].long_prompt_tokens,
    }
    same = all(each.same_tokens for each in taken)
    in_time = median(each.first_token_ms for each in taken) <= median(limits)
    little = median(each.net_loss for each in taken) <= LOSS_ALLOWED
    return {**row, "holds": same and (schedule == "fifo" or (in_time and little))}


def table(result: dict[str, Any]) -> str:
    lines = [
        "| schedule | during | first token ms (min..max) | limit ms | net loss % (min..max) "
        "| gross loss % | tokens same | holds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        first, net, gross = (row[k] for k in ("first_token_ms", "net_loss", "gross_loss"))
        same = ", ".join(f"{k}: {'yes' if v else 'NO'}" for k, v in row["same_tokens"].items())
        what = f"{row['long_prompt_tokens']:,}-token prefill"
        if row["during"] == "decode":
            what = f"{DECODE_TOKENS}-token decode"
        lines.append(
            f"| {row['schedule']} | {what} "
            f"| {first['p50']:,.0f} ({first['min']:,.0f}..{first['max']:,.0f}) "
            f"| {row['limit_ms']['p50']:,.0f} "
            f"| {net['p50']:.1%} ({net['min']:.1%}..{net['max']:.1%}) | {gross['p50']:.1%} "
            f"| {same} | {'yes' if row['holds'] else 'NO'} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    leave_no_server_behind()
    result = measure(options.rounds, options.threads)
    print(table(result))
    result["holds"] = all(row["holds"] for row in result["rows"])
    write("fairness", result)
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
