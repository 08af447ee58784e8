"""What does a store directory hold, as a table that survives a kill?

SQLite in WAL mode. A committed row survives the end of the process however it comes. `synchronous`
is NORMAL: a loss of power may take the last rows, never the table, and since part files are fsynced
before their rows, a row that is there has its parts. One thread writes; `read_*` open connections
of their own.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capserve.serving.disk_codec import (
    NAME_BYTES,
    UNREADABLE,
    SpanReader,
    cut_names,
    pack_pairs,
    pack_record,
    pack_spans,
    pack_text,
    unpack_ends,
    unpack_marks,
    unpack_record,
    unpack_text,
)
from capserve.serving.disk_files import PartFile
from capserve.serving.rows import CapsuleKey, CapsuleRow, PartRow, SessionRow, TurnRow

FORMAT = "1"
"""Of the tables and of the part files. A manifest of another format is foreign."""

FILE_NAME = "manifest.sqlite3"

_TABLES = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS parts (
    name BLOB PRIMARY KEY, nbytes INTEGER NOT NULL, file_bytes INTEGER NOT NULL,
    checksum BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS capsules (
    namespace BLOB NOT NULL, position INTEGER NOT NULL, digest BLOB NOT NULL,
    spans BLOB NOT NULL, parts BLOB NOT NULL,
    based_on_position INTEGER, based_on_digest BLOB,
    pinned INTEGER NOT NULL, used_at REAL NOT NULL,
    PRIMARY KEY (namespace, position, digest));
CREATE TABLE IF NOT EXISTS sessions (
    id BLOB PRIMARY KEY, namespace BLOB NOT NULL, parent_id BLOB,
    tokens BLOB NOT NULL, spans BLOB NOT NULL, marks BLOB NOT NULL, turns BLOB NOT NULL,
    chain BLOB NOT NULL, newest_position INTEGER, newest_digest BLOB,
    conversation BLOB NOT NULL, used_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS turns (
    namespace BLOB NOT NULL, digest BLOB NOT NULL, supersedes BLOB,
    text BLOB NOT NULL, tokens BLOB NOT NULL, rest BLOB NOT NULL, used_at REAL NOT NULL,
    superseded INTEGER NOT NULL, nbytes INTEGER NOT NULL,
    PRIMARY KEY (namespace, digest));
CREATE INDEX IF NOT EXISTS turns_by_age ON turns (superseded, used_at, nbytes);
"""


class ManifestCorruptError(Exception):
    """The file is no manifest, or a damaged one."""


@dataclass(frozen=True, slots=True)
class Loaded:
    parts: list[tuple[PartRow, PartFile]]
    rows: list[CapsuleRow]
    """In the order of their last use."""
    partless: list[CapsuleKey]
    """Of capsules that name parts which no row knows."""


def is_corrupt(error: sqlite3.Error) -> bool:
    """The table itself is damaged, rather than the disk full or a file out of reach."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_MISMATCH)


class Manifest:
    """The writing side. Changes come inside `with manifest.transaction()`."""

    def __init__(self, directory: Path) -> None:
        """Raises ManifestCorruptError; sqlite3.Error or OSError where the disk is to blame."""
        self.path = directory / FILE_NAME
        # Made before SQLite does: its side files take over these permissions.
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_TABLES)
            self._count_turns()
        except sqlite3.Error as error:
            self._db.close()
            # A table of this name with other columns is an OperationalError without a code.
            if is_corrupt(error) or "no such column" in str(error):
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
            return dict(self._db.execute("SELECT name, value FROM meta"))
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

    def load(self) -> Loaded:
        """Every part and capsule. Raises ManifestCorruptError."""
        try:
            return self._load()
        except UNREADABLE as error:
            raise ManifestCorruptError(f"a row makes no sense: {error}") from None
        except sqlite3.Error as error:
            if is_corrupt(error):
                raise ManifestCorruptError(str(error)) from None
            raise

    def _load(self) -> Loaded:
        parts: dict[bytes, PartRow] = {}
        files: list[PartFile] = []
        for name, nbytes, size, checksum in self._db.execute("SELECT * FROM parts"):
            parts[name] = PartRow(name, nbytes)
            files.append(PartFile(size, checksum))
        rows: list[CapsuleRow] = []
        partless: list[CapsuleKey] = []
        spans = SpanReader()
        names: dict[bytes, str] = {}
        for (
            space,
            position,
            digest,
            packed,
            listed,
            base,
            base_digest,
            pinned,
            used_at,
        ) in self._db.execute("SELECT * FROM capsules ORDER BY used_at"):
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
        return Loaded(list(zip(parts.values(), files, strict=True)), rows, partless)

    def put_part(self, row: PartRow, file: PartFile) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?)",
            (row.name, row.nbytes, file.file_bytes, file.checksum),
        )

    def drop_parts(self, names: Iterable[bytes]) -> None:
        self._db.executemany("DELETE FROM parts WHERE name = ?", [(name,) for name in names])

    def put_capsule(self, row: CapsuleRow) -> None:
        base = row.based_on
        assert base is None or base.namespace == row.key.namespace, "a journal has one namespace"
        assert all(len(part.name) == NAME_BYTES for part in row.parts)
        self._db.execute(
            "INSERT OR REPLACE INTO capsules VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *_columns(row.key),
                pack_spans(row.spans),
                b"".join(part.name for part in row.parts),
                None if base is None else base.position,
                None if base is None else base.digest,
                row.pinned,
                row.used_at,
            ),
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
        self._db.execute(
            "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
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
            ),
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
        self._db.execute(
            "INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, 0, ?)",
            (space, row.digest, row.supersedes, *packed, row.used_at, nbytes),
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

    def _count_turns(self) -> None:
        found = self._db.execute("SELECT coalesce(sum(nbytes), 0) FROM turns").fetchone()
        self.turn_bytes = int(found[0])


def read_sessions(directory: Path) -> list[SessionRow]:
    """In the order of their last use. Raises ManifestCorruptError or sqlite3.Error."""
    spans = SpanReader()
    found = []
    for row in _read(directory, "SELECT * FROM sessions ORDER BY used_at"):
        try:
            namespace = unpack_text(row[1])
            found.append(
                SessionRow(
                    id=unpack_text(row[0]),
                    namespace=namespace,
                    parent_id=None if row[2] is None else unpack_text(row[2]),
                    tokens=row[3],
                    spans=spans(row[4]),
                    marks=unpack_marks(row[5]),
                    turns=unpack_ends(row[6]),
                    chain=tuple(cut_names(row[7])),
                    newest=None if row[8] is None else CapsuleKey(namespace, row[8], row[9]),
                    conversation=unpack_text(row[10]),
                    used_at=row[11],
                )
            )
        except UNREADABLE as error:
            raise ManifestCorruptError(f"a session's row makes no sense: {error}") from None
    return found


def read_turns(directory: Path, most_bytes: int | None) -> list[TurnRow]:
    """The newest that fit into `most_bytes`, the oldest of them first. Raises as `read_sessions`.

    Those that a newer one goes on from are the first to be left out.
    """
    found: list[TurnRow] = []
    left = most_bytes
    for row in _read(
        directory,
        "SELECT namespace, digest, supersedes, text, tokens, rest, used_at, nbytes FROM turns"
        " ORDER BY superseded, used_at DESC",
    ):
        if left is not None and (left := left - row[7]) < 0:
            break
        try:
            record = unpack_record(*row[3:6])
        except UNREADABLE as error:
            raise ManifestCorruptError(f"a turn's row makes no sense: {error}") from None
        found.append(TurnRow(unpack_text(row[0]), row[1], row[2], record, row[6]))
    return sorted(found, key=lambda turn: turn.used_at)


def read_fingerprint(directory: Path) -> str | None:
    """Whose capsules a directory holds; None when it has no manifest that says so."""
    if not (directory / FILE_NAME).is_file():
        return None
    try:
        rows = dict(_read(directory, "SELECT name, value FROM meta"))
    except (sqlite3.Error, ManifestCorruptError):
        return None
    return rows.get("fingerprint")


def set_aside(path: Path) -> Path:
    """Rename a manifest and its side files to `manifest.corrupt-<n>`; the new path."""
    number = 1
    while (aside := path.with_name(f"manifest.corrupt-{number}")).exists():
        number += 1
    for suffix in ("-shm", "-wal", ""):
        with suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    return aside


def _read(directory: Path, query: str) -> Iterator[tuple[Any, ...]]:
    with closing(sqlite3.connect(directory / FILE_NAME)) as db:
        try:
            yield from db.execute(query)
        except sqlite3.Error as error:
            if is_corrupt(error):
                raise ManifestCorruptError(str(error)) from None
            raise


def _columns(key: CapsuleKey) -> tuple[bytes, int, bytes]:
    return pack_text(key.namespace), key.position, key.digest
