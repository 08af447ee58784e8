"""The definition, in float32 with one rounding at the end."""

from __future__ import annotations

import torch
from torch import Tensor


def normed(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x [T, D] any float dtype -> f32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale


def rows_norm(x: Tensor, scale: Tensor, eps: float, out: Tensor, rows: int) -> None:
    """out[:rows] = N(x[:rows])."""
    out[:rows] = normed(x[:rows], scale, eps).to(out.dtype)


def norm_residual(
    x: Tensor, y: Tensor | None, scale: Tensor, eps: float, out: Tensor, rows: int
) -> None:
    """x[:rows] += y[:rows], rounded; out[:rows] = N of what x then holds."""
    if y is not None:
        x[:rows] = (x[:rows].float() + y[:rows].float()).to(x.dtype)
    rows_norm(x, scale, eps, out, rows)
