"""How fast are prefill and restore on this machine, as measured so far?"""

from __future__ import annotations

from capserve.serving.prefix import Rates

MIN_SAMPLE_TOKENS = 64
"""A shorter prefill call measures the cost of a call, not that of its tokens."""


class RateMeter:
    """Moving averages of the two costs that a plan weighs. The worker thread alone feeds it."""

    def __init__(self, first_guess: Rates | None = None, weight: float = 0.2) -> None:
        """`weight` in [0, 1): how much one measurement moves an average; 0 keeps the guess."""
        assert 0.0 <= weight < 1.0
        self._rates = first_guess or Rates()
        self._weight = weight

    @property
    def rates(self) -> Rates:
        return self._rates

    def saw_prefill(self, tokens: int, elapsed_ms: float) -> None:
        if tokens >= MIN_SAMPLE_TOKENS:
            self._rates = Rates(
                self._moved(self._rates.prefill_ms_per_token, elapsed_ms / tokens),
                self._rates.restore_ms_per_byte,
            )

    def saw_restore(self, nbytes: int, elapsed_ms: float) -> None:
        if nbytes > 0:  # a restore that moved nothing says nothing about bytes
            self._rates = Rates(
                self._rates.prefill_ms_per_token,
                self._moved(self._rates.restore_ms_per_byte, elapsed_ms / nbytes),
            )

    def _moved(self, average: float, sample: float) -> float:
        return average + self._weight * (sample - average)
