"""Does the unit of work under way still get anywhere?

The worker's thread says when a unit (a plan with its restore, a prefill chunk, a decode step, an
order, upkeep) begins and ends; whoever asks sees one frozen value and compares it with the clock.
Nobody asks the engine: one that hangs answers nobody.

A unit is overdue after the watchdog's time. Two things stretch it: the first unit of a phase reads
weights from disk and compiles kernels, and a machine on which every unit takes long is slow, not
stuck.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Gauge

FIRST_TIMES = 5.0
"""How much longer the first unit of a phase may take."""

USUAL_TIMES = 3.0
"""A unit may always take so many times what its phase usually takes: the longest prefill chunk, at
the end of a full context, takes about twice the average one."""

USUAL_WEIGHT = 0.2
"""How much one unit moves what is usual."""


@dataclass(frozen=True, slots=True)
class _Unit:
    phase: str
    began_s: float
    limit_s: float


@dataclass(frozen=True, slots=True)
class Overdue:
    """A unit that has taken longer than it may."""

    phase: str
    elapsed_s: float
    limit_s: float

    def __str__(self) -> str:
        taken = f"{self.phase} has taken {self.elapsed_s:.1f} s"
        return f"{taken}; the watchdog allows {self.limit_s:g} s"


class Watch:
    """One thread works, any thread looks. `limit_s`: seconds; `clock`: monotonic seconds."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        assert limit_s > 0
        self._limit_s = limit_s
        self._clock = clock
        self._usual_s: dict[str, float] = {}  # the worker's thread alone
        self._unit: _Unit | None = None  # replaced whole: readers need no lock

    # -- the worker's thread -----------------------------------------------------------------

    @contextmanager
    def unit(self, phase: str) -> Iterator[None]:
        """The block is one unit of work. Not nested."""
        began_s = self._clock()
        self._unit = _Unit(phase, began_s, self._allowed_s(phase))
        try:
            yield
        finally:
            self._unit = None
            elapsed_s = self._clock() - began_s
            usual_s = self._usual_s.get(phase, elapsed_s)
            self._usual_s[phase] = usual_s + USUAL_WEIGHT * (elapsed_s - usual_s)

    def _allowed_s(self, phase: str) -> float:
        usual_s = self._usual_s.get(phase)
        if usual_s is None:
            return FIRST_TIMES * self._limit_s
        return max(self._limit_s, USUAL_TIMES * usual_s)

    # -- any thread --------------------------------------------------------------------------

    def elapsed_s(self) -> float:
        """Of the unit under way; 0 between two units."""
        unit = self._unit
        return 0.0 if unit is None else max(0.0, self._clock() - unit.began_s)

    def overdue(self) -> Overdue | None:
        """The unit under way, when it should have ended by now."""
        unit = self._unit
        if unit is None:
            return None
        elapsed_s = self._clock() - unit.began_s
        return Overdue(unit.phase, elapsed_s, unit.limit_s) if elapsed_s > unit.limit_s else None

    def expose(self, registry: CollectorRegistry) -> None:
        """Add its two gauges, which look whenever they are read."""
        taken = Gauge(
            "capserve_unit_seconds",
            "Time that the unit of work under way has taken so far",
            registry=registry,
        )
        taken.set_function(self.elapsed_s)
        stuck = Gauge(
            "capserve_stuck",
            "1 while the unit of work under way takes longer than the watchdog allows",
            registry=registry,
        )
        stuck.set_function(lambda: float(self.overdue() is not None))


def phase_of(prefill_left_tokens: int | None) -> str:
    """The phase of a turn's next unit, by what is left of its prompt (None: nothing is begun)."""
    if prefill_left_tokens is None:
        return "restore"
    return "prefill" if prefill_left_tokens else "decode"
