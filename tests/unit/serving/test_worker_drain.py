"""A worker that is told to go ends what it has taken, and one whose engine hangs says so."""

from __future__ import annotations

import pytest
from serving_harness import (
    END,
    WAIT_S,
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
from capserve.errors import UnavailableError
from capserve.serving.watch import FIRST_TIMES, USUAL_TIMES, Watch, phase_of
from capserve.testing.fake_engine import Call

QUESTION = user(some_words(60, seed=2))
LONG = user(some_words(700, seed=3))
SAMPLING = Sampling(end_tokens=(END,), drafts=3)


# -- draining ----------------------------------------------------------------------------------


def refused(s: Serving) -> str:
    with pytest.raises(UnavailableError, match="shutting down") as raised:
        s.submit(make_prompt([QUESTION]))
    assert raised.value.retry_after_s is not None
    return raised.value.message


def test_a_draining_worker_takes_nothing_new_and_ends_what_runs_and_waits() -> None:
    with serving() as s:
        gate = s.engine.hold("step", at=2)
        prompts = [make_prompt([message]) for message in (LONG, QUESTION)]
        _, running = s.submit(prompts[0])
        gate.wait_arrived()
        _, waiting = s.submit(prompts[1])
        s.worker.drain()
        refused(s)
        health = s.worker.health()
        assert (health["status"], health["ready"], health["draining"]) == ("draining", False, True)
        assert not s.worker.ready
        assert not s.worker.drained, "one turn runs and one waits"
        gate.open()
        for sink, prompt in zip((running, waiting), prompts, strict=True):
            finished(sink.wait())
            assert sink.tokens == cold_reply(s.engine.limits, prompt, SAMPLING, 8)
        assert s.worker.drained
        refused(s)


def test_a_draining_worker_takes_up_the_turn_that_is_parked() -> None:
    with serving(min_slice_ms=0.0, short_turn_ms=60_000.0, fair_share=0.9) as s:
        gate = s.engine.hold("step", at=1)
        long, short = make_prompt([LONG]), make_prompt([QUESTION])
        _, parked = s.submit(long, max_tokens=200)
        gate.wait_arrived()
        inside = s.engine.hold("step", at=2)
        _, guest = s.submit(short, max_tokens=1)
        gate.open()
        inside.wait_arrived()
        s.worker.drain()
        assert not s.worker.drained
        inside.open()
        for sink, prompt, most in ((guest, short, 1), (parked, long, 200)):
            finished(sink.wait())
            assert sink.tokens == cold_reply(s.engine.limits, prompt, SAMPLING, most)
        assert s.worker.drained


def test_an_idle_worker_is_drained_at_once() -> None:
    with serving() as s:
        assert s.worker.wait_ready(WAIT_S)
        s.worker.drain()
        assert s.worker.drained
        assert not s.worker.wait_ready(0.0)


def test_at_the_deadline_what_runs_is_cancelled_and_what_waits_is_told_to_come_back() -> None:
    with serving() as s:
        gate = s.engine.hold("step", at=2)
        _, running = s.submit(make_prompt([LONG]), max_tokens=200)
        gate.wait_arrived()
        _, waiting = s.submit(make_prompt([QUESTION]))
        s.worker.drain()
        s.worker.cancel_all()
        # The engine still hangs in its step: nothing above waited for it.
        told = failed(waiting.end)
        assert (told.status, told.retry_after_s is not None) == (503, True)
        assert s.worker.health()["status"] == "stopping"
        gate.open()
        assert failed(running.wait()).status == 503
        assert s.engine.calls("step") == 2, "the step that was under way is the last"
        assert s.worker.drained


# -- the watchdog ------------------------------------------------------------------------------

LIMIT_S = 60.0


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("call", "phase"), [("reset", "restore"), ("extend", "prefill"), ("step", "decode")]
)
def test_a_unit_that_does_not_end_turns_health_red_until_it_ends(call: Call, phase: str) -> None:
    clock = Clock()
    with serving(watch=Watch(LIMIT_S, clock)) as s:
        warm, _ = s.ask(make_prompt([LONG]))  # the first of each phase may take longer
        finished(warm)
        gate = s.engine.hold(call)
        _, sink = s.submit(make_prompt([QUESTION]))
        gate.wait_arrived()
        clock.now_s += LIMIT_S
        assert s.worker.health()["status"] == "ok", "not yet longer than it may"
        clock.now_s += 2.5
        health = s.worker.health()
        assert (health["status"], health["ready"]) == ("stuck", False)
        assert health["stuck"] == f"{phase} has taken 62.5 s; the watchdog allows 60 s"
        assert not s.worker.ready
        text = s.metrics.exposition().decode()
        assert "capserve_unit_seconds 62.5\n" in text
        assert "capserve_stuck 1.0\n" in text
        assert not s.engine.trespasses, "the watchdog asked the engine"
        gate.open()
        finished(sink.wait())
        health = s.worker.health()
        assert (health["status"], health["stuck"]) == ("ok", None)
        assert s.worker.ready
        assert "capserve_stuck 0.0\n" in s.metrics.exposition().decode()


def test_a_stuck_worker_still_takes_turns_and_serves_them_when_it_gets_on() -> None:
    clock = Clock()
    with serving(watch=Watch(LIMIT_S, clock)) as s:
        gate = s.engine.hold("extend")
        _, first = s.submit(make_prompt([LONG]))
        gate.wait_arrived()
        clock.now_s += FIRST_TIMES * LIMIT_S + 1
        assert s.worker.health()["status"] == "stuck"
        _, second = s.submit(make_prompt([QUESTION]))
        gate.open()
        finished(first.wait())
        finished(second.wait())


def test_the_first_unit_of_a_phase_may_take_longer() -> None:
    clock = Clock()
    watch = Watch(LIMIT_S, clock)
    with watch.unit("prefill"):
        clock.now_s += FIRST_TIMES * LIMIT_S
        assert watch.overdue() is None
        clock.now_s += 1
        late = watch.overdue()
        assert late is not None
        assert (late.elapsed_s, late.limit_s) == (301.0, 300.0)
    assert watch.overdue() is None
    assert watch.elapsed_s() == 0.0


def test_a_slow_machine_is_not_a_stuck_one_and_each_phase_has_its_own_measure() -> None:
    clock = Clock()
    watch = Watch(LIMIT_S, clock)
    for phase, usual_s in (("prefill", 100.0), ("decode", 1.0)):
        for _ in range(3):
            with watch.unit(phase):
                clock.now_s += usual_s
    for phase, limit_s in (("prefill", USUAL_TIMES * 100), ("decode", LIMIT_S)):
        with watch.unit(phase):
            clock.now_s += limit_s
            assert watch.overdue() is None
            clock.now_s += 0.5
            late = watch.overdue()
            assert late is not None
            assert late.limit_s == pytest.approx(limit_s)
            assert late.phase == phase


def test_a_unit_that_raises_has_ended_too() -> None:
    watch = Watch(LIMIT_S, Clock())
    with pytest.raises(RuntimeError), watch.unit("decode"):
        raise RuntimeError
    assert watch.overdue() is None


@pytest.mark.parametrize(("left", "phase"), [(None, "restore"), (7, "prefill"), (0, "decode")])
def test_a_phase_is_told_from_what_is_left_of_the_prompt(left: int | None, phase: str) -> None:
    assert phase_of(left) == phase
