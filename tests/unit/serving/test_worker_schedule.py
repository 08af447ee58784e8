"""A short turn runs in the middle of a long one, and nobody can tell from their tokens."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
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
from capserve.serving import worker as worker_module
from capserve.serving.prefix import MIN_DECODED_TOKENS
from capserve.serving.turn import Finished, TurnEvent, WorkItem
from capserve.testing.fake_engine import Call, Gate
from capserve.text.prompt import Prompt

LONG = make_prompt([user(some_words(2000, seed=3))])
SHORT = make_prompt([user(some_words(20, seed=4))])
# The same seed and K everywhere, and everything that depends on what was said before.
SAMPLING = Sampling(
    temperature=0.8,
    seed=7,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    drafts=3,
    end_tokens=(END,),
)
FAIR = {"min_slice_ms": 0.0}


class Order:
    """Who ended in which order."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    def sink(self, name: str) -> RecordingSink:
        order = self

        class Noting(RecordingSink):
            def deliver(self, event: TurnEvent) -> None:
                super().deliver(event)
                if self.ends:
                    order.ends.append(name)

        return Noting()


def assert_undisturbed(s: Serving, prompt: Prompt, sink: RecordingSink, most: int) -> None:
    assert sink.tokens == cold_reply(s.engine.limits, prompt, SAMPLING, most)


def begun_long(
    s: Serving,
    sink: RecordingSink | None = None,
    most: int = 60,
    at: int = 3,
    call: Call = "extend",
) -> tuple[WorkItem, RecordingSink, Gate]:
    """A long turn that stands inside its `at`-th call."""
    gate = s.engine.hold(call, at)
    sink = sink or RecordingSink()
    item, _ = s.submit(LONG, sink=sink, max_tokens=most, sampling=SAMPLING)
    gate.wait_arrived()
    return item, sink, gate


def ask_short(s: Serving, sink: RecordingSink | None = None) -> RecordingSink:
    return s.submit(SHORT, sink=sink or RecordingSink(), max_tokens=4, sampling=SAMPLING)[1]


def assert_nothing_is_held(s: Serving) -> None:
    assert not s.store._parked
    assert not any(session.busy for session in s.sessions.all())
    s.store.check()


@pytest.mark.parametrize(("call", "at"), [("extend", 3), ("extend", 16), ("step", 1), ("step", 9)])
def test_a_short_turn_runs_inside_a_long_one_and_both_say_what_they_would_have_said(
    call: Call, at: int
) -> None:
    order = Order()
    with serving(**FAIR) as s:
        _, long, gate = begun_long(s, order.sink("long"), call=call, at=at)
        short = ask_short(s, order.sink("short"))
        gate.open()
        inside, outside = finished(short.wait()), finished(long.wait())
        assert order.ends == ["short", "long"]
        assert_undisturbed(s, SHORT, short, 4)
        assert_undisturbed(s, LONG, long, 60)
        assert (inside.metrics.parks, outside.metrics.parks) == (0, 1)
        assert outside.metrics.parked_ms > 0
        assert outside.metrics.new_prefill_tokens == len(LONG.tokens), "it was read twice"
        assert inside.metrics.session_id != outside.metrics.session_id
        assert_nothing_is_held(s)


def test_a_long_turn_is_parked_again_for_each_short_one_that_comes() -> None:
    with serving(**FAIR) as s:
        gates = [s.engine.hold("extend", at) for at in (2, 6, 10)]
        # Each short turn makes one call of its own.
        _, long = s.submit(LONG, max_tokens=60, sampling=SAMPLING)
        for gate in gates:
            gate.wait_arrived()
            short = ask_short(s)
            gate.open()
            finished(short.wait())
            assert_undisturbed(s, SHORT, short, 4)
        assert finished(long.wait()).metrics.parks == 3
        assert_undisturbed(s, LONG, long, 60)
        assert_nothing_is_held(s)


def test_short_turns_that_wait_together_need_one_parking() -> None:
    order = Order()
    with serving(**FAIR) as s:
        _, long, gate = begun_long(s, order.sink("long"))
        shorts = [ask_short(s, order.sink(f"short {n}")) for n in range(3)]
        gate.open()
        for short in shorts:
            finished(short.wait())
        assert finished(long.wait()).metrics.parks == 1
        assert order.ends == ["short 0", "short 1", "short 2", "long"]
        assert_undisturbed(s, LONG, long, 60)


@pytest.mark.parametrize(
    "limits",
    [{"schedule": "fifo"}, {"max_parked_turns": 0}, {"fair_share": 0.0}, {"min_slice_ms": 1e9}],
    ids=lambda limits: next(iter(limits)),
)
def test_a_limit_that_forbids_it_keeps_the_order_of_arrival(limits: dict[str, object]) -> None:
    order = Order()
    with serving(**{**FAIR, **limits}) as s:
        _, long, gate = begun_long(s, order.sink("long"))
        short = ask_short(s, order.sink("short"))
        gate.open()
        finished(short.wait())
        assert finished(long.wait()).metrics.parks == 0
        assert order.ends == ["long", "short"]
        assert s.worker.health()["schedule"] == limits.get("schedule", "fair")


def test_a_turn_that_is_not_short_waits_for_its_turn() -> None:
    order = Order()
    with serving(**FAIR) as s:
        _, long, gate = begun_long(s, order.sink("first"))
        other = make_prompt([user(some_words(1900, seed=8))])
        _, second = s.submit(other, sink=order.sink("second"), max_tokens=60, sampling=SAMPLING)
        gate.open()
        finished(second.wait())
        assert finished(long.wait()).metrics.parks == 0
        assert order.ends == ["first", "second"]


def test_without_room_for_its_state_a_long_turn_goes_on() -> None:
    with serving(budget_bytes=5000, **FAIR) as s:  # the small state, and no KV
        _, long, gate = begun_long(s)
        short = ask_short(s)
        gate.open()
        finished(short.wait())
        assert finished(long.wait()).metrics.parks == 0
        assert_undisturbed(s, LONG, long, 60)


def test_a_turn_that_is_cancelled_while_parked_ends_within_one_unit_and_its_chunks_stay() -> None:
    with serving(checkpoint_interval=4096, **FAIR) as s:
        item, long, gate = begun_long(s)
        inside = s.engine.hold("step")
        short = ask_short(s)
        gate.open()
        inside.wait_arrived()
        assert s.worker.health()["parked"] == 1
        assert s.worker.depth() == 0
        item.cancel.cancel("client")
        then = s.engine.hold("step")
        inside.open()
        then.wait_arrived()
        assert failed(long.end).status == 499, "it waited for more than one unit of work"
        assert long.end.metrics.parked_ms > 0
        assert s.worker.health()["parked"] == 0
        then.open()
        finished(short.wait())
        assert_undisturbed(s, SHORT, short, 4)
        assert_nothing_is_held(s)
        end, again = s.ask(LONG, sampling=SAMPLING, max_tokens=60)
        assert finished(end).metrics.cached_tokens == 3 * 128
        assert_undisturbed(s, LONG, again, 60)


def test_a_parked_turn_whose_state_can_not_be_released_still_frees_its_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(**FAIR) as s:
        _, long, gate = begun_long(s)
        begun = next(session for session in s.sessions.all() if session.busy)

        def fails(*_: object, **__: object) -> None:
            raise RuntimeError("planted")

        with monkeypatch.context() as patch:
            patch.setattr(s.store, "release", fails)
            s.engine.fail("extend", 1)  # the short one's: the long one is parked then
            short = ask_short(s)
            gate.open()
            for sink in (short, long):
                assert failed(sink.wait()).code == "engine_error"
            assert s.worker.wait_ready(WAIT_S)
        assert not begun.busy


@pytest.mark.parametrize(("call", "at"), [("extend", 1), ("step", 2)])
def test_a_fault_fails_the_parked_turn_too_and_heals(call: Call, at: int) -> None:
    with serving(**FAIR) as s:
        _, long, gate = begun_long(s)
        s.engine.fail(call, at)  # the long turn stands inside its call: this one is the short's
        short, other = ask_short(s), ask_short(s)
        gate.open()
        for sink in (short, long, other):
            assert failed(sink.wait()).code == "engine_error"
        assert s.worker.wait_ready(WAIT_S)
        assert (s.worker.health()["faults"], s.worker.health()["parked"]) == (1, 0)
        assert_nothing_is_held(s)
        end, again = s.ask(LONG, sampling=SAMPLING, max_tokens=60)
        finished(end)
        assert_undisturbed(s, LONG, again, 60)


def test_a_fault_in_the_swap_itself_fails_everybody_and_heals() -> None:
    calls: tuple[tuple[Call, int], ...] = (("snapshot", 1), ("restore", 1))
    for call, at in calls:
        with serving(checkpoint_interval=4096, **FAIR) as s:
            _, long, gate = begun_long(s)
            s.engine.fail(call, at)
            short = ask_short(s)
            gate.open()
            assert failed(long.wait()).code == "engine_error"
            assert short.ended.wait(WAIT_S)
            assert s.worker.wait_ready(WAIT_S)
            assert_nothing_is_held(s)


def test_stopping_cancels_the_parked_turn_as_it_does_the_running_one() -> None:
    with serving(**FAIR) as s:
        _, long, gate = begun_long(s)
        inside = s.engine.hold("step")
        short = ask_short(s)
        gate.open()
        inside.wait_arrived()
        waiting = ask_short(s)
        assert not s.worker.stop(0.0), "the engine still stands in its call"
        assert failed(waiting.wait()).status == 503
        inside.open()
        assert failed(short.wait()).status == 503
        assert failed(long.wait()).status == 503
        assert s.worker.stop(WAIT_S)
        assert s.metrics.health()["by_state"] == {"rejected": 1, "cancelled": 2}
        assert_nothing_is_held(s)


def test_a_guest_that_outlives_its_estimate_is_parked_for_the_turn_that_it_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clock:
        passed_s = 0.0

        def monotonic(self) -> float:
            return time.monotonic() + self.passed_s

    clock = Clock()
    monkeypatch.setattr(worker_module, "time", clock)

    def take_long() -> None:
        clock.passed_s += 60.0

    order = Order()
    with serving(max_parked_turns=1, **FAIR) as s:
        _, long, gate = begun_long(s, order.sink("long"))
        s.engine.when("step", 2, take_long)  # the guest's own: the long turn reads its prompt
        _, liar = s.submit(SHORT, sink=order.sink("liar"), max_tokens=12, sampling=SAMPLING)
        gate.open()
        assert finished(liar.wait()).metrics.parks == 1
        assert finished(long.wait()).metrics.parks == 1
        assert order.ends == ["long", "liar"]
        assert_undisturbed(s, SHORT, liar, 12)
        assert_undisturbed(s, LONG, long, 60)
        assert_nothing_is_held(s)


def test_the_same_request_again_branches_from_the_parked_one_and_both_are_right() -> None:
    with serving(**FAIR) as s:
        _, long, gate = begun_long(s, call="step", at=8, most=100)
        _, again = s.submit(LONG, max_tokens=8, sampling=SAMPLING)
        gate.open()
        inside = finished(again.wait())
        assert inside.metrics.prefix_action == "fork"
        assert inside.metrics.cached_tokens == LONG.prompt_end
        assert inside.metrics.session_id != finished(long.wait()).metrics.session_id
        assert finished(long.wait()).metrics.parks == 1
        assert_undisturbed(s, LONG, again, 8)
        assert_undisturbed(s, LONG, long, 100)


def test_nobody_goes_on_in_the_journal_of_a_parked_turn_even_at_its_very_tip() -> None:
    with serving(checkpoint_interval=256, **FAIR) as s:
        _, long, gate = begun_long(s, at=2)  # its end is a boundary, and where it is parked
        words = some_words(2000, seed=3).split()[:255]
        shared = make_prompt([user(" ".join(words))])
        assert (shared.tokens[:256] == LONG.tokens[:256]).all()
        _, other = s.submit(shared, max_tokens=4, sampling=SAMPLING)
        gate.open()
        inside, outside = finished(other.wait()), finished(long.wait())
        assert inside.metrics.cached_tokens == 256
        assert inside.metrics.session_id != outside.metrics.session_id
        assert outside.metrics.parks == 1
        assert_undisturbed(s, shared, other, 4)
        assert_undisturbed(s, LONG, long, 60)


def test_the_end_of_a_guest_is_hot_only_until_the_parked_turn_goes_on() -> None:
    class Looks(RecordingSink):
        def deliver(self, event: TurnEvent) -> None:
            if isinstance(event, Finished):
                hot.append(s.sessions.hot)
            super().deliver(event)

    hot: list[object] = []
    with serving(**FAIR) as s:
        _, long, gate = begun_long(s)
        resumed = s.engine.hold("restore")
        short = ask_short(s, Looks())
        gate.open()
        guest = finished(short.wait()).metrics.session_id
        resumed.wait_arrived()
        assert s.sessions.hot is None, "the state is about to be another one"
        resumed.open()
        finished(long.wait())
        assert [getattr(session, "id", None) for session in hot] == [guest]


@pytest.mark.parametrize("said", [MIN_DECODED_TOKENS - 1, MIN_DECODED_TOKENS])
def test_a_long_cancelled_decode_keeps_its_state_for_who_goes_on_from_what_was_heard(
    said: int,
) -> None:
    with serving() as s:
        gate = s.engine.hold("step", at=said)
        item, sink = s.submit(SHORT, max_tokens=100, sampling=replace(SAMPLING, drafts=0))
        gate.wait_arrived()
        item.cancel.cancel("client")
        gate.open()
        failed(sink.wait())
        assert s.sessions.hot is None
        assert len(sink.tokens) == said
        tip = len(SHORT.tokens) + said - 1
        assert (tip in s.store.positions("key/a")) == (said >= MIN_DECODED_TOKENS)
        assert_nothing_is_held(s)


GUEST = st.fixed_dictionaries(
    {
        "words": st.sampled_from([5, 30, 130, 700]),
        "most": st.integers(1, 30),
        "drafts": st.integers(0, 4),
        "comes": st.tuples(st.sampled_from(["extend", "step", "snapshot"]), st.integers(1, 40)),
        "goes": st.one_of(
            st.none(), st.tuples(st.sampled_from(["extend", "step", "restore"]), st.integers(1, 60))
        ),
    }
)


@hypothesis_settings(max_examples=25, deadline=None)
@given(guests=st.lists(GUEST, min_size=1, max_size=6), exact=st.booleans())
def test_whoever_comes_and_goes_at_whatever_moment_every_reply_is_that_of_a_cold_run(
    guests: list[dict[str, Any]], exact: bool
) -> None:
    with serving(exact=exact, min_slice_ms=0.0, max_parked_turns=3, fair_share=0.9) as s:
        asked: list[tuple[WorkItem, Sampling]] = []
        for number, guest in enumerate([{"words": 1500, "most": 60, "drafts": 3}, *guests]):
            sampling = replace(SAMPLING, drafts=guest["drafts"])
            # Three of them start alike, so that they find each other's capsules.
            text = some_words(1500, seed=number % 2)
            prompt = make_prompt([user(" ".join(text.split()[: guest["words"]]))])
            item = s.item(prompt, max_tokens=guest["most"], sampling=sampling)
            asked.append((item, sampling))
            if guest.get("goes") is not None:
                s.engine.when(*guest["goes"], item.cancel.cancel)
        once, submitted = threading.Lock(), set()

        def submit(item: WorkItem) -> None:
            with once:  # those whose moment never came are submitted at the end
                if id(item) in submitted:
                    return
                submitted.add(id(item))
            s.worker.submit(item)

        for (item, _), guest in zip(asked[1:], guests, strict=True):
            s.engine.when(*guest["comes"], lambda item=item: submit(item))  # type: ignore[misc]
        submit(asked[0][0])
        sink_of(asked[0][0]).wait()
        for item, _ in asked:
            submit(item)
        for item, sampling in asked:
            sink, request = sink_of(item), item.request
            sink.wait()
            whole = cold_reply(s.engine.limits, request.prompt, sampling, request.max_output_tokens)
            if isinstance(sink.end, Finished):
                assert sink.tokens == whole
            else:
                assert failed(sink.end).status == 499
                assert sink.tokens == whole[: len(sink.tokens)]
        assert s.worker.health()["faults"] == 0
        assert s.worker.stop(WAIT_S)
        assert_nothing_is_held(s)


def sink_of(item: WorkItem) -> RecordingSink:
    assert isinstance(item.sink, RecordingSink)
    return item.sink
