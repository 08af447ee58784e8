"""Small steps that several engine tests take."""

from __future__ import annotations

import numpy as np
import torch
from numpy.random import default_rng

from capserve.engine.capsule import TorchCapsule
from capserve.engine.parts import PartPool
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


def live_bits(engine: TorchEngine) -> TorchCapsule:
    """A copy of the live buffers, whatever capsules of an equal history there are.

    A `snapshot` would hand out those capsules' own parts, and prove nothing about the buffers.
    """
    live = engine._live
    shared, live._pool = live._pool, PartPool(live._tiers)
    try:
        capsule = engine.snapshot()
    finally:
        live._pool = shared
    assert isinstance(capsule, TorchCapsule)
    return capsule


def assert_same_bits(a: TorchCapsule, b: TorchCapsule) -> None:
    """Every byte of every part."""
    assert a.position == b.position
    for mine, theirs in zip(a.parts, b.parts, strict=True):
        assert mine is not theirs, "one part compared with itself"
        for (name, tensor), other in zip(
            mine.tensors.items(), theirs.tensors.values(), strict=True
        ):
            assert name == "history" or torch.equal(tensor, other), name
