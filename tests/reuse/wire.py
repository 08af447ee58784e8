"""What stands between a test and the worker: an engine with traps, and sinks that keep everything.

A trap runs inside an exact call of the engine, in the worker's thread: there a client can leave,
another one can come, and the process can die.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NoReturn

import pytest

from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import (
    MAX_DRAFTS,
    Capsule,
    CapsulePart,
    Chunk,
    EngineLimits,
    Sampling,
    TokenArray,
    TokenConstraint,
    TokenLogprob,
)
from capserve.serving.turn import Delta, Failed, Finished, TurnEvent

WAIT_S = 60.0
"""Longest that a turn may take on a busy machine."""


A_THREAD_DIES = pytest.mark.filterwarnings(
    r"ignore:Exception in thread capserve-(engine|disk)[\s\S]*SystemExit"
    ":pytest.PytestUnhandledThreadExceptionWarning"
)
"""For tests in which a process is killed: its threads end by `killed`."""


def killed() -> NoReturn:
    """The process dies here. Nobody catches this, and a thread that it ends says nothing."""
    raise SystemExit


class Wire:
    """An engine that passes every call on and can do something inside one. Implements `Engine`."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self._calls: Counter[str] = Counter()
        self._traps: dict[tuple[str, int], Callable[[], None]] = {}

    def when(self, call: str, at: int, action: Callable[[], None]) -> None:
        """Run `action` inside the `at`-th call of this kind from now on. Set while idle, or in
        another action."""
        assert at >= 1
        self._traps[(call, self._calls[call] + at)] = action

    def disarm(self) -> bool:
        """Forget what was not reached; tells whether there was something."""
        left, self._traps = bool(self._traps), {}
        return left

    def _enter(self, call: str) -> None:
        self._calls[call] += 1
        action = self._traps.pop((call, self._calls[call]), None)
        if action is not None:
            action()

    @property
    def limits(self) -> EngineLimits:
        return self.engine.limits

    @property
    def position(self) -> int:
        return self.engine.position

    @property
    def graph_capture_count(self) -> int:
        return self.engine.graph_capture_count

    def reset(self) -> None:
        self._enter("reset")
        self.engine.reset()

    def extend(self, tokens: TokenArray) -> None:
        self._enter("extend")
        self.engine.extend(tokens)

    def begin(
        self,
        sampling: Sampling,
        context: TokenArray,
        output: TokenArray | None = None,
        constraint: TokenConstraint | None = None,
    ) -> None:
        self._enter("begin")
        self.engine.begin(sampling, context, output, constraint)

    def step(self, most: int = MAX_DRAFTS + 1) -> Chunk:
        self._enter("step")
        return self.engine.step(most)

    def snapshot(self) -> Capsule:
        self._enter("snapshot")
        return self.engine.snapshot()

    def restore(self, capsule: Capsule) -> int:
        self._enter("restore")
        return self.engine.restore(capsule)

    def move(self, capsule: Capsule, tier: str) -> Capsule:
        self._enter("move")
        return self.engine.move(capsule, tier)

    def unpack(self, position: int, parts: Sequence[CapsulePart | memoryview]) -> Capsule:
        self._enter("unpack")
        return self.engine.unpack(position, parts)


class Collector:
    """A sink that keeps every event. `on_first` is called, once, when the first one came."""

    def __init__(self, on_first: Callable[[], None] | None = None) -> None:
        self._events: list[TurnEvent] = []
        self._ended = threading.Event()
        self._on_first = on_first

    def deliver(self, event: TurnEvent) -> None:
        self._events.append(event)
        action, self._on_first = self._on_first, None
        if action is not None:
            action()
        if not isinstance(event, Delta):
            self._ended.set()

    def wait(self) -> Finished | Failed:
        assert self._ended.wait(WAIT_S), "the turn never ended"
        return self.the_end()

    def the_end(self) -> Finished | Failed:
        """The one terminal event; AssertionError when there are more, or something follows it."""
        [end] = [event for event in self._events if not isinstance(event, Delta)]
        assert self._events[-1] is end, "something follows the terminal event"
        return end

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    @property
    def tokens(self) -> list[int]:
        return [t for event in self._events if isinstance(event, Delta) for t in event.tokens]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [p for event in self._events if isinstance(event, Delta) for p in event.logprobs]
