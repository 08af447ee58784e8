"""What does a store directory hold, as a table that survives a kill?

SQLite in WAL mode. A committed row survives the end of the process however it comes. `synchronous`
is NORMAL: a loss of power may take the last rows, never the table, and since part files are fsynced
before their rows, a row that is there has its parts. One thread writes; those who read sessions and
turns open connections of their own (`manifest_read.py`).

Each row carries a checksum, since a byte that turns on the disk may leave a row that reads well. A
row that fails it, or makes no sense, is left out and removed, and no other suffers. What may change
while the row stays (pins, times of use, marks of superseded turns) is outside the checksum.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Literal

from capserve.serving.capsules.rows import CapsuleKey, CapsuleRow, PartRow, SessionRow, TurnRow
from capserve.serving.disk.codec import (
    NAME_BYTES,
    UNREADABLE,
    SpanReader,
    cut_names,
    pack_pairs,
    pack_record,
    pack_spans,
    pack_text,
    row_check,
    unpack_text,
)
from capserve.serving.disk.files import PartFile

FORMAT = "2"
"""Of the tables and of the part files. A manifest of another format is foreign."""

FILE_NAME = "manifest.sqlite3"

_TABLES = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS parts (
    name BLOB PRIMARY KEY, nbytes INTEGER NOT NULL, file_bytes INTEGER NOT NULL,
    checksum BLOB NOT NULL, row_check BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS capsules (
    namespace BLOB NOT NULL, position INTEGER NOT NULL, digest BLOB NOT NULL,
    spans BLOB NOT NULL, parts BLOB NOT NULL,
    based_on_position INTEGER, based_on_digest BLOB, row_check BLOB NOT NULL,
    pinned INTEGER NOT NULL, used_at REAL NOT NULL,
    PRIMARY KEY (namespace, position, digest));
CREATE TABLE IF NOT EXISTS sessions (
    id BLOB PRIMARY KEY, namespace BLOB NOT NULL, parent_id BLOB,
    tokens BLOB NOT NULL, spans BLOB NOT NULL, marks BLOB NOT NULL, turns BLOB NOT NULL,
    chain BLOB NOT NULL, newest_position INTEGER, newest_digest BLOB,
    conversation BLOB NOT NULL, used_at REAL NOT NULL, row_check BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS turns (
    namespace BLOB NOT NULL, digest BLOB NOT NULL, supersedes BLOB,
    text BLOB NOT NULL, tokens BLOB NOT NULL, rest BLOB NOT NULL, used_at REAL NOT NULL,
    row_check BLOB NOT NULL, superseded INTEGER NOT NULL, nbytes INTEGER NOT NULL,
    PRIMARY KEY (namespace, digest));
CREATE INDEX IF NOT EXISTS turns_by_age ON turns (superseded, used_at, nbytes);
"""


Table = Literal["sessions", "turns"]


class ManifestCorruptError(Exception):
    """The file is no manifest, or a damaged one."""


@dataclass(frozen=True, slots=True)
class Loaded:
    parts: list[tuple[PartRow, PartFile]]
    rows: list[CapsuleRow]
    """In the order of their last use."""
    partless: list[CapsuleKey]
    """Of capsules that name parts which no row knows."""
    unreadable: int
    """Rows that were left out."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """Which row can't be read; both columns, since a number is given again."""

    table: Table
    rowid: int
    check: bytes


def is_corrupt(error: sqlite3.Error) -> bool:
    """The table itself is damaged, rather than the disk full or a file out of reach."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_ERROR:  # a table that is not as `_TABLES` says has no code of its own
        return "column" in str(error) or "no such table" in str(error)
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_MISMATCH)


class Manifest:
    """The writing side. Changes come inside `with manifest.transaction()`."""

    def __init__(self, directory: Path) -> None:
        """Raises ManifestCorruptError; sqlite3.Error or OSError where the disk is to blame."""
        self.path = directory / FILE_NAME
        # Made before SQLite does: its side files take over these permissions.
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self._db.text_factory = bytes  # what a damaged header calls text need be none
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_TABLES)
            self._count_turns()
        except sqlite3.Error as error:
            self._db.close()
            if is_corrupt(error):
                raise ManifestCorruptError(str(error)) from None
            raise

    def close(self) -> None:
        self._db.close()

    def set_aside(self) -> Path:
        """Close it and move its files out of the way; the new path."""
        self._db.close()
        return set_aside(self.path)

    def begin(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self._db.execute("COMMIT")

    def rollback(self) -> None:
        # The disk may be what fails: then SQLite rolls back by itself.
        with suppress(sqlite3.Error):
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self._count_turns()

    def meta(self) -> dict[str, str]:
        """Raises ManifestCorruptError."""
        try:
            return meta_of(self._db.execute("SELECT name, value FROM meta"))
        except sqlite3.Error as error:
            if is_corrupt(error):
                raise ManifestCorruptError(str(error)) from None
            raise

    def set_meta(self, fingerprint: str) -> None:
        self._db.executemany(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)",
            [("fingerprint", fingerprint), ("format", FORMAT)],
        )

    def clear(self) -> None:
        for table in ("parts", "capsules", "sessions", "turns"):
            self._db.execute(f"DELETE FROM {table}")
        self.turn_bytes = 0

    def load(self, removes_bad: bool = True) -> Loaded:
        """Every part and capsule. Raises ManifestCorruptError."""
        try:
            return self._load(removes_bad)
        except sqlite3.Error as error:
            if is_corrupt(error):
                raise ManifestCorruptError(str(error)) from None
            raise

    def _load(self, removes_bad: bool) -> Loaded:
        parts: dict[bytes, PartRow] = {}
        files: list[PartFile] = []
        bad_parts: list[bytes] = []
        for name, nbytes, size, checksum, check in self._db.execute("SELECT * FROM parts"):
            if row_check(name, nbytes, size, checksum) != check:
                bad_parts.append(name)
                continue
            parts[name] = PartRow(name, nbytes)
            files.append(PartFile(size, checksum))
        rows: list[CapsuleRow] = []
        partless: list[CapsuleKey] = []
        bad: list[int] = []
        spans = SpanReader()
        names: dict[bytes, str] = {}
        for rowid, *fields, check, pinned, used_at in self._db.execute(
            "SELECT rowid, * FROM capsules ORDER BY used_at"
        ):
            if row_check(*fields) != check or not (used_at is not None and isfinite(used_at)):
                bad.append(rowid)
                continue
            space, position, digest, packed, listed, base, base_digest = fields
            namespace = names.get(space) or names.setdefault(space, unpack_text(space))
            key = CapsuleKey(namespace, position, digest)
            try:
                needed = tuple(map(parts.__getitem__, cut_names(listed)))
            except KeyError:
                partless.append(key)
                continue
            rows.append(
                CapsuleRow(
                    key=key,
                    spans=spans(packed),
                    parts=needed,
                    based_on=None if base is None else CapsuleKey(namespace, base, base_digest),
                    pinned=bool(pinned),
                    used_at=used_at,
                )
            )
        if removes_bad:
            self.drop_parts(bad_parts)
            self._db.executemany("DELETE FROM capsules WHERE rowid = ?", [(n,) for n in bad])
        found = list(zip(parts.values(), files, strict=True))
        return Loaded(found, rows, partless, len(bad_parts) + len(bad))

    def put_part(self, row: PartRow, file: PartFile) -> None:
        columns = (row.name, row.nbytes, file.file_bytes, file.checksum)
        self._db.execute(
            "INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?)", (*columns, row_check(*columns))
        )

    def drop_parts(self, names: Iterable[bytes]) -> None:
        self._db.executemany("DELETE FROM parts WHERE name = ?", [(name,) for name in names])

    def put_capsule(self, row: CapsuleRow) -> None:
        base = row.based_on
        assert base is None or base.namespace == row.key.namespace, "a journal has one namespace"
        assert all(len(part.name) == NAME_BYTES for part in row.parts)
        columns = (
            *_columns(row.key),
            pack_spans(row.spans),
            b"".join(part.name for part in row.parts),
            None if base is None else base.position,
            None if base is None else base.digest,
        )
        self._db.execute(
            "INSERT OR REPLACE INTO capsules VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*columns, row_check(*columns), row.pinned, row.used_at),
        )

    def drop_capsules(self, keys: Iterable[CapsuleKey]) -> None:
        self._db.executemany(
            "DELETE FROM capsules WHERE namespace = ? AND position = ? AND digest = ?",
            [_columns(key) for key in keys],
        )

    def set_pinned(self, key: CapsuleKey, pinned: bool) -> None:
        self._db.execute(
            "UPDATE capsules SET pinned = ? WHERE namespace = ? AND position = ? AND digest = ?",
            (pinned, *_columns(key)),
        )

    def set_used(self, used: Iterable[tuple[CapsuleKey, float]]) -> None:
        self._db.executemany(
            "UPDATE capsules SET used_at = ? WHERE namespace = ? AND position = ? AND digest = ?",
            [(used_at, *_columns(key)) for key, used_at in used],
        )

    def put_session(self, row: SessionRow) -> None:
        newest = row.newest
        assert newest is None or newest.namespace == row.namespace
        columns = (
            pack_text(row.id),
            pack_text(row.namespace),
            None if row.parent_id is None else pack_text(row.parent_id),
            row.tokens,
            pack_spans(row.spans),
            pack_pairs(row.marks),
            pack_pairs(row.turns),
            b"".join(row.chain),
            None if newest is None else newest.position,
            None if newest is None else newest.digest,
            pack_text(row.conversation),
            row.used_at,
        )
        self._db.execute(
            "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*columns, row_check(*columns)),
        )

    def drop_session(self, session_id: str) -> None:
        self._db.execute("DELETE FROM sessions WHERE id = ?", (pack_text(session_id),))

    def put_turn(self, row: TurnRow, budget_bytes: int) -> None:
        """Over the budget, records that a newer one goes on from leave first, then the oldest."""
        space = pack_text(row.namespace)
        packed = pack_record(row.record)
        nbytes = sum(len(column) for column in packed)
        self.drop_turns(row.namespace, [row.digest])
        if nbytes > budget_bytes:
            return
        columns = (space, row.digest, row.supersedes, *packed, row.used_at)
        self._db.execute(
            "INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, ?)",
            (*columns, row_check(*columns), nbytes),
        )
        self.turn_bytes += nbytes
        if row.supersedes is not None:
            self._db.execute(
                "UPDATE turns SET superseded = 1 WHERE namespace = ? AND digest = ?",
                (space, row.supersedes),
            )
        while self.turn_bytes > budget_bytes:
            rowid, freed = self._db.execute(
                "SELECT rowid, nbytes FROM turns ORDER BY superseded DESC, used_at LIMIT 1"
            ).fetchone()
            self._db.execute("DELETE FROM turns WHERE rowid = ?", (rowid,))
            self.turn_bytes -= freed

    def drop_turns(self, namespace: str, digests: Iterable[bytes]) -> None:
        space = pack_text(namespace)
        for digest in digests:
            for (freed,) in self._db.execute(
                "DELETE FROM turns WHERE namespace = ? AND digest = ? RETURNING nbytes",
                (space, digest),
            ).fetchall():
                self.turn_bytes -= freed

    def drop_rows(self, rows: Iterable[BadRow]) -> None:
        for row in rows:
            self._db.execute(
                f"DELETE FROM {row.table} WHERE rowid = ? AND row_check = ?", (row.rowid, row.check)
            )
        self._count_turns()

    def _count_turns(self) -> None:
        found = self._db.execute("SELECT coalesce(sum(nbytes), 0) FROM turns").fetchone()
        self.turn_bytes = int(found[0])


def remove(directory: Path) -> None:
    """A manifest and its side files."""
    for suffix in ("-shm", "-wal", ""):
        (directory / (FILE_NAME + suffix)).unlink(missing_ok=True)


def set_aside(path: Path) -> Path:
    """Rename a manifest and its side files to `manifest.corrupt-<n>`; the new path."""
    number = 1
    while (aside := path.with_name(f"manifest.corrupt-{number}")).exists():
        number += 1
    for suffix in ("-shm", "-wal", ""):
        with suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    return aside


def meta_of(rows: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    try:
        return {unpack_text(name): unpack_text(value) for name, value in rows}
    except UNREADABLE as error:
        raise ManifestCorruptError(f"whose it is can't be read: {error}") from None


def _columns(key: CapsuleKey) -> tuple[bytes, int, bytes]:
    return pack_text(key.namespace), key.position, key.digest
