"""Rotary position embedding over the leading dims of a head (Su et al. 2021).

Half-split pairs (i, i + rotary_dim / 2). For text the family's three-row multimodal form is the
same number in all rows, hence plain rotary. Angles of all positions are made once, at start: a step
reads its rows, and a position's bits never depend on who else was in the call.
"""

from __future__ import annotations

import torch
from torch import Tensor

Angles = tuple[Tensor, Tensor]
"""cos and sin, [T, 1, rotary_dim / 2]."""


class Rotary:
    def __init__(
        self,
        rotary_dim: int,
        theta: float,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rotary_dim = rotary_dim
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        inv_freq = 1.0 / theta**exponent  # [rotary_dim / 2] f32
        angle = (torch.arange(positions, dtype=torch.float32)[:, None] * inv_freq).unsqueeze(1)
        self._cos = angle.cos().to(device, dtype)
        self._sin = angle.sin().to(device, dtype)

    @property
    def tables(self) -> Angles:
        """Of all positions: cos and sin, [P, rotary_dim / 2]."""
        return self._cos.squeeze(1), self._sin.squeeze(1)

    @staticmethod
    def table_bytes(rotary_dim: int, positions: int, dtype: torch.dtype) -> int:
        return positions * rotary_dim * dtype.itemsize

    def angles(self, start: int, count: int) -> Angles:
        """Of the positions [start, start + count)."""
        return self._cos[start : start + count], self._sin[start : start + count]

    def rotate(self, x: Tensor, angles: Angles) -> Tensor:
        """x [T, H, D] -> the same with the first rotary_dim dims rotated."""
        cos, sin = angles
        half = self.rotary_dim // 2
        a, b = x[..., :half], x[..., half : self.rotary_dim]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., self.rotary_dim :]], dim=-1)
