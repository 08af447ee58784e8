"""Engines for the reuse tests, and what each of them compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from capserve.engine import capsule, history, runtime, shelf
from capserve.engine.runtime import TorchEngine
from capserve.nano import checkpoint_dir
from tests.reuse.ledger import Ledger, account_of

MAX_MODEL_LEN = 4096

Engines = Callable[[int, str], tuple[TorchEngine, TorchEngine]]
"""(prefill chunk in tokens, dtype) -> a hot and a cold engine, the same pair each time."""


def _load(chunk: int, dtype: str = "float32") -> TorchEngine:
    return TorchEngine.load(
        checkpoint_dir(),
        dtype=dtype,
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
        prefill_chunk=chunk,
        threads=1,
    )


@pytest.fixture(scope="session")
def engines() -> Engines:
    made: dict[tuple[int, str], tuple[TorchEngine, TorchEngine]] = {}

    def pair(chunk: int, dtype: str = "float32") -> tuple[TorchEngine, TorchEngine]:
        key = (chunk, dtype)
        if key not in made:
            made[key] = (_load(chunk, dtype), _load(chunk, dtype))
        return made[key]

    return pair


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> tuple[TorchEngine, TorchEngine]:
    """A hot and a cold engine whose KV is cut into parts of 64 tokens, so that short prompts share
    parts as long ones do. Good for one test."""
    for module in (capsule, history, runtime, shelf):
        monkeypatch.setattr(module, "SEGMENT_TOKENS", 64)
    hot, cold = _load(64), _load(64)
    assert hot.limits.segment_tokens == 64
    return hot, cold


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Other tests may have set another number, and kernels may choose by it."""
    torch.set_num_threads(1)


@pytest.fixture
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    """What this test compares; it joins the session's account when the test ends."""
    mine = Ledger()
    yield mine
    account_of(request.config).add(mine)
