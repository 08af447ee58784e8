"""Capsules on a card: device memory, pinned host memory and bytes, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from capserve.engine.capsule import TorchCapsule
from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import Sampling, TokenArray
from capserve.testing.tiny import SHAPES, write_checkpoint
from tests.engine.helpers import assert_same_bits, live_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

POSITION = 700


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    path: Path = write_checkpoint(tmp_path_factory.mktemp("tiny"), SHAPES["gqa6-equal-heads"])
    return TorchEngine.load(
        path, device="cuda", dtype=request.param, max_model_len=1024, prefill_chunk=128
    )


def tokens(count: int, seed: int = 0) -> TokenArray:
    return np.random.default_rng(seed).integers(0, 320, count, dtype=np.int32)


@pytest.fixture
def whole(engine: TorchEngine) -> TorchCapsule:
    """A state with a decoded tail, in device memory, that no capsule of the engine shares."""
    ids = tokens(POSITION - 9)
    engine.reset()
    engine.extend(ids)
    engine.begin(Sampling(drafts=3), ids)
    while engine.position < POSITION:
        engine.step(POSITION - engine.position + (engine._decode.pending is None))
    return live_bits(engine)


def leave(engine: TorchEngine) -> None:
    engine.reset()
    engine.extend(tokens(900, seed=1))


def on_host(capsule: TorchCapsule) -> dict[str, bytes]:
    return {part.name.hex(): b"".join(part.pack()) for part in capsule.parts}


def test_a_capsule_goes_to_the_host_and_back_into_the_state(
    engine: TorchEngine, whole: TorchCapsule
) -> None:
    assert engine.limits.tiers == ("gpu", "host")
    kept = engine.snapshot()
    assert isinstance(kept, TorchCapsule)
    host = engine.move(kept, "host")
    assert isinstance(host, TorchCapsule)
    assert {part.tier for part in host.parts} == {"host"}
    assert all(t.device.type == "cpu" for part in host.parts for t in part.tensors.values())
    assert on_host(host) == on_host(kept)
    del kept
    leave(engine)
    assert engine.restore(host) == engine.limits.capsule_bytes(POSITION)
    assert_same_bits(live_bits(engine), whole)
    again = engine.move(host, "gpu")
    assert isinstance(again, TorchCapsule)
    assert again.segments[0].kv.is_cuda
    leave(engine)
    engine.restore(again)
    assert_same_bits(live_bits(engine), whole)


def test_host_memory_is_pinned(engine: TorchEngine, whole: TorchCapsule) -> None:
    host = engine.move(engine.snapshot(), "host")
    assert isinstance(host, TorchCapsule)
    assert all(segment.kv.is_pinned() for segment in host.segments)


def test_packed_parts_come_back_from_either_tier(engine: TorchEngine, whole: TorchCapsule) -> None:
    kept = engine.snapshot()
    host = engine.move(kept, "host")
    for capsule in (kept, host):
        files = [memoryview(b"".join(part.pack())) for part in capsule.parts]
        leave(engine)
        unpacked = engine.unpack(POSITION, files)
        assert {part.tier for part in unpacked.parts} == {"host"}
        engine.restore(unpacked)
        assert_same_bits(live_bits(engine), whole)
    del kept, host, capsule, unpacked
    unpacked = engine.unpack(POSITION, files)  # now no part of it lives
    leave(engine)
    engine.restore(unpacked)
    assert_same_bits(live_bits(engine), whole)


def test_a_capsule_dropped_right_after_its_restore_was_copied_before(
    engine: TorchEngine, whole: TorchCapsule
) -> None:
    files = [memoryview(b"".join(part.pack())) for part in whole.parts]
    for _ in range(20):
        leave(engine)
        engine.restore(engine.unpack(POSITION, files))
        other = [torch.zeros(1 << 20).pin_memory() for _ in range(4)]  # takes freed memory
        assert_same_bits(live_bits(engine), whole)
        del other


def test_the_byte_formulas_hold_on_the_card(engine: TorchEngine, whole: TorchCapsule) -> None:
    for capsule in (whole, engine.move(engine.snapshot(), "host")):
        total = sum(part.nbytes for part in capsule.parts)
        assert total == engine.limits.capsule_bytes(POSITION)
