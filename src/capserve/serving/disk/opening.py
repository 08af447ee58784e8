"""Whose is the manifest of a store directory, and what becomes of one that this process can't use?

A server drops a manifest of another engine or format, and sets a damaged one aside. A tool that
only looks refuses both, and changes nothing.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from capserve.errors import StartupError
from capserve.serving.disk.manifest import (
    FILE_NAME,
    FORMAT,
    Loaded,
    Manifest,
    ManifestCorruptError,
    remove,
    set_aside,
)
from capserve.serving.disk.manifest_read import read_meta

log = logging.getLogger("capserve.disk")


@contextmanager
def no_collection() -> Iterator[None]:
    """A store's rows are a hundred thousand new objects and none is garbage: the collector would
    walk them over and over, for a third of the time that they take."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def open_manifest(
    directory: Path, fingerprint: str | None, tidies: bool
) -> tuple[Manifest, Loaded, str]:
    """With what it lists, and the fingerprint that it has. Raises StartupError, OSError or
    sqlite3.Error."""
    try:
        return _try_manifest(directory, fingerprint, tidies)
    except ManifestCorruptError as error:
        if fingerprint is None:
            raise StartupError(
                f"capsule directory {directory}: a damaged manifest was left alone: {error}"
            ) from None
        aside = set_aside(directory / FILE_NAME)
        log.error("manifest set aside as %s, the store starts empty: %s", aside, error)
    return _try_manifest(directory, fingerprint, tidies)


def _try_manifest(
    directory: Path, fingerprint: str | None, tidies: bool
) -> tuple[Manifest, Loaded, str]:
    there = read_meta(directory)
    mine = fingerprint if fingerprint is not None else there.get("fingerprint", "")
    foreign = bool(there) and there != {"fingerprint": mine, "format": FORMAT}
    if foreign and fingerprint is None:
        raise StartupError(
            f"capsule directory {directory}: it is of format {there.get('format')}, not "
            f"{FORMAT}, and was left alone: only a server of that format can read it"
        )
    if foreign:
        log.warning(
            "%s: everything in it is dropped, it is of format %s and engine %s, not %s and %s",
            directory / FILE_NAME,
            there.get("format"),
            there.get("fingerprint"),
            FORMAT,
            mine,
        )
        remove(directory)
    manifest = Manifest(directory)
    try:
        if foreign or not there:
            manifest.set_meta(mine)
        return manifest, manifest.load(tidies), mine
    except BaseException:
        manifest.close()
        raise
