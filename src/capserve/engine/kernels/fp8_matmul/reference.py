"""The definition, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from capserve.engine.weights import BLOCK, BlockFp8Weight, dense

LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_PEAK = 1e-12
"""A group of zeros needs a scale, too."""


def quantise_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> q [T, K] e4m3, s [T, ceil(K / 128)] f32."""
    tokens, k = x.shape
    groups = -(-k // BLOCK)
    padded = torch.zeros(tokens, groups * BLOCK, dtype=torch.float32, device=x.device)
    padded[:, :k] = x
    grouped = padded.view(tokens, groups, BLOCK)
    scale = grouped.abs().amax(-1).clamp(min=SMALLEST_PEAK) / LARGEST
    q = (grouped / scale[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return q.view(tokens, groups * BLOCK)[:, :k], scale


def widened(q: Tensor, scale: Tensor) -> Tensor:
    """What q and s stand for: [T, K] f32."""
    return q.float() * scale.repeat_interleave(BLOCK, 1)[:, : q.shape[1]]


def fp8_matmul(x: Tensor, weight: BlockFp8Weight) -> Tensor:
    """[T, N] f32, with x quantised."""
    return widened(*quantise_groups(x)) @ dense(weight).t()
