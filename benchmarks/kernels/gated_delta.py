"""The gated delta net's kernels at the shapes of the 27B and the 9B: rows, fold and prefill.

Peers: for rows the definition's torch operations; for a prefill fla-core's chunked rule on ready
q, k, v, g and beta, where that package is installed (ours also convolves, norms and gates).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import Case, Launch, sets_for
from capserve.engine.kernels.gated_delta import (
    chunked_triton,
    prefill_scratch_elements,
    reference,
    rows_scratch_floats,
    triton,
)

MAX_ROWS, TAPS, EPS = 9, 4, 1e-6
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    key_heads: int
    heads: int
    dim: int = 128

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.heads) * self.dim

    @property
    def values(self) -> int:
        return self.heads * self.dim

    @property
    def width(self) -> int:
        return self.channels + self.values + 2 * self.heads

    @property
    def state_bytes(self) -> int:
        return self.heads * self.dim * self.dim * 4


SHAPES = [Shape("27B", 48, 16, 48), Shape("9B", 24, 16, 32)]


class Inputs:
    """Everything of one layer of one shape, for `tokens` tokens."""

    def __init__(self, shape: Shape, tokens: int, device: torch.device) -> None:
        def random(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(*sizes, device=device).to(dtype)

        heads, dim = shape.heads, shape.dim
        self.recurrent = random(heads, dim, dim)
        self.layer: dict[str, Any] = {
            "projected": random(tokens, shape.width, dtype=BF16),
            "conv": random(TAPS - 1 + MAX_ROWS, shape.channels, dtype=BF16),
            "conv_weight": random(TAPS, shape.channels),
            "rate": -torch.rand(heads, device=device),
            "dt_bias": random(heads),
            "norm": torch.ones(dim, device=device),
            "eps": EPS,
            "recurrent": self.recurrent,
            "out": torch.empty(tokens, shape.values, dtype=BF16, device=device),
        }
        self.rows = {
            "row_k": random(MAX_ROWS, heads, dim),
            "row_d": random(MAX_ROWS, heads, dim),
            "row_decay": torch.rand(MAX_ROWS, heads, device=device),
        }


def rows_launches(
    shape: Shape, rows: int, device: torch.device, module: Any, warps: int | None
) -> Sequence[Launch]:
    count = sets_for(shape.state_bytes)
    extra: dict[str, Any] = {}
    if module is triton:
        floats = rows_scratch_floats(MAX_ROWS, shape.heads, shape.dim, shape.dim)
        extra["scratch"] = torch.empty(floats, device=device)
        extra |= {"warps": warps} if warps else {}
    sets = [Inputs(shape, MAX_ROWS, device) for _ in range(count)]
    return [partial(module.delta_rows, **x.layer, **x.rows, **extra, rows=rows) for x in sets]


def fold_launches(shape: Shape, accepted: int, device: torch.device, config: Any) -> list[Launch]:
    layers, heads, dim = shape.layers, shape.heads, shape.dim
    arguments: dict[str, Any] = {
        "recurrent": torch.randn(layers, heads, dim, dim, device=device),
        "conv": torch.randn(layers, TAPS - 1 + MAX_ROWS, shape.channels, device=device).to(BF16),
        "row_k": torch.randn(layers, MAX_ROWS, heads, dim, device=device) * 0.01,
        "row_d": torch.randn(layers, MAX_ROWS, heads, dim, device=device) * 0.01,
        "row_decay": torch.rand(layers, MAX_ROWS, heads, device=device),
        "accepted": torch.tensor([accepted], dtype=torch.int32, device=device),
    }
    extra = {"config": config} if config else {}
    return [partial(triton.fold_rows, **arguments, **extra)]


STAGES = ("features", "solve", "states", "outputs")


def prefill_launches(
    shape: Shape, tokens: int, device: torch.device, stage: str, config: Any
) -> list[Launch]:
    sizes = (shape.key_heads, shape.heads, shape.dim, shape.dim)
    narrow, wide = prefill_scratch_elements(tokens, *sizes)
    scratch = torch.empty(narrow, dtype=BF16, device=device)
    sums = torch.empty(wide, device=device)
    config = config or chunked_triton.CONFIG
    chunk = chunked_triton.Prefill(sizes, TAPS, tokens, 0, scratch, sums, config)
    layers = [chunked_triton.Layer(**Inputs(shape, tokens, device).layer) for _ in range(2)]
    for layer in layers:
        chunk(layer)  # so that the scratch holds numbers
    launch: Callable[[chunked_triton.Layer], None] = getattr(chunk, stage) if stage else chunk
    return [partial(launch, layer) for layer in layers]


def fla_launches(shape: Shape, tokens: int, device: torch.device) -> list[Launch]:
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    keys, heads, dim = shape.key_heads, shape.heads, shape.dim
    normalised = torch.nn.functional.normalize
    q, k, v = (torch.randn(1, tokens, n, dim, device=device) for n in (keys, keys, heads))
    arguments = {
        "q": normalised(q, dim=-1).to(BF16),
        "k": normalised(k, dim=-1).to(BF16),
        "v": v.to(BF16),
        "g": -torch.rand(1, tokens, heads, device=device),
        "beta": torch.rand(1, tokens, heads, device=device),
        "initial_state": torch.randn(1, heads, dim, dim, device=device),
        "output_final_state": True,
    }
    return [partial(rule, **arguments)]


def prefill_configs() -> list[chunked_triton.Config]:
    """The table's entry, and what differs from it in one place."""
    base = chunked_triton.CONFIG
    names = ("states_values", "states_warps", "states_stages")
    states = [(64, 8, 3), (64, 4, 2), (64, 8, 2), (32, 4, 3), (16, 4, 2), (32, 8, 2), (128, 8, 2)]
    changes: list[dict[str, int]] = [dict(zip(names, entry, strict=True)) for entry in states]
    changes += [{"solve_warps": 8}, {"outputs_warps": 8}, {"solve_warps": 2}]
    changes += [{"features_tokens": 64}, {"features_tokens": 16}, {"features_warps": 8}]
    return [base, *(base._replace(**change) for change in changes)]


def cases(device: torch.device) -> Iterable[Case]:
    fla: bool = importlib.util.find_spec("fla") is not None
    for shape in SHAPES:
        for rows in (1, 4, 9):
            moved = rows * (shape.width + shape.channels + shape.values) * 2
            yield Case(
                f"{shape.name} rows",
                rows,
                shape.state_bytes + moved,
                partial(rows_launches, shape, rows, device, triton),
                peer=partial(rows_launches, shape, rows, device, reference, None),
                configs=(8, 4, 16),
                table_key="ROWS_WARPS",
            )
        for rows in (1, 4, 9):
            yield Case(
                f"{shape.name} fold, all layers",
                rows,
                2 * shape.layers * shape.state_bytes,
                partial(fold_launches, shape, rows, device),
                configs=[
                    triton.FoldConfig(keys, warps)
                    for keys, warps in ((32, 4), (16, 4), (16, 2), (64, 4), (64, 8), (128, 8))
                ],
                table_key="FOLD",
            )
        for tokens in (2048, 8192) if shape.name == "27B" else (2048,):
            floor = tokens * (shape.width + shape.values) * 2 + 2 * shape.state_bytes
            peer: Callable[[], Sequence[Launch]] | None = None
            if fla:
                peer = partial(fla_launches, shape, tokens, device)
            yield Case(
                f"{shape.name} prefill {tokens}",
                1,
                floor,
                partial(prefill_launches, shape, tokens, device, ""),
                peer=peer,
                configs=prefill_configs(),
                table_key="CONFIG",
            )
        for stage in STAGES:
            yield Case(
                f"{shape.name} prefill 2048 {stage}",
                1,
                floor_of(shape, stage, 2048),
                partial(prefill_launches, shape, 2048, device, stage),
            )


def floor_of(shape: Shape, stage: str, tokens: int) -> int:
    """Bytes that a stage moves with its scratch in memory, bf16."""
    qk, values, keys = 2 * shape.key_heads * shape.dim, shape.values, shape.heads * shape.dim
    states = -(-tokens // 64) * shape.heads * shape.dim * shape.dim
    moved = {
        "features": tokens * 2 * shape.channels,
        "solve": tokens * (qk // 2 + 2 * values + keys),
        "states": tokens * (qk // 2 + 2 * values + keys) + states,
        "outputs": tokens * (qk + 3 * values) + states,
    }
    return 2 * moved[stage]
