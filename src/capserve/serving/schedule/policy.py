"""Should the running turn make way, and who has the engine next?

Pure: values in, a decision out. There is one hot state, so turns run one after the other; `fair`
lets a short turn run in the middle of a long one, which is parked meanwhile, within these bounds:

  - A turn runs at least `min_slice_ms` between two parkings, and at most `max_parked_turns` wait.
  - `fair_share` bounds what a parked turn lends: at most that part of its time, from its start to
    its end as estimated, goes to the turns that it is parked for. It takes at the most
    1 / (1 - fair_share) times as long as alone, plus one guest that took longer than estimated.
  - A turn that others are parked for is a guest. It is short, so it makes way for nobody, until it
    has taken twice its estimate: then the oldest parked turn has the engine again and the guest is
    parked behind the others, a long turn as they are. The parked ones do not become more by that.
  - When the engine is free, the oldest parked turn goes on before any waiting turn but a short one
    that its share has room for.

So each turn ends: a parked one waits for guests, whose time is bounded, and for older parked ones.
Estimates are milliseconds; `serving/schedule/forecast.py` makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from capserve.serving.limits import Limits

OVERRUN = 2.0
"""Times its estimate that a guest may take. Rates move by less than this from turn to turn, and
one that was no short turn after all costs the parked ones no more than a second short one."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A turn that has not begun, and may begin now."""

    estimate_ms: float | None
    """None when it is not known yet."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A turn that has begun: parked, or running."""

    own_ms: float
    """Time that it has had the engine."""
    remaining_ms: float
    """Estimated time that it still needs."""
    lent_ms: float
    """Time that guests took while it was parked, and that the swaps took."""


@dataclass(frozen=True, slots=True)
class Running:
    begun: Begun
    slice_ms: float
    """Since it last was given the engine."""
    estimate_ms: float
    """What it was estimated at before it began."""
    guest: bool
    """Others are parked for it."""


@dataclass(frozen=True, slots=True)
class Continue:
    """The running turn goes on."""


@dataclass(frozen=True, slots=True)
class ParkFor:
    """Park the running turn and start the waiting turn at this index."""

    index: int


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Park the running turn behind the others, and resume the oldest parked one."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start the waiting turn at this index."""

    index: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Resume the oldest parked turn."""


@dataclass(frozen=True, slots=True)
class Idle:
    """There is nothing to run."""


def concerns(running: Running, parked: int, limits: Limits) -> bool:
    """Could `while_running` say anything but Continue? Estimates are worth their cost only then."""
    if limits.schedule == "fifo" or running.slice_ms < limits.min_slice_ms:
        return False
    return parked > 0 if running.guest else parked < limits.max_parked_turns


def while_running(
    running: Running,
    waiting: Sequence[Waiting],
    parked: Sequence[Begun],
    swap_ms: float,
    limits: Limits,
) -> Continue | ParkFor | GiveBack:
    """`waiting` in order of arrival, `parked` the oldest first; `swap_ms` to park and resume."""
    if not concerns(running, len(parked), limits):
        return Continue()
    if running.guest:
        outlived = running.begun.own_ms > OVERRUN * running.estimate_ms
        return GiveBack() if outlived else Continue()
    index = _first_short(waiting, running.begun, [running.begun, *parked], swap_ms, limits)
    return Continue() if index is None else ParkFor(index)


def when_free(
    waiting: Sequence[Waiting], parked: Sequence[Begun], resume_ms: float, limits: Limits
) -> Start | Resume | Idle:
    """Nobody runs. `waiting` in order of arrival, `parked` the oldest first; `resume_ms` to take
    the state of the oldest up again."""
    if parked:
        # The next guest takes the place of the last one: no swap is added, but the way back is
        # still to come.
        index = _first_short(waiting, parked[0], parked, resume_ms, limits)
        return Resume() if index is None else Start(index)
    return Start(0) if waiting else Idle()


def _first_short(
    waiting: Sequence[Waiting],
    long: Begun,
    lenders: Sequence[Begun],
    swap_ms: float,
    limits: Limits,
) -> int | None:
    """The first waiting turn that is short beside `long`, and that all `lenders` have time for."""
    for index, turn in enumerate(waiting):
        if turn.estimate_ms is None:
            return None  # it may be short itself: nobody behind it is let past unseen
        cost_ms = turn.estimate_ms + swap_ms
        if turn.estimate_ms >= limits.short_turn_ms or cost_ms >= long.remaining_ms / 2:
            continue
        if all(_can_lend(lender, cost_ms, limits.fair_share) for lender in lenders):
            return index
    return None


def _can_lend(turn: Begun, cost_ms: float, share: float) -> bool:
    lent_ms = turn.lent_ms + cost_ms
    return lent_ms <= share * (lent_ms + turn.own_ms + turn.remaining_ms)
