"""Which engines must keep the contract? Add a builder here, and every contract test runs on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import Engine
from capserve.nano import checkpoint_dir
from capserve.testing.fake_engine import FakeEngine, fake_limits
from capserve.testing.tiny import SHAPES, write_checkpoint


def fake() -> Engine:
    return FakeEngine()


def fake_with_two_tiers() -> Engine:
    return FakeEngine(fake_limits(tiers=("gpu", "host"), fingerprint="two tiers"))


def nano() -> Engine:
    return TorchEngine.load(
        checkpoint_dir(), device="cpu", max_model_len=1024, prefill_chunk=128, threads=1
    )


def tiny() -> Engine:
    """Its prefill chunks lie across the bounds of segments, other than nano's."""
    with TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder), SHAPES["gqa6-equal-heads"])
        return TorchEngine.load(
            path, device="cpu", max_model_len=1024, prefill_chunk=192, threads=1
        )


ENGINES: dict[str, Callable[[], Engine]] = {
    "fake": fake,
    "fake-two-tiers": fake_with_two_tiers,
    "nano": nano,
    "tiny": tiny,
}
"""By name. A builder returns a fresh engine at position 0 with room for 1,000 positions or more."""
