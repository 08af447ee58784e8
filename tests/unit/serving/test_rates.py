"""Measured costs move the averages; what says nothing about them does not."""

from __future__ import annotations

import pytest

from capserve.serving.prefix import FIRST_RESTORE_RATES, Rates
from capserve.serving.rates import RateMeter


def test_the_averages_approach_what_is_measured_each_tier_by_itself() -> None:
    meter = RateMeter()
    for _ in range(60):
        meter.saw_prefill(512, 51.2)
        meter.saw_restore("host", 1_000_000, 0.25)
        meter.saw_decode(3, 15.0)
    assert meter.rates.prefill_ms_per_token == pytest.approx(0.1, rel=0.01)
    assert meter.rates.decode_ms_per_token == pytest.approx(5.0, rel=0.01)
    assert meter.rates.restore_ms_per_byte["host"] == pytest.approx(2.5e-7, rel=0.01)
    assert meter.rates.restore_ms_per_byte["disk"] == FIRST_RESTORE_RATES["disk"]


def test_one_outlier_moves_an_average_by_its_weight_alone() -> None:
    meter = RateMeter(Rates(1.0), weight=0.25)
    meter.saw_prefill(100, 500.0)
    assert meter.rates.prefill_ms_per_token == pytest.approx(2.0)


def test_a_short_prefill_and_an_empty_restore_say_nothing_about_rates() -> None:
    meter = RateMeter(Rates(1.0))
    meter.saw_prefill(3, 30.0)
    meter.saw_restore("host", 0, 5.0)
    meter.saw_decode(0, 5.0)
    assert meter.rates == Rates(1.0)


def test_a_meter_without_weight_keeps_its_guess() -> None:
    meter = RateMeter(Rates(1.0), weight=0.0)
    meter.saw_prefill(1000, 1.0)
    meter.saw_restore("gpu", 1000, 1.0)
    meter.saw_decode(1, 1.0)
    assert meter.rates == Rates(1.0)


def test_a_tier_that_nobody_guessed_costs_what_the_dearest_does() -> None:
    rates = Rates(restore_ms_per_byte={"host": 1.0, "disk": 3.0})
    assert rates.restore_rate("host") == 1.0
    assert rates.restore_rate("tape") == 3.0
