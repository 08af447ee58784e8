"""The short convolution in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def causal_conv(shifted: Sequence[Tensor], weight: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """shifted[j] [T, C]: the input of W-1-j tokens before; weight[j] [C] f32 -> [T, C] in dtype.

    The sum runs in float32 in the order of the taps and is rounded once.
    """
    total = shifted[0].float() * weight[0]
    for x, w in zip(shifted[1:], weight[1:], strict=True):
        total = torch.addcmul(total, x.float(), w)
    return functional.silu(total.to(dtype))


def shifts(window: Tensor, taps: int) -> tuple[Tensor, ...]:
    """window [W-1 + T, C] (the W-1 inputs before, then T new ones) -> W views [T, C]."""
    count = window.shape[0] - (taps - 1)
    return tuple(window[j : j + count] for j in range(taps))
