"""A cancel token: one reason, and whoever subscribed hears it in the cancelling thread."""

from __future__ import annotations

import threading

from capserve.serving.turn import CancelToken


def test_the_first_reason_wins_and_subscribers_hear_once() -> None:
    token, heard = CancelToken(), []
    token.subscribe(lambda: heard.append(token.reason))
    token.cancel("disconnect")
    token.cancel("shutdown")
    assert (token.cancelled, token.reason, heard) == (True, "disconnect", ["disconnect"])


def test_whoever_subscribes_too_late_is_called_at_once() -> None:
    token, heard = CancelToken(), []
    token.cancel()
    token.subscribe(lambda: heard.append("late"))
    assert heard == ["late"]


def test_a_subscriber_may_look_at_the_token_and_cancel_it_again() -> None:
    token, heard = CancelToken(), []

    def subscriber() -> None:
        token.cancel("again")
        token.subscribe(lambda: heard.append(token.cancelled))

    token.subscribe(subscriber)
    token.cancel("first")
    assert heard == [True]
    assert token.reason == "first"


def test_of_many_cancelling_threads_exactly_one_wins() -> None:
    for _ in range(20):
        token, heard = CancelToken(), []
        token.subscribe(lambda heard=heard: heard.append(1))  # type: ignore[misc]
        start = threading.Barrier(4)

        def cancel(token: CancelToken = token, start: threading.Barrier = start) -> None:
            start.wait(10.0)
            token.cancel(threading.current_thread().name)

        threads = [threading.Thread(target=cancel) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10.0)
        assert heard == [1]
