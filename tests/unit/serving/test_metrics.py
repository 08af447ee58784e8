"""One record, several views of it: they must tell the same story."""

from __future__ import annotations

import logging
from dataclasses import fields

import pytest
from prometheus_client.parser import text_string_to_metric_families

from capserve.serving.metrics import (
    LATENCY_WINDOW,
    MetricsLog,
    TurnMetrics,
    line,
    rejected_before_submit,
)

DONE = TurnMetrics(
    request_id="req-1",
    terminal_state="done",
    prefix_action="append",
    queued_ms=2.0,
    prefill_ms=30.0,
    first_delta_ms=40.0,
    decode_ms=100.0,
    decode_tok_per_s=50.0,
    spec_attempts=9,
    spec_accepts=6,
    prompt_tokens=100,
    cached_tokens=90,
    new_prefill_tokens=10,
    output_tokens=5,
    pin="pinned",
)
MISSED = TurnMetrics(
    request_id="req-2",
    terminal_state="cancelled",
    prefix_action="rebuild",
    miss_reason="diverged(message 3, token 812)",
    prompt_tokens=50,
    new_prefill_tokens=50,
)


def samples(log: MetricsLog) -> dict[tuple[str, tuple[str, ...]], float]:
    families = text_string_to_metric_families(log.exposition().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.values(), reverse=True))): sample.value
        for family in families
        for sample in family.samples
    }


def test_health_and_prometheus_add_up_the_same_turns() -> None:
    log = MetricsLog()
    log.watch_queue(lambda: 7)
    for turn in (DONE, MISSED, DONE):
        log.record(turn)
    health = log.health()
    assert health["by_state"] == {"done": 2, "cancelled": 1}
    assert health["by_action"] == {"append": 2, "rebuild": 1}
    assert (health["cached_tokens"], health["new_prefill_tokens"]) == (180, 70)
    assert health["queue_depth"] == 7
    series = samples(log)
    assert series["capserve_turns_total", ("done", "append")] == 2
    assert series["capserve_prompt_tokens_total", ("cached",)] == 180
    assert series["capserve_prompt_tokens_total", ("prefilled",)] == 70
    assert series["capserve_draft_tokens_total", ("accepted",)] == 12
    assert series["capserve_draft_tokens_total", ("rejected",)] == 6
    assert series["capserve_misses_total", ("diverged",)] == 1
    assert series["capserve_queue_depth", ()] == 7
    assert series["capserve_phase_seconds_sum", ("first_delta",)] == pytest.approx(0.08)


def test_the_prompt_tokens_of_all_turns_are_those_cached_and_those_read() -> None:
    log = MetricsLog()
    cut = TurnMetrics("r", "cancelled", "append", prompt_tokens=700, cached_tokens=40)
    for turn in (DONE, cut, TurnMetrics("r", "rejected", prompt_tokens=9000)):
        log.record(turn)
    health = log.health()
    assert health["prompt_tokens"] == 140
    assert health["cached_tokens"] + health["new_prefill_tokens"] == 140


def test_a_request_refused_before_its_turn_has_a_record_too() -> None:
    log = MetricsLog()
    refused = rejected_before_submit("req-3", 12.0)
    log.record(refused)
    assert (refused.request_id, refused.tokenize_ms) == ("req-3", 12.0)
    assert log.health()["by_state"] == {"rejected": 1}
    assert samples(log)["capserve_turns_total", ("rejected", "none")] == 1


def test_percentiles_are_over_the_last_turns_that_got_a_token() -> None:
    log = MetricsLog()
    assert log.health()["first_delta_ms"] == {"p50": None, "p95": None, "turns": 0}
    for n in range(LATENCY_WINDOW + 100):
        log.record(TurnMetrics("r", "done", first_delta_ms=float(n)))
    log.record(MISSED)
    shown = log.health()["first_delta_ms"]
    assert shown["turns"] == LATENCY_WINDOW
    assert shown["p50"] == 100 + LATENCY_WINDOW / 2 - 1
    assert shown["p95"] == 100 + 486


def test_two_logs_share_no_series() -> None:
    one, other = MetricsLog(), MetricsLog()
    one.record(DONE)
    assert ("capserve_turns_total", ("done", "append")) not in samples(other)


def test_each_turn_is_one_readable_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="capserve.turns"):
        log = MetricsLog()
        log.record(DONE)
        log.record(MISSED)
    assert [record.getMessage() for record in caplog.records] == [
        "req-1 done append cached 90 new 10 out 5 first 40 ms decode 50.0 tok/s queued 2 ms"
        " pin pinned",
        "req-2 cancelled rebuild cached 0 new 50 out 0 first - decode - queued 0 ms"
        " miss diverged(message 3, token 812)",
    ]
    assert "\n" not in line(MISSED)


def test_a_turn_that_made_way_says_for_how_long_and_others_are_not_counted() -> None:
    parked = TurnMetrics(
        "req-4", "done", "restore", session_id="abc", restored_from="disk", parked_ms=250.0, parks=2
    )
    assert line(parked).endswith(" from disk parked 2x 250 ms session abc")
    log = MetricsLog()
    for turn in (DONE, parked):
        log.record(turn)
    series = samples(log)
    assert series["capserve_phase_seconds_count", ("parked",)] == 1
    assert series["capserve_phase_seconds_sum", ("parked",)] == pytest.approx(0.25)


def test_the_record_is_a_plain_dict_with_every_field() -> None:
    assert set(DONE.as_dict()) == {field.name for field in fields(TurnMetrics)}
    assert DONE.as_dict()["cached_tokens"] == 90
