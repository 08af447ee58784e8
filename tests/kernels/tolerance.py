"""How far may a kernel be from its definition? One table, the same on the card and off it.

The reference is computed in float32 (float64 where that matters) from the same inputs. A bfloat16
kernel may round in other places than the reference, once or twice an element; a float32 one may add
in another order.
"""

from __future__ import annotations

import torch
from torch import Tensor

LIMITS: dict[torch.dtype, tuple[float, float, float]] = {
    # largest |difference| over the largest |reference|, the same with a floor of 1 under the
    # latter, and ||difference|| over ||reference||
    torch.float32: (float("inf"), 2e-5, float("inf")),
    torch.bfloat16: (2e-2, float("inf"), 8e-3),
}


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, what: str = "output") -> None:
    """`dtype`: the coarsest type that the kernel rounds to on its way, not always that of `got`.
    NaN and infinity are equal to themselves only, so a poisoned element that was not written
    fails."""
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} for {tuple(want.shape)}"
    if want.numel() == 0:
        return
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    same = (got == want) | (got.isnan() & want.isnan())
    assert bool((got.isfinite() | same).all()), f"{what}: {int((~got.isfinite()).sum())} not finite"
    difference = torch.where(same, torch.zeros_like(got), (got - want).abs())
    want = torch.where(want.isfinite(), want, torch.zeros_like(want))
    relative, absolute, norm = LIMITS[dtype]
    largest, peak = difference.max().item(), want.abs().max().item()
    assert largest <= relative * peak, f"{what}: off by {largest:.3e}, peak {peak:.3e}"
    assert largest <= absolute * max(1.0, peak), f"{what}: off by {largest:.3e}, peak {peak:.3e}"
    error, length = difference.norm().item(), want.norm().item()
    assert error <= norm * length, f"{what}: error {error:.3e} of {length:.3e}"


def assert_same_bits(got: Tensor, want: Tensor, what: str = "output") -> None:
    """Bit for bit: two zeros of different sign differ, a NaN equals the same NaN."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    unequal = int((got.contiguous().view(width) != want.contiguous().view(width)).sum())
    assert unequal == 0, f"{what}: {unequal} of {got.numel()} elements differ in their bits"


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An output full of NaN: what a kernel leaves out is seen."""
    return torch.full(shape, float("nan"), device=device).to(dtype)
