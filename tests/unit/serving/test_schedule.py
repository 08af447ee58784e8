"""Who makes way for whom: the rules one by one, then whole days on a simulated engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from capserve.serving.limits import Limits
from capserve.serving.schedule.forecast import OutputGuess, decode_left_tokens
from capserve.serving.schedule.policy import (
    Begun,
    Continue,
    GiveBack,
    Idle,
    ParkFor,
    Resume,
    Running,
    Start,
    Waiting,
    concerns,
    when_free,
    while_running,
)

FAIR = Limits(4096, 4096)
FIFO = replace(FAIR, schedule="fifo")
LONG = Running(Begun(1000.0, 10_000.0, 0.0), slice_ms=1000.0, estimate_ms=11_000.0, guest=False)
SHORT = Waiting(100.0)


def decided(
    running: Running = LONG,
    waiting: Sequence[Waiting] = (SHORT,),
    parked: Sequence[Begun] = (),
    swap_ms: float = 10.0,
    limits: Limits = FAIR,
) -> Continue | ParkFor | GiveBack:
    return while_running(running, waiting, parked, swap_ms, limits)


# -- rule by rule ------------------------------------------------------------------------------


def test_a_long_turn_makes_way_for_the_first_short_one_that_waits() -> None:
    longer = Waiting(9_000.0)
    assert decided(waiting=[longer, longer, SHORT, Waiting(1.0)]) == ParkFor(2)
    assert decided(waiting=[longer]) == Continue()
    assert decided(waiting=[]) == Continue()


def test_nobody_is_let_past_a_turn_whose_length_is_not_known_yet() -> None:
    assert decided(waiting=[Waiting(None), SHORT]) == Continue()
    assert decided(waiting=[SHORT, Waiting(None)]) == ParkFor(0)


def test_first_come_first_served_never_parks() -> None:
    assert decided(limits=FIFO) == Continue()
    assert not concerns(LONG, 0, FIFO)


def test_a_turn_is_short_below_the_limit_and_below_half_of_what_the_other_has_left() -> None:
    assert decided(waiting=[Waiting(FAIR.short_turn_ms)]) == Continue()
    assert decided(waiting=[Waiting(FAIR.short_turn_ms - 1)]) == ParkFor(0)
    ending = replace(LONG, begun=Begun(10_000.0, 220.0, 0.0))
    assert decided(ending, swap_ms=10.0) == Continue()
    assert decided(ending, swap_ms=9.0) == ParkFor(0)


def test_a_slice_has_its_minimum() -> None:
    assert decided(replace(LONG, slice_ms=FAIR.min_slice_ms - 1)) == Continue()
    assert decided(replace(LONG, slice_ms=FAIR.min_slice_ms)) == ParkFor(0)


def test_no_more_turns_are_parked_than_the_bound_says() -> None:
    parked = [Begun(5000.0, 5000.0, 0.0)] * FAIR.max_parked_turns
    assert decided(parked=parked[1:]) == ParkFor(0)
    assert decided(parked=parked) == Continue()
    assert decided(limits=replace(FAIR, max_parked_turns=0)) == Continue()


def test_no_turn_lends_more_than_its_share_whether_it_runs_or_is_parked_already() -> None:
    # In all 11,000 ms of its own; half of the whole may be lent: 11,000 ms.
    spent = Begun(1000.0, 10_000.0, 10_900.0)
    assert decided(replace(LONG, begun=spent), swap_ms=0.0) == ParkFor(0)
    assert decided(replace(LONG, begun=spent), swap_ms=1.0) == Continue()
    assert decided(parked=[spent], swap_ms=1.0) == Continue()
    assert when_free([SHORT], [spent], 0.0, FAIR) == Start(0)
    assert when_free([Waiting(101.0)], [spent], 0.0, FAIR) == Resume()
    nothing = replace(FAIR, fair_share=0.0)
    assert decided(limits=nothing) == Continue()


def test_a_guest_makes_way_for_nobody_until_it_outlives_twice_its_estimate() -> None:
    parked = [Begun(5000.0, 50_000.0, 0.0)]
    guest = Running(Begun(800.0, 50_000.0, 0.0), slice_ms=800.0, estimate_ms=400.0, guest=True)
    assert decided(guest, parked=parked) == Continue()
    overrun = replace(guest, begun=Begun(801.0, 50_000.0, 0.0))
    assert decided(overrun, parked=parked) == GiveBack()
    full = parked * FAIR.max_parked_turns
    assert decided(overrun, parked=full) == GiveBack(), "the parked ones do not become more by it"
    assert decided(replace(overrun, slice_ms=100.0), parked=parked) == Continue()


def test_a_free_engine_takes_the_oldest_parked_turn_before_a_long_waiting_one() -> None:
    parked = [Begun(5000.0, 50_000.0, 0.0), Begun(1.0, 1.0, 0.0)]
    assert when_free([Waiting(9000.0)], parked, 0.0, FAIR) == Resume()
    assert when_free([], parked, 0.0, FAIR) == Resume()
    assert when_free([Waiting(9000.0), SHORT], parked[:1], 0.0, FAIR) == Start(1)
    assert when_free([Waiting(None), SHORT], parked[:1], 0.0, FAIR) == Resume()
    assert when_free([Waiting(9000.0), SHORT], [], 0.0, FAIR) == Start(0)
    assert when_free([Waiting(None)], [], 0.0, FAIR) == Start(0)
    assert when_free([], [], 0.0, FAIR) == Idle()


# -- how long a reply gets ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "said", "guess", "left"),
    [
        (1000, 0, 256.0, 256.0),  # nothing known but the others
        (30, 0, 256.0, 30.0),  # what was asked for is less
        (1000, 100, 256.0, 156.0),  # on its way to the guess
        (1000, 300, 256.0, 300.0),  # outlived it: half done
        (1000, 800, 256.0, 200.0),  # no more than it may
        (1000, 1000, 256.0, 0.0),
    ],
)
def test_a_reply_that_outlived_the_guess_is_taken_to_be_half_done(
    most: int, said: int, guess: float, left: float
) -> None:
    assert decode_left_tokens(most, said, guess) == left


def test_the_guess_follows_the_replies() -> None:
    guess = OutputGuess()
    for _ in range(60):
        guess.saw(20)
    assert 20 <= guess.tokens < 22


# -- whole days --------------------------------------------------------------------------------

UNIT_MS = 20.0
SWAP_MS = 6.0


@dataclass(eq=False)
class Job:
    arrives_ms: float
    needs_ms: float
    error: float = 1.0
    """Estimate over truth."""
    own_ms: float = 0.0
    lent_ms: float = 0.0
    slice_ms: float = 0.0
    guest: bool = False
    gave_back: bool = False
    began_ms: float = inf
    ended_ms: float = inf
    known: bool = False

    @property
    def left_ms(self) -> float:
        return self.needs_ms - self.own_ms

    def waiting(self) -> Waiting:
        return Waiting(self.needs_ms * self.error if self.known else None)

    def begun(self) -> Begun:
        return Begun(self.own_ms, self.left_ms * self.error, self.lent_ms)


@dataclass
class Day:
    """One engine and a virtual clock: what `serving/schedule/stage.py` does, without the turns."""

    jobs: list[Job]
    limits: Limits
    now_ms: float = 0.0
    running: Job | None = None
    parked: list[Job] = field(default_factory=list)
    most_parked: int = 0
    swaps: int = 0
    idle_ms: float = 0.0

    def run(self) -> None:
        coming = sorted(self.jobs, key=lambda job: job.arrives_ms)
        queue: list[Job] = []
        for _ in range(200_000):
            while coming and coming[0].arrives_ms <= self.now_ms:
                queue.append(coming.pop(0))
            self.choose(queue)
            self.most_parked = max(self.most_parked, len(self.parked))
            if self.running is not None:
                self.work(self.running)
            elif coming:
                self.idle_ms += coming[0].arrives_ms - self.now_ms
                self.now_ms = coming[0].arrives_ms
            else:
                return
        raise AssertionError("the day never ended")

    def choose(self, queue: list[Job]) -> None:
        unknown = [job for job in queue if not job.known]
        if unknown and (self.running is not None or self.parked):
            unknown[0].known = True  # one plan a unit
        waiting = [job.waiting() for job in queue]
        parked = [job.begun() for job in self.parked]
        if self.running is None:
            match when_free(waiting, parked, SWAP_MS / 2, self.limits):
                case Start(index):
                    self.start(queue.pop(index))
                case Resume():
                    self.resume()
            return
        one = self.running
        estimate_ms = one.needs_ms * one.error
        running = Running(one.begun(), one.slice_ms, estimate_ms, one.guest)
        match while_running(running, waiting, parked, SWAP_MS, self.limits):
            case ParkFor(index):
                self.park(one)
                self.start(queue.pop(index))
            case GiveBack():
                one.gave_back = True
                self.park(one)
                self.resume()

    def start(self, job: Job) -> None:
        job.guest, job.began_ms, self.running = bool(self.parked), self.now_ms, job

    def park(self, job: Job) -> None:
        self.now_ms += SWAP_MS / 2
        self.swaps += 1
        for lender in (job, *self.parked):
            lender.lent_ms += SWAP_MS / 2
        self.parked.append(job)

    def resume(self) -> None:
        job = self.running = self.parked.pop(0)
        self.now_ms += SWAP_MS / 2
        job.lent_ms += SWAP_MS / 2
        job.slice_ms, job.guest = 0.0, False

    def work(self, job: Job) -> None:
        spent = min(UNIT_MS, job.left_ms)
        self.now_ms += spent
        job.own_ms += spent
        job.slice_ms += spent
        if job.guest:
            for lender in self.parked:
                lender.lent_ms += spent
        if job.left_ms <= 1e-9:
            job.ended_ms = self.now_ms
            self.running = None


def job_lists(errors: st.SearchStrategy[float]) -> st.SearchStrategy[list[Job]]:
    times = st.floats(0, 20_000)
    sizes = st.one_of(st.floats(1, 500), st.floats(500, 20_000))
    return st.lists(st.builds(Job, times, sizes, errors), min_size=1, max_size=25)


LIMITS = st.builds(
    lambda share, slice_ms, bound: replace(
        FAIR, fair_share=share, min_slice_ms=slice_ms, max_parked_turns=bound
    ),
    st.sampled_from([0.0, 0.2, 0.5, 0.9]),
    st.sampled_from([0.0, 50.0, 200.0]),
    st.integers(0, 3),
)


@settings(max_examples=150, deadline=None)
@given(jobs=job_lists(st.floats(0.1, 10)), limits=LIMITS)
def test_every_turn_ends_however_wrong_the_estimates_are(jobs: list[Job], limits: Limits) -> None:
    day = Day(jobs, limits)
    day.run()
    assert all(job.ended_ms < inf for job in jobs)
    assert day.most_parked <= limits.max_parked_turns
    worked_ms = sum(job.needs_ms for job in jobs)
    assert day.now_ms == pytest.approx(worked_ms + day.idle_ms + day.swaps * SWAP_MS)


@settings(max_examples=150, deadline=None)
@given(jobs=job_lists(st.just(1.0)), limits=LIMITS)
@example(  # a second guest, for whom the way back from the first was not counted
    jobs=[Job(0.0, 3162.0), Job(574.0, 230.0), Job(0.0, 550.0), Job(576.0, 1.0)],
    limits=replace(FAIR, fair_share=0.2, min_slice_ms=0.0, max_parked_turns=1),
)
def test_no_turn_takes_longer_than_its_share_allows(jobs: list[Job], limits: Limits) -> None:
    Day(jobs, limits).run()
    for job in jobs:
        assert not job.gave_back
        most_ms = job.needs_ms / (1 - limits.fair_share)
        assert job.ended_ms - job.began_ms <= most_ms + 1e-6


@settings(max_examples=150, deadline=None)
@given(jobs=job_lists(st.floats(0.5, 1.0)), limits=LIMITS)
def test_guests_that_were_underestimated_cost_no_more_than_one_of_them_each_time(
    jobs: list[Job], limits: Limits
) -> None:
    Day(jobs, limits).run()
    for job in jobs:
        # The share counts what guests really took; only the last one can go beyond it, by at most
        # as much again as it was let in for.
        beyond_ms = limits.short_turn_ms + limits.min_slice_ms + UNIT_MS + SWAP_MS
        if not job.gave_back:
            most_ms = job.needs_ms / (1 - limits.fair_share)
            assert job.ended_ms - job.began_ms <= most_ms + beyond_ms


@settings(max_examples=150, deadline=None)
@given(
    arrivals=st.lists(st.floats(1_000, 6_000), min_size=1, max_size=5),
    needs=st.lists(st.floats(10, 150), min_size=5, max_size=5),
)
def test_a_short_turn_waits_for_one_slice_a_swap_and_the_short_ones_before_it(
    arrivals: list[float], needs: list[float]
) -> None:
    long = Job(0.0, 10_000.0)
    short = [Job(at, size) for at, size in zip(sorted(arrivals), needs, strict=False)]
    day = Day([long, *short], FAIR)
    day.run()
    before_ms = 0.0
    for job in short:
        slice_ms = FAIR.min_slice_ms + len(short) * UNIT_MS  # a unit for each estimate, too
        assert job.began_ms - job.arrives_ms <= slice_ms + SWAP_MS * len(short) + before_ms
        assert job.ended_ms < long.ended_ms
        before_ms += job.needs_ms


def test_one_after_the_other_is_the_order_of_arrival_under_fifo() -> None:
    jobs = [Job(0.0, 5000.0), Job(10.0, 50.0), Job(20.0, 4000.0), Job(30.0, 1.0)]
    day = Day(jobs, FIFO)
    day.run()
    assert sorted(jobs, key=lambda job: job.ended_ms) == jobs
    assert day.swaps == 0


def test_a_guest_that_outlives_its_estimate_waits_for_the_turn_it_interrupted() -> None:
    long, liar = Job(0.0, 10_000.0), Job(500.0, 8_000.0, error=0.05)
    Day([long, liar], FAIR).run()
    assert liar.gave_back
    assert liar.began_ms < long.ended_ms < liar.ended_ms
    assert long.ended_ms - long.began_ms <= 10_000.0 + 2 * 400.0 + UNIT_MS + 3 * SWAP_MS
