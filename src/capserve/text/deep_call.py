"""How is a library called that may descend deep, and may take long?

On a thread of its own, made for the call, whose stack is deep enough; its caller waits for so long
and no longer. A call that can't be stopped is left to its end, and few of them at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from capserve.errors import UnavailableError

T = TypeVar("T")

STACK_BYTES = 64 << 20
"""Address space: memory is taken as far as a call goes down."""

MOST_S = 10.0
MOST_LEFT = 2
"""Calls that were given up and still run. They cost a processor each."""

_sizing = threading.Lock()
"""The size of a stack is a setting of the whole process until its thread is started."""


class TookTooLongError(Exception):
    """The call was given up."""


class DeepCalls:
    """Any thread may call it."""

    def __init__(self, most_s: float = MOST_S, most_left: int = MOST_LEFT) -> None:
        self._most_s = most_s
        self._most_left = most_left
        self._left = 0
        self._lock = threading.Lock()

    @property
    def left(self) -> int:
        """Calls that were given up and still run."""
        return self._left

    def run(self, call: Callable[[], T]) -> T:
        """What `call` returns or raises; TookTooLongError after `most_s`, UnavailableError while
        `most_left` given-up calls still run."""
        with self._lock:
            if self._left >= self._most_left:
                raise UnavailableError(
                    f"{self._left} grammars that took too long still run; new ones have to wait",
                    retry_after_s=self._most_s,
                )
        result: Future[T] = Future()
        given_up = False

        def work() -> None:
            try:
                result.set_result(call())
            except BaseException as error:  # noqa: BLE001 - the caller's to handle
                result.set_exception(error)
            with self._lock:
                self._left -= given_up

        thread = threading.Thread(target=work, name="capserve-deep", daemon=True)
        with _sizing:
            before = threading.stack_size(STACK_BYTES)
            try:
                thread.start()
            finally:
                threading.stack_size(before)
        try:
            return result.result(self._most_s)
        except TimeoutError:
            with self._lock:
                if not result.done():
                    given_up = True
                    self._left += 1
                    raise TookTooLongError(f"it took more than {self._most_s:g} s") from None
            return result.result()
