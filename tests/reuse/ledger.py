"""What did the reuse tests compare, and how often did rounding decide a token?

One ledger for a test session. It is printed at the session's end: a near tie is never hidden.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

from capserve.serving.prefix import PrefixAction

NEAR_TIE = 1e-4
"""Score. States that were decoded and states that were prefilled differ by about 1e-6 in float32,
so a margin above this can't be turned by rounding."""


MOST_DRIFT = NEAR_TIE
"""Log probability of one token, hot against cold, in float32. Tokens alone are a blunt measure: a
confident model says the same on a wrong state. A wrong state is off by far more than this, and
rounding by far less; the session's largest is printed."""


ACCOUNT = pytest.StashKey["Ledger"]()


@dataclass(frozen=True, slots=True)
class NearTie:
    """A token that differs where the cold run itself could hardly choose."""

    index: int
    """In the turn's output."""
    hot: int
    cold: int
    margin: float


@dataclass
class Ledger:
    tokens: int = 0
    near_ties: list[NearTie] = field(default_factory=list)
    logprobs: int = 0
    """Tokens whose log probability was compared too."""
    drift: float = 0.0
    """Largest difference of a log probability."""
    actions: Counter[PrefixAction] = field(default_factory=Counter)
    cancelled: int = 0
    states: int = 0
    """States that were compared bit for bit with a cold run's."""
    remembered: int = 0
    """Of `tokens`, those whose cold run had been made before."""
    tiers: Counter[str] = field(default_factory=Counter)
    """Turns whose state came from a tier, by the tier."""
    parked: int = 0
    """Turns that made way for another one."""
    steps: Counter[str] = field(default_factory=Counter)
    """What happened to a server, by name."""

    def add(self, other: Ledger) -> None:
        self.tokens += other.tokens
        self.near_ties += other.near_ties
        self.logprobs += other.logprobs
        self.drift = max(self.drift, other.drift)
        self.actions += other.actions
        self.cancelled += other.cancelled
        self.states += other.states
        self.remembered += other.remembered
        self.tiers += other.tiers
        self.parked += other.parked
        self.steps += other.steps

    def lines(self) -> list[str]:
        turns = ", ".join(f"{action.value} {self.actions[action]}" for action in PrefixAction)
        lines = [
            f"near ties: {len(self.near_ties)} of {self.tokens} tokens compared",
            f"log probabilities: {self.logprobs} compared, largest difference {self.drift:.1e}",
            f"turns compared with a cold run: {turns}; cancelled {self.cancelled}",
            f"states compared bit for bit: {self.states}",
        ]
        if self.steps:
            tiers = ", ".join(f"{tier} {count}" for tier, count in sorted(self.tiers.items()))
            steps = ", ".join(f"{name} {count}" for name, count in sorted(self.steps.items()))
            lines += [
                f"states restored from: {tiers}; turns that were parked: {self.parked}",
                f"tokens compared with a cold run made before: {self.remembered}",
                f"steps of the machine: {self.steps.total()}: {steps}",
            ]
        return lines + [f"  {tie}" for tie in self.near_ties]


def account_of(config: pytest.Config) -> Ledger:
    """What all tests of this process have compared so far."""
    return config.stash.setdefault(ACCOUNT, Ledger())
