"""Where does the time of a prefill go, kernel by kernel, and which chunk length is best?

    python -m benchmarks.prefill [--size 27B] [--context 32768] [--json FILE]

A few layers at real shapes (random weights, made on the card) run the engine's own chunk network;
times are scaled to the whole model. A cold prompt of 8,192 tokens in chunks of each length, and a
warm turn of 16 to 128 tokens at a long context: what the device does, by kernel and by matmul, how
long it waits for the host, and what a chunk takes, since a turn can be cancelled between two. Then
the matmuls alone at shapes that are near, over weights that are not in the cache: what would other
chunk lengths or padded outputs bring? The ceiling is a square matmul of the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional

from benchmarks.card import card
from benchmarks.gpu import DEVICE, seconds, wall
from benchmarks.kernels import sets_for
from benchmarks.shapes import config_json, names, random_weights
from capserve.engine.models.config import ModelConfig
from capserve.engine.models.qwen3_5 import Qwen35
from capserve.engine.models.qwen3_5_prefill import ChunkNetwork
from capserve.engine.state import State

PROMPT = 8192
LENGTHS = (1024, 1664, 2048, 3328, 4096, 8192)
"""1664 and 3328: with tiles of 128 x 256 the narrow outputs then fill 132 multiprocessors nearly
twice and four times."""

TURNS = (1, 16, 64, 128)
LAYERS = 8
"""Two periods of the model; the last of the weights are out of the cache when the first return."""

KEPT = 18
"""Rows of a table."""

Row = dict[str, Any]


def network_of(size: str, positions: int) -> tuple[Qwen35, State, int]:
    """-> the model cut to `LAYERS` layers, without its MTP head, its state, and how many times it
    must be laid end to end to be the whole."""
    values = config_json(size)
    scale = values["num_hidden_layers"] // LAYERS
    values |= {"num_hidden_layers": LAYERS, "mtp_num_hidden_layers": 0, "vocab_size": 4096}
    config = ModelConfig.from_dict(values, name=f"{size} shape, {LAYERS} layers")
    weights: Any = random_weights(config, torch.bfloat16, DEVICE)
    model = Qwen35(config, weights, DEVICE, vocab=4096, positions=positions)
    return model, State(config, torch.bfloat16, DEVICE, positions, for_card=True), scale


def absorbed(network: ChunkNetwork, start: int, end: int, length: int) -> None:
    """[start, end) in chunks on the grid of `length`."""
    ids = torch.randint(0, 4096, (end - start,), dtype=torch.int32, device=DEVICE)
    at = start
    while at < end:
        until = min(end, (at // length + 1) * length)
        network.absorb(ids[at - start : until - start], at)
        at = until


def measured(network: ChunkNetwork, start: int, end: int, length: int, scale: int) -> Row:
    """Wall and kernel time of the whole model in ms, and the tables behind the latter."""

    def run() -> None:
        absorbed(network, start, end, length)

    run()
    run()
    taken = median(wall(run) for _ in range(5))
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA], record_shapes=True) as profile:
        run()
        torch.cuda.synchronize()
    kernels = [
        event
        for event in profile.key_averages()
        if event.device_type.name == "CUDA" and event.self_device_time_total > 0
    ]
    busy = sum(event.self_device_time_total for event in kernels)
    row: Row = {
        "wall_ms": 1e3 * taken * scale,
        "kernels_ms": busy / 1e3 * scale,
        "idle_share": max(0.0, 1 - busy / 1e6 / taken),
        "launches": sum(event.count for event in kernels) * scale,
        "kernels": [
            {
                "kernel": event.key[:64],
                "count": event.count * scale,
                "ms": event.self_device_time_total / 1e3 * scale,
                "share": event.self_device_time_total / busy,
            }
            for event in sorted(kernels, key=lambda event: -event.self_device_time_total)[:KEPT]
        ],
        "matmuls": list(_matmuls(profile.key_averages(group_by_input_shape=True), scale)),
    }
    row["matmuls_ms"] = sum(entry["ms"] for entry in row["matmuls"])
    return row


def _matmuls(events: Iterable[Any], scale: int) -> Iterable[Row]:
    for event in events:
        if event.key != "aten::mm" or not event.self_device_time_total:
            continue
        (m, k), (_, n) = event.input_shapes[:2]
        yield {
            "m": m,
            "n": n,
            "k": k,
            "count": event.count * scale,
            "ms": event.self_device_time_total / 1e3 * scale,
            "tflops": 2 * m * n * k * event.count / event.self_device_time_total / 1e6,
            "gb_per_s": 2
            * (m * k + n * k + m * n)
            * event.count
            / event.self_device_time_total
            / 1e3,
        }


def shown(name: str, row: Row) -> Row:
    print(
        f"\n{name}: {row['wall_ms']:.1f} ms, {row['kernels_ms']:.1f} in {row['launches']} kernels, "
        f"idle {row['idle_share']:.0%}, matmuls {row['matmuls_ms']:.1f}"
    )
    for entry in row["kernels"]:
        print(
            f"  {entry['kernel']:64s} {entry['count']:6d} {entry['ms']:9.2f} ms "
            f"{entry['share']:6.1%}"
        )
    for entry in row["matmuls"]:
        print(
            f"  [{entry['m']}, {entry['k']}] x [{entry['k']}, {entry['n']}]: {entry['ms']:.2f} ms, "
            f"{entry['tflops']:.0f} TFLOP/s, {entry['gb_per_s']:.0f} GB/s",
            flush=True,
        )
    return row


# ---- matmuls alone ------------------------------------------------------------------------------


def outputs_of(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(N, K) of a layer's matmuls, and of the delta net's entry with its output padded."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, dim = config.num_attention_heads, config.head_dim
    entry = config.conv_dim + config.value_dim + 2 * config.linear_num_value_heads
    return {
        "delta entry": (entry, hidden),
        "delta entry to 128": (-(-entry // 128) * 128, hidden),
        "delta entry to 256": (-(-entry // 256) * 256, hidden),
        "attention entry": (2 * (heads + config.num_key_value_heads) * dim, hidden),
        "mixer out": (hidden, config.value_dim),
        "gate and up": (2 * inner, hidden),
        "down": (hidden, inner),
    }


def rates(config: ModelConfig, lengths: Iterable[int]) -> list[Row]:
    rows = []
    for name, (n, k) in outputs_of(config).items():
        weights = [
            torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) * k**-0.5
            for _ in range(sets_for(2 * n * k))
        ]
        for m in lengths:
            x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
            repeats = max(1, 4096 // m)

            def run(x: torch.Tensor = x, repeats: int = repeats) -> None:
                for _ in range(repeats):
                    for weight in weights:  # noqa: B023
                        functional.linear(x, weight)

            each = seconds(run) / repeats / len(weights)
            row = {"matmul": name, "m": m, "n": n, "k": k, "us": 1e6 * each}
            row["tflops"] = 2 * m * n * k / each / 1e12
            row["gb_per_s"] = 2 * (m * k + n * k + m * n) / each / 1e9
            rows.append(row)
            print(
                f"{name:20s} {m:5d} x {k} x {n}: {row['us']:8.1f} us, {row['tflops']:.0f} TFLOP/s, "
                f"{row['gb_per_s']:.0f} GB/s",
                flush=True,
            )
    return rows


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=names(), default="27B")
    parser.add_argument("--context", type=int, default=32_768, help="of the warm turns")
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS, help="of a chunk")
    parser.add_argument("--json", type=Path, help="where to keep the result")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    ceiling = 2 * 8192**3 / seconds(lambda: a @ b) / 1e12
    print(f"square matmul {ceiling:.0f} TFLOP/s")
    positions = max(PROMPT, options.context + max(TURNS))
    model, state, scale = network_of(options.size, positions)
    result: Row = {
        "card": card(threads=1) | {"gpu": torch.cuda.get_device_name(DEVICE)},
        "size": options.size,
        "bf16_tflops": ceiling,
        "cold": {},
        "warm": {},
    }
    for length in options.lengths:
        network = ChunkNetwork(model, state, length)
        row = measured(network, 0, PROMPT, length, scale)
        row["chunk_ms"] = row["wall_ms"] * min(1.0, length / PROMPT)
        result["cold"][length] = shown(f"{PROMPT} tokens in chunks of {length}", row)
        if length == 2048:
            for count in TURNS:
                end = options.context + count
                row = measured(network, options.context, end, length, scale)
                result["warm"][count] = shown(f"{count} tokens at {options.context}", row)
        del network
        gc.collect()
        torch.cuda.empty_cache()
    config = model.config
    del model, state
    gc.collect()
    result["matmuls"] = rates(config, (*TURNS[1:], *options.lengths))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    brief = {length: round(row["wall_ms"], 1) for length, row in result["cold"].items()}
    turns = {count: round(row["wall_ms"], 1) for count, row in result["warm"].items()}
    print(json.dumps({"bf16_tflops": ceiling, "cold_ms": brief, "warm_ms": turns}))


if __name__ == "__main__":
    main()
