"""What a server keeps on disk is decided by its settings alone."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from capserve.cli.compose import _limits, capsule_directory, open_disk, private_settings
from capserve.cli.doctor import Verdict, _capsules
from capserve.config import Settings, load_settings
from capserve.errors import StartupError
from capserve.testing.fake_engine import fake_limits

ENGINE = replace(fake_limits(), fingerprint="0123456789abcdef" * 4)


def test_a_server_of_a_command_leaves_nothing_on_disk_unless_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert private_settings(Settings()).disk_budget_bytes == 0
    assert private_settings(load_settings({"port": 1})).disk_budget_bytes == 0
    asked = load_settings({"capsule_dir": "/somewhere"})
    assert private_settings(asked).disk_budget_bytes == Settings().disk_budget_bytes > 0
    monkeypatch.setenv("CAPSERVE_DISK_BUDGET_BYTES", "1GiB")
    assert private_settings(load_settings({})).disk_budget_bytes == 1 << 30


def test_each_engine_has_a_directory_of_its_own(tmp_path: Path) -> None:
    settings = Settings(capsule_dir=str(tmp_path))
    assert capsule_directory(settings, ENGINE.fingerprint) == tmp_path / "0123456789abcdef"
    disk = open_disk(settings, ENGINE)
    assert disk is not None
    assert disk.budget_bytes == settings.disk_budget_bytes
    disk.close(10)


def test_without_a_budget_there_is_no_disk_tier(tmp_path: Path) -> None:
    settings = load_settings({"capsule_dir": str(tmp_path), "disk_budget_bytes": 0})
    assert open_disk(settings, ENGINE) is None
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_use_names_the_process_and_the_ways_out(tmp_path: Path) -> None:
    settings = Settings(capsule_dir=str(tmp_path))
    first = open_disk(settings, ENGINE)
    assert first is not None
    with pytest.raises(StartupError) as refusal:
        open_disk(settings, ENGINE)
    words = (str(os.getpid()), "--capsule-dir", "--disk-budget 0", str(tmp_path))
    assert all(word in refusal.value.message for word in words)
    first.close(10)
    again = open_disk(settings, ENGINE)
    assert again is not None
    again.close(10)


def test_limits_have_a_budget_for_each_tier_that_there_is() -> None:
    settings = load_settings({"capsule_budget_bytes": 10, "gpu_budget_bytes": 20})
    budgets = _limits(settings, ENGINE).capsule_budget_bytes
    assert budgets == {"host": 10, "disk": settings.disk_budget_bytes}
    card = replace(ENGINE, tiers=("gpu", "host"))
    assert _limits(settings, card).capsule_budget_bytes["gpu"] == 20


def test_limits_take_the_schedule_from_the_settings() -> None:
    given = {
        "schedule": "fifo",
        "fair_share": 0.25,
        "min_slice_ms": 7.0,
        "short_turn_ms": 8.0,
        "max_parked_turns": 9,
    }
    limits = _limits(load_settings(given), ENGINE)
    assert {name: getattr(limits, name) for name in given} == given


def test_the_doctor_tells_where_capsules_would_lie(tmp_path: Path) -> None:
    check = _capsules(Settings(capsule_dir=str(tmp_path / "not there yet")))
    assert str(tmp_path) in check.detail
    assert _capsules(load_settings({"disk_budget_bytes": 0})).verdict is Verdict.NOTE
