"""A model is a directory, a hub id or nothing; whatever is wrong is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from capserve import nano
from capserve.cli import models
from capserve.errors import StartupError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A hub that never answers, and an empty cache; returns the cache's folder."""

    def no_network(repo_id: str, **options: Any) -> str:
        if options.get("local_files_only"):
            return snapshot_download(repo_id, cache_dir=tmp_path, **options)
        raise httpx2.ConnectError("no route to host")

    monkeypatch.setattr(models, "snapshot_download", no_network)
    return tmp_path


def test_no_model_is_the_embedded_one() -> None:
    assert models.resolve_model(None) == (nano.checkpoint_dir(), "nano")


def test_a_directory_is_served_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert models.resolve_model(str(tmp_path)) == (tmp_path, tmp_path.name)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config\.json"):
        models.resolve_model(str(tmp_path))


@pytest.mark.parametrize("model", ["/no/such/place", "./no/such", "~/no-such-model", "nonsense"])
def test_a_path_that_is_not_there_never_asks_the_hub(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "snapshot_download", pytest.fail)
    with pytest.raises(StartupError, match="no such directory"):
        models.resolve_model(model)


def test_a_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(StartupError, match="directory that holds it"):
        models.resolve_model(str(file))


def test_a_cached_hub_id_works_offline(offline: Path) -> None:
    snapshot = offline / "models--org--small" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = offline / "models--org--small" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    assert models.resolve_model("org/small") == (snapshot, "org/small")


@pytest.mark.usefixtures("offline")
def test_a_hub_that_can_not_be_reached_is_one_line() -> None:
    with pytest.raises(StartupError) as refusal:
        models.resolve_model("org/small")
    assert "org/small" in refusal.value.message
    assert "can't be reached" in refusal.value.message
    assert "\n" not in refusal.value.message


def test_only_what_a_server_reads_is_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked: dict[str, Any] = {}

    def fetch(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(models, "snapshot_download", fetch)
    models.resolve_model("org/small")
    assert asked["repo_id"] == "org/small"
    assert not any(pattern in ("*", "*.bin", "*.pt") for pattern in asked["allow_patterns"])
    assert "*.safetensors" in asked["allow_patterns"]


def test_an_incomplete_download_falls_back_to_the_same_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(repo_id: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("not there")

    monkeypatch.setattr(models, "snapshot_download", nothing)
    with pytest.raises(StartupError, match="not cached"):
        models.resolve_model("org/small")
