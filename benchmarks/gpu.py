"""How near to the card's own limits is the engine, at the shapes that people run?

    python -m benchmarks.gpu [--size 27B] [--form bf16|fp8] [--context 32768] [--peer] [--profile]

Random weights at real shapes, made on the card. Ceilings (copy bandwidth, matmul rates, host link)
are measured in the same run. Acceptance cannot be real with random weights, so a speculative step
has its time measured for each number of drafts, and tokens a second at given lengths are derived.
Random ids are all over the vocabulary, so those steps draft among all ids (" wide"); text and code
take the narrower drafts, whose step is timed on the device's clock.
`--peer`: transformers on the same card, after ours has left it.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.card import card, write
from benchmarks.shapes import REAL_IDS, config_json, config_of, names, random_weights
from capserve.engine.kernels.launch import PDL
from capserve.engine.models.assembly import quantisable
from capserve.engine.models.config import ModelConfig
from capserve.engine.models.qwen3_5 import Qwen35
from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import Sampling, TokenArray
from capserve.engine.weights import Weight, quantised

DEVICE = torch.device("cuda")
TARGETS = {
    "bf16": {"step_ms": 13.4, "speculative_ms": 16.0, "prefill_ms": 680.0},
    "fp8": {"step_ms": float("nan"), "speculative_ms": 10.0, "prefill_ms": 450.0},
}
"""Of the 27B shape on one H200: docs/log.md says where they come from."""

ACCEPT_LENGTHS = (2, 3, 4)


# ---- ceilings -----------------------------------------------------------------------------------


def ceilings() -> dict[str, float]:
    big = torch.empty(4 << 30, dtype=torch.uint8, device=DEVICE)
    half = big[: 2 << 30]
    copy = 2 * half.nbytes / seconds(lambda: big[2 << 30 :].copy_(half)) / 1e9
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    bf16 = 2 * 8192**3 / seconds(lambda: a @ b) / 1e12
    pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(pinned, device=DEVICE)
    up = pinned.nbytes / seconds(lambda: there.copy_(pinned, non_blocking=True)) / 1e9
    return {"copy_gb_per_s": copy, "bf16_tflops": bf16, "host_link_gb_per_s": up}


def seconds(call: Callable[[], Any], repeats: int = 7) -> float:
    """Median on the device's own clock."""
    call()
    event: Any = torch.cuda.Event
    taken = []
    for _ in range(repeats):
        began, ended = event(enable_timing=True), event(enable_timing=True)
        began.record()
        call()
        ended.record()
        ended.synchronize()
        taken.append(float(began.elapsed_time(ended)) / 1e3)
    return median(taken)


def wall(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = perf_counter()
    call()
    torch.cuda.synchronize()
    return perf_counter() - began


# ---- the engine ---------------------------------------------------------------------------------


def weights_of(config: ModelConfig, form: str) -> dict[str, Weight | torch.Tensor]:
    weights: dict[str, Weight | torch.Tensor] = dict(random_weights(config, torch.bfloat16, DEVICE))
    if form == "fp8":
        for name in weights:
            tensor = weights[name]
            if quantisable(name) and isinstance(tensor, torch.Tensor):
                weights[name] = quantised(tensor)
    return weights


def engine_of(size: str, form: str, positions: int, chunk: int) -> TorchEngine:
    config = config_of(size)
    with torch.inference_mode():
        weights = weights_of(config, form)
        model = Qwen35(config, weights, DEVICE, vocab=REAL_IDS, positions=positions)
        del weights
    gc.collect()
    torch.cuda.empty_cache()
    engine = TorchEngine(
        model,
        positions=positions,
        prefill_chunk=chunk,
        vocab=REAL_IDS,
        max_drafts=8,
        fingerprint="benchmark",
    )
    began = perf_counter()
    engine.warm_up()
    print(f"warm-up {perf_counter() - began:.1f} s, {engine.graph_capture_count} graphs, PDL {PDL}")
    return engine


def ids(count: int, seed: int = 0) -> TokenArray:
    return np.random.default_rng(seed).integers(0, REAL_IDS, count, dtype=np.int32)


def filled(engine: TorchEngine, context: int) -> None:
    engine.reset()
    engine.extend(ids(context))


def step_ms(engine: TorchEngine, context: int, drafts: int, repeats: int = 24) -> float:
    """Median wall time of a step: launch, device, copy of the result, bookkeeping."""
    if engine.position < context or engine.position > context + 2048:
        filled(engine, context)
    engine.begin(Sampling(temperature=0.0, drafts=drafts), ids(1))
    for _ in range(4):
        engine.step()
    return 1e3 * median(wall(engine.step) for _ in range(repeats))


def device_ms(engine: TorchEngine, piece: str) -> float:
    """Median of one piece on the device's own clock. The state is worth nothing afterwards."""
    decode = engine._card
    assert decode is not None
    position = engine.position

    def once() -> float:
        decode._cursor.put(position=position, count=1)
        event: Any = torch.cuda.Event
        began, ended = event(enable_timing=True), event(enable_timing=True)
        began.record()
        decode._graphs.run(piece)
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended))

    return median(once() for _ in range(15))


# ---- the table ----------------------------------------------------------------------------------


def decode_rows(engine: TorchEngine, context: int, found: dict[str, float]) -> dict[str, Any]:
    weight_bytes = read_bytes(engine)
    floor = 1e3 * weight_bytes / found["copy_gb_per_s"] / 1e9
    filled(engine, 2048)
    steps = {drafts: step_ms(engine, 2048, drafts) for drafts in range(9)}
    print("speculative_ms", steps, flush=True)
    one, four = device_ms(engine, "step 0"), device_ms(engine, "verify 3")
    rows: dict[str, Any] = {
        "weight_gb": weight_bytes / 1e9,
        "floor_ms": floor,
        "step_ms": steps[0],
        "of_floor": floor / steps[0],
        "device_step_ms": one,
        "verify_4_rows_ms": four,
        "verify_4_over_1": four / one,
        "draft_3_ms": device_ms(engine, "draft 3"),
        "draft_3_wide_ms": device_ms(engine, "draft 3 wide"),
        "device_speculative_3_ms": device_ms(engine, "step 3"),
        "speculative_ms": steps,
        "derived_tokens_per_s": {
            str(length): {str(k): length / ms * 1e3 for k, ms in steps.items() if k >= length - 1}
            for length in ACCEPT_LENGTHS
        },
    }
    long = {}
    for length in (8192, context):
        filled(engine, length)
        long[length] = {k: step_ms(engine, length, k) for k in (0, 3)}
    rows["step_ms_at_context"] = long
    return rows


def read_bytes(engine: TorchEngine) -> int:
    """Weight bytes that one step of one row must read: all but the embedding and the MTP head."""
    return engine._model.step_bytes


def prefill_rows(engine: TorchEngine, context: int) -> dict[str, Any]:
    tokens = ids(8192)

    def cold() -> None:
        engine.reset()
        engine.extend(tokens)

    cold()
    prefill = median(wall(cold) for _ in range(3))
    filled(engine, context)
    start = engine.snapshot()
    warm = {}
    for count in (16, 64):
        fresh = ids(count, 1)

        def turn(fresh: TokenArray = fresh) -> None:
            engine.extend(fresh)
            engine.begin(Sampling(drafts=3), fresh)
            engine.step()

        samples = []
        for _ in range(5):
            engine.restore(start)
            samples.append(wall(turn))
        warm[count] = 1e3 * median(samples)
    return {"prefill_8192_ms": 1e3 * prefill, "warm_turn_ms": warm}


def capsule_rows(engine: TorchEngine, context: int, found: dict[str, float]) -> dict[str, Any]:
    filled(engine, context)
    on_card = engine.snapshot()
    on_host = engine.move(on_card, "host")
    filled(engine, context // 2)
    other = engine.snapshot()
    rows: dict[str, Any] = {"capsule_gb": engine.limits.capsule_bytes(context) / 1e9}
    for name, capsule in (("gpu", on_card), ("host", on_host)):
        samples, moved = [], 0
        for _ in range(5):
            engine.restore(other)
            engine._live.written_from(0)  # nothing of the capsule is in the buffer
            torch.cuda.synchronize()
            began = perf_counter()
            moved = engine.restore(capsule)
            torch.cuda.synchronize()
            samples.append(perf_counter() - began)
        taken = median(samples)
        ceiling = found["copy_gb_per_s"] / 2 if name == "gpu" else found["host_link_gb_per_s"]
        rows[f"restore_{name}_ms"] = 1e3 * taken
        rows[f"restore_{name}_of_ceiling"] = moved / taken / 1e9 / ceiling
    return rows


def profile_rows(engine: TorchEngine, piece: str) -> list[dict[str, Any]]:
    """Time of each kernel in one piece, launched without its graph, largest share first."""
    decode = engine._card
    assert decode is not None
    launches = decode._graphs._pieces[piece]
    decode._cursor.put(position=engine.position, count=1)
    with torch.inference_mode():
        launches()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(3):
                launches()
            torch.cuda.synchronize()
    events = [e for e in profile.key_averages() if e.device_time_total > 0]
    total = sum(e.device_time_total for e in events)
    rows = [
        {
            "kernel": e.key[:60],
            "launches": e.count // 3,
            "us": e.device_time_total / 3,
            "share": e.device_time_total / total,
        }
        for e in sorted(events, key=lambda e: -e.device_time_total)[:16]
    ]
    print(f"{piece}: {total / 3e3:.2f} ms in kernels")
    for row in rows:
        print(f"  {row['kernel']:60s} {row['launches']:5d} {row['us']:9.1f} us {row['share']:6.1%}")
    return rows


# ---- transformers -------------------------------------------------------------------------------


def peer_rows(size: str) -> dict[str, Any]:
    """transformers at the same shape on the same card: a decode step and 8,192 tokens' prefill."""
    import transformers

    made: Any = transformers
    config = made.Qwen3_5TextConfig(
        **{k: v for k, v in config_json(size).items() if k not in ("model_type", "architectures")}
    )
    torch.set_default_dtype(torch.bfloat16)
    with DEVICE:
        model = made.Qwen3_5ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    tokens = torch.from_numpy(ids(8192)).long().to(DEVICE)[None]
    with torch.inference_mode():

        def prefill() -> Any:
            return model(tokens, use_cache=True, logits_to_keep=1)

        prefill()
        prefill_s = median(wall(prefill) for _ in range(2))
        cache = model(tokens[:, :2048], use_cache=True, logits_to_keep=1).past_key_values

        def step() -> Any:
            return model(tokens[:, :1], use_cache=True, past_key_values=cache)

        step()
        step_s = median(wall(step) for _ in range(5))
    return {
        "transformers": transformers.__version__,
        "step_ms": 1e3 * step_s,
        "prefill_8192_ms": 1e3 * prefill_s,
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=names(), default="27B")
    parser.add_argument("--form", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument("--context", type=int, default=32_768, help="of the long rows")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of one prefill chunk")
    parser.add_argument("--peer", action="store_true", help="transformers beside it")
    parser.add_argument("--profile", action="store_true", help="which kernels take the time")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    found = ceilings()
    print({name: round(value, 1) for name, value in found.items()})
    engine = engine_of(options.size, options.form, options.context + 4096, options.chunk)
    captured = engine.graph_capture_count
    result: dict[str, Any] = {
        "card": card(threads=1) | {"gpu": torch.cuda.get_device_name(DEVICE)},
        "question": __doc__,
        "size": options.size,
        "form": options.form,
        "prefill_chunk": options.chunk,
        "ceilings": found,
        "targets": TARGETS[options.form] if options.size == "27B" else {},
    }
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "decode": lambda: decode_rows(engine, options.context, found),
        "prefill": lambda: prefill_rows(engine, options.context),
        "capsules": lambda: capsule_rows(engine, options.context, found),
    }
    for name, measure in parts.items():
        result[name] = measure()
        print(name, result[name], flush=True)
    result["graph_captures_after_warm_up"] = engine.graph_capture_count - captured
    result["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    if options.profile:
        filled(engine, 2048)
        result["profile"] = {p: profile_rows(engine, p) for p in ("step 0", "step 3")}
    if options.peer:
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        result["peer"] = peer_rows(options.size)
    write(f"gpu-{options.size.lower()}-{options.form}", result)


if __name__ == "__main__":
    main()
