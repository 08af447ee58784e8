"""Where do capsules, sessions and finished turns outlive the process?

A directory of its own for each engine fingerprint: a lock, a manifest, one file a part. Start-up
reads the manifest alone. Every change is put into a queue and written by one background thread, so
no caller waits for a disk; only `read` does, for the bytes it returns.

What a caller may rely on:

- `holds(key)` means that files and rows are written: a kill of the process can't take them. Files
  are fsynced before their rows, so a loss of power takes the last rows at the most.
- A part is read whole and checked. What is torn, corrupt, missing or foreign costs one log line,
  its file and every capsule that needs it; it is never loaded.
- A manifest of another fingerprint or format is foreign as a whole: one log line, and everything
  in it is dropped, since none of it could ever be restored here.
- A row of the manifest that is damaged is dropped alone: one log line. A table that is damaged is
  set aside as `manifest.corrupt-<n>`: one log line, an empty store.
- When a write fails, `fault` says why, waiting saves are given up (`take_given_up`) and reads go
  on. Rows and removals wait. The first change after RETRY_S tries again, and clears the fault when
  it works; the end of the process tries at once, removals at the least.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from capserve.engine.seam import CapsulePart
from capserve.errors import CapsuleError, StartupError
from capserve.serving.capsules.rows import CapsuleKey, CapsuleRow, SessionRow, TurnRow
from capserve.serving.disk.files import DirectoryLock, PartFile, PartFiles, make_directory
from capserve.serving.disk.index import Footprint
from capserve.serving.disk.manifest import FILE_NAME, BadRow, ManifestCorruptError
from capserve.serving.disk.manifest_read import read_sessions, read_turns
from capserve.serving.disk.opening import no_collection, open_manifest
from capserve.serving.disk.queue import (
    Clear,
    DropPart,
    DropRows,
    DropSession,
    DropTurns,
    Forget,
    Pin,
    PutSession,
    PutTurn,
    Save,
    StartOver,
)
from capserve.serving.disk.state import DiskState
from capserve.serving.disk.writer import DiskWriter

log = logging.getLogger("capserve.disk")

PENDING_BYTES = 1 << 30
"""Bytes of parts that may wait; a disk that is slower than that loses the oldest saves."""

LEAST_PENDING_BYTES = 64 << 20

_Row = TypeVar("_Row")


def pending_bound(host_budget_bytes: int) -> int:
    """Most bytes that may wait beside a memory of this budget: they may have left it already."""
    return min(PENDING_BYTES, max(LEAST_PENDING_BYTES, host_budget_bytes // 2))


def default_capsule_dir() -> Path:
    """The user's cache directory; one sub-directory for each fingerprint."""
    return Path(os.path.expanduser("~/.cache")) / "capserve" / "capsules"


@dataclass(frozen=True, slots=True)
class BadPart:
    name: bytes
    path: Path
    reason: str
    capsules: int
    """How many need it."""


class DiskTier:
    """Queries and changes from any thread. The lock is never held across I/O."""

    def __init__(
        self,
        directory: Path,
        files: PartFiles,
        state: DiskState,
        writer: DiskWriter,
        tidies: bool,
    ) -> None:
        """Use `open`."""
        self.directory = directory
        self._files = files
        self._state = state
        self._writer = writer
        self._tidies = tidies

    @classmethod
    def open(
        cls,
        directory: Path,
        fingerprint: str | None,
        budget_bytes: int,
        pending_bytes: int = PENDING_BYTES,
        *,
        tidies: bool = True,
    ) -> DiskTier:
        """Take the directory, and start writing in the background.

        `fingerprint`: the engine's. None is for tools that load nothing: it takes whose store is
        there, and refuses one that is damaged or of another format. `tidies`: what a crash left
        and what can't be read is removed, so is what is over the budget; else nothing changes that
        is not asked for.
        Raises StartupError when another process has the directory, or when it can't be written.
        """
        make_directory(directory)
        try:
            lock = DirectoryLock(directory)
        except OSError as error:
            raise StartupError(f"capsule directory {directory}: {error.strerror}") from None
        try:
            with no_collection():
                manifest, loaded, owner = open_manifest(directory, fingerprint, tidies)
                state = DiskState(budget_bytes, pending_bytes)
                state.index.load(loaded.parts, loaded.rows)
        except StartupError:
            lock.release()
            raise
        except (OSError, sqlite3.Error) as error:
            lock.release()
            raise StartupError(f"capsule directory {directory}: {error}") from None
        if loaded.partless:
            log.warning(
                "capsule directory %s: %d capsules without all their parts are left out",
                directory,
                len(loaded.partless),
            )
        if loaded.unreadable:
            log.warning(
                "capsule directory %s: %d unreadable rows of capsules and parts are left out",
                directory,
                loaded.unreadable,
            )
        for key in loaded.partless if tidies else ():
            state.queue.put(Forget(key))
        files = PartFiles(directory)
        writer = DiskWriter(directory, lock, manifest, files, state, owner, tidies)
        writer.thread.start()
        return cls(directory, files, state, writer, tidies)

    # -- queries -------------------------------------------------------------------------------

    def capsules(self) -> list[CapsuleRow]:
        with self._state.condition:
            return self._state.index.rows()

    def sessions(self) -> list[SessionRow]:
        """From the manifest, in the order of their last use."""
        return self._read_rows(lambda: read_sessions(self.directory))

    def turns(self, most_bytes: int | None = None) -> list[TurnRow]:
        """From the manifest, the oldest first; of more than `most_bytes`, the newest."""
        return self._read_rows(lambda: read_turns(self.directory, most_bytes))

    def holds(self, key: CapsuleKey) -> bool:
        """Whether a kill of the process would leave this capsule."""
        with self._state.condition:
            return key in self._state.index

    def footprint(self, key: CapsuleKey) -> Footprint:
        """Bytes of the files of a capsule that is held."""
        with self._state.condition:
            return self._state.index.footprint(key)

    @property
    def budget_bytes(self) -> int:
        return self._state.budget_bytes

    @property
    def dropped_saves(self) -> int:
        """Given up before they were written: too many waited, or the tier was off."""
        with self._state.condition:
            return self._state.dropped_saves

    @property
    def refused_saves(self) -> int:
        """Larger than what the budget leaves beside pins."""
        with self._state.condition:
            return self._state.refused_saves

    @property
    def used_bytes(self) -> int:
        """Of all part files."""
        with self._state.condition:
            return self._state.index.used_bytes

    @property
    def pending_bytes(self) -> int:
        with self._state.condition:
            return self._state.queue.pending_bytes

    @property
    def fault(self) -> str | None:
        """Why nothing is written, in one line; None when all is well."""
        with self._state.condition:
            return self._state.fault

    def take_evicted(self) -> list[CapsuleKey]:
        """Capsules that were saved and are not there, since the last call: evicted, given up before
        they were written, or found bad. Not those that were forgotten."""
        with self._state.condition:
            found = [key for key in self._state.evicted if key not in self._state.index]
            self._state.evicted = []
            return found

    @property
    def has_news(self) -> bool:
        """Whether `take_evicted` or `take_given_up` has anything. Takes no lock: what comes at the
        same moment is heard the next time."""
        return bool(self._state.evicted or self._state.given_up)

    def take_given_up(self) -> list[CapsuleKey]:
        """Saves, since the last call, that may be handed over again: too many waited, or the disk
        had a fault."""
        with self._state.condition:
            found, self._state.given_up = self._state.given_up, []
            return found

    @property
    def takes_saves(self) -> bool:
        """No fault stands in the way, or it is time to try again."""
        with self._state.condition:
            return not self._state.is_off()

    def read(self, name: bytes) -> memoryview:
        """A part's file, whole and checked.

        Raises CapsuleError; the part and every capsule that needs it are gone then.
        """
        with self._state.condition:
            part = self._state.index.parts.get(name)
        if part is None:
            raise CapsuleError(f"part {name.hex()} is not on disk")
        try:
            return self._files.read(name, part.file)
        except CapsuleError as error:
            self._drop_bad(name, part.file, error.message)
            raise CapsuleError(f"part {name.hex()}: {error.message}") from None

    def verify(self) -> Iterator[BadPart]:
        """Read every file; yields those that `read` would refuse, and leaves them as they are."""
        with self._state.condition:
            parts = list(self._state.index.parts.items())
        for name, part in parts:
            try:
                self._files.read(name, part.file)
            except CapsuleError as error:
                path = self._files.path(name)
                yield BadPart(name, path, error.message, len(part.holders))

    def check(self, timeout_s: float = 10.0) -> None:
        """Count afresh, after all that waits is written. Raises AssertionError on a difference."""
        assert self.flush(timeout_s), f"not written in {timeout_s} s: {self.fault}"
        sizes = self._files.sizes()
        with self._state.condition:
            self._state.index.check()
            known = {name: part.file.file_bytes for name, part in self._state.index.parts.items()}
            assert sizes == known, "part files are not those that the index knows"
            assert sum(sizes.values()) == self._state.index.used_bytes

    # -- changes -------------------------------------------------------------------------------

    def save(self, row: CapsuleRow, parts: Sequence[CapsulePart]) -> None:
        """Write a capsule in the background; parts that are there already are not written again."""
        assert [part.name for part in parts] == [part.name for part in row.parts]
        assert len({part.name for part in parts}) == len(parts), "a capsule has a part once"
        with self._state.condition:
            if self._state.is_off():
                self._state.give_up([row.key])
                return
            self._state.queue.put(Save(row, tuple(parts)), self._state.index.parts)
            self._state.give_up(self._state.queue.trim(self._state.most_pending_bytes))
            self._state.condition.notify_all()

    def forget(self, key: CapsuleKey) -> None:
        """It is not held any more from now on; its files go in the background."""
        with self._state.condition:
            self._state.queue.cancel(key)
            self._state.index.hide(key)
            self._state.touched.pop(key, None)
            self._state.put(Forget(key))

    def set_pinned(self, key: CapsuleKey, pinned: bool) -> None:
        with self._state.condition:
            waiting = self._state.queue.waiting(key)
            if waiting is not None:
                self._state.queue.replace_waiting(replace(waiting.row, pinned=pinned))
            self._state.index.set_pinned(key, pinned)
            self._state.put(Pin(key, pinned))

    def touch(self, key: CapsuleKey) -> None:
        """It was used now. Written with the next change, so a kill may lose it."""
        with self._state.condition:
            if key in self._state.index:
                self._state.touched[key] = time.time()
                self._state.index.touch(key, self._state.touched[key])

    def put_session(self, row: SessionRow) -> None:
        with self._state.condition:
            self._state.put_heavy(PutSession(row))

    def drop_session(self, session_id: str) -> None:
        with self._state.condition:
            self._state.put(DropSession(session_id))

    def put_turn(self, row: TurnRow) -> None:
        with self._state.condition:
            self._state.put_heavy(PutTurn(row))

    def drop_turns(self, namespace: str, digests: Iterable[bytes]) -> None:
        with self._state.condition:
            self._state.put(DropTurns(namespace, tuple(digests)))

    def clear(self) -> None:
        """Forget every capsule, session and turn that came before."""
        with self._state.condition:
            self._state.queue.drop()
            for row in self._state.index.rows():
                self._state.index.hide(row.key)
            self._state.touched.clear()
            self._state.put(Clear())

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that came before is written. False: not in this time, or switched off."""
        with self._state.condition:
            state = self._state
            state.flushing += 1
            state.condition.notify_all()
            try:
                if not state.condition.wait_for(state.settled, timeout_s):
                    return False
                return state.fault is None
            finally:
                state.flushing -= 1

    def close(self, timeout_s: float) -> None:
        """Write what waits and give the directory back. After the timeout the rest is lost."""
        with self._state.condition:
            self._state.closing = True
            self._state.condition.notify_all()
        self._writer.thread.join(timeout_s)
        if self._writer.thread.is_alive():
            log.warning("capsule directory %s: not all was written at the end", self.directory)

    # -- any thread, with I/O ------------------------------------------------------------------

    def _read_rows(self, read: Callable[[], tuple[list[_Row], list[BadRow]]]) -> list[_Row]:
        with self._state.condition:
            generation = self._state.generation
        try:
            found, bad = read()
            if bad:
                path, table = self.directory / FILE_NAME, bad[0].table
                log.warning("%s: %d unreadable rows of %s are left out", path, len(bad), table)
            if bad and self._tidies:
                with self._state.condition:
                    self._state.put(DropRows(tuple(bad)))
            return found
        except ManifestCorruptError as error:
            with self._state.condition:
                self._state.put(StartOver(str(error), generation))
        except sqlite3.Error as error:
            log.warning("%s: unreadable, %s", self.directory / FILE_NAME, error)
        return []

    def _drop_bad(self, name: bytes, file: PartFile, reason: str) -> None:
        with self._state.condition:
            part = self._state.index.parts.get(name)
            if part is None or part.file is not file:
                return  # evicted while it was read, which is no fault of the file
            lost = self._state.index.drop_part(name)
            self._state.evicted.extend(lost)
            for key in lost:
                self._state.put(Forget(key))
            self._state.put(DropPart(name))
        log.warning("%s is dropped with %d capsules: %s", self._files.path(name), len(lost), reason)
