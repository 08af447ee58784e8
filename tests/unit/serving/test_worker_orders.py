"""What is asked beside turns is done between two units of work, in the engine's own thread."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
from serving_harness import (
    WAIT_S,
    Serving,
    failed,
    finished,
    make_prompt,
    serving,
    some_words,
    user,
)

from capserve.errors import CapserveError, ConflictError, QueueFullError, UnavailableError
from capserve.serving.schedule.order_queue import MAX_ORDERS
from capserve.serving.sessions.orders import ListSessions, SessionOrder

ORDER = ListSessions("key")
PROMPT = make_prompt([user(some_words(60, seed=2))])


class RecordingDesk:
    """Answers with the number of the order; may raise."""

    def __init__(self, error: Exception | None = None) -> None:
        self.threads: list[threading.Thread] = []
        self.error = error

    def execute(self, order: SessionOrder) -> Any:
        assert order == ORDER
        self.threads.append(threading.current_thread())
        if self.error is not None:
            raise self.error
        return len(self.threads)


def owner(s: Serving) -> threading.Thread | None:
    return s.engine.owner


def test_an_order_is_carried_out_in_the_middle_of_a_turn_and_changes_nothing_of_it() -> None:
    desk = RecordingDesk()
    with serving(desk=desk) as s:
        first, second = s.engine.hold("step", 3), s.engine.hold("step", 4)
        _, sink = s.submit(PROMPT, max_tokens=60)
        first.wait_arrived()
        future = s.worker.order(ORDER)
        assert not future.done(), "somebody was inside a unit of work"
        first.open()
        second.wait_arrived()
        assert future.result(WAIT_S) == 1
        assert not sink.ended.is_set()
        second.open()
        finished(sink.wait())
    assert desk.threads == [owner(s)]


def test_orders_are_carried_out_on_an_idle_server_in_their_order() -> None:
    with serving(desk=RecordingDesk()) as s:
        futures = [s.worker.order(ORDER) for _ in range(5)]
        assert [future.result(WAIT_S) for future in futures] == [1, 2, 3, 4, 5]


def test_a_refused_order_is_its_callers_to_hear_alone() -> None:
    desk = RecordingDesk(ConflictError("session_id: a turn works on it."))
    with serving(desk=desk) as s:
        gate = s.engine.hold("step", 3)
        _, sink = s.submit(PROMPT)
        gate.wait_arrived()
        future = s.worker.order(ORDER)
        gate.open()
        with pytest.raises(ConflictError):
            future.result(WAIT_S)
        finished(sink.wait())
        assert s.worker.health()["faults"] == 0


def test_an_order_that_breaks_turns_health_red_and_fails_the_turn_that_runs() -> None:
    desk = RecordingDesk(RuntimeError("planted"))
    with serving(desk=desk) as s:
        gate = s.engine.hold("step", 3)
        _, sink = s.submit(PROMPT, max_tokens=60)
        gate.wait_arrived()
        broken, behind = s.worker.order(ORDER), s.worker.order(ORDER)
        gate.open()
        with pytest.raises(CapserveError, match="order failed"):
            broken.result(WAIT_S)
        assert failed(sink.wait()).code == "engine_error"
        with pytest.raises(UnavailableError):
            behind.result(WAIT_S)
        assert s.worker.wait_ready(WAIT_S)
        assert s.worker.health()["faults"] == 1
        desk.error = None
        assert s.worker.order(ORDER).result(WAIT_S) == 2
        finished(s.ask(PROMPT)[0])


def test_a_line_of_orders_has_its_end_and_one_that_nobody_waits_for_is_skipped() -> None:
    desk = RecordingDesk()
    with serving(desk=desk) as s:
        gate = s.engine.hold("extend")
        _, sink = s.submit(PROMPT)
        gate.wait_arrived()
        futures = [s.worker.order(ORDER) for _ in range(MAX_ORDERS)]
        with pytest.raises(QueueFullError, match=f"{MAX_ORDERS} orders wait, {MAX_ORDERS} may"):
            s.worker.order(ORDER)
        assert futures[0].cancel()
        gate.open()
        finished(sink.wait())
        assert [future.result(WAIT_S) for future in futures[1:]] == list(range(1, MAX_ORDERS))


def test_stopping_fails_the_orders_that_wait_and_takes_no_more() -> None:
    with serving(desk=RecordingDesk(), start=False) as s:
        with pytest.raises(UnavailableError, match="not ready"):
            s.worker.order(ORDER)
        s.worker.start()
        gate = s.engine.hold("extend")
        _, sink = s.submit(PROMPT)
        gate.wait_arrived()
        future: Future[Any] = s.worker.order(ORDER)
        assert not s.worker.stop(0.0)
        with pytest.raises(UnavailableError, match="shutting down"):
            future.result(WAIT_S)
        with pytest.raises(UnavailableError, match="shutting down"):
            s.worker.order(ORDER)
        gate.open()
        failed(sink.wait())
