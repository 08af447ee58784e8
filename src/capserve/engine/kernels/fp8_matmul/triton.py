"""On the card: Triton for the quantisation and the widening, the vendor's matmul in between."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.language.extra import cuda

from capserve.engine.kernels import launch
from capserve.engine.kernels.fp8_matmul.reference import LARGEST, SMALLEST_PEAK
from capserve.engine.kernels.rows_matmul.triton import widened
from capserve.engine.weights import BLOCK, BlockFp8Weight

_SIDE = tl.constexpr(BLOCK)
_LARGEST = tl.constexpr(LARGEST)
_SMALLEST_PEAK = tl.constexpr(SMALLEST_PEAK)

_TOKENS_A_PROGRAM = 32
_SCALE_ROWS = 4
"""The matmul wants both scales in columns of a multiple of 16 bytes."""

_WIDENED_ROWS = 4096
"""Rows of W in bfloat16 at a time: 140 MB at the widest matrix of the family."""


@triton.jit
def _quantise(x, q, scales, T, K, stride, TOKENS: tl.constexpr, PDL: tl.constexpr):
    """One group of TOKENS tokens. scales [groups, stride]: token fastest."""
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    group = tl.program_id(1)
    k = group * _SIDE + tl.arange(0, _SIDE)
    inside = (t < T)[:, None] & (k < K)[None, :]
    at = t.to(tl.int64)[:, None] * K + k[None, :]
    tile = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(tile), 1), _SMALLEST_PEAK) / _LARGEST
    scaled = tl.minimum(tl.maximum(tile / scale[:, None], -_LARGEST), _LARGEST)
    tl.store(q + at, scaled.to(q.dtype.element_ty), mask=inside)
    tl.store(scales + group.to(tl.int64) * stride + t, scale, mask=t < stride)


@triton.jit
def _widen(weight, scales, out, N, K, BLOCKS, ROWS: tl.constexpr):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    k = block * _SIDE + tl.arange(0, _SIDE)
    inside = (n < N)[:, None] & (k < K)[None, :]
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    scale = tl.load(scales + tl.program_id(0) * ROWS // _SIDE * BLOCKS + block)
    w = widened(tl.load(weight + at, mask=inside, other=0.0)) * scale
    tl.store(out + at, w.to(out.dtype.element_ty), mask=inside)


def quantise_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> q [T', K] e4m3, s [T', ceil(K / 128)] f32 with strides (1, T'), where T' is T up
    to a multiple of 4: what the matmul takes. Rows of q from T on hold whatever was there, and
    their scale is that of zeros."""
    tokens, k = x.shape
    assert x.is_contiguous()
    rows = triton.cdiv(tokens, _SCALE_ROWS) * _SCALE_ROWS
    groups = triton.cdiv(k, BLOCK)
    q = torch.empty(rows, k, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(groups, rows, dtype=torch.float32, device=x.device)
    if tokens:
        _quantise[(triton.cdiv(rows, _TOKENS_A_PROGRAM), groups)](
            x, q, scales, tokens, k, rows, TOKENS=_TOKENS_A_PROGRAM, PDL=launch.PDL,
            launch_pdl=launch.PDL,
        )  # fmt: skip
    return q, scales.t()


def multiplies_blocks(weight: BlockFp8Weight) -> bool:
    """Whether the vendor's matmul takes this weight by its blocks on this card."""
    n, k = weight.weight.shape
    hopper = launch.capability(weight.weight.device)[0] == 9
    return hopper and hasattr(functional, "scaled_mm") and n % 16 == 0 and k % 16 == 0


def fp8_matmul(x: Tensor, weight: BlockFp8Weight) -> Tensor:
    """x [T, K] -> y [T, N] like x; see the package. A float32 x is not quantised."""
    if x.dtype is not torch.bfloat16 or not multiplies_blocks(weight):
        return widened_matmul(x, weight)
    tokens = x.shape[0]
    q, scale = quantise_groups(x)
    blocks = weight.scale.shape[1]
    w_scale = weight.scale
    if blocks % _SCALE_ROWS:
        w_scale = functional.pad(w_scale, (0, -blocks % _SCALE_ROWS))
    y = functional.scaled_mm(
        q,
        weight.weight.t(),
        scale,
        functional.ScalingType.BlockWise1x128,
        w_scale.t(),
        functional.ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return y[:tokens]


def widened_matmul(x: Tensor, weight: BlockFp8Weight) -> Tensor:
    """The same on any card, with x as it is."""
    n, k = weight.weight.shape
    y = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device)
    room = torch.empty(min(n, _WIDENED_ROWS), k, dtype=x.dtype, device=x.device)
    rows = 32
    for first in range(0, n, _WIDENED_ROWS):
        part = launch.readable_fp8(weight.weight)[first : first + _WIDENED_ROWS]
        count = part.shape[0]
        blocks = weight.scale.shape[1]
        _widen[(triton.cdiv(count, rows), blocks)](
            part, weight.scale[first // BLOCK :], room, count, k, blocks, ROWS=rows
        )
        torch.mm(x, room[:count].t(), out=y[:, first : first + count])
    return y
