"""Which engines must keep the contract? Add a builder here, and every contract test runs on it."""

from __future__ import annotations

from collections.abc import Callable

from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import Engine
from capserve.nano import checkpoint_dir
from capserve.testing.fake_engine import FakeEngine


def fake() -> Engine:
    return FakeEngine()


def nano() -> Engine:
    return TorchEngine.load(
        checkpoint_dir(), device="cpu", max_model_len=1024, prefill_chunk=128, threads=1
    )


ENGINES: dict[str, Callable[[], Engine]] = {"fake": fake, "nano": nano}
"""By name. A builder returns a fresh engine at position 0 with room for 1,000 positions or more."""
