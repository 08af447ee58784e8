"""Rotary position embedding over the leading dims of a head (Su et al. 2021).

Half-split pairs (i, i + rotary_dim / 2). For text the family's three-row multimodal form is the
same number in all rows, hence plain rotary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from capserve.engine.layers.linear import ROW_TILE


class Rotary:
    def __init__(self, rotary_dim: int, theta: float, device: torch.device) -> None:
        self.rotary_dim = rotary_dim
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        self._inv_freq = (1.0 / theta**exponent).to(device)  # [rotary_dim / 2] f32

    def angles(self, start: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [count, 1, rotary_dim / 2] of the positions [start, start + count)."""
        end = start + -(-count // ROW_TILE) * ROW_TILE  # whole tiles: see `tiled`
        positions = torch.arange(start, end, dtype=torch.float32, device=self._inv_freq.device)
        angle = (positions[:, None] * self._inv_freq).unsqueeze(1)
        return angle.cos()[:count].to(dtype), angle.sin()[:count].to(dtype)

    def rotate(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """x [T, H, D] -> the same with the first rotary_dim dims rotated."""
        cos, sin = angles
        half = self.rotary_dim // 2
        a, b = x[..., :half], x[..., half : self.rotary_dim]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., self.rotary_dim :]], dim=-1)
