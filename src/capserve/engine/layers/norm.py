"""Root mean square norms of the family.

Two kinds: all norms scale by `1 + w` with w stored around 0, except the gated delta net's output
norm, which scales by a plain w stored around 1. The caller passes the final scale. Inside float32,
one rounding at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RmsNorm:
    """y = x * rsqrt(mean(x^2) + eps) * scale  (Zhang and Sennrich 2019).

    The 1 / D of the mean is moved into constants, rsqrt(sum(x^2) + D eps) * (scale sqrt(D)): one
    elementwise call less on a path where calls, not bytes, are the cost.
    """

    def __init__(self, scale: Tensor, eps: float) -> None:
        """scale [D], or [H, D] for a norm with a weight a head; float32."""
        dim = scale.shape[-1]
        self._gain = scale * dim**0.5
        # a tensor, because torch makes a new one of every Python number it meets: 10 us a call
        self._floor = torch.tensor(eps * dim, device=scale.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] any float dtype -> like x."""
        f = x.float()
        r = (f * f).sum(-1, keepdim=True).add_(self._floor).rsqrt_()
        return (f * r).mul_(self._gain).to(x.dtype)
