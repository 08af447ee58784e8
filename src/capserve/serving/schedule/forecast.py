"""How long will a turn take? Milliseconds for the schedule, from the rates measured so far.

A turn costs what its plan costs (the state to move and the tokens to read) and its decode. How long
a reply gets nobody knows. The guess is the moving average of replies so far; one that has outlived
the guess is taken to be half done: where lengths have no scale of their own, half of the replies
that got this far get twice as far, and none is about to end only because it is already long.
"""

from __future__ import annotations

from dataclasses import dataclass

from capserve.serving.running.bench import Bench, Turn
from capserve.serving.running.decode_run import output_limit
from capserve.serving.running.turn_run import TurnRun, plan_for
from capserve.serving.schedule.policy import Begun, Running, Waiting

FIRST_GUESS_TOKENS = 256
"""The length of a reply before any was seen: a paragraph or two."""

GUESS_WEIGHT = 0.1
"""How much one reply moves the guess: the last ten or twenty count."""

STALE_S = 2.0
"""A plan for a waiting turn is worth this long: its capsules may leave, or better ones come."""


def decode_left_tokens(most: int, said: int, guess: float) -> float:
    """Tokens still to come of a reply that may have `most` and has `said`."""
    return min(most, max(guess, 2.0 * said)) - said


class OutputGuess:
    """The moving average of the lengths of finished replies, in tokens."""

    def __init__(self) -> None:
        self.tokens = float(FIRST_GUESS_TOKENS)

    def saw(self, tokens: int) -> None:
        self.tokens += GUESS_WEIGHT * (tokens - self.tokens)


@dataclass(eq=False, slots=True)
class Clocked:
    """A run with its times, in milliseconds. The worker's thread keeps them."""

    run: TurnRun
    estimate_ms: float
    guest: bool
    own_ms: float = 0.0
    lent_ms: float = 0.0
    slice_started_ms: float = 0.0
    """`own_ms` when it was last given the engine."""

    @property
    def turn(self) -> Turn:
        return self.run.turn

    def new_slice(self) -> None:
        self.slice_started_ms = self.own_ms


@dataclass(frozen=True, slots=True)
class _Estimate:
    ms: float
    made_at: float


class Forecast:
    """Worker thread only: a plan reads sessions and store."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._estimates: dict[Turn, _Estimate] = {}
        self._reply = OutputGuess()

    def saw_reply(self, tokens: int) -> None:
        self._reply.saw(tokens)

    def refresh(self, turns: list[Turn], now: float) -> None:
        """Estimate one of these waiting turns: the first unknown one, else the most stale one.

        One at a time, since this stands between two steps of a turn that somebody reads.
        """
        alive = set(turns)
        self._estimates = {t: known for t, known in self._estimates.items() if t in alive}
        unknown = [turn for turn in turns if turn not in self._estimates]
        if not unknown:
            oldest = min(turns, key=lambda turn: self._estimates[turn].made_at, default=None)
            if oldest is not None and now - self._estimates[oldest].made_at > STALE_S:
                unknown = [oldest]
        for turn in unknown[:1]:
            self._estimates[turn] = _Estimate(self.from_the_start_ms(turn), now)

    def waiting(self, turn: Turn) -> Waiting:
        known = self._estimates.get(turn)
        return Waiting(None if known is None else known.ms)

    def from_the_start_ms(self, turn: Turn) -> float:
        request = turn.item.request
        plan = plan_for(request.prompt, request.namespace, self._bench)
        return plan.estimated_ms + self._decode_ms(turn, 0)

    def begun(self, clocked: Clocked) -> Begun:
        return Begun(clocked.own_ms, self._remaining_ms(clocked), clocked.lent_ms)

    def running(self, clocked: Clocked) -> Running:
        slice_ms = clocked.own_ms - clocked.slice_started_ms
        return Running(self.begun(clocked), slice_ms, clocked.estimate_ms, clocked.guest)

    def swap_ms(self, clocked: Clocked) -> float:
        """To copy its state away, and to move all of it back: more than what mostly is needed,
        since KV that another capsule has, or that is still live, stays where it is."""
        limits, session = self._bench.engine.limits, clocked.run.session
        if session is None:
            return 0.0
        moved = limits.small_state_bytes + limits.capsule_bytes(len(session.journal))
        return moved * self._bench.meter.rates.restore_rate(limits.tiers[0])

    def _remaining_ms(self, clocked: Clocked) -> float:
        run, rates = clocked.run, self._bench.meter.rates
        unread = run.prefill_left_tokens
        if unread is None:  # nothing of it was done yet
            return clocked.estimate_ms
        return unread * rates.prefill_ms_per_token + self._decode_ms(run.turn, run.said_tokens)

    def _decode_ms(self, turn: Turn, said: int) -> float:
        left = decode_left_tokens(output_limit(turn, self._bench), said, self._reply.tokens)
        return left * self._bench.meter.rates.decode_ms_per_token
