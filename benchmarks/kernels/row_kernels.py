"""The small kernels around a step's matmuls, and the passes of a prefill that no matmul has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels import Case, Launch, sets_for
from capserve.engine.kernels.fp8_matmul.triton import quantise_groups
from capserve.engine.kernels.rms_norm.triton import norm_residual, rows_norm
from capserve.engine.kernels.rows_input.triton import embed_rows, mtp_input
from capserve.engine.kernels.silu_mul.triton import silu_mul

EPS = 1e-6
PREFILL = (2048, 8192)
HIDDEN = 5120
INNER = 17408


def cases(device: torch.device) -> Iterable[Case]:
    scale = torch.ones(HIDDEN, device=device)

    def bf16(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).bfloat16()

    def build(bytes_per_set: int, make: Callable[[], Launch]) -> Callable[[object], list[Launch]]:
        return lambda config: [make() for _ in range(sets_for(bytes_per_set))]

    table = bf16(2048, HIDDEN)
    for rows in (1, 4, 9):
        tokens = torch.randint(0, 2048, (rows,), dtype=torch.int32, device=device)
        row_bytes = rows * HIDDEN * 2

        def norm(rows: int = rows) -> Launch:
            x, out = bf16(rows, HIDDEN), bf16(rows, HIDDEN)
            return lambda: rows_norm(x, scale, EPS, out, rows)

        def embed(rows: int = rows, tokens: Tensor = tokens) -> Launch:
            out = bf16(rows, HIDDEN)
            return lambda: embed_rows(tokens, table, out, rows)

        def draft(rows: int = rows, tokens: Tensor = tokens) -> Launch:
            hidden, out = bf16(rows, HIDDEN), bf16(rows, 2 * HIDDEN)
            return lambda: mtp_input(tokens, table, hidden, scale, scale, EPS, out, rows)

        few = 16 << 20  # rows are small and come from the cache in a step, too
        yield Case("27B rows_norm", rows, 2 * row_bytes, build(few, norm))
        yield Case("27B embed_rows", rows, 2 * row_bytes, build(few, embed))
        yield Case("27B mtp_input", rows, 4 * row_bytes, build(few, draft))
    for tokens_count in PREFILL:
        yield from _prefill(tokens_count, scale, bf16, build)


def _prefill(
    count: int,
    scale: Tensor,
    bf16: Callable[..., Tensor],
    build: Callable[[int, Callable[[], Launch]], Callable[[object], Sequence[Launch]]],
) -> Iterable[Case]:
    def norm() -> Launch:
        x, y, out = (bf16(count, HIDDEN) for _ in range(3))
        return lambda: norm_residual(x, y, scale, EPS, out, count)

    def plain_norm() -> Sequence[Launch]:
        x, y = bf16(count, HIDDEN), bf16(count, HIDDEN)
        weight = scale.bfloat16()
        return [lambda: functional.rms_norm(x + y, (HIDDEN,), weight, EPS)] * 2

    def activation() -> Launch:
        x, out = bf16(count, 2 * INNER), bf16(count, INNER)
        return lambda: silu_mul(x, out)

    def plain_activation() -> Sequence[Launch]:
        gate, up = bf16(count, 2 * INNER).chunk(2, -1)
        return [lambda: functional.silu(gate).mul_(up)] * 2

    def quantise() -> Launch:
        x = bf16(count, INNER)
        return lambda: quantise_groups(x)

    hidden = count * HIDDEN * 2
    inner = count * INNER * 2
    yield Case("27B norm_residual", count, 4 * hidden, build(4 * hidden, norm), plain_norm)
    yield Case("27B silu_mul", count, 3 * inner, build(3 * inner, activation), plain_activation)
    floor = inner + inner // 2 + inner // 64
    yield Case("27B quantise_groups", count, floor, build(floor, quantise))
