"""Reuse, speculation and splits change no bit where the design says so (I5, I6, I7)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from capserve.engine.layers.linear import Linear
from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import Sampling
from capserve.engine.weights import PlainWeight
from tests.engine.helpers import assert_same_bits, generate, live_bits, tokens

PROMPT = 300
GRID = 128


@pytest.fixture(params=["nano", "nano_bf16"])
def engine(request: pytest.FixtureRequest) -> TorchEngine:
    engine: TorchEngine = request.getfixturevalue(request.param)
    engine.reset()
    return engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1552, 256), (256, 768), (256, 512), (8192, 256), (8, 256)])
def test_a_row_of_a_matmul_has_the_same_bits_in_any_company(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    linear = Linear(PlainWeight(torch.randn(shape, generator=generator).to(dtype)))
    row = torch.randn(shape[1], generator=generator).to(dtype)
    alone = linear(row[None])[0]
    for count in range(1, 10):
        for place in range(count):
            rows = torch.randn(count, shape[1], generator=generator).to(dtype)
            rows[place] = row
            assert torch.equal(linear(rows)[place], alone), f"{count} rows, place {place}"


def test_a_prefill_split_on_the_grid_has_the_bits_of_one_call(engine: TorchEngine) -> None:
    ids = tokens(PROMPT, engine.limits.vocab_size)
    engine.extend(ids)
    whole = live_bits(engine)
    for cuts in ([GRID], [2 * GRID], [GRID, 2 * GRID]):
        engine.reset()
        for part in np.split(ids, cuts):
            engine.extend(part)
        assert_same_bits(live_bits(engine), whole)


def test_a_restore_on_the_grid_has_the_bits_of_a_cold_prefill(engine: TorchEngine) -> None:
    ids = tokens(PROMPT, engine.limits.vocab_size)
    engine.extend(ids[: 2 * GRID])
    boundary = engine.snapshot()
    engine.extend(ids[2 * GRID :])
    cold = live_bits(engine)
    generate(engine, ids, 30, Sampling(drafts=3))
    engine.reset()
    engine.extend(tokens(200, engine.limits.vocab_size, seed=8))  # another session in between
    engine.restore(boundary)
    engine.extend(ids[2 * GRID :])
    assert_same_bits(live_bits(engine), cold)


def test_a_restore_off_the_grid_has_the_bits_of_a_run_that_broke_there_too(
    engine: TorchEngine,
) -> None:
    ids = tokens(PROMPT, engine.limits.vocab_size)
    engine.extend(ids[:201])
    boundary = engine.snapshot()
    engine.extend(ids[201:])
    cold = live_bits(engine)
    engine.reset()
    engine.restore(boundary)
    engine.extend(ids[201:])
    assert_same_bits(live_bits(engine), cold)


def test_the_number_of_drafts_changes_no_bit_of_the_state(engine: TorchEngine) -> None:
    ids = tokens(PROMPT, engine.limits.vocab_size)
    engine.extend(ids)
    start = engine.snapshot()
    plain = None
    for drafts in (0, 1, 3, 4, 8):
        engine.restore(start)
        out, chunks = generate(engine, ids, 60, Sampling(drafts=drafts))
        if drafts:
            assert any(chunk.accepted < chunk.drafted for chunk in chunks), "no roll-back was seen"
        position = engine.position
        engine.restore(start)  # absorb the same tokens one by one up to the same place
        again, _ = generate(engine, ids, position - PROMPT + 1, Sampling(drafts=0))
        assert again[:60] == out
        reference = live_bits(engine)
        engine.restore(start)
        generate(engine, ids, 60, Sampling(drafts=drafts))
        assert_same_bits(live_bits(engine), reference)
        plain = plain or out
        assert out == plain


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_turn_parked_in_mid_decode_goes_on_as_if_undisturbed(
    engine: TorchEngine, temperature: float, drafts: int
) -> None:
    sampling = Sampling(
        temperature=temperature, seed=5, drafts=drafts, presence_penalty=0.5, repetition_penalty=1.1
    )
    ids = tokens(PROMPT, engine.limits.vocab_size)
    engine.extend(ids)
    start = engine.snapshot()
    undisturbed, _ = generate(engine, ids, 80, sampling)
    engine.restore(start)
    engine.begin(sampling, ids)
    out: list[int] = []
    while len(out) < 40:
        out += engine.step().tokens
    parked = engine.snapshot()
    engine.reset()
    engine.extend(tokens(77, engine.limits.vocab_size, seed=2))
    generate(engine, ids[:77], 9, Sampling(drafts=drafts))
    engine.restore(parked)
    engine.begin(sampling, ids, np.array(out, dtype=np.int32))
    while len(out) < 80:
        out += engine.step().tokens
    assert out[:80] == undisturbed


def test_a_snapshot_in_mid_turn_does_not_disturb_it(engine: TorchEngine) -> None:
    ids = tokens(PROMPT, engine.limits.vocab_size)
    engine.extend(ids)
    start = engine.snapshot()
    undisturbed, _ = generate(engine, ids, 60, Sampling(drafts=3))
    engine.restore(start)
    engine.begin(Sampling(drafts=3), ids)
    out: list[int] = []
    while len(out) < 60:
        out += engine.step().tokens
        engine.snapshot()
    assert out[:60] == undisturbed


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_same_seed_gives_the_same_output_for_every_k_hot_and_cold(
    nano: TorchEngine, temperature: float
) -> None:
    ids = tokens(PROMPT, nano.limits.vocab_size)
    outputs = []
    for drafts in (0, 4):
        sampling = Sampling(temperature=temperature, top_p=0.95, top_k=50, seed=7, drafts=drafts)
        nano.reset()
        nano.extend(ids[: 2 * GRID])
        boundary = nano.snapshot()
        nano.extend(ids[2 * GRID :])
        outputs.append(generate(nano, ids, 100, sampling)[0])  # cold
        nano.restore(boundary)
        nano.extend(ids[2 * GRID :])
        outputs.append(generate(nano, ids, 100, sampling)[0])  # hot
    assert all(output == outputs[0] for output in outputs)
    if temperature:
        nano.restore(boundary)
        nano.extend(ids[2 * GRID :])
        other = generate(nano, ids, 100, Sampling(temperature=temperature, seed=8))[0]
        assert other != outputs[0]


def test_the_context_can_be_filled_to_its_last_position_with_drafts(nano_bf16: TorchEngine) -> None:
    engine = nano_bf16
    engine.reset()
    limit = engine.limits.max_positions
    ids = tokens(limit - 6, engine.limits.vocab_size)
    engine.extend(ids)
    engine.begin(Sampling(drafts=8), ids)
    out: list[int] = []
    while engine.position < limit:
        out += engine.step().tokens
    assert engine.position == limit
    assert len(out) == 7


def test_every_change_of_k_in_mid_turn_is_invisible(nano: TorchEngine) -> None:
    """Also after a step that accepted all of 8 drafts, and with a bound on what a step decides."""
    ids = np.tile(tokens(7, nano.limits.vocab_size, seed=3), 40)  # repetitive: all is accepted
    nano.reset()
    nano.extend(ids)
    start = nano.snapshot()
    plain, _ = generate(nano, ids, 150, Sampling())
    reference = live_bits(nano)
    nano.restore(start)
    out: list[int] = []
    whole = 0
    for i in range(1000):
        if len(out) >= len(plain):
            break
        drafts = (8, 0, 3, 0, 0, 8, 1)[i % 7]
        nano.begin(Sampling(drafts=drafts), ids, np.array(out, dtype=np.int32))
        most = len(plain) - len(out)
        chunk = nano.step(most)
        assert len(chunk.tokens) <= most
        whole += chunk.accepted == 8
        out += chunk.tokens
    assert whole > 0, "no step accepted all of its drafts: the case was not tried"
    assert out == plain
    assert_same_bits(live_bits(nano), reference)


@pytest.mark.parametrize("drafts", [0, 8])
def test_the_last_position_is_reached_from_every_side_with_drafts(
    nano_bf16: TorchEngine, drafts: int
) -> None:
    engine = nano_bf16
    limit = engine.limits.max_positions
    for short in range(1, 12):
        engine.reset()
        ids = np.tile(tokens(7, engine.limits.vocab_size, seed=3), limit // 7 + 1)[: limit - short]
        engine.extend(ids)
        engine.begin(Sampling(drafts=drafts), ids)
        count = 0
        while engine.position < limit:
            count += len(engine.step().tokens)
        assert count == short + 1


@torch.inference_mode()
def test_the_number_of_prefill_threads_changes_no_bit_of_what_is_decoded(nano: TorchEngine) -> None:
    """Accepted rows are folded in by the next call, which may be a prefill."""
    ids = tokens(PROMPT, nano.limits.vocab_size)
    states = []
    nano.reset()
    nano.extend(ids)
    start = nano.snapshot()
    before = nano._prefill_threads
    try:
        for threads in (1, 2):
            nano._prefill_threads = threads
            nano.restore(start)
            nano.begin(Sampling(drafts=3), ids)
            for _ in range(5):
                nano.step()
            nano._settle()
            states.append(live_bits(nano))
    finally:
        nano._prefill_threads = before
    assert_same_bits(states[0], states[1])
