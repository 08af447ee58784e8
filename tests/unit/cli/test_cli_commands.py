"""What the command line accepts, refuses and prints."""

from __future__ import annotations

import socket

import pytest

from capserve.cli.main import main
from capserve.config import Settings, env_name, flag_name


def run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(argv)
    code = left.value.code
    out = capsys.readouterr()
    return int(code or 0), out.out, out.err


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_help_groups_every_setting_with_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["serve", "--help"], capsys)
    assert code == 0
    for panel in ("Model", "Server", "Scheduling", "Reuse"):
        assert panel in out
    for name in Settings.model_fields:
        assert flag_name(name) in out
        assert env_name(name) in out


def test_an_unknown_flag_is_an_error_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(["serve", "--modle", "x"], capsys)
    assert code == 2
    assert "--modle" in err
    assert "--model" in err


def test_a_bad_value_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(["serve", "--port", "70000"], capsys)
    assert code == 2
    assert err.strip().splitlines() == [
        "error --port: should be less than or equal to 65535, not '70000'"
    ]


def test_a_directory_without_a_model_is_one_clear_line(
    tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(["serve", "--port", "0", "--model", str(tmp_path)], capsys)
    assert code == 2
    assert "config.json" in err
    assert len(err.strip().splitlines()) == 1


def test_a_taken_port_is_told_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # The model does not exist either: the port must be looked at first.
        code, _, err = run(["serve", "--port", str(port), "--model", "/no/such/model"], capsys)
    assert code == 2
    assert str(port) in err
    assert "/no/such/model" not in err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["--version"], capsys)
    assert code == 0
    assert out.startswith("capserve ")
