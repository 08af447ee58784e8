"""Does `/health` answer all the time, and how fast?

A thread that polls at a steady rate on one connection of its own while the scenes are played.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import httpx
import numpy as np

PERIOD_S = 0.1


class Pulse:
    """Milliseconds of every answer; pauses count neither as answers nor as failures."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._stop = threading.Event()
        self._lock = threading.Lock()  # held while one request is under way
        self.times_ms: list[float] = []
        self.failures = 0
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For as long as the server is down on purpose."""
        with self._lock:
            yield

    def report(self) -> dict[str, Any]:
        times = self.times_ms or [float("nan")]
        p50, p99 = np.percentile(times, [50, 99])
        return {
            "polls": len(self.times_ms),
            "failures": self.failures,
            "p50_ms": float(p50),
            "p99_ms": float(p99),
            "max_ms": max(times),
        }

    def _poll(self) -> None:
        with httpx.Client(base_url=self._root, timeout=30) as client:
            while not self._stop.wait(PERIOD_S):
                with self._lock:
                    self._once(client)

    def _once(self, client: httpx.Client) -> None:
        began = perf_counter()
        try:
            status = client.get("/health").status_code
        except httpx.TransportError:
            # A kept connection that a restart cut is no failure of the server: ask once more.
            try:
                status = client.get("/health").status_code
            except httpx.TransportError:
                status = 0
        if status == 200:
            self.times_ms.append((perf_counter() - began) * 1e3)
        else:
            self.failures += 1
