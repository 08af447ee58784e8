"""Root mean square norms of the family.

Two kinds: all norms scale by `1 + w` with w stored around 0, except the gated delta net's output
norm, which scales by a plain w stored around 1. The caller passes the final scale. Inside float32,
one rounding at the end.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from capserve.engine.kernels.rms_norm.cpu import rms_norm
from capserve.engine.layers.linear import MAX_ROWS


class RmsNorm:
    """y = x * rsqrt(mean(x^2) + eps) * scale  (Zhang and Sennrich 2019)."""

    def __init__(self, scale: Tensor, eps: float) -> None:
        """scale [D], or [H, D] for a norm with a weight a head; float32."""
        self.scale = scale
        self.eps = eps
        self._rows_scale = (
            scale.reshape(-1, scale.shape[-1]).numpy() if scale.device.type == "cpu" else None
        )
        self._rows_eps = np.float32(eps)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] any float dtype -> like x."""
        if self._rows_scale is not None and x.dtype == torch.float32 and len(x) <= MAX_ROWS:
            flat = x.reshape(-1, x.shape[-1]).numpy()
            y = np.empty(flat.shape, np.float32)
            rms_norm(flat, self._rows_scale, self._rows_eps, y)
            return torch.from_numpy(y).view(x.shape)
        f = x.float()
        r = torch.mean(f * f, -1, keepdim=True).add_(self.eps).rsqrt_()
        return (f * r).mul_(self.scale).to(x.dtype)
