"""In which forms does a matrix lie in memory?

A form is one dataclass with its tensors; the matmuls `match` on it. Another one (int4 with group
scales, say) is a dataclass here, an arm there and a line in `dense`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

BLOCK = 128
"""Side of a square of weights that shares one scale in the family's FP8 checkpoints."""


@dataclass(frozen=True)
class PlainWeight:
    """W as it is."""

    weight: Tensor
    """[N, K] bf16 or f32, contiguous."""

    def __post_init__(self) -> None:
        assert self.weight.dim() == 2
        assert self.weight.is_contiguous()


@dataclass(frozen=True)
class BlockFp8Weight:
    """W[n, k] = weight[n, k] * scale[n // 128, k // 128]: the family's official FP8 checkpoints,
    which call the scale `weight_scale_inv`."""

    weight: Tensor
    """[N, K] float8_e4m3fn, contiguous."""
    scale: Tensor
    """[ceil(N / 128), ceil(K / 128)] f32, contiguous."""

    def __post_init__(self) -> None:
        assert self.weight.dtype is torch.float8_e4m3fn
        assert self.scale.dtype is torch.float32
        assert self.weight.is_contiguous()
        assert self.scale.is_contiguous()
        n, k = self.weight.shape
        assert self.scale.shape == (-(-n // BLOCK), -(-k // BLOCK)), (self.scale.shape, (n, k))


@dataclass(frozen=True)
class SplitWeight:
    """An FP8 matrix with a few plain rows below it, which a decode step reads in one launch: the
    delta net's gate inputs stay bf16 in FP8 checkpoints."""

    head: BlockFp8Weight
    """N a multiple of 128."""
    tail: PlainWeight

    def __post_init__(self) -> None:
        assert self.head.weight.shape[0] % BLOCK == 0
        assert self.head.weight.shape[1] == self.tail.weight.shape[1]


Weight = PlainWeight | BlockFp8Weight | SplitWeight


def shape_of(weight: Weight) -> tuple[int, int]:
    """(N, K): outputs and inputs."""
    match weight:
        case PlainWeight() | BlockFp8Weight():
            n, k = weight.weight.shape
            return n, k
        case SplitWeight(head, tail):
            n, k = shape_of(head)
            return n + tail.weight.shape[0], k
        case _:
            assert_never(weight)


def bytes_of(weight: Weight) -> int:
    """Bytes that a matmul reads at least."""
    match weight:
        case PlainWeight():
            return weight.weight.nbytes
        case BlockFp8Weight():
            return weight.weight.nbytes + weight.scale.nbytes
        case SplitWeight(head, tail):
            return bytes_of(head) + bytes_of(tail)
        case _:
            assert_never(weight)


def dense(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """W [N, K] in `dtype`: what the form stands for."""
    match weight:
        case PlainWeight():
            return weight.weight.to(dtype)
        case BlockFp8Weight():
            n, k = weight.weight.shape
            scale = weight.scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
            return (weight.weight.float() * scale).to(dtype)
        case SplitWeight(head, tail):
            return torch.cat([dense(head, dtype), dense(tail, dtype)])
        case _:
            assert_never(weight)


def quantised(w: Tensor) -> BlockFp8Weight:
    """w [N, K] -> the nearest FP8 form: every square's largest element becomes e4m3's largest."""
    n, k = w.shape
    rows, columns = -(-n // BLOCK), -(-k // BLOCK)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK, dtype=torch.float32, device=w.device)
    padded[:n, :k] = w
    squares = padded.view(rows, BLOCK, columns, BLOCK)
    limit = torch.finfo(torch.float8_e4m3fn).max
    scale = squares.abs().amax((1, 3)).clamp_(min=1e-12) / limit
    narrow = (squares / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    narrow = narrow.view(rows * BLOCK, columns * BLOCK)[:n, :k]
    return BlockFp8Weight(narrow.contiguous(), scale.contiguous())
