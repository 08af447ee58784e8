"""Cancellation and failure at exact points: one end a turn, and the next turn is right."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_harness import (
    END,
    WAIT_S,
    RecordingSink,
    Serving,
    cold_reply,
    failed,
    finished,
    make_prompt,
    serving,
    some_words,
    user,
)

from capserve.engine.seam import Sampling
from capserve.errors import CapserveError, UnavailableError
from capserve.serving.turn import Failed
from capserve.testing.fake_engine import Call

QUESTION = user(some_words(60, seed=2))
LONG = user(some_words(700, seed=3))
SAMPLING = Sampling(end_tokens=(END,), drafts=3)


def assert_serves_right(s: Serving) -> None:
    """The next request works, and its answer is that of a server that reuses nothing."""
    for message in (LONG, QUESTION):
        prompt = make_prompt([message])
        end, sink = s.ask(prompt)
        finished(end)
        assert sink.tokens == cold_reply(s.engine.limits, prompt, SAMPLING, 8)
    s.store.check_some()


def test_a_turn_cancelled_in_the_queue_leaves_it_at_once() -> None:
    with serving(max_queue_depth=2) as s:
        gate = s.engine.hold("extend")
        _, running = s.submit(make_prompt([QUESTION]))
        gate.wait_arrived()
        first, first_sink = s.submit(make_prompt([LONG]))
        _, second_sink = s.submit(make_prompt([QUESTION]))
        first.cancel.cancel("client")
        # The engine still hangs in its call: nothing below waits for the worker.
        assert failed(first_sink.end).status == 499
        assert s.worker.depth() == 1
        _, third_sink = s.submit(make_prompt([QUESTION]))
        assert s.worker.depth() == 2
        gate.open()
        for sink in (running, second_sink, third_sink):
            finished(sink.wait())
        assert (0, 128) not in s.engine.extended, "the cancelled turn ran"


def test_a_turn_cancelled_before_its_submit_ends_at_once() -> None:
    with serving() as s:
        gate = s.engine.hold("extend")
        _, running = s.submit(make_prompt([QUESTION]))
        gate.wait_arrived()
        item = s.item(make_prompt([QUESTION]))
        item.cancel.cancel("client")
        s.worker.submit(item)
        assert isinstance(item.sink, RecordingSink)
        assert failed(item.sink.end).status == 499
        gate.open()
        finished(running.wait())


def test_a_prefill_cancelled_between_chunks_keeps_its_chunks_for_the_retry() -> None:
    with serving(checkpoint_interval=4096) as s:
        prompt = make_prompt([LONG])
        gate = s.engine.hold("extend", at=3)
        item, sink = s.submit(prompt)
        gate.wait_arrived()
        item.cancel.cancel("client")
        gate.open()
        end = sink.wait()
        assert failed(end).status == 499
        assert end.metrics.terminal_state == "cancelled"
        assert end.metrics.new_prefill_tokens == 3 * 128, "the chunk in progress is the last"
        assert s.worker.health()["hot_position"] is None
        again, retried = s.ask(prompt)
        assert finished(again).metrics.cached_tokens == 3 * 128
        assert again.metrics.prefix_action == "restore"
        assert retried.tokens == cold_reply(s.engine.limits, prompt, SAMPLING, 8)


def test_a_decode_cancelled_at_an_accept_boundary_stops_there() -> None:
    with serving() as s:
        prompt = make_prompt([QUESTION])
        gate = s.engine.hold("step", at=4)
        item, sink = s.submit(prompt, max_tokens=200)
        gate.wait_arrived()
        item.cancel.cancel("client")
        gate.open()
        assert failed(sink.wait()).status == 499
        assert s.engine.calls("step") == 4
        expected = cold_reply(s.engine.limits, prompt, SAMPLING, 200)
        assert sink.tokens == expected[: len(sink.tokens)]
        assert s.worker.health()["hot_position"] is None, "the client did not take this reply"
        again = finished(s.ask(prompt)[0])
        assert again.metrics.cached_tokens == prompt.prompt_end, "the prompt's capsule was lost"
        assert again.metrics.miss_reason is None
        assert_serves_right(s)


@pytest.mark.parametrize(
    ("call", "at"),
    [
        ("extend", 1),
        ("extend", 4),
        ("begin", 1),
        ("step", 1),
        ("step", 3),
        ("snapshot", 1),
        ("snapshot", 3),
    ],
)
def test_an_engine_fault_fails_the_turn_and_the_waiting_ones_and_heals(call: Call, at: int) -> None:
    with serving() as s:
        gate = s.engine.hold("reset")
        _, sink = s.submit(make_prompt([LONG]))
        gate.wait_arrived()
        waiting = [s.submit(make_prompt([QUESTION]))[1] for _ in range(2)]
        s.engine.fail(call, at)
        healing = s.engine.hold("reset")
        gate.open()
        assert failed(sink.wait()).code == "engine_error"
        assert [failed(other.wait()).code for other in waiting] == ["engine_error"] * 2
        healing.wait_arrived()
        assert s.worker.health()["status"] == "error"
        assert not s.worker.ready
        with pytest.raises(UnavailableError):
            s.submit(make_prompt([QUESTION]))
        healing.open()
        assert s.worker.wait_ready(WAIT_S)
        assert s.worker.health()["faults"] == 1
        assert_serves_right(s)


@pytest.mark.parametrize("call", ["reset", "restore"])
def test_a_fault_while_a_state_is_taken_up_leaves_nothing_hot(call: Call) -> None:
    with serving() as s:
        finished(s.ask(make_prompt([LONG]))[0])
        other = user(some_words(300, seed=9))
        if call == "restore":
            finished(s.ask(make_prompt([other]))[0])
        s.engine.fail(call)
        failed(s.ask(make_prompt([other if call == "reset" else LONG]))[0])
        assert s.worker.wait_ready(WAIT_S)
        assert s.worker.health()["faults"] == 1
        assert_serves_right(s)


def test_a_client_fault_in_the_engine_fails_that_turn_alone() -> None:
    with serving() as s:
        gate = s.engine.hold("extend")
        _, running = s.submit(make_prompt([QUESTION]))
        gate.wait_arrived()
        s.engine.fail("begin", error=client_fault())
        _, waiting = s.submit(make_prompt([QUESTION]))
        gate.open()
        assert failed(running.wait()).status == 400
        finished(waiting.wait())
        assert s.worker.health()["faults"] == 0


def client_fault() -> CapserveError:
    error = CapserveError("grammar: not one that this engine knows", param="grammar")
    error.status = 400
    return error


def test_a_fault_that_can_not_be_healed_at_once_is_healed_when_idle() -> None:
    with serving(idle_check_s=0.01) as s:
        s.engine.fail("extend")
        s.engine.fail("reset", at=2)  # the first belongs to the turn
        gate = s.engine.hold("reset", at=3)
        failed(s.ask(make_prompt([QUESTION]))[0])
        gate.wait_arrived()
        assert s.worker.health()["status"] == "error"
        assert "planted fault in extend" in s.worker.health()["fault"]
        gate.open()
        assert s.worker.wait_ready(WAIT_S)
        assert_serves_right(s)


def test_a_broken_account_turns_health_red_and_ends_nobody_else() -> None:
    with serving(idle_check_s=0.01) as s:

        def broken() -> None:
            raise AssertionError("planted: counter and parts differ")

        healing = s.engine.hold("reset")
        check, s.store.check_some = s.store.check_some, broken  # type: ignore[method-assign]
        healing.wait_arrived()
        assert s.worker.health()["status"] == "error"
        assert "counter and parts differ" in s.worker.health()["fault"]
        s.store.check_some = check  # type: ignore[method-assign]
        healing.open()
        assert s.worker.wait_ready(WAIT_S)
        assert_serves_right(s)


def test_a_broken_account_empties_the_store_and_counts_once() -> None:
    with serving(idle_check_s=0.01) as s:
        upkept = threading.Semaphore(0)
        check = s.store.check_some

        def counted() -> None:
            check()
            upkept.release()

        def drifted() -> None:
            s.store.check_some = counted  # type: ignore[method-assign]
            s.store._memory.tier("host").used_bytes += 1
            check()

        finished(s.ask(make_prompt([QUESTION]))[0])
        s.store.check_some = drifted  # type: ignore[method-assign]
        for _ in range(3):
            assert upkept.acquire(timeout=WAIT_S)
        assert s.worker.health()["faults"] == 1
        assert s.worker.ready
        again = finished(s.ask(make_prompt([QUESTION]))[0])
        assert (again.metrics.cached_tokens, again.metrics.miss_reason) == (0, "evicted")
        assert_serves_right(s)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("CUDA out of memory."), RuntimeError("can't allocate 9 bytes")],
    ids=["by type", "in words", "in other words"],
)
def test_a_capsule_that_memory_has_no_room_for_costs_no_turn(error: Exception) -> None:
    def refuse() -> None:
        raise error

    with serving() as s:
        prompt = make_prompt([QUESTION])
        s.engine.when("snapshot", 1, refuse)
        end, sink = s.ask(prompt, pin=True)
        assert finished(end).metrics.pin == (
            f"refused: the machine has no memory for the state of {prompt.prompt_end} tokens"
        )
        assert sink.tokens == cold_reply(s.engine.limits, prompt, SAMPLING, 8)
        assert s.worker.health()["faults"] == 0
        assert s.store.footprint().refused == 1
        assert_serves_right(s)


CALLS: tuple[Call, ...] = ("extend", "begin", "step", "snapshot", "restore")
TURN = st.fixed_dictionaries(
    {
        "long": st.booleans(),
        "raise_at": st.one_of(st.none(), st.integers(1, 8)),
        "cancel": st.one_of(st.none(), st.tuples(st.sampled_from(CALLS), st.integers(1, 12))),
    }
)
FAULTS = st.lists(st.tuples(st.sampled_from(CALLS), st.integers(1, 30)), max_size=3)


@settings(max_examples=40, deadline=None)
@given(turns=st.lists(TURN, min_size=1, max_size=6), faults=FAULTS)
def test_every_submitted_turn_gets_exactly_one_terminal_event(
    turns: list[dict[str, object]], faults: list[tuple[Call, int]]
) -> None:
    with serving(min_slice_ms=0.0) as s:  # long turns are parked, at whatever moment it may be
        for call, at in faults:
            s.engine.fail(call, at)
        sinks = []
        for turn in turns:
            sink = RecordingSink(turn["raise_at"])  # type: ignore[arg-type]
            item = s.item(make_prompt([LONG if turn["long"] else QUESTION]), sink=sink)
            if turn["cancel"] is not None:
                call, at = turn["cancel"]  # type: ignore[misc]
                s.engine.when(call, at, item.cancel.cancel)
            try:
                s.worker.submit(item)
            except UnavailableError:
                assert sink.events == [], "a refused turn gets an exception and no event"
                continue
            sinks.append(sink)
        for sink in sinks:
            end = sink.wait()
            assert end.metrics.terminal_state in ("done", "cancelled", "error")
            assert isinstance(end, Failed) or end.metrics.terminal_state == "done"
        assert s.worker.stop(WAIT_S)
        assert all(len(sink.ends) == 1 for sink in sinks)
        s.store.check_some()
