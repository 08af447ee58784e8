"""Settings come from flags, environment and defaults, and a bad one is named."""

from __future__ import annotations

import pytest

from capserve.config import Settings, env_name, flag_name, flag_of, load_settings
from capserve.errors import StartupError


def test_flags_win_over_the_environment_which_wins_over_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert load_settings({}).port == 8000
    monkeypatch.setenv("CAPSERVE_PORT", "8111")
    assert load_settings({"port": None}).port == 8111
    assert load_settings({"port": "8222"}).port == 8222


@pytest.mark.parametrize(("text", "size"), [("2GiB", 2 << 30), ("512MB", 512 * 10**6), ("0", 0)])
def test_a_size_may_have_a_unit(text: str, size: int) -> None:
    assert load_settings({"capsule_budget_bytes": text}).capsule_budget_bytes == size


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("port", "70000", ("--port", "65535", "70000")),
        ("port", "web", ("--port", "integer", "web")),
        ("drafts", "9", ("--drafts", "8", "9")),
        ("prefill_chunk", "100", ("--prefill-chunk", "64", "100")),
        ("capsule_budget_bytes", "2XiB", ("--capsule-budget", "XiB")),
        ("dtype", "float8", ("--dtype", "bfloat16", "float8")),
    ],
)
def test_a_bad_flag_is_one_line_with_its_name_and_both_values(
    name: str, value: str, parts: tuple[str, ...]
) -> None:
    with pytest.raises(StartupError) as refusal:
        load_settings({name: value})
    assert all(part in refusal.value.message for part in parts)
    assert "\n" not in refusal.value.message


def test_a_bad_variable_is_named_as_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPSERVE_HEARTBEAT_S", "60")
    with pytest.raises(StartupError, match=r"CAPSERVE_HEARTBEAT_S.*10.*60"):
        load_settings({})


def test_keys_in_the_environment_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPSERVE_API_KEY", "first, second")
    assert load_settings({}).api_key == ("first", "second")


def test_an_empty_key_is_refused_and_no_key_is_ever_printed() -> None:
    with pytest.raises(StartupError, match="empty") as refusal:
        load_settings({"api_key": ["secret-key", ""]})
    assert "secret-key" not in refusal.value.message


def test_every_setting_has_a_flag_of_its_own() -> None:
    names = list(Settings.model_fields)
    flags = [flag_name(name) for name in names]
    assert len(set(flags)) == len(names)
    assert all(flag_of(name).help and flag_of(name).panel for name in names)
    assert env_name("port") == "CAPSERVE_PORT"


def test_settings_can_not_be_changed() -> None:
    settings = load_settings({})
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1
