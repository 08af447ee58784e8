"""The short convolution in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional


def causal_conv(window: Tensor, weight: Tensor) -> Tensor:
    """window [W-1 + T, C] (the W-1 inputs before, then T new ones), weight [W, C] f32 -> [T, C].

    The sum runs in float32 in the order of the taps and is rounded once to the window's dtype.
    """
    taps = weight.shape[0]
    count = window.shape[0] - (taps - 1)
    wide = window.float()
    total = wide[:count] * weight[0]
    for j in range(1, taps):
        total = torch.addcmul(total, wide[j : j + count], weight[j])
    return functional.silu(total.to(window.dtype))
