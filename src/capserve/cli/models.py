"""Which directory holds the checkpoint that the person asked for?

`--model` is a directory, a hub id, or nothing for the embedded model. Everything else of the server
reads a directory, so the network is touched here only. A hub id that is cached works offline.
"""

from __future__ import annotations

import re
from pathlib import Path

import httpx2
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from capserve import nano
from capserve.errors import StartupError

FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt")
"""What a server reads of a repository: no pickles, no other frameworks' weights."""

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_model(model: str | None) -> tuple[Path, str]:
    """The checkpoint directory for `model`, and the name to serve it under.

    Downloads a hub id that is not cached, with the hub's own progress bar. Raises `StartupError`
    with one line when there is no such directory or the hub can't be reached.
    """
    if model is None:
        return nano.checkpoint_dir(), nano.NAME
    path = Path(model).expanduser()
    if path.is_dir():
        return _checked(path), path.resolve().name
    if path.exists():
        raise StartupError(f"--model {model}: this is a file; give the directory that holds it")
    # A relative path can look like a hub id: a leading dot, slash or tilde says that it is none.
    if model[0] in "./~" or not HUB_ID.fullmatch(model):
        raise StartupError(f"--model {model}: there is no such directory")
    return _checked(_fetch(model)), model


def _checked(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise StartupError(f"--model {path}: the directory has no config.json")
    return path


def _fetch(repo_id: str) -> Path:
    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(FILES)))
    except GatedRepoError as error:
        raise StartupError(
            f"--model {repo_id}: access must be requested on the hub first; then set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise StartupError(
            f"--model {repo_id}: neither a directory here nor a model on the hub"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx2.HTTPError, OSError) as error:
        return _cached(repo_id, error)


def _cached(repo_id: str, error: Exception) -> Path:
    """The hub did not answer: what an earlier download left, if it is there."""
    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(FILES), local_files_only=True))
    except (LocalEntryNotFoundError, OSError):
        raise StartupError(
            f"--model {repo_id}: not a directory, not cached, and the hub can't be reached "
            f"({type(error).__name__})"
        ) from error
