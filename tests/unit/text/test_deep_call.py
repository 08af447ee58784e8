"""A call that takes too long is given up, and few of these at a time."""

from __future__ import annotations

import sys
import threading

import pytest

from capserve.errors import UnavailableError
from capserve.text.deep_call import STACK_BYTES, DeepCalls, TookTooLongError

WAIT_S = 20.0


def test_a_call_gives_what_it_returns_or_raises() -> None:
    calls = DeepCalls()
    assert calls.run(lambda: 7) == 7
    with pytest.raises(KeyError, match="gone"):
        calls.run(lambda: {}["gone"])
    with pytest.raises(SystemExit):  # whatever it is, its caller does not wait for nothing
        calls.run(lambda: sys.exit(3))
    assert calls.left == 0


def test_it_has_a_deep_stack_and_threads_after_it_the_usual_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, sizes = threading.stack_size(), []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        sizes.append(threading.stack_size())
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    DeepCalls().run(lambda: None)
    assert sizes == [STACK_BYTES]
    assert threading.stack_size() == before


def test_a_call_that_takes_too_long_is_left_to_its_end() -> None:
    calls = DeepCalls(most_s=0.02, most_left=2)
    gates = [threading.Event() for _ in range(2)]
    ended = threading.Barrier(3)

    def slow(gate: threading.Event) -> None:
        gate.wait(WAIT_S)
        ended.wait(WAIT_S)

    for count, gate in enumerate(gates):
        assert calls.left == count
        with pytest.raises(TookTooLongError, match=r"more than 0\.02 s"):
            calls.run(lambda gate=gate: slow(gate))
    # Two still run: another one is not begun, and its caller is told to come again.
    begun = threading.Event()
    with pytest.raises(UnavailableError, match="2 grammars") as refused:
        calls.run(begun.set)
    assert refused.value.retry_after_s == 0.02
    assert not begun.is_set()
    for gate in gates:
        gate.set()
    ended.wait(WAIT_S)
    for thread in threading.enumerate():
        if thread.name == "capserve-deep":
            thread.join(WAIT_S)
    assert calls.left == 0
    assert calls.run(lambda: "again") == "again"
