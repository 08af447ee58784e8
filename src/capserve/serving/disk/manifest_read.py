"""What can be read of a manifest beside its writer?

Each call has a connection of its own, and changes nothing. Rows that can't be read are told, so
that the writer may remove them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from capserve.serving.capsules.rows import CapsuleKey, SessionRow, TurnRow
from capserve.serving.disk.codec import (
    UNREADABLE,
    SpanReader,
    cut_names,
    row_check,
    unpack_ends,
    unpack_marks,
    unpack_record,
    unpack_text,
)
from capserve.serving.disk.manifest import (
    FILE_NAME,
    BadRow,
    ManifestCorruptError,
    Table,
    is_corrupt,
    meta_of,
)

_Row = TypeVar("_Row")


def read_sessions(directory: Path) -> tuple[list[SessionRow], list[BadRow]]:
    """In the order of their last use. Raises ManifestCorruptError or sqlite3.Error."""
    spans = SpanReader()

    def session(row: tuple[Any, ...]) -> SessionRow:
        namespace = unpack_text(row[1])
        return SessionRow(
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

    rows = _read(directory, "SELECT rowid, row_check, * FROM sessions ORDER BY used_at")
    return _checked("sessions", ((*row[:2], row[2:-1]) for row in rows), session)


def read_turns(directory: Path, most_bytes: int | None) -> tuple[list[TurnRow], list[BadRow]]:
    """The newest that fit into `most_bytes`, the oldest of them first. Raises as `read_sessions`.

    Those that a newer one goes on from are the first to be left out.
    """
    rows = []
    left = most_bytes
    for nbytes, *row in _read(
        directory,
        "SELECT nbytes, rowid, row_check, namespace, digest, supersedes, text, tokens, rest,"
        " used_at FROM turns ORDER BY superseded, used_at DESC",
    ):
        if left is not None and (left := left - nbytes) < 0:
            break
        rows.append((row[0], row[1], tuple(row[2:])))

    def turn(row: tuple[Any, ...]) -> TurnRow:
        return TurnRow(unpack_text(row[0]), row[1], row[2], unpack_record(*row[3:6]), row[6])

    found, bad = _checked("turns", rows, turn)
    return sorted(found, key=lambda turn: turn.used_at), bad


def _checked(
    table: Table,
    rows: Iterable[tuple[int, bytes, tuple[Any, ...]]],
    made: Callable[[tuple[Any, ...]], _Row],
) -> tuple[list[_Row], list[BadRow]]:
    """`rows`: (rowid, row_check, what it covers). What can't be read is left out."""
    found: list[_Row] = []
    bad: list[BadRow] = []
    for rowid, check, columns in rows:
        try:
            if row_check(*columns) != check:
                raise ValueError("its checksum is wrong")
            found.append(made(columns))
        except UNREADABLE:
            bad.append(BadRow(table, rowid, check))
    return found, bad


def read_meta(directory: Path) -> dict[str, str]:
    """Whose a manifest is and of which format; {} when there is none yet. Changes nothing.

    Raises ManifestCorruptError or sqlite3.Error.
    """
    if not (directory / FILE_NAME).is_file() or not (directory / FILE_NAME).stat().st_size:
        return {}
    return meta_of(_read(directory, "SELECT name, value FROM meta"))


def _read(directory: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(directory / FILE_NAME)) as db:
        db.text_factory = bytes
        try:
            return db.execute(query).fetchall()
        except sqlite3.Error as error:
            if is_corrupt(error):
                raise ManifestCorruptError(str(error)) from None
            raise
