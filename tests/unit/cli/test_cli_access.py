"""Who may reach a server is what its owner said, and a key is shown to nobody."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from capserve.cli.access import api_keys, check_address, is_loopback, with_keys
from capserve.cli.compose import private_settings
from capserve.cli.main import main
from capserve.config import Settings, load_settings
from capserve.errors import StartupError


def key_file(folder: Path, text: str | bytes, mode: int = 0o600) -> Settings:
    """Settings that name a file with this content."""
    file = folder / "keys"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    file.chmod(mode)
    return load_settings({"api_key_file": str(file)})


def test_a_key_file_has_one_key_a_line_between_comments_and_blank_lines(tmp_path: Path) -> None:
    settings = key_file(tmp_path, "# team a\nalpha-key\n\n   # b\n  beta-key  \r\nalpha-key\n")
    assert api_keys(settings) == ("alpha-key", "beta-key")


def test_keys_of_flags_and_file_are_all_accepted_and_the_file_is_read_once(tmp_path: Path) -> None:
    settings = key_file(tmp_path, "from-file\n").model_copy(update={"api_key": ("a", "b")})
    known = with_keys(settings)
    assert known.api_key == ("a", "b", "from-file")
    (tmp_path / "keys").unlink()
    assert api_keys(known) == known.api_key


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "0 lines and no key"),
        ("# only\n\n# comments\n", "3 lines and no key"),
        ("good-key\nsecret words\n", "line 2 has a space"),
        (b"\xff\xfe secret", "UTF-8"),
        (None, "No such file"),
    ],
)
def test_a_key_file_that_can_not_be_used_is_an_error_before_anything_is_loaded(
    tmp_path: Path,
    content: str | bytes | None,
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        key_file(tmp_path, content)
    with pytest.raises(SystemExit) as left:
        main(["serve", "--port", "0", "--api-key-file", str(file), "--model", "/no/such/model"])
    out, err = capsys.readouterr()
    assert left.value.code == 2
    assert says in err
    assert str(file) in err
    assert "/no/such/model" not in err
    assert "secret" not in out + err
    assert "good-key" not in out + err


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o400, False), (0o640, True)])
def test_a_key_file_that_others_can_read_is_warned_of(
    tmp_path: Path, mode: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = key_file(tmp_path, "secret-key", mode)
    with caplog.at_level(logging.WARNING, "capserve.api"):
        assert api_keys(settings) == ("secret-key",)
    assert (f"mode {mode:04o}" in caplog.text) == warns
    assert "secret-key" not in caplog.text


def test_settings_that_are_printed_show_no_key() -> None:
    assert "secret-key" not in repr(load_settings({"api_key": ["secret-key"]}))


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"])
def test_a_loopback_address_needs_no_key(address: str) -> None:
    assert is_loopback(address)
    check_address(address, Settings())


@pytest.mark.parametrize(
    "address", ["0.0.0.0", "::", "192.168.1.7", "8.8.8.8", "fe80::1%eth0", "::ffff:10.0.0.1"]
)
def test_any_other_address_needs_a_key_or_a_word(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StartupError) as refusal:
        check_address(address, Settings())
    words = (address, "--api-key", "--api-key-file", "127.0.0.1", "--allow-unauthenticated")
    assert all(word in refusal.value.message for word in words)
    check_address(address, load_settings({"api_key": ["a"]}))
    assert not caplog.records
    check_address(address, load_settings({"allow_unauthenticated": True}))
    assert address in caplog.text, "said aloud, even when it is meant"


def test_an_open_server_on_every_address_does_not_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve", "--host", "0.0.0.0", "--port", "0", "--model", "/no/such/model"])
    err = capsys.readouterr().err
    assert left.value.code == 2
    assert "0.0.0.0" in err
    assert "/no/such/model" not in err
    assert len(err.strip().splitlines()) == 1


def test_a_server_of_a_command_asks_for_no_key_and_lets_no_page_in(tmp_path: Path) -> None:
    settings = key_file(tmp_path, "a-key").model_copy(update={"cors_origin": ("*",)})
    private = private_settings(settings)
    assert api_keys(private) == ()
    assert private.cors_origin == ()


def test_origins_may_be_repeated_or_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPSERVE_CORS_ORIGIN", "https://a.example, http://localhost:3000")
    assert load_settings({}).cors_origin == ("https://a.example", "http://localhost:3000")
    assert load_settings({"cors_origin": ["*"]}).cors_origin == ("*",)


@pytest.mark.parametrize(
    "origin", ["a.example", "https://a.example/", "https://a.example/app", "https://A.example", ""]
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(StartupError, match="--cors-origin") as refusal:
        load_settings({"cors_origin": [origin]})
    assert repr(origin) in refusal.value.message
