"""The doctor reads the text files of a checkpoint as a server does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import capserve.nano
from capserve.cli.doctor import run_doctor
from capserve.config import load_settings

NANO = Path(next(iter(capserve.nano.__path__)))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The embedded one, whose text files may be replaced."""
    for file in NANO.iterdir():
        if file.suffix in (".json", ".jinja", ".safetensors"):
            os.symlink(file, tmp_path / file.name)
    return tmp_path


def replace(checkpoint: Path, name: str, content: bytes) -> None:
    (checkpoint / name).unlink(missing_ok=True)
    (checkpoint / name).write_bytes(content)


def report(
    capsys: pytest.CaptureFixture[str], model: Path, **flags: Any
) -> tuple[int, dict[str, Any]]:
    settings = load_settings({"port": "0", "model": str(model), **flags})
    code = run_doctor(settings, as_json=True)
    return code, {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}


def test_a_good_checkpoint_is_healthy(capsys: pytest.CaptureFixture[str], checkpoint: Path):
    code, checks = report(capsys, checkpoint)
    assert code == 0
    assert "8,192 tokens" in checks["model text"]["detail"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("chat_template.jinja", b"{% if", "does not compile"),
        ("chat_template.jinja", b"\xff\xfe", "can't be read"),
        ("tokenizer.json", b"{", "tokenizer.json"),
        ("generation_config.json", b"{", "generation_config.json"),
        ("generation_config.json", b'{"eos_token_id": 99999999}', "99999999"),
        ("generation_config.json", b'{"eos_token_id": 2, "temperature": -1}', "temperature"),
    ],
)
def test_a_broken_text_file_is_bad_and_the_port_is_still_checked(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, name: str, content: bytes, words: str
):
    replace(checkpoint, name, content)
    code, checks = report(capsys, checkpoint)
    assert code == 1
    assert checks["model"]["verdict"] == "ok"
    assert checks["model text"]["verdict"] == "bad"
    assert words in checks["model text"]["detail"]
    assert checks["port"]["verdict"] == "ok"


def test_a_template_of_the_settings_is_the_one_that_counts(
    capsys: pytest.CaptureFixture[str], checkpoint: Path
):
    mine = checkpoint / "mine"
    mine.write_text("{% if")
    code, checks = report(capsys, checkpoint, chat_template=str(mine))
    assert code == 1
    assert str(mine) in checks["model text"]["detail"]
