"""What do the callers of the disk tier and its writer share?

The index, the queue and the fault, under one condition that nobody holds across I/O. Every method
but the constructor is called with it held.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from capserve.serving.capsules.rows import CapsuleKey
from capserve.serving.disk.index import DiskIndex
from capserve.serving.disk.queue import Change, PutSession, PutTurn, WriteQueue

OWED_BYTES = 64 << 20
"""Rows that wait for the end of a fault; of more, the oldest turns are given up."""


class DiskState:
    def __init__(self, budget_bytes: int, pending_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.most_pending_bytes = pending_bytes
        self.condition = threading.Condition()
        self.index = DiskIndex()
        self.queue = WriteQueue()
        self.touched: dict[CapsuleKey, float] = {}
        """Uses that the manifest does not know yet."""
        self.evicted: list[CapsuleKey] = []
        self.given_up: list[CapsuleKey] = []
        """Those of `evicted` that may be handed over again."""
        self.dropped_saves = 0
        self.refused_saves = 0
        self.fault: str | None = None
        self.retry_at = 0.0
        """Monotonic seconds from which writing is tried again in spite of the fault."""
        self.busy = True
        """The writer has taken changes out of the queue that are not written yet."""
        self.generation = 0
        """Counts the manifests that were begun anew."""
        self.flushing = 0
        self.closing = False
        self.last_try_failed = False
        """Not even what frees room could be written at the end."""

    def is_off(self) -> bool:
        return self.closing or self.wait_s() is not None

    def wait_s(self) -> float | None:
        """Until a fault lets the next try happen; None when nothing stands in its way."""
        left_s = self.retry_at - time.monotonic()
        return None if self.fault is None or left_s <= 0 else left_s

    def has_work(self) -> bool:
        # At the end without waiting: a session that was deleted must not come back.
        if self.last_try_failed if self.closing else self.wait_s() is not None:
            return False
        return len(self.queue) > 0 or bool(self.touched and (self.flushing or self.closing))

    def settled(self) -> bool:
        return not self.busy and not self.has_work()

    def put(self, change: Change) -> None:
        if not self.closing:
            self.queue.put(change, self.index.parts)
            self.condition.notify_all()

    def put_heavy(self, change: PutSession | PutTurn) -> None:
        bound = self.most_pending_bytes
        self.put(change)
        self.give_up(self.queue.trim(min(bound, OWED_BYTES) if self.fault else bound))

    def give_up(self, keys: Sequence[CapsuleKey]) -> None:
        """Saves that will not be written."""
        self.dropped_saves += len(keys)
        self.evicted.extend(keys)
        self.given_up.extend(keys)
