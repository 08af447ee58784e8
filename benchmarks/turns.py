"""What does a turn of a growing conversation cost over HTTP, read cold and continued?

A server on the embedded model; one conversation of eight turns from about 4k to 12k tokens, sent
with its whole history each time, as agents do. `cold` resends the same history under a fresh
`cache_salt`, so that nothing may be reused. Each pair is sent back to back; the time is that of the
first streamed delta. The ceiling of a continued turn is the time to read its new tokens at the
prefill rate measured in the same run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from uuid import uuid4

import numpy as np
from openai import OpenAI
from rich.console import Console

from benchmarks.card import card, spread, write
from capserve.cli.compose import serving
from capserve.config import load_settings

TURNS = 8
FIRST_CHARS, MORE_CHARS = 13_500, 3_700
"""Characters of source in the first message and in each later one: 4k tokens, then about 1.1k."""


def conversation(source: str, turn: int) -> str:
    if turn == 0:
        return f"Here is a file.\n\n{source[:FIRST_CHARS]}\n\nWhat is it about?"
    start = FIRST_CHARS + (turn - 1) * MORE_CHARS
    return f"Here is more of it.\n\n{source[start : start + MORE_CHARS]}\n\nWhat does it add?"


def ask(client: OpenAI, model: str, messages: list[Any], salt: str) -> dict[str, Any]:
    """One streamed request: seconds to the first delta, the reply, the metrics record."""
    began = perf_counter()
    first = None
    text = ""
    record: dict[str, Any] = {}
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        stream=True,
        max_tokens=48,
        temperature=0,
        extra_body={"cache_salt": salt, "enable_thinking": False},
    )
    for chunk in stream:
        for choice in chunk.choices:
            if choice.delta.content:
                first = first or perf_counter() - began
                text += choice.delta.content
        record = (chunk.model_extra or {}).get("capserve") or record
    return {"ttft_s": first or perf_counter() - began, "text": text, "record": record}


def one_round(client: OpenAI, model: str, source: str) -> list[dict[str, Any]]:
    messages: list[Any] = []
    salt = uuid4().hex
    rows = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": conversation(source, turn)})
        warm = ask(client, model, messages, salt)
        cold = ask(client, model, messages, uuid4().hex)
        messages.append({"role": "assistant", "content": warm["text"] or "-"})
        record = warm["record"]
        rows.append(
            {
                "prompt_tokens": record["prompt_tokens"],
                "action": record["prefix_action"],
                "cached_tokens": record["cached_tokens"],
                "new_tokens": record["new_prefill_tokens"],
                "ttft_ms": warm["ttft_s"] * 1e3,
                "cold_ttft_ms": cold["ttft_s"] * 1e3,
                "cold_prefill_tok_per_s": cold["record"]["new_prefill_tokens"]
                / cold["record"]["prefill_ms"]
                * 1e3,
            }
        )
    return rows


def measure(rounds: int, threads: int) -> dict[str, Any]:
    files = sorted(Path(np.__file__).parent.glob("*.py"))
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    taken = []
    with serving(load_settings({"threads": threads}), Console(stderr=True)) as server:
        client = OpenAI(base_url=server.url, api_key="-", max_retries=0)
        for _ in range(rounds):
            taken.append(one_round(client, server.assembly.name, source))
    turns = []
    for turn in range(TURNS):
        rows = [rows[turn] for rows in taken]
        rate = median(row["cold_prefill_tok_per_s"] for row in rows)
        last = rows[-1]
        turns.append(
            {
                "turn": turn + 1,
                "prompt_tokens": last["prompt_tokens"],
                "action": last["action"],
                "cached_tokens": last["cached_tokens"],
                "new_tokens": last["new_tokens"],
                "ttft_ms": spread([row["ttft_ms"] for row in rows]),
                "cold_ttft_ms": spread([row["cold_ttft_ms"] for row in rows]),
                "ceiling_ms": last["new_tokens"] / rate * 1e3,
            }
        )
    return {"card": card(threads), "turns": turns}


def table(result: dict[str, Any]) -> str:
    lines = [
        "| turn | prompt | action | cached | new | cold TTFT ms | capserve TTFT ms | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for turn in result["turns"]:
        cold, warm = turn["cold_ttft_ms"]["p50"], turn["ttft_ms"]["p50"]
        lines.append(
            f"| {turn['turn']} | {turn['prompt_tokens']:,} | {turn['action']} "
            f"| {turn['cached_tokens']:,} | {turn['new_tokens']:,} "
            f"| {cold:,.0f} | {warm:,.0f} | {cold / warm:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    result = measure(options.rounds, options.threads)
    print(table(result))
    write("turns", result)


if __name__ == "__main__":
    main()
