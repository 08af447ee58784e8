"""On the card: one program a row, or two for the draft head's input."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from capserve.engine.kernels import launch


@triton.jit
def _row_of_token(tokens, table, r, V, d, inside, D: tl.constexpr):
    token = tl.minimum(tl.maximum(tl.load(tokens + r), 0), V - 1)
    return tl.load(table + token.to(tl.int64) * D + d, mask=inside, other=0.0)


@triton.jit
def _embed(tokens, table, out, V, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    r = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < D
    row = _row_of_token(tokens, table, r, V, d, inside, D)
    tl.store(out + r.to(tl.int64) * D + d, row.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["eps"])
def _mtp_input(tokens, table, hidden, e_scale, h_scale, out, V, eps, D: tl.constexpr,
               BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    if PDL:
        cuda.gdc_launch_dependents()
    r = tl.program_id(0)
    half = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < D
    if half == 0:
        scale = tl.load(e_scale + d, mask=inside, other=0.0)
    else:
        scale = tl.load(h_scale + d, mask=inside, other=0.0)
    if PDL:
        cuda.gdc_wait()
    if half == 0:
        row = _row_of_token(tokens, table, r, V, d, inside, D).to(tl.float32)
    else:
        at = hidden + r.to(tl.int64) * D + d
        row = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    normed = row * tl.rsqrt(tl.sum(row * row, 0) / D + eps) * scale
    to = out + r.to(tl.int64) * (2 * D) + half * D + d
    tl.store(to, normed.to(out.dtype.element_ty), mask=inside)


def embed_rows(tokens: Tensor, table: Tensor, out: Tensor, rows: int) -> None:
    """out[:rows] = table[tokens[:rows]]; see the package."""
    v, d = table.shape
    _check(tokens, table, out, rows, d)
    block = min(1024, triton.next_power_of_2(d))
    _embed[(rows, triton.cdiv(d, block))](
        tokens, table, out, v, D=d, BLOCK=block, PDL=launch.PDL, launch_pdl=launch.PDL
    )


def mtp_input(
    tokens: Tensor,
    table: Tensor,
    hidden: Tensor,
    e_scale: Tensor,
    h_scale: Tensor,
    eps: float,
    out: Tensor,
    rows: int,
) -> None:
    """out[:rows] = [N(table[tokens]) | N(hidden)]; see the package."""
    v, d = table.shape
    _check(tokens, table, out, rows, 2 * d)
    assert hidden.is_contiguous()
    assert hidden.shape[0] >= rows
    assert hidden.shape[1] == d
    for scale in (e_scale, h_scale):
        assert scale.dtype is torch.float32
        assert scale.numel() == d
    _mtp_input[(rows, 2)](
        tokens,
        table,
        hidden,
        e_scale,
        h_scale,
        out,
        v,
        eps,
        D=d,
        BLOCK=triton.next_power_of_2(d),
        PDL=launch.PDL,
        num_warps=4 if d <= 2048 else 8,
        launch_pdl=launch.PDL,
    )


def _check(tokens: Tensor, table: Tensor, out: Tensor, rows: int, width: int) -> None:
    assert tokens.dtype is torch.int32
    assert tokens.numel() >= rows >= 1
    assert table.is_contiguous()
    assert out.is_contiguous()
    assert out.shape[0] >= rows
    assert out.shape[1] == width
