"""What a request, a pin, a queue and a session may take, and what happens beyond it."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from serving_harness import (
    END,
    WAIT_S,
    RecordingSink,
    cold_reply,
    failed,
    finished,
    make_prompt,
    serving,
    some_words,
    system,
    user,
)

from capserve.engine.seam import Sampling
from capserve.errors import (
    ContextLengthError,
    InvalidRequestError,
    QueueFullError,
    TooLargeError,
    UnavailableError,
)
from capserve.serving.capsules.footprint import Footprint, TierFootprint
from capserve.serving.turn import Finished, TurnEvent
from capserve.testing.fake_engine import FakeEngine, fake_limits

SYSTEM = system(some_words(150, seed=1))
QUESTION = user(some_words(60, seed=2))


def scripted(*tokens: int) -> FakeEngine:
    return FakeEngine(fake_limits(), script=lambda context: tokens)


def test_every_limit_of_a_request_has_its_status_and_both_numbers() -> None:
    limits = fake_limits(max_positions=400)
    with serving(limits, max_prompt_tokens=300) as s:
        with pytest.raises(TooLargeError, match=r"302 tokens.*300") as too_large:
            s.submit(make_prompt([user(some_words(299))]))
        with pytest.raises(ContextLengthError, match=r"400 tokens.*400") as too_long:
            s.submit(make_prompt([user(some_words(397))]))
        with pytest.raises(InvalidRequestError, match="flashrt_pin_prefix: 99"):
            s.submit(make_prompt([user(some_words(5))]), pin=99)
        with pytest.raises(InvalidRequestError, match=r"flashrt_K: 8 .* 0\.\.4"):
            s.submit(make_prompt([user(some_words(5))]), sampling=Sampling(drafts=8))
        with pytest.raises(InvalidRequestError, match="max_tokens: 0"):
            s.submit(make_prompt([user(some_words(5))]), max_tokens=0)
        assert (too_large.value.status, too_long.value.status) == (413, 400)
        finished(s.ask(make_prompt([user(some_words(5))]))[0])
        assert s.metrics.health()["by_state"] == {"rejected": 5, "done": 1}


def test_a_pin_outlives_a_store_that_is_full_and_its_own_session() -> None:
    limits = fake_limits()
    budget = limits.capsule_bytes(152) + 2 * limits.capsule_bytes(300)
    with serving(limits, budget_bytes=budget, max_active_sessions=2) as s:
        pinned = finished(s.ask(make_prompt([SYSTEM, QUESTION]), pin=152)[0])
        assert pinned.metrics.pin == "pinned"
        for seed in range(10, 16):
            finished(s.ask(make_prompt([user(some_words(250, seed=seed))]))[0])
        assert s.store.footprint().pinned == 1
        later = finished(s.ask(make_prompt([SYSTEM, user(some_words(8))]))[0])
        assert later.metrics.prefix_action == "restore"
        assert later.metrics.cached_tokens == 152
        again = finished(s.ask(make_prompt([SYSTEM, QUESTION]), pin=152)[0])
        assert again.metrics.pin == "pinned"


def test_a_pin_before_the_hot_state_is_made_on_the_way() -> None:
    with serving(engine=scripted(20, END)) as s:
        first = finished(s.ask(s.build([SYSTEM, QUESTION]))[0])
        longer = s.build([SYSTEM, QUESTION, first.message, user(some_words(5))])
        done = finished(s.ask(longer, pin=100)[0])
        assert done.metrics.pin == "pinned"
        assert s.store.footprint().pinned == 1
        assert 100 in s.store.positions("key/a")


def test_a_pin_over_budget_is_refused_and_the_request_is_served() -> None:
    limits = fake_limits()
    with serving(limits, budget_bytes=limits.small_state_bytes + 10) as s:
        prompt = make_prompt([SYSTEM, QUESTION])
        end, sink = s.ask(prompt, pin=True)
        done = finished(end)
        assert done.metrics.pin is not None
        assert done.metrics.pin.startswith("refused: needs ")
        assert str(limits.small_state_bytes + 10) in done.metrics.pin
        assert sink.tokens == cold_reply(limits, prompt, Sampling(end_tokens=(END,)), 8)
        again = finished(s.ask(make_prompt([SYSTEM, user(some_words(9))]))[0])
        assert again.metrics.miss_reason == "over_budget"


def test_a_refused_pin_is_not_paid_for_again_on_every_turn() -> None:
    limits = fake_limits()
    engine = FakeEngine(limits, script=lambda context: [20, END])
    with serving(engine=engine, budget_bytes=limits.small_state_bytes) as s:
        messages = [SYSTEM, QUESTION]
        messages.append(finished(s.ask(s.build(messages), pin=152)[0]).message)
        done = finished(s.ask(s.build([*messages, user(some_words(10))]), pin=152)[0])
        assert done.metrics.prefix_action == "message_append"
        assert done.metrics.pin is not None
        assert done.metrics.pin.startswith("refused: no room")


def test_an_evicted_history_is_named_as_the_reason() -> None:
    limits = fake_limits()
    with serving(limits, budget_bytes=limits.capsule_bytes(300)) as s:
        s.ask(make_prompt([SYSTEM, QUESTION]))
        s.ask(make_prompt([user(some_words(280, seed=30))]))
        done = finished(s.ask(make_prompt([SYSTEM, QUESTION]))[0])
        assert done.metrics.cached_tokens == 0
        assert done.metrics.miss_reason == "evicted"


def test_a_full_queue_is_refused_with_a_time_to_retry_and_then_serves_again() -> None:
    with serving(max_queue_depth=2) as s:
        gate = s.engine.hold("extend")
        prompt = make_prompt([QUESTION])
        sinks = [s.submit(prompt)[1]]
        gate.wait_arrived()
        sinks += [s.submit(prompt)[1] for _ in range(2)]
        assert s.worker.depth() == 2
        with pytest.raises(QueueFullError, match="2 turns wait, max_queue_depth is 2") as full:
            s.submit(prompt)
        assert full.value.retry_after_s is not None
        assert 1.0 <= full.value.retry_after_s <= 60.0
        gate.open()
        for sink in sinks:
            finished(sink.wait())
        finished(s.ask(prompt)[0])


def test_idle_sessions_expire_with_their_capsules_but_pins_stay() -> None:
    with serving(session_idle_ttl_s=0.0, idle_check_s=0.01) as s:
        upkept = threading.Event()
        check = s.store.check_some

        def watched() -> None:
            check()
            if s.store.footprint().evicted:
                upkept.set()

        s.store.check_some = watched  # type: ignore[method-assign]
        finished(s.ask(make_prompt([SYSTEM, QUESTION]), pin=100)[0])
        assert upkept.wait(WAIT_S)
    assert len(s.sessions) == 0
    assert s.store.footprint().capsules == s.store.footprint().pinned == 1
    assert s.sessions.hot is None


def test_upkeep_is_done_on_a_busy_server_too() -> None:
    with serving(idle_check_s=0.001) as s:
        waiting_at: list[int] = []
        gate = s.engine.hold("extend")
        sinks = [s.submit(make_prompt([QUESTION]))[1]]
        gate.wait_arrived()
        sinks += [s.submit(make_prompt([QUESTION]))[1] for _ in range(2)]
        check = s.store.check_some

        def watched() -> None:
            waiting_at.append(s.worker.depth())
            check()

        s.store.check_some = watched  # type: ignore[method-assign]
        gate.open()
        for sink in sinks:
            finished(sink.wait())
    assert waiting_at[0] == 2, "the first upkeep waited for an empty queue"


def test_sessions_beyond_the_limit_leave_and_their_capsules_stay() -> None:
    with serving(max_active_sessions=1) as s:
        prompts = [make_prompt([user(some_words(80, seed=seed))]) for seed in range(4)]
        for prompt in prompts:
            finished(s.ask(prompt)[0])
        assert len(s.sessions) == 1
        assert s.store.footprint().evicted == 0
        for prompt in prompts:
            assert finished(s.ask(prompt)[0]).metrics.cached_tokens == prompt.prompt_end


def test_a_pin_beyond_half_of_the_budget_is_refused_and_its_state_kept_unpinned() -> None:
    limits = fake_limits()
    engine = FakeEngine(limits, script=lambda context: [20, END])
    budget = 3 * limits.capsule_bytes(152)
    with serving(engine=engine, budget_bytes=budget) as s:
        first = finished(s.ask(make_prompt([SYSTEM, QUESTION]), pin=152)[0])
        assert first.metrics.pin == "pinned"
        prompt = make_prompt([user(some_words(150, seed=4)), QUESTION])
        second = finished(s.ask(prompt, pin=152)[0])
        needed = 2 * limits.capsule_bytes(152)
        refusal = f"needs {needed} bytes beside the pins, the budget for pins is {budget // 2}"
        assert second.metrics.pin == f"refused: {refusal}"
        assert s.store.footprint().pinned == 1


def test_a_client_that_asks_again_the_moment_it_hears_the_end_is_not_refused() -> None:
    class AsksAgain(RecordingSink):
        def deliver(self, event: TurnEvent) -> None:
            if isinstance(event, Finished):
                s.worker.submit(following)
            super().deliver(event)

    with serving(max_queue_depth=0) as s:
        prompt = make_prompt([QUESTION])
        following = s.item(prompt)
        finished(s.ask(prompt, sink=AsksAgain())[0])
        assert isinstance(following.sink, RecordingSink)
        finished(following.sink.wait())


def test_before_the_start_and_after_the_stop_turns_are_refused_with_503() -> None:
    prompt = make_prompt([QUESTION])
    with serving(start=False) as s:
        assert s.worker.health()["status"] == "starting"
        with pytest.raises(UnavailableError, match="not ready"):
            s.submit(prompt)
        s.worker.start()
        assert s.worker.ready
        finished(s.ask(prompt)[0])
    assert not s.worker.ready
    with pytest.raises(UnavailableError, match="shutting down") as stopped:
        s.submit(prompt)
    assert stopped.value.retry_after_s is not None


def test_stopping_cancels_the_running_turn_and_fails_the_waiting_ones() -> None:
    with serving() as s:
        gate = s.engine.hold("step", at=3)
        running = s.submit(make_prompt([QUESTION]), max_tokens=200)[1]
        gate.wait_arrived()
        waiting = [s.submit(make_prompt([QUESTION]))[1] for _ in range(3)]
        stopper = threading.Thread(target=s.worker.stop, args=(WAIT_S,))
        stopper.start()
        errors = [failed(sink.wait()) for sink in waiting]
        gate.open()
        errors.append(failed(running.wait()))
        stopper.join(WAIT_S)
        assert [error.status for error in errors] == [503] * 4
    assert s.metrics.health()["by_state"] == {"rejected": 3, "cancelled": 1}


def test_what_is_switched_off_is_named_while_the_server_says_that_it_is_well() -> None:
    with serving() as s:
        whole = s.store.footprint
        assert s.worker.health()["degraded"] == []

        def without_disk() -> Footprint:
            tiers = {**whole().tiers, "disk": TierFootprint(0, 0, 0, "no space left")}
            return replace(whole(), tiers=tiers)

        s.store.footprint = without_disk  # type: ignore[method-assign]
        finished(s.ask(make_prompt([QUESTION]))[0])
        health = s.worker.health()
        assert (health["status"], health["degraded"]) == ("ok", ["disk: no space left"])
        s.store.footprint = whole  # type: ignore[method-assign]
