"""Root mean square norms of the family.

Two kinds: all norms scale by `1 + w` with w stored around 0, except the gated delta net's output
norm, which scales by a plain w stored around 1. The caller passes the final scale. Inside float32,
one rounding at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x [..., D] any float dtype, scale [D] or broadcastable, float32 -> like x.

    y = x * rsqrt(mean(x^2) + eps) * scale  (Zhang and Sennrich 2019).
    """
    f = x.float()
    r = torch.mean(f * f, -1, keepdim=True).add_(eps).rsqrt_()
    return (f * r).mul_(scale).to(x.dtype)
