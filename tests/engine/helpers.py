"""Small steps that several engine tests take."""

from __future__ import annotations

import numpy as np
import torch
from numpy.random import default_rng

from capserve.engine.capsule import TorchCapsule
from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import Chunk, Sampling, TokenArray


def tokens(count: int, vocab: int, seed: int = 0) -> TokenArray:
    return default_rng(seed).integers(0, vocab, count, dtype=np.int32)


def generate(
    engine: TorchEngine, context: TokenArray, count: int, sampling: Sampling
) -> tuple[list[int], list[Chunk]]:
    """At least `count` tokens after what the engine has absorbed, trimmed to `count`."""
    engine.begin(sampling, context)
    out: list[int] = []
    chunks: list[Chunk] = []
    while len(out) < count:
        chunks.append(engine.step())
        out += chunks[-1].tokens
    return out[:count], chunks


def kv_of(capsule: TorchCapsule) -> torch.Tensor:
    """[layers, k|v, Hkv, position, D] without the MTP layer's slot 0, which is never read."""
    kv = torch.cat([segment.kv for segment in capsule.segments], dim=3).clone()
    kv[-1, :, :, 0] = 0
    return kv


def assert_same_bits(a: TorchCapsule, b: TorchCapsule) -> None:
    assert a.position == b.position
    assert torch.equal(a.recurrent, b.recurrent)
    assert torch.equal(a.conv, b.conv)
    assert torch.equal(a.hidden, b.hidden)
    assert torch.equal(kv_of(a), kv_of(b))
