"""E1 to E9 of `capserve.engine.seam`, on every engine there is (tests/contract/engines.py)."""

from __future__ import annotations

import numpy as np
import pytest
from contract_steps import GREEDY, SAMPLED, decode, most_drafts, run_cold, some_tokens, with_drafts

from capserve.engine.seam import Chunk, Engine, Sampling
from capserve.errors import CapserveError, ContextLengthError


def test_e1_position_counts_the_tokens_that_were_absorbed(engine: Engine) -> None:
    assert engine.position == 0
    engine.extend(some_tokens(engine, 70))
    assert engine.position == 70
    engine.extend(some_tokens(engine, 1))
    assert engine.position == 71
    capsule = engine.snapshot()
    assert capsule.position == 71
    engine.reset()
    assert engine.position == 0
    engine.restore(capsule)
    assert engine.position == 71


@pytest.mark.parametrize("drafts", [0, 4])
def test_e2_the_state_lags_the_decided_tokens_by_the_pending_one(
    engine: Engine, drafts: int
) -> None:
    prompt = some_tokens(engine, 65)
    engine.extend(prompt)
    engine.begin(with_drafts(GREEDY, min(drafts, engine.limits.max_drafts)), prompt)
    decided = 0
    for step in range(12):
        chunk = engine.step()
        decided += len(chunk.tokens)
        assert 1 <= len(chunk.tokens) <= drafts + 1
        assert len(chunk.tokens) - 1 <= chunk.accepted <= chunk.drafted <= drafts
        assert step > 0 or len(chunk.tokens) == 1, "the first step samples one token"
        assert engine.position == 65 + decided - 1


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_e2_a_step_decides_at_most_what_it_was_asked_for_and_loses_nothing(
    engine: Engine, sampling: Sampling
) -> None:
    prompt = some_tokens(engine, 65)
    drafts = most_drafts(engine)
    expected = run_cold(engine, prompt, with_drafts(sampling, drafts), 24)
    engine.reset()
    engine.extend(prompt)
    engine.begin(with_drafts(sampling, drafts), prompt)
    said: list[int] = []
    for turn in range(12):
        most = 1 + turn % 3
        chunk = engine.step(most)
        said += chunk.tokens
        assert 1 <= len(chunk.tokens) <= most
        assert chunk.drafted < most
        assert engine.position == 65 + len(said) - 1
    said += decode(engine, 24)
    assert said[:24] == expected


def test_e2_extend_forgets_the_pending_token(engine: Engine) -> None:
    prompt = some_tokens(engine, 64)
    reply = run_cold(engine, prompt, GREEDY, 1)
    more = np.array([*reply, 3, 5], dtype=np.int32)
    engine.extend(more)
    assert engine.position == 67
    whole = np.concatenate([prompt, more])
    engine.begin(GREEDY, whole)
    hot = decode(engine, 6)
    engine.reset()
    engine.extend(prompt)
    engine.extend(more)
    engine.begin(GREEDY, whole)
    assert decode(engine, 6) == hot


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [1, 63, 64, 200])
def test_e3_a_restored_state_goes_on_as_the_original_would(
    engine: Engine, sampling: Sampling, length: int
) -> None:
    prompt = some_tokens(engine, length, seed=length)
    engine.extend(prompt)
    capsule = engine.snapshot()
    engine.begin(sampling, prompt)
    expected = decode(engine, 16)
    engine.reset()
    engine.extend(some_tokens(engine, 33, seed=99))  # another conversation in between
    engine.restore(capsule)
    engine.begin(sampling, prompt)
    assert decode(engine, 16) == expected


def test_e3_a_turn_is_taken_up_again_in_its_middle(engine: Engine) -> None:
    sampling = with_drafts(
        SAMPLED,
        most_drafts(engine),
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
    )
    prompt = some_tokens(engine, 80)
    expected = run_cold(engine, prompt, sampling, 24)
    engine.reset()
    engine.extend(prompt)
    engine.begin(sampling, prompt)
    said: list[int] = []
    while len(said) < 8:
        said += engine.step().tokens
    capsule = engine.snapshot()
    run_cold(engine, some_tokens(engine, 20, seed=5), GREEDY, 4)
    engine.restore(capsule)
    engine.begin(sampling, prompt, np.array(said, dtype=np.int32))
    assert said + decode(engine, 24 - len(said)) == expected


def test_e4_a_prefill_cut_on_the_grid_equals_the_whole(engine: Engine) -> None:
    grid = engine.limits.grid
    prompt = some_tokens(engine, 3 * grid + 7)
    expected = run_cold(engine, prompt, SAMPLED, 12)
    for cut in (grid, 2 * grid, 3 * grid):
        engine.reset()
        engine.extend(prompt[:cut])
        capsule = engine.snapshot()
        engine.reset()
        engine.restore(capsule)
        engine.extend(prompt[cut:])
        engine.begin(SAMPLED, prompt)
        assert decode(engine, 12) == expected, f"cut at {cut}"


def test_e4_cuts_at_chunk_ends_change_nothing(engine: Engine) -> None:
    limits = engine.limits
    length = min(2 * limits.prefill_chunk + 50, limits.max_positions - 20)
    prompt = some_tokens(engine, length)
    expected = run_cold(engine, prompt, GREEDY, 8)
    engine.reset()
    while engine.position < length:
        end = limits.chunk_end(engine.position, length)
        engine.extend(prompt[engine.position : end])
    engine.begin(GREEDY, prompt)
    assert decode(engine, 8) == expected


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_e5_the_tokens_do_not_depend_on_the_number_of_drafts(
    engine: Engine, sampling: Sampling
) -> None:
    prompt = some_tokens(engine, 90)
    expected = run_cold(engine, prompt, sampling, 32)
    for drafts in range(1, most_drafts(engine) + 1):
        assert run_cold(engine, prompt, with_drafts(sampling, drafts), 32) == expected


def test_e5_the_seed_decides_what_is_sampled(engine: Engine) -> None:
    prompt = some_tokens(engine, 90)
    hot = with_drafts(SAMPLED, 0, temperature=2.0, top_k=0, top_p=1.0)
    same = run_cold(engine, prompt, hot, 32)
    assert run_cold(engine, prompt, hot, 32) == same
    assert run_cold(engine, prompt, with_drafts(hot, 0, seed=4321), 32) != same


@pytest.mark.parametrize("drafts", [0, 4])
def test_e6_an_end_token_ends_the_chunk_and_is_not_absorbed(engine: Engine, drafts: int) -> None:
    prompt = some_tokens(engine, 70)
    drafts = min(drafts, engine.limits.max_drafts)
    free = run_cold(engine, prompt, GREEDY, 24)
    end = free[10]
    first = free.index(end)  # greedy may have said it before
    engine.reset()
    engine.extend(prompt)
    engine.begin(with_drafts(GREEDY, drafts, end_tokens=(end,)), prompt)
    said: list[int] = []
    chunk: Chunk | None = None
    while chunk is None or chunk.stop is None:
        chunk = engine.step()
        said += chunk.tokens
        assert len(said) <= first + 1, "the end token passed unseen"
    assert said == free[: first + 1]
    assert chunk.stop == end == chunk.tokens[-1]
    assert engine.position == len(prompt) + first


def test_e7_a_refused_call_leaves_the_state_as_it_was(engine: Engine) -> None:
    prompt = some_tokens(engine, 64)
    expected = run_cold(engine, prompt, GREEDY, 8)
    engine.reset()
    engine.extend(prompt)
    too_many = engine.limits.max_positions - 64 + 1
    with pytest.raises(CapserveError) as caught:
        engine.extend(some_tokens(engine, too_many))
    assert str(engine.limits.max_positions) in caught.value.message
    assert engine.position == 64
    engine.begin(GREEDY, prompt)
    assert decode(engine, 8) == expected


def test_e7_the_context_ends_with_an_error_and_not_with_a_wrong_token(engine: Engine) -> None:
    room = engine.limits.max_positions
    prompt = some_tokens(engine, room - 2)
    engine.extend(prompt)
    engine.begin(with_drafts(GREEDY, most_drafts(engine)), prompt)
    said = 0
    while said < 3:  # two more are absorbed, and one is decided after them
        said += len(engine.step().tokens)
    assert said == 3
    assert engine.position == room
    with pytest.raises(ContextLengthError):
        engine.step()
    assert engine.position == room


def test_e8_a_capsule_survives_everything_that_comes_later(engine: Engine) -> None:
    prompt = some_tokens(engine, 130)
    engine.extend(prompt[:100])
    early = engine.snapshot()
    engine.extend(prompt[100:])
    late = engine.snapshot()
    cold = {100: run_cold(engine, prompt[:100], GREEDY, 8)}
    engine.reset()
    engine.extend(prompt[:100])
    engine.extend(prompt[100:])
    engine.begin(GREEDY, prompt)
    cold[130] = decode(engine, 8)
    engine.reset()
    engine.extend(some_tokens(engine, 300, seed=7))
    for capsule in (late, early, late, early):
        engine.restore(capsule)
        engine.begin(GREEDY, prompt[: capsule.position])
        assert decode(engine, 8) == cold[capsule.position]


def test_e9_the_byte_formulas_equal_the_bytes_of_a_capsule(engine: Engine) -> None:
    for length in (1, 64, 513, 700):
        engine.reset()
        engine.extend(some_tokens(engine, length, seed=length))
        capsule = engine.snapshot()
        parts = {part.name: part.nbytes for part in capsule.parts}
        assert len(parts) == len(capsule.parts), "a capsule names each part once"
        assert sum(parts.values()) == engine.limits.capsule_bytes(length)


def test_e9_capsules_of_one_history_share_their_common_parts(engine: Engine) -> None:
    engine.extend(some_tokens(engine, 600))
    first = engine.snapshot()
    engine.extend(some_tokens(engine, 100, seed=1))
    second = engine.snapshot()
    kept = {part.name: part.nbytes for capsule in (first, second) for part in capsule.parts}
    alone = engine.limits.capsule_bytes(600) + engine.limits.capsule_bytes(700)
    assert sum(kept.values()) <= alone - 512 * engine.limits.kv_bytes_per_token


def test_logprobs_come_only_when_asked_for(engine: Engine) -> None:
    prompt = some_tokens(engine, 64)
    engine.extend(prompt)
    engine.begin(GREEDY, prompt)
    assert engine.step().logprobs == ()
    engine.reset()
    engine.extend(prompt)
    engine.begin(with_drafts(GREEDY, most_drafts(engine), top_logprobs=3), prompt)
    for _ in range(4):
        chunk = engine.step()
        assert [entry.token for entry in chunk.logprobs] == list(chunk.tokens)
        assert all(len(entry.top) == 3 and entry.logprob <= 0 for entry in chunk.logprobs)
