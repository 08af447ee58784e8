"""The definition: one dot product a row and column, in float32; one rounding, to the output."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from capserve.engine.weights import Weight, dense

Norm = tuple[Tensor, float]
"""Final scale [K] f32, eps."""


def normed(x: Tensor, norm: Norm | None) -> Tensor:
    """x [R, K] any float dtype -> N(x) f32."""
    x = x.float()
    if norm is None:
        return x
    scale, eps = norm
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale


def rows_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, K] f32, weight [N, K] f32 or bf16 -> [R, N] f32."""
    return torch.stack([weight.float() @ row for row in x])


def rows_matmul_into(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    rows: int,
    *,
    norm: Norm | None = None,
    residual: bool = False,
) -> None:
    """As the package says."""
    y = rows_matmul(normed(x[:rows], norm), dense(weight))
    if residual:
        y = y + out[:rows].float()
    out[:rows] = y.to(out.dtype)


def rows_swiglu(
    x: Tensor, weight: Weight, out: Tensor, rows: int, *, norm: Norm | None = None
) -> None:
    """As the package says; weight [2 I, K], the gate's rows first."""
    gate, up = rows_matmul(normed(x[:rows], norm), dense(weight)).chunk(2, -1)
    out[:rows] = (functional.silu(gate) * up).to(out.dtype)
