"""On the card: one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from capserve.engine.kernels import launch

_BLOCK = 2048


@triton.jit
def _silu_mul(x, out, INNER, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < INNER
    gate = tl.load(x + t * 2 * INNER + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + t * 2 * INNER + INNER + i, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + t * INNER + i, y.to(out.dtype.element_ty), mask=inside)


def silu_mul(x: Tensor, out: Tensor) -> None:
    """x [T, 2 I] -> out [T, I]; see the package."""
    tokens, inner = out.shape
    assert x.shape == (tokens, 2 * inner), (x.shape, out.shape)
    assert x.is_contiguous()
    assert out.is_contiguous()
    if tokens:
        block = min(_BLOCK, triton.next_power_of_2(inner))
        _silu_mul[(tokens, triton.cdiv(inner, block))](
            x, out, inner, BLOCK=block, PDL=launch.PDL, launch_pdl=launch.PDL
        )
