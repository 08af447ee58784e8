"""What is asked of the worker's thread besides turns, until it has time for it?

An order (list the sessions, fork one, export one) runs between two units of work, one at a time, so
that a stream waits for one order at the most. Its answer is a future: the result, or the
CapserveError that the client is to see. A future that its owner has cancelled is skipped.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from capserve.errors import CapserveError, QueueFullError
from capserve.serving.sessions.orders import SessionOrder

MAX_ORDERS = 64
"""Waiting ones; each is short, but an export copies a whole state."""


class Desk(Protocol):
    """Who carries orders out, in the worker's thread: `capserve.serving.sessions.desk`."""

    def execute(self, order: SessionOrder, /) -> Any: ...


@dataclass(eq=False)
class Asked:
    order: SessionOrder
    future: Future[Any] = field(default_factory=Future)

    def run(self, desk: Desk) -> None:
        """Carry it out. A CapserveError is the answer; what nobody foresaw (and a 500) is the
        caller's to hear too, and then raised here: nobody knows what it left behind."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = desk.execute(self.order)
        except CapserveError as error:
            self.future.set_exception(error)
            if error.status == 500:
                raise
        except Exception as error:
            failure = CapserveError("The order failed; the server's log says why.")
            failure.__cause__ = error
            self.future.set_exception(failure)
            raise
        else:
            self.future.set_result(result)

    def fail(self, error: CapserveError) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class OrderQueue:
    """Not locked: its owner does that."""

    def __init__(self) -> None:
        self._asked: deque[Asked] = deque()

    def __len__(self) -> int:
        return len(self._asked)

    def add(self, order: SessionOrder) -> Future[Any]:
        """Raises QueueFullError (429)."""
        if len(self._asked) >= MAX_ORDERS:
            raise QueueFullError(
                f"{len(self._asked)} orders wait, {MAX_ORDERS} may.", retry_after_s=1.0
            )
        asked = Asked(order)
        self._asked.append(asked)
        return asked.future

    def take(self) -> Asked | None:
        return self._asked.popleft() if self._asked else None

    def drain(self) -> list[Asked]:
        asked = list(self._asked)
        self._asked.clear()
        return asked
