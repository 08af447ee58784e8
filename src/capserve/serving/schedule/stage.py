"""Which turns wait, which one has the engine, and which are parked?

The queue, the running turn and the parked ones, with what moves a turn between them. The decisions
are `schedule/policy.py`'s; this carries them out and keeps the times that they are made from.

The three lists are guarded by the worker's condition. Its thread alone moves turns that have begun,
so it may read without the lock what only it writes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from capserve.serving.running.bench import Bench, Turn
from capserve.serving.running.turn_run import TurnRun
from capserve.serving.schedule.forecast import Clocked, Forecast
from capserve.serving.schedule.policy import (
    Continue,
    GiveBack,
    Idle,
    ParkFor,
    Resume,
    Start,
    concerns,
    when_free,
    while_running,
)


class Stage:
    def __init__(self, changed: threading.Condition, bench: Bench) -> None:
        self._changed = changed
        self._bench = bench
        self._limits = bench.limits
        self._forecast = Forecast(bench)
        self.queue: deque[Turn] = deque()
        self.running: Clocked | None = None
        self.parked: list[Clocked] = []
        """The one that is parked for the longest first."""

    # -- under the condition -----------------------------------------------------------------

    def begun(self) -> list[Clocked]:
        return [*([] if self.running is None else [self.running]), *self.parked]

    def withdraw(self, turn: Turn) -> bool:
        """Take a waiting turn out of the queue; False when it has begun or ended."""
        if turn not in self.queue:
            return False
        self.queue.remove(turn)
        return True

    def drain(self) -> list[Turn]:
        """Take all waiting turns out."""
        waiting = list(self.queue)
        self.queue.clear()
        return waiting

    # -- the worker's thread -----------------------------------------------------------------

    def choose(self) -> Clocked | None:
        """Decide who has the engine for the next unit of work, and give it to that turn."""
        running = self.running
        if running is None:
            self._fill()
        elif (self.queue or running.guest) and concerns(
            self._forecast.running(running), len(self.parked), self._limits
        ):
            self._reconsider(running)
        return self.running

    def _fill(self) -> None:
        waiting = self._may_begin()
        if self.parked:
            self._forecast.refresh(waiting, time.monotonic())
        values = [self._forecast.waiting(turn) for turn in waiting]
        parked = [self._forecast.begun(clocked) for clocked in self.parked]
        resume_ms = self._forecast.swap_ms(self.parked[0]) / 2 if self.parked else 0.0
        match when_free(values, parked, resume_ms, self._limits):
            case Start(index):
                self._start(waiting[index])
            case Resume():
                self._resume()
            case Idle():
                pass

    def _reconsider(self, running: Clocked) -> None:
        waiting = self._may_begin()
        self._forecast.refresh(waiting, time.monotonic())
        match while_running(
            self._forecast.running(running),
            [self._forecast.waiting(turn) for turn in waiting],
            [self._forecast.begun(clocked) for clocked in self.parked],
            self._forecast.swap_ms(running),
            self._limits,
        ):
            case Continue():
                pass
            case ParkFor(index):
                if self._park(running):
                    self._start(waiting[index])
            case GiveBack():
                if self._park(running):
                    self._resume()

    def worked(self, clocked: Clocked, elapsed_ms: float) -> None:
        """`clocked` had the engine for this long."""
        clocked.own_ms += elapsed_ms
        if clocked.guest:
            _lend(elapsed_ms, self.parked)

    def over(self, clocked: Clocked, *, finished: bool) -> None:
        """A parked or running turn has ended: nothing is held for it any more."""
        clocked.run.close()
        if finished:  # how long a reply would have got that was cut off, nobody knows
            self._forecast.saw_reply(clocked.run.said_tokens)
        with self._changed:
            if clocked in self.parked:
                self.parked.remove(clocked)

    def _may_begin(self) -> list[Turn]:
        """Waiting turns in order, without those whose session somebody works on before them (W6).

        When nobody has begun, the first of the queue is among them.
        """
        taken = {clocked.run.session_id for clocked in self.begun()}
        free = []
        with self._changed:
            waiting = list(self.queue)
        for turn in waiting:
            name = turn.item.request.session_id
            if name is None or name not in taken:
                free.append(turn)
                taken.add(name)
        return free

    def _start(self, turn: Turn) -> None:
        estimate_ms = self._forecast.waiting(turn).estimate_ms or 0.0
        with self._changed:
            if self.withdraw(turn):  # unless it was cancelled a moment ago
                guest = bool(self.parked)
                self.running = Clocked(TurnRun(turn, self._bench), estimate_ms, guest)

    def _park(self, clocked: Clocked) -> bool:
        began = time.monotonic()
        done = clocked.run.park()
        _lend((time.monotonic() - began) * 1e3, [clocked, *self.parked])
        # Its slice is over either way: where there is no room, not every unit may try again.
        clocked.new_slice()
        if done:
            with self._changed:
                self.parked.append(clocked)
                self.running = None
        return done

    def _resume(self) -> None:
        with self._changed:
            clocked = self.running = self.parked.pop(0)
        began = time.monotonic()
        clocked.run.resume()
        clocked.guest = False
        clocked.new_slice()
        _lend((time.monotonic() - began) * 1e3, [clocked])


def _lend(elapsed_ms: float, lenders: Sequence[Clocked]) -> None:
    for lender in lenders:
        lender.lent_ms += elapsed_ms
