"""What of sessions and finished turns outlives the process, and how does it come back?

The one place that tells both readers of a changed session: the text thread, by way of
`Transcripts`, and the disk tier, as rows. Rows go out when a turn is committed and when a session
is forked, cut back, taken in or dropped; writing them is the disk tier's own, in the background.
`revive` brings them back at start-up from the manifest alone: no state is read before a turn asks
for it. Without a disk tier only the text thread is told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from capserve.serving.capsules.rows import CapsuleKey, CapsuleRow, SessionRow, TurnRow
from capserve.serving.journal import Journal
from capserve.serving.sessions.conversation_json import conversation_json, conversation_of
from capserve.serving.sessions.registry import Session, SessionRegistry
from capserve.serving.sessions.transcripts import Transcripts
from capserve.text.prompt import TurnRecord

log = logging.getLogger("capserve.capsules")

# -- out ---------------------------------------------------------------------------------------


class Rows(Protocol):
    """What the archive asks of the disk tier. Writes are asynchronous and never raise."""

    def sessions(self) -> list[SessionRow]: ...
    def turns(self, most_bytes: int | None = None, /) -> list[TurnRow]: ...
    def capsules(self) -> list[CapsuleRow]: ...
    def put_session(self, row: SessionRow, /) -> None: ...
    def drop_session(self, session_id: str, /) -> None: ...
    def put_turn(self, row: TurnRow, /) -> None: ...
    def drop_turns(self, namespace: str, digests: Sequence[bytes], /) -> None: ...


class Archive:
    """Worker thread only, but for what it tells `Transcripts`, which has its own lock."""

    def __init__(self, transcripts: Transcripts, disk: Rows | None = None) -> None:
        self._transcripts = transcripts
        self._disk = disk

    def turn_ended(
        self,
        namespace: str,
        digest: bytes,
        record: TurnRecord,
        supersedes: bytes | None = None,
    ) -> None:
        """A turn came to a clean end: the next one may take over its tokens."""
        gone = self._transcripts.publish(namespace, digest, record, supersedes)
        if self._disk is None:
            return
        if (namespace, digest) not in gone:
            self._disk.put_turn(TurnRow(namespace, digest, supersedes, record, time.time()))
        for lost_namespace, lost_digest in gone:
            self._disk.drop_turns(lost_namespace, [lost_digest])

    def session_changed(self, session: Session) -> None:
        """Its journal, conversation or newest capsule is another one than before."""
        self._transcripts.set_session(
            session.id, session.namespace, session.conversation, session.record
        )
        if self._disk is not None:
            self._disk.put_session(session_row(session))

    def session_gone(self, session_id: str) -> None:
        self._transcripts.drop_session(session_id)
        if self._disk is not None:
            self._disk.drop_session(session_id)

    def turns_gone(self, namespace: str, digests: Sequence[bytes]) -> None:
        """Nobody can continue these any more."""
        for digest in digests:
            self._transcripts.forget(namespace, digest)
        if self._disk is not None and digests:
            self._disk.drop_turns(namespace, list(digests))


def session_row(session: Session) -> SessionRow:
    """`session` as it would come back after a restart."""
    journal = session.journal
    return SessionRow(
        id=session.id,
        namespace=session.namespace,
        parent_id=session.parent_id,
        tokens=np.ascontiguousarray(journal.tokens, dtype="<i4").tobytes(),
        spans=journal.spans,
        marks=tuple(mark for mark in journal.marks if session.knows(mark.messages)),
        turns=tuple(turn for turn in session.turns if session.knows(turn.messages)),
        chain=session.chain,
        newest=session.newest,
        conversation=conversation_json(session.conversation),
        used_at=unix_time(session.last_used_at),
    )


def unix_time(monotonic_s: float) -> float:
    """Unix seconds of a moment on this process' monotonic clock."""
    return time.time() - (time.monotonic() - monotonic_s)


# -- back --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Revived:
    """How much came back."""

    sessions: int
    turns: int
    capsules: int


class Adopts(Protocol):
    """What `revive` asks of `CapsuleStore`."""

    def adopt(self, rows: Iterable[CapsuleRow], /) -> int: ...
    def holds(self, key: CapsuleKey, /) -> bool: ...


def revive(
    sessions: SessionRegistry,
    transcripts: Transcripts,
    store: Adopts,
    disk: Rows,
    now: float,
) -> Revived:
    """Bring back what the last process left, before the worker starts. `now`: Unix seconds.

    What nobody used for the sessions' idle TTL, in wall-clock time, stays away and leaves the
    manifest; so does a row that can't be read, with one line in the log.
    """
    capsules = store.adopt(disk.capsules())
    turns = 0
    for turn in sorted(disk.turns(transcripts.budget_bytes), key=lambda row: row.used_at):
        if now - turn.used_at > sessions.idle_ttl_s:
            disk.drop_turns(turn.namespace, [turn.digest])
            continue
        gone = transcripts.publish(turn.namespace, turn.digest, turn.record, turn.supersedes)
        turns += 1
        for namespace, digest in gone:
            disk.drop_turns(namespace, [digest])
    alive = 0
    for row in sorted(disk.sessions(), key=lambda row: row.used_at):
        if now - row.used_at > sessions.idle_ttl_s:
            disk.drop_session(row.id)
            continue
        try:
            session = _session_of(row, transcripts, store, now)
        except (ValueError, AssertionError) as error:
            log.warning("session %s is not taken up again: %s", row.id, error)
            disk.drop_session(row.id)
            continue
        sessions.add(session)
        transcripts.set_session(session.id, session.namespace, session.conversation, session.record)
        alive += 1
    sessions.trim()
    return Revived(alive, turns, capsules)


def _session_of(row: SessionRow, transcripts: Transcripts, store: Adopts, now: float) -> Session:
    journal = Journal(np.frombuffer(row.tokens, dtype="<i4").astype(np.int32), row.spans)
    journal.keep_marks(row.marks, len(journal))
    journal.chain = row.chain
    # A wall clock may have been set back: nothing was used in the future.
    idle_s = max(0.0, now - row.used_at)
    newest = row.newest if row.newest is not None and store.holds(row.newest) else None
    conversation = conversation_of(row.conversation)
    record = None
    if conversation is not None:
        record = transcripts.longest(row.namespace, row.chain[: len(conversation.messages) + 1])
    return Session(
        id=row.id,
        namespace=row.namespace,
        journal=journal,
        last_used_at=time.monotonic() - idle_s,
        newest=newest,
        parent_id=row.parent_id,
        conversation=conversation,
        chain=row.chain,
        record=record,
        turns=list(row.turns),
    )
