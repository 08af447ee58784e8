"""What may happen to a disk? It is slow, full, damaged, or its process dies in the middle.

`DiskSeam` stands below the disk tier, where a file is written and where a transaction begins and
ends. `damage` is what happens to files behind everybody's back.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from capserve.serving.disk import files as disk_files
from capserve.serving.disk import writer as disk_writer
from capserve.serving.disk.files import PartFiles
from capserve.serving.disk.manifest import FILE_NAME, Manifest
from tests.reuse.wire import killed


class DiskSeam:
    """One disk. Writers pass `_enter` in their own threads; the test sets what happens there."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._slow = False
        self._full = False
        self._dies_in: int | None = None
        """Calls that still go through."""
        self.refused = 0
        """Writes that found the disk full."""

    def slow(self) -> None:
        """Nothing is written any more, until `ready`: everything that is saved waits."""
        with self._changed:
            self._slow = True

    def ready(self) -> None:
        with self._changed:
            self._slow = False
            self._changed.notify_all()

    def set_full(self, full: bool) -> None:
        with self._changed:
            self._full = full

    @property
    def full(self) -> bool:
        return self._full

    def die(self, after: int = 0) -> None:
        """The process is killed: its writer ends inside its next call but `after`."""
        with self._changed:
            self._dies_in = after
            self._slow = False
            self._changed.notify_all()

    def live(self) -> None:
        """Another process."""
        with self._changed:
            self._dies_in = None

    def _enter(self, writes: bool) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._slow)
            if self._dies_in is not None:
                if self._dies_in == 0:
                    killed()
                self._dies_in -= 1
            if writes and self._full:
                self.refused += 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def installed(self) -> Iterator[DiskSeam]:
        """Below every disk tier of this process while the block runs. A tier that failed tries
        again at once, not a minute later."""

        def before(real: Callable[..., Any], *, writes: bool = False) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                self._enter(writes)
                return real(*args)

            return call

        with ExitStack() as stack:
            for owner, name, writes in (
                (disk_files, "_write", True),
                (disk_files, "sync_directory", False),
                (Manifest, "begin", False),
                (Manifest, "commit", False),
                (PartFiles, "remove", False),
            ):
                call = before(getattr(owner, name), writes=writes)
                stack.enter_context(patch.object(owner, name, call))
            stack.enter_context(patch.object(disk_writer, "RETRY_S", 0.0))
            yield self
            self.ready()


def part_files(directory: Path) -> list[Path]:
    return sorted((directory / "parts").glob("*/*.safetensors"))


def damage(file: Path, how: str, at: int) -> None:
    """`how`: "flip" a byte, "cut" the end off, "lose" the file. `at`: where, modulo its size."""
    if how == "lose":
        file.unlink()
        return
    content = bytearray(file.read_bytes())
    place = at % len(content)
    if how == "cut":
        del content[place:]
    else:
        assert how == "flip"
        content[place] ^= 0x40
    file.write_bytes(content)


def damage_manifest(directory: Path, how: str) -> None:
    """Of a server that is not running. `how`: "head", "middle" or "cut"."""
    file = directory / FILE_NAME
    content = bytearray(file.read_bytes())
    # What a crash left beside it would mend the pages that are damaged here.
    for beside in ("-wal", "-shm"):
        file.with_name(file.name + beside).unlink(missing_ok=True)
    if how == "head":
        content[:64] = b"\xff" * 64
    elif how == "middle":
        # The head of every page but the first: whichever is read, it is found out.
        for start in range(4096, len(content), 4096):
            content[start : start + 32] = b"\xff" * 32
    else:
        assert how == "cut"
        del content[len(content) // 2 :]
    file.write_bytes(content)
