"""The fake has to be honest, or every test on top of it proves nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from serving_harness import END, ids, make_prompt, serving, some_words, user

from capserve.engine.seam import Engine, Sampling
from capserve.errors import CapsuleError
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
    "move": lambda engine: engine.move(FakeEngine(engine.limits).snapshot(), "host"),
    "unpack": lambda engine: engine.unpack(0, FakeEngine(engine.limits).snapshot().parts),
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
        capsules = [entry.capsule for entry in s.store._catalog if entry.capsule is not None]
        names = {part.name for capsule in capsules for part in capsule.parts[1:]}
        assert s.engine.live_segments == len(names)
        assert 0 < used <= 3 * limits.capsule_bytes(700)
        del capsules
        s.store.clear()
        gc.collect()
        assert s.engine.live_segments == 0, "something outside the store keeps capsules alive"


def test_kv_that_changed_on_its_way_shows_in_the_restore_and_not_before() -> None:
    engine = FakeEngine(fake_limits(segment_tokens=16))
    engine.extend(ids(range(1, 41)))
    files = [bytearray(b"".join(part.pack())) for part in engine.snapshot().parts]
    files[1][8 + int.from_bytes(files[1][:8], "little")] ^= 1  # a token of the first segment
    engine.reset()
    capsule = engine.unpack(40, [memoryview(file) for file in files])
    with pytest.raises(WrongStateError, match="small state and segments disagree"):
        engine.restore(capsule)


@pytest.mark.parametrize(("cuts", "same"), [([64, 192], True), ([7, 14], False)])
def test_names_depend_on_tokens_and_on_where_a_prefill_was_cut(cuts: list[int], same: bool) -> None:
    tokens = ids(range(1, 301))
    whole, pieces = FakeEngine(), FakeEngine()
    whole.extend(tokens)
    for piece in np.split(tokens, cuts):
        pieces.extend(piece)
    names = [[part.name for part in engine.snapshot().parts] for engine in (whole, pieces)]
    assert (names[0] == names[1]) is same


def test_a_decoded_token_and_a_prefilled_one_make_two_names() -> None:
    said, read = FakeEngine(), FakeEngine()
    said.extend(ids(range(1, 101)))
    said.begin(Sampling(), ids(range(1, 101)))
    (token,) = said.step().tokens
    said.step()
    read.extend(ids([*range(1, 101), token]))
    capsules = [engine.snapshot() for engine in (said, read)]
    assert capsules[0].position == capsules[1].position
    assert not {p.name for p in capsules[0].parts} & {p.name for p in capsules[1].parts}
    read.restore(capsules[0])
    assert [p.name for p in read.snapshot().parts] == [p.name for p in capsules[0].parts]


def test_capsules_live_in_the_tiers_that_were_asked_for_and_count_there() -> None:
    limits = fake_limits(tiers=("gpu", "host"), fingerprint="card", segment_tokens=100)
    engine = FakeEngine(limits)
    engine.extend(ids(range(1, 251)))
    capsule = engine.snapshot()
    assert engine.live_segments == 3
    moved = engine.move(capsule, "host")
    assert engine.live_segments == 6
    assert [part.nbytes for part in moved.parts] == [part.nbytes for part in capsule.parts]
    del capsule
    assert engine.live_segments == 3
    with pytest.raises(AssertionError, match="'disk' is none of"):
        engine.move(moved, "disk")
    with pytest.raises(CapsuleError, match="'card', not 'other'"):
        FakeEngine(replace(limits, fingerprint="other")).unpack(
            250, [memoryview(b"".join(part.pack())) for part in moved.parts]
        )


@pytest.mark.parametrize("call", ["move", "unpack"])
def test_moves_can_be_held_and_made_to_fail(call: str) -> None:
    engine = after(1, 2, 3)
    capsule, expected = engine.snapshot(), next_token(after(1, 2, 3))
    reach = REACHES[call]
    engine.fail(call, error=CapsuleError("no room"))
    with pytest.raises(CapsuleError, match="no room"):
        reach(engine)
    assert next_token(engine) == expected, "an error that refuses leaves the state as it was"
    engine.fail(call)
    with pytest.raises(RuntimeError, match=f"planted fault in {call}"):
        reach(engine)
    engine.restore(capsule)
    assert next_token(engine) == expected
    seen: list[int] = []
    engine.when(call, 2, lambda: seen.append(engine.calls(call)))
    reach(engine)
    assert not seen
    reach(engine)
    assert seen == [4]
