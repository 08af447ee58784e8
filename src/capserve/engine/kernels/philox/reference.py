"""Philox 4x32-10 on int64 tensors that hold unsigned 32-bit words."""

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def philox(
    counter: tuple[Tensor, int, int, int], seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words for each element of counter[0] (int64, values < 2^32); seed is 64-bit unsigned."""
    c0 = counter[0]
    c1, c2, c3 = (torch.full_like(c0, word & _LOW) for word in counter[1:])
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1  # wraps beyond 2^63; the low 64 bits are what we want
        hi0, lo0 = (p0 >> 32) & _LOW, p0 & _LOW
        hi1, lo1 = (p1 >> 32) & _LOW, p1 & _LOW
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def gumbel(tokens: Tensor, position: int, seed: int) -> Tensor:
    """Standard Gumbel noise of each token id [N] int64 at `position`, f32 [N].

    Four neighbouring ids share one Philox block. u = (word + 1/2) / 2^32 is never 0 or 1.
    """
    words = philox((tokens >> 2, position & _LOW, position >> 32, 0), seed)
    lane = tokens & 3
    word = torch.where(lane < 2, torch.where(lane == 0, words[0], words[1]),
                       torch.where(lane == 2, words[2], words[3]))  # fmt: skip
    u = (word.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(u)).float()
