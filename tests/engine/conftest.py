"""Engines and checkpoints that the engine tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import capserve.nano
from capserve.engine.runtime import TorchEngine
from capserve.testing.tiny import SHAPES, write_checkpoint

torch.set_num_threads(1)  # two OpenMP threads stall each other on a busy machine


@pytest.fixture(scope="session")
def nano_dir() -> Path:
    return Path(capserve.nano.__file__).parent


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes each tiny checkpoint once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = write_checkpoint(tmp_path_factory.mktemp(name), SHAPES[name])
        return made[name]

    return make


@pytest.fixture(scope="session")
def nano(nano_dir: Path) -> TorchEngine:
    """The real nano engine, float32. Tests start with `reset` or `restore`."""
    return TorchEngine.load(nano_dir, max_model_len=4096, prefill_chunk=128)


@pytest.fixture(scope="session")
def nano_bf16(nano_dir: Path) -> TorchEngine:
    return TorchEngine.load(nano_dir, max_model_len=1024, prefill_chunk=128, dtype="bfloat16")
