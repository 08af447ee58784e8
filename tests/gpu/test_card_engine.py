"""The engine on a card says what the host says, and says it with the same bits however it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import capserve.nano
from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import Sampling, TokenArray
from capserve.testing.tiny import SHAPES, write_checkpoint
from tests.engine.helpers import assert_same_bits, live_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

CHUNK, POSITIONS = 128, 2048
SAMPLED = Sampling(temperature=0.8, top_k=20, top_p=0.95, seed=99)
Load = Callable[..., TorchEngine]


@pytest.fixture(scope="module", params=["nano", "flat-tied", "gqa6-equal-heads"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "nano":
        return Path(capserve.nano.__file__).parent
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), SHAPES[request.param])


def load(path: Path, dtype: str, device: str = "cuda", **more: bool) -> TorchEngine:
    return TorchEngine.load(
        path, device=device, dtype=dtype, max_model_len=POSITIONS, prefill_chunk=CHUNK, **more
    )


@pytest.fixture(scope="module")
def exact(path: Path) -> TorchEngine:
    return load(path, "float32")


@pytest.fixture(scope="module")
def narrow(path: Path) -> TorchEngine:
    return load(path, "bfloat16")


def tokens(engine: TorchEngine, count: int, seed: int = 0) -> TokenArray:
    draw = np.random.default_rng(seed)
    return draw.integers(0, min(320, engine.limits.vocab_size), count, dtype=np.int32)


def reply(engine: TorchEngine, sampling: Sampling, count: int, prompt: int = 300) -> list[int]:
    return decode(engine, sampling, count, prompt)[:count]


def decode(engine: TorchEngine, sampling: Sampling, count: int, prompt: int = 300) -> list[int]:
    """All that was decided until there were `count` tokens."""
    ids = tokens(engine, prompt)
    engine.reset()
    engine.extend(ids)
    engine.begin(sampling, ids)
    said: list[int] = []
    while len(said) < count:
        said += engine.step().tokens
    return said


def test_greedy_tokens_in_float32_are_the_hosts(path: Path, exact: TorchEngine) -> None:
    host = load(path, "float32", device="cpu")
    expected = reply(host, Sampling(), 96)
    for drafts in (0, 1, 4, 8):
        assert reply(exact, Sampling(drafts=drafts), 96) == expected, f"K = {drafts}"


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_the_number_of_drafts_changes_no_token_in_bfloat16(
    narrow: TorchEngine, sampling: Sampling
) -> None:
    expected = reply(narrow, sampling, 128)
    for drafts in (1, 4, 8):
        assert reply(narrow, replace(sampling, drafts=drafts), 128) == expected, f"K = {drafts}"


def test_the_number_of_drafts_changes_no_bit_of_the_state(narrow: TorchEngine) -> None:
    states = []
    for drafts in (0, 4):
        reply(narrow, replace(SAMPLED, drafts=drafts), 56)
        while narrow.position < 300 + 64:
            narrow.step(300 + 64 - narrow.position)
        states.append(live_bits(narrow))
    assert_same_bits(states[0], states[1])


def test_a_replayed_graph_leaves_the_bits_of_single_launches(
    path: Path, narrow: TorchEngine
) -> None:
    eager = load(path, "bfloat16", capture=False)
    assert eager.graph_capture_count == 0
    states = []
    for engine in (narrow, eager):
        said = reply(engine, replace(SAMPLED, drafts=3), 48)
        states.append((said, live_bits(engine)))
    assert states[0][0] == states[1][0]
    assert_same_bits(states[0][1], states[1][1])


def test_no_graph_is_captured_after_the_warm_up(narrow: TorchEngine) -> None:
    before = narrow.graph_capture_count
    reply(narrow, replace(SAMPLED, drafts=5, repetition_penalty=1.1, top_logprobs=2), 40)
    assert before > 0
    assert narrow.graph_capture_count == before


def test_a_restore_on_the_grid_has_the_bits_of_a_cold_prefill(narrow: TorchEngine) -> None:
    ids = tokens(narrow, 700, seed=3)
    narrow.reset()
    narrow.extend(ids)
    whole = live_bits(narrow)
    narrow.reset()
    narrow.extend(ids[: 3 * CHUNK])
    kept = narrow.move(narrow.snapshot(), "host")
    narrow.extend(tokens(narrow, 500, seed=4))
    narrow.restore(kept)
    narrow.extend(ids[3 * CHUNK :])
    assert_same_bits(live_bits(narrow), whole)


def test_512_decoded_tokens_stay_near_the_prefill_of_the_same(exact: TorchEngine) -> None:
    said = decode(exact, replace(SAMPLED, drafts=4), 505)
    while exact.position < 300 + 512:
        said += exact.step(300 + 512 - exact.position).tokens
    ids = np.concatenate([tokens(exact, 300), np.array(said[:512], np.int32)])
    exact.snapshot()
    decoded = exact._state.recurrent.clone()
    exact.reset()
    exact.extend(ids)
    scale = exact._state.recurrent.abs().max()
    assert float((exact._state.recurrent - decoded).abs().max() / scale) < 2e-4
