"""The fake has to be honest, or every test on top of it proves nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from serving_harness import END, ids, make_prompt, serving, some_words, user

from capserve.engine.seam import Engine, Sampling
from capserve.testing.fake_engine import FakeEngine, WrongStateError, WrongThreadError, fake_limits


def next_token(engine: Engine, sampling: Sampling = Sampling()) -> int:
    engine.begin(sampling, ids([]))
    return engine.step().tokens[0]


def after(*tokens: int) -> FakeEngine:
    engine = FakeEngine(fake_limits(vocab_size=100_000))
    engine.extend(ids(tokens))
    return engine


def test_the_next_token_depends_on_every_absorbed_token_and_its_place() -> None:
    base = next_token(after(1, 2, 3))
    assert base == next_token(after(1, 2, 3))
    others = [after(9, 2, 3), after(1, 9, 3), after(1, 2, 9), after(2, 1, 3), after(1, 2, 3, 0)]
    assert base not in [next_token(engine) for engine in others]


def test_the_sampling_counts_only_where_it_may() -> None:
    sampled = Sampling(temperature=0.5, seed=1)
    assert next_token(after(1, 2), Sampling(seed=1)) == next_token(after(1, 2), Sampling(seed=2))
    assert next_token(after(1, 2), sampled) != next_token(
        after(1, 2), Sampling(temperature=0.5, seed=2)
    )


def test_a_planted_fault_leaves_a_wrong_state_until_a_restore() -> None:
    engine = after(1, 2, 3)
    capsule, expected = engine.snapshot(), next_token(after(1, 2, 3))
    engine.fail("extend")
    with pytest.raises(RuntimeError, match="planted fault in extend"):
        engine.extend(ids([4]))
    assert engine.position != 3
    assert next_token(engine) != expected
    engine.restore(capsule)
    assert next_token(engine) == expected


def test_a_scripted_fake_says_its_lines_and_refuses_a_wrong_state() -> None:
    engine = FakeEngine(fake_limits(), script=lambda context: [20, 21])
    prompt = ids([5, 6, 7])
    engine.extend(prompt)
    engine.begin(Sampling(end_tokens=(END,), drafts=4), prompt)
    said: list[int] = []
    stop = None
    while stop is None:
        chunk = engine.step()
        said += chunk.tokens
        stop = chunk.stop
    assert said == [20, 21, END]
    engine.reset()
    engine.extend(ids([5, 6]))
    with pytest.raises(WrongStateError):
        engine.begin(Sampling(), prompt)


REACHES: dict[str, Callable[[FakeEngine], object]] = {
    "reset": FakeEngine.reset,
    "extend": lambda engine: engine.extend(ids([4])),
    "begin": lambda engine: engine.begin(Sampling(), ids([])),
    "step": FakeEngine.step,
    "snapshot": FakeEngine.snapshot,
    "restore": lambda engine: engine.restore(FakeEngine(engine.limits).snapshot()),
    "position": lambda engine: engine.position,
    "graph_capture_count": lambda engine: engine.graph_capture_count,
}


@pytest.mark.parametrize("what", REACHES)
def test_a_second_thread_is_refused_whatever_it_reaches_for(what: str) -> None:
    engine = after(1, 2, 3)
    engine.begin(Sampling(), ids([]))
    with ThreadPoolExecutor(1, thread_name_prefix="stranger") as pool:
        refusal = pool.submit(REACHES[what], engine).exception()
    assert isinstance(refusal, WrongThreadError)
    assert f"{what} from thread stranger_0" in str(refusal)
    assert engine.trespasses == [str(refusal)]
    assert engine.position == 3, "a refused call changes nothing"
    assert engine.step().tokens[0] == next_token(after(1, 2, 3))


def test_the_thread_that_builds_an_engine_may_hand_it_to_the_one_that_calls_it() -> None:
    engine = FakeEngine(fake_limits())
    assert (engine.position, engine.owner) == (0, None)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(engine.extend, ids([1, 2, 3])).result()
        assert pool.submit(lambda: engine.position).result() == 3
    with pytest.raises(WrongThreadError):
        engine.reset()


def test_a_test_on_the_worker_fails_for_a_second_thread_even_when_its_error_is_swallowed() -> None:
    def trespass() -> None:
        with serving() as s:
            s.ask(make_prompt([user(some_words(20))]))
            with suppress(WrongThreadError):
                s.engine.reset()

    with pytest.raises(AssertionError, match="a second thread reached for the engine"):
        trespass()


def test_drafts_are_sometimes_right_and_sometimes_wrong() -> None:
    engine = after(1, 2, 3)
    engine.begin(Sampling(drafts=4), ids([]))
    chunks = [engine.step() for _ in range(60)]
    lengths = {len(chunk.tokens) for chunk in chunks}
    assert lengths == {1, 2, 3, 4, 5}


def test_what_the_store_counts_is_what_stays_alive() -> None:
    limits = fake_limits()
    with serving(limits, budget_bytes=3 * limits.capsule_bytes(700)) as s:
        for seed in range(12):
            s.ask(make_prompt([user(some_words(600 + 40 * seed, seed=seed % 5))]))
        assert s.worker.stop(20.0)
        gc.collect()
        used = s.store.footprint().used_bytes
        entries = list(s.store._entries.values())
        keys = {part.key for entry in entries for part in entry.capsule.parts[1:]}
        assert s.engine.live_segments == len(keys)
        assert 0 < used <= 3 * limits.capsule_bytes(700)
        del entries
        while s.store.evict_lru() is not None or s.store.footprint().capsules:
            s.store.protect(None)
        gc.collect()
        assert s.engine.live_segments == 0, "something outside the store keeps capsules alive"
