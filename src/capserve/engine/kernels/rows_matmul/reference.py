"""The definition: one dot product a row and column, in float32."""

import torch
from torch import Tensor


def rows_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, K] f32, weight [N, K] f32 or bf16 -> [R, N] f32."""
    return torch.stack([weight.float() @ row for row in x])
