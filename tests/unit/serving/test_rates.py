"""Measured costs move the averages; what says nothing about them does not."""

from __future__ import annotations

import pytest

from capserve.serving.prefix import Rates
from capserve.serving.rates import RateMeter


def test_the_averages_approach_what_is_measured() -> None:
    meter = RateMeter(Rates(prefill_ms_per_token=1.0, restore_ms_per_byte=1e-6))
    for _ in range(60):
        meter.saw_prefill(512, 51.2)
        meter.saw_restore(1_000_000, 0.25)
    assert meter.rates.prefill_ms_per_token == pytest.approx(0.1, rel=0.01)
    assert meter.rates.restore_ms_per_byte == pytest.approx(2.5e-7, rel=0.01)


def test_one_outlier_moves_an_average_by_its_weight_alone() -> None:
    meter = RateMeter(Rates(1.0, 1e-6), weight=0.25)
    meter.saw_prefill(100, 500.0)
    assert meter.rates.prefill_ms_per_token == pytest.approx(2.0)


def test_a_short_prefill_and_an_empty_restore_say_nothing_about_rates() -> None:
    meter = RateMeter(Rates(1.0, 1e-6))
    meter.saw_prefill(3, 30.0)
    meter.saw_restore(0, 5.0)
    assert meter.rates == Rates(1.0, 1e-6)


def test_a_meter_without_weight_keeps_its_guess() -> None:
    meter = RateMeter(Rates(1.0, 1e-6), weight=0.0)
    meter.saw_prefill(1000, 1.0)
    meter.saw_restore(1000, 1.0)
    assert meter.rates == Rates(1.0, 1e-6)
