"""How does a queue of changes become files and rows, in an order that a kill can't break?

One thread. New parts are written and fsynced, then one transaction names them; what leaves is first
taken out of the manifest and then unlinked. So at every moment each row has its parts, and a file
without a row is a leftover that the next start removes. Parts are packed, hashed and written piece
by piece in calls that release the GIL: the engine's thread is hardly delayed.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import assert_never

from capserve.engine.seam import CapsulePart
from capserve.serving.capsules.rows import CapsuleKey, CapsuleRow, PartRow
from capserve.serving.disk.files import DirectoryLock, PartFiles, free_bytes
from capserve.serving.disk.index import DiskIndex, Entry
from capserve.serving.disk.manifest import Manifest, ManifestCorruptError, is_corrupt
from capserve.serving.disk.queue import (
    ROWS,
    Change,
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

log = logging.getLogger("capserve.disk")

TURN_BYTES = 256 << 20
"""Of finished turns in the manifest."""

RETRY_S = 60.0
"""From a failed write to the next try."""


class _NoRoomError(Exception):
    """What may not be evicted fills the budget."""


class DiskWriter:
    """Every method but the constructor runs on its own thread."""

    def __init__(
        self,
        directory: Path,
        lock: DirectoryLock,
        manifest: Manifest,
        files: PartFiles,
        state: DiskState,
        fingerprint: str,
        tidies: bool = True,
    ) -> None:
        """`tidies`: begin with removing what a crash left and what is over the budget."""
        self._directory = directory
        self._lock = lock
        self._manifest = manifest
        self._files = files
        self._state = state
        self._fingerprint = fingerprint
        self._tidies = tidies
        self._steps: list[Callable[[], None]] = []
        """Of the next transaction, in the order of the changes."""
        self._finishing: list[Entry] = []
        """Capsules that it lists."""
        self._unlisted: set[bytes] = set()
        """Parts that have a file and no committed row."""
        self._removing: list[Forget] = []
        """Evictions that are not committed."""
        self._bad_files: list[bytes] = []
        """Of parts whose rows it removes."""
        self._needed_bytes = 0
        """Of the write in progress, for the fault."""
        self._broken_save: CapsuleKey | None = None
        """The one that the failed write is to blame on."""
        self._no_manifest = False
        """A new one could not be made yet."""
        self.thread = threading.Thread(target=self._run, name="capserve-disk", daemon=True)

    def _run(self) -> None:
        state = self._state
        try:
            if self._tidies:
                self._guarded([], self._tidy)
            while (batch := self._next_batch()) is not None:
                self._guarded(batch, partial(self._write, batch))
        except Exception as error:
            log.exception("the disk tier has stopped")
            with state.condition:
                state.fault = f"{type(error).__name__}: {error}"
                state.retry_at = float("inf")
                state.last_try_failed = True
                state.give_up(state.queue.drop())
        finally:
            with state.condition:
                state.busy = False
                state.condition.notify_all()
                # Reads go on: the directory stays this process' own.
                state.condition.wait_for(lambda: state.closing)
            self._manifest.close()
            self._lock.release()

    def _next_batch(self) -> list[Change] | None:
        """Waits for one; None at the end. Empty when only uses are to be written."""
        state = self._state
        with state.condition:
            state.busy = False
            state.condition.notify_all()
            while not (state.closing or state.has_work()):
                state.condition.wait(state.wait_s())
            if not state.has_work():
                return None
            state.busy = True
            return state.queue.take()

    def _guarded(self, batch: Sequence[Change], work: Callable[[], None]) -> None:
        state = self._state
        try:
            work()
        except Exception as error:  # told in `fault`, and tried again
            if not isinstance(error, (OSError, sqlite3.Error, ManifestCorruptError)):
                log.exception("capsules are not written")
            self._failed(error, batch)
        else:
            with state.condition:
                if state.fault is not None:
                    log.warning("capsule directory %s can be written again", self._directory)
                state.fault = None
        finally:
            with state.condition:
                for change in batch:
                    state.queue.release(change)

    def _tidy(self) -> None:
        """What a crash left behind, and a budget that is lower than before."""
        with self._state.condition:
            known = list(self._state.index.parts)
        found = self._files.remove_leftovers(known)
        if found.removed:
            log.warning(
                "capsule directory %s: %d files without a row removed",
                self._directory,
                found.removed,
            )
        if found.foreign_count:
            log.warning(
                "capsule directory %s: %d foreign files left alone: %s",
                self._directory,
                found.foreign_count,
                ", ".join(found.foreign),
            )
        try:
            self._make_room(0)
        except _NoRoomError:
            log.warning(
                "capsule directory %s: pins take more than the budget of %d bytes",
                self._directory,
                self._state.budget_bytes,
            )
        self._commit()

    def _write(self, batch: Sequence[Change]) -> None:
        if self._no_manifest:
            self._make_manifest()
        for change in batch:
            self._apply(change)
        self._commit()
        self._commit()  # the parts of what the first one replaced

    def _apply(self, change: Change) -> None:
        manifest, state = self._manifest, self._state
        match change:
            case Save(row, parts):
                self._save(row, parts)
            case Forget(key):
                if any(entry.row.key == key for entry in self._finishing):
                    self._commit()  # it must be in the index to leave it
                with state.condition:
                    state.index.discard(key)
                self._steps.append(lambda: manifest.drop_capsules([key]))
            case Pin(key, pinned):
                with state.condition:
                    state.index.set_pinned(key, pinned)
                self._steps.append(lambda: manifest.set_pinned(key, pinned))
            case PutSession(session):
                self._steps.append(lambda: manifest.put_session(session))
            case DropSession(session_id):
                self._steps.append(lambda: manifest.drop_session(session_id))
            case PutTurn(turn):
                self._steps.append(lambda: manifest.put_turn(turn, TURN_BYTES))
            case DropTurns(namespace, digests):
                self._steps.append(lambda: manifest.drop_turns(namespace, digests))
            case DropPart(name):
                self._steps.append(partial(self._drop_part_row, name))
            case Clear():
                # What this transaction lists so far must be in the index to leave it.
                self._commit()
                with state.condition:
                    state.index.discard_all()
                self._steps.append(self._manifest.clear)
                # A later save must not take over a part whose row goes here.
                self._commit()
            case DropRows(rows):
                self._steps.append(lambda: manifest.drop_rows(rows))
            case StartOver(reason, generation):
                if generation == state.generation:
                    raise ManifestCorruptError(reason)
            case _:
                assert_never(change)

    def _save(self, row: CapsuleRow, parts: Sequence[CapsulePart]) -> None:
        state, index = self._state, self._state.index
        with state.condition:
            entry = index.begin(row)
            missing = [part for part in parts if part.name not in index.parts]
            needed = sum(part.nbytes for part in missing)
        try:
            if not self._fits(needed):
                # What this transaction lists may leave again once it is committed.
                self._commit()
                if not self._fits(needed):
                    raise _NoRoomError
            for part in missing:
                self._write_part(part, entry)
        except _NoRoomError:
            with state.condition:
                index.abort(entry)
                state.refused_saves += 1
                state.evicted.append(row.key)
            return
        except Exception as error:
            with state.condition:
                index.abort(entry)
            if not isinstance(error, (OSError, sqlite3.Error)):
                self._broken_save = row.key
            raise
        self._finishing.append(entry)
        self._steps.append(partial(self._list, entry))

    def _fits(self, nbytes: int) -> bool:
        with self._state.condition:
            return self._state.index.fixed_bytes + nbytes <= self._state.budget_bytes

    def _list(self, entry: Entry) -> None:
        with self._state.condition:
            if entry.broken:
                return
            known = self._state.index.parts
            fresh = [known[part.name] for part in entry.row.parts if part.name in self._unlisted]
        for part in fresh:
            self._manifest.put_part(part.row, part.file)
        self._manifest.put_capsule(entry.row)

    def _drop_part_row(self, name: bytes) -> None:
        with self._state.condition:
            written_again = name in self._state.index.parts
        if not written_again:
            self._manifest.drop_parts([name])
            self._bad_files.append(name)

    def _write_part(self, part: CapsulePart, entry: Entry) -> None:
        pieces = part.pack()
        self._needed_bytes = sum(piece.nbytes for piece in pieces)
        self._make_room(self._needed_bytes)
        file = self._files.write(part.name, pieces)
        row = PartRow(part.name, part.nbytes)
        with self._state.condition:
            self._state.index.add_part(row, file, entry)
        self._unlisted.add(part.name)
        self._needed_bytes = 0

    def _make_room(self, nbytes: int) -> None:
        state, index = self._state, self._state.index
        with state.condition:
            over = index.used_bytes + nbytes - state.budget_bytes
            if over <= 0:
                return
            while over > index.dead_bytes():
                key = index.evict_one()
                if key is None:
                    break
                self._removing.append(Forget(key))
                self._steps.append(partial(self._manifest.drop_capsules, [key]))
                state.evicted.append(key)
        self._commit()
        with state.condition:
            if index.used_bytes + nbytes > state.budget_bytes:
                raise _NoRoomError

    def _commit(self) -> None:
        """Everything since the last time, in one transaction; then the files that nobody needs."""
        state, index, manifest = self._state, self._state.index, self._manifest
        with state.condition:
            dead = list(index.dead)
            used, state.touched = state.touched, {}
        if not (self._steps or dead or used):
            return
        try:
            self._files.sync()
            manifest.begin()
            for step in self._steps:
                step()
            manifest.drop_parts(dead)
            manifest.set_used(used.items())
            manifest.commit()
        except Exception:
            with state.condition:
                state.touched = used | state.touched
            raise
        with state.condition:
            for entry in self._finishing:
                self._unlisted.difference_update(part.name for part in entry.row.parts)
                if entry.broken:
                    index.abort(entry)
                    state.evicted.append(entry.row.key)
                    state.put(Forget(entry.row.key))
                else:
                    index.finish(entry)
            gone = [name for name in dead if name in index.dead]
        bad, self._bad_files = self._bad_files, []
        self._steps, self._finishing, self._removing = [], [], []
        for name in bad:
            self._files.remove(name)
        for name in gone:
            self._files.remove(name)
            self._unlisted.discard(name)
            with state.condition:
                if name in index.dead:
                    index.remove_part(name)

    def _failed(self, error: Exception, batch: Sequence[Change]) -> None:
        state, index = self._state, self._state.index
        self._manifest.rollback()
        corrupt = isinstance(error, ManifestCorruptError) or (
            isinstance(error, sqlite3.Error) and is_corrupt(error)
        )
        with state.condition:
            for entry in self._finishing:
                index.abort(entry)
            broken, self._broken_save = self._broken_save, None
            lost = [c.row.key for c in batch if isinstance(c, Save) and c.row.key not in index]
            if broken is not None:  # it would fail again, and take others with it
                state.evicted.append(broken)
                lost.remove(broken)
            state.give_up([*lost, *state.queue.drop((Save,))])
            kept = [c for c in batch if not isinstance(c, (Save, StartOver))]
            if state.closing:
                # A full disk may still take what frees room: once more, with that alone.
                state.last_try_failed = not any(isinstance(c, (Save, *ROWS)) for c in batch)
                kept = [c for c in kept if not isinstance(c, ROWS)]
                state.queue.drop(ROWS)
            state.queue.put_back([*self._removing, *kept])
            unlisted = [name for name in self._unlisted if name in index.dead]
        self._steps, self._finishing, self._removing, self._bad_files = [], [], [], []
        # Half a capsule helps nobody, and its bytes are what the disk has not got.
        for name in unlisted:
            try:
                self._files.remove(name)
            except OSError:
                continue  # it stays counted, and is tried again with the next transaction
            self._unlisted.discard(name)
            with state.condition:
                if name in index.dead:
                    index.remove_part(name)
        if corrupt:
            self._start_over(error)
        else:
            self._switch_off(error)

    def _switch_off(self, error: Exception) -> None:
        state = self._state
        path = getattr(error, "filename", None) or self._manifest.path
        what = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        try:
            free = f"{free_bytes(self._directory):,} bytes free"
        except OSError as unknown:
            free = f"free bytes unknown ({unknown.strerror})"
        needed = f"{self._needed_bytes:,} bytes needed, " if self._needed_bytes else ""
        self._needed_bytes = 0
        with state.condition:
            state.fault = what  # shown to whoever asks for `/health`: no path, no sizes
            state.retry_at = time.monotonic() + RETRY_S
        log.error(
            "capsules are not written for %.0f s at the least: %s: %s; %s%s",
            *(RETRY_S, path, what, needed, free),
        )

    def _start_over(self, error: Exception) -> None:
        """An empty manifest in place of a damaged one. Its capsules are lost, and no others."""
        state = self._state
        aside = self._manifest.set_aside()
        log.error("manifest set aside as %s, the store is empty: %s", aside, error)
        with state.condition:
            state.evicted.extend(row.key for row in state.index.rows())
            state.index = DiskIndex()
            state.touched = {}
            self._unlisted = set()
            state.generation += 1
        self._no_manifest = True
        try:
            self._make_manifest()
        except (OSError, sqlite3.Error) as again:
            self._switch_off(again)

    def _make_manifest(self) -> None:
        self._manifest = Manifest(self._directory)
        self._manifest.set_meta(self._fingerprint)
        self._files.remove_leftovers(())
        self._no_manifest = False
