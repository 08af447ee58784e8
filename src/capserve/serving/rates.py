"""How fast are prefill, decode and restore on this machine, as measured so far?"""

from __future__ import annotations

from dataclasses import replace

from capserve.serving.prefix import Rates

MIN_SAMPLE_TOKENS = 64
"""A shorter prefill call measures the cost of a call, not that of its tokens."""


class RateMeter:
    """Moving averages of the costs that a plan and a schedule weigh. The worker thread alone feeds
    it."""

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
            moved = self._moved(self._rates.prefill_ms_per_token, elapsed_ms / tokens)
            self._rates = replace(self._rates, prefill_ms_per_token=moved)

    def saw_decode(self, tokens: int, elapsed_ms: float) -> None:
        """One step, which decided so many tokens."""
        if tokens > 0:
            moved = self._moved(self._rates.decode_ms_per_token, elapsed_ms / tokens)
            self._rates = replace(self._rates, decode_ms_per_token=moved)

    def saw_restore(self, tier: str, nbytes: int, elapsed_ms: float) -> None:
        """A state came from `tier`: `nbytes` were moved, or read from disk, until it was live."""
        if nbytes > 0:  # a restore that moved nothing says nothing about bytes
            moved = self._moved(self._rates.restore_rate(tier), elapsed_ms / nbytes)
            per_tier = {**self._rates.restore_ms_per_byte, tier: moved}
            self._rates = replace(self._rates, restore_ms_per_byte=per_tier)

    def _moved(self, average: float, sample: float) -> float:
        return average + self._weight * (sample - average)
