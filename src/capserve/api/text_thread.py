"""Where does the heavy work of a request run?

On one thread of its own: parsing, validating, rendering and tokenizing a long history take
milliseconds to seconds, and neither the event loop (`/health` must answer) nor the engine's thread
may spend them. One thread, because the work is Python and would only fight over the interpreter.
Grammars have another one of the kind: the largest take a second, and others need not wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from capserve.errors import QueueFullError

T = TypeVar("T")


class TextThread:
    """A bounded line of jobs in front of one thread. Used from the event loop only."""

    def __init__(
        self, max_waiting: int, name: str = "capserve-text", what: str = "to be tokenized"
    ) -> None:
        """`max_waiting` jobs may wait or run at once; at least one. `what` they wait for."""
        assert max_waiting >= 1
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._max_waiting = max_waiting
        self._what = what
        self._waiting = 0

    async def run(self, job: Callable[[], T]) -> T:
        """The result of `job`. Cancelling the caller takes a job that has not begun off the line.

        Raises `QueueFullError`, and whatever `job` raises.
        """
        if self._waiting >= self._max_waiting:
            raise QueueFullError(
                f"{self._waiting} requests wait {self._what}; {self._max_waiting} are the most.",
                retry_after_s=1.0,
            )
        self._waiting += 1
        future = self._pool.submit(job)
        # Counted down when the job is over, not when the caller left: a running job can't stop.
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: self._done(loop))
        return await asyncio.wrap_future(future)

    def _done(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.call_soon_threadsafe(self._count_down)
        except RuntimeError:
            self._count_down()  # the loop is closed: nobody counts on the other side any more

    def _count_down(self) -> None:
        self._waiting -= 1

    def close(self) -> None:
        """Drop what waits; return at once."""
        self._pool.shutdown(wait=False, cancel_futures=True)
