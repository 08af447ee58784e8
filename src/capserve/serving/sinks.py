"""How do a turn's events get from the worker thread to whoever waits for them?

Two sinks. `FutureSink` folds the events into one reply: the plain answer is the stream, folded.
`StreamSink` is a bounded channel to one asyncio reader. `deliver` never blocks in either: when the
reader lags, further deltas merge into the newest waiting one, so the channel holds a bounded number
of events, loses nothing and keeps the order. A reader that takes nothing for too long while data
waits has its turn cancelled.

The one module of serving that knows asyncio.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from capserve.serving.turn import CancelToken, Delta, Failed, Finished, TurnEvent, merged

MAX_WAITING_EVENTS = 64
"""Beyond it deltas merge: a reader this far behind gains nothing from finer pieces."""


@dataclass(frozen=True)
class Reply:
    """A whole turn: everything that was delivered, and how it ended."""

    delta: Delta
    end: Finished | Failed


class FutureSink:
    """Folds a turn into `future`, which the terminal event resolves (it never raises)."""

    def __init__(self) -> None:
        self.future: Future[Reply] = Future()
        # Running futures can't be cancelled: a waiter that leaves must not break `deliver`.
        self.future.set_running_or_notify_cancel()
        self._deltas: list[Delta] = []

    def deliver(self, event: TurnEvent) -> None:
        if isinstance(event, Delta):
            self._deltas.append(event)
        else:
            self.future.set_result(Reply(merged(self._deltas), event))

    def wait(self, timeout_s: float | None = None) -> Reply:
        """For threads. TimeoutError when the turn takes longer."""
        return self.future.result(timeout_s)

    async def reply(self) -> Reply:
        """For the event loop."""
        return await asyncio.shield(asyncio.wrap_future(self.future))


class StreamSink:
    """Worker thread in, `async for` out. Make it on the loop that reads it; one reader."""

    def __init__(
        self,
        cancel: CancelToken,
        stall_timeout_s: float,
        max_waiting: int = MAX_WAITING_EVENTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert max_waiting >= 1
        self._cancel = cancel
        self._stall_timeout_s = stall_timeout_s
        self._max_waiting = max_waiting
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: deque[TurnEvent] = deque()
        self._waiting_since: float | None = None
        self._wake_due = False
        self._ended = False
        self._arrived = asyncio.Event()

    # -- the worker's side -------------------------------------------------------------------

    def deliver(self, event: TurnEvent) -> None:
        with self._lock:
            newest = self._waiting[-1] if self._waiting else None
            full = len(self._waiting) >= self._max_waiting
            if full and isinstance(event, Delta) and isinstance(newest, Delta):
                self._waiting[-1] = merged((newest, event))
            else:
                self._waiting.append(event)
            if self._waiting_since is None:
                self._waiting_since = self._clock()
            wake, self._wake_due = not self._wake_due, True
        if wake:
            self._wake()
        self.check_stall()

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:  # the loop is closed: nobody will ever read
            self._cancel.cancel("event loop closed")

    # -- the reader's side -------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Events that the reader has not taken."""
        return len(self._waiting)

    @property
    def stalled_s(self) -> float:
        """For how long data has waited without the reader taking any; 0 when none waits."""
        with self._lock:
            since = self._waiting_since
            return 0.0 if since is None else self._clock() - since

    def check_stall(self) -> bool:
        """Cancel the turn when its reader has stalled for too long. Any thread; never blocks."""
        stalled = self.stalled_s > self._stall_timeout_s
        if stalled:
            self._cancel.cancel("stream stalled")
        return stalled

    async def next(self, timeout_s: float | None = None) -> TurnEvent | None:
        """The next event, or None when none came in `timeout_s` (time for a heartbeat).

        Raises StopAsyncIteration after the terminal event.
        """
        while True:
            event = self._take()
            if event is not None:
                return event
            if self._ended:
                raise StopAsyncIteration
            try:
                await asyncio.wait_for(self._arrived.wait(), timeout_s)
            except TimeoutError:
                return None

    def __aiter__(self) -> StreamSink:
        return self

    async def __anext__(self) -> TurnEvent:
        event = await self.next()
        assert event is not None, "without a timeout there is always an event"
        return event

    def _take(self) -> TurnEvent | None:
        with self._lock:
            if not self._waiting:
                self._wake_due = False
                self._waiting_since = None
                # Under the lock: a delivery from here on sets it again.
                self._arrived.clear()
                return None
            event = self._waiting.popleft()
            self._waiting_since = self._clock() if self._waiting else None
            self._ended = not isinstance(event, Delta)
            return event
