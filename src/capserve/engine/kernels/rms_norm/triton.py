"""On the card: one program a row, which it holds whole, so it is read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from capserve.engine.kernels import launch


@triton.jit(do_not_specialize=["eps"])
def _norm(x, y, scale, out, eps, D: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
          PDL: tl.constexpr):  # fmt: skip
    d = tl.arange(0, BLOCK)
    inside = d < D
    at = tl.program_id(0).to(tl.int64) * D + d
    if PDL:
        cuda.gdc_launch_dependents()
    weight = tl.load(scale + d, mask=inside, other=0.0)
    if PDL:
        cuda.gdc_wait()
    row = tl.load(x + at, mask=inside, other=0.0)
    if ADD:
        added = row.to(tl.float32) + tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        row = added.to(row.dtype)
        tl.store(x + at, row, mask=inside)
    wide = row.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    tl.store(out + at, (wide * factor * weight).to(out.dtype.element_ty), mask=inside)


def rows_norm(x: Tensor, scale: Tensor, eps: float, out: Tensor, rows: int) -> None:
    """out[:rows] = N(x[:rows]); see the package."""
    _launch(x, None, scale, eps, out, rows)


def norm_residual(
    x: Tensor, y: Tensor | None, scale: Tensor, eps: float, out: Tensor, rows: int
) -> None:
    """x[:rows] += y[:rows]; out[:rows] = N(x[:rows]). Without y as `rows_norm`."""
    _launch(x, y, scale, eps, out, rows)


def _launch(x: Tensor, y: Tensor | None, scale: Tensor, eps: float, out: Tensor, rows: int) -> None:
    d = x.shape[1]
    for tensor in (x, out) if y is None else (x, y, out):
        assert tensor.is_contiguous()
        assert tensor.shape[0] >= rows
        assert tensor.shape[1] == d
    assert scale.dtype is torch.float32
    assert scale.numel() == d
    if rows == 0:
        return
    _norm[(rows,)](
        x,
        x if y is None else y,
        scale,
        out,
        eps,
        D=d,
        BLOCK=triton.next_power_of_2(d),
        ADD=y is not None,
        PDL=launch.PDL,
        num_warps=4 if d <= 2048 else 8,
        launch_pdl=launch.PDL,
    )
