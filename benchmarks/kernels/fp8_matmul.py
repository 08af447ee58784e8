"""A prefill's matmul with FP8 weights against cuBLAS in bfloat16: what FP8 brings to cold prefill.

The ceiling here is arithmetic: read the microseconds against the peer's, not the bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn import functional

from benchmarks.kernels import Case, Launch
from capserve.engine.kernels.fp8_matmul.triton import fp8_matmul, widened_matmul
from capserve.engine.weights import BlockFp8Weight, dense, quantised

SHAPES = [
    ("delta-in", 16384, 5120),
    ("mixer-out", 5120, 6144),
    ("gate-up", 34816, 5120),
    ("down", 5120, 17408),
]


def cases(device: torch.device) -> Iterable[Case]:
    for name, n, k in SHAPES:
        for tokens in (256, 2048):
            yield from _cases(name, n, k, tokens, device)


def _cases(name: str, n: int, k: int, tokens: int, device: torch.device) -> Iterable[Case]:
    def weight() -> BlockFp8Weight:
        return quantised(torch.randn(n, k, device=device) * k**-0.5)

    def x() -> torch.Tensor:
        return torch.randn(tokens, k, device=device).bfloat16()

    def blocks(config: object) -> Sequence[Launch]:
        held, rows = weight(), x()
        return [lambda: fp8_matmul(rows, held)] * 2

    def widened(config: object) -> Sequence[Launch]:
        held, rows = weight(), x()
        return [lambda: widened_matmul(rows, held)] * 2

    def library() -> Sequence[Launch]:
        held, rows = dense(weight(), torch.bfloat16), x()
        return [lambda: functional.linear(rows, held)] * 2

    floor = n * k + tokens * (3 * k + 2 * n)
    yield Case(f"27B {name} by blocks", tokens, floor, blocks, library)
    yield Case(f"27B {name} widened", tokens, floor, widened)
