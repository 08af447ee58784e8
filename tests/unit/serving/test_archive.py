"""What outlives the process comes back as it was, or not at all."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from serving_harness import chain_of, ids, user

from capserve.serving.capsules.rows import CapsuleKey, CapsuleRow, SessionRow, TurnEnd, TurnRow
from capserve.serving.journal import Journal, Span, SpanKind
from capserve.serving.sessions.archive import (
    Archive,
    revive,
    session_row,
)
from capserve.serving.sessions.registry import Session, SessionRegistry
from capserve.serving.sessions.transcripts import Transcripts, record_bytes
from capserve.text.messages import Conversation, Message
from capserve.text.prompt import TurnRecord


class Shelf:
    """A disk tier in memory: rows as they were put."""

    def __init__(self) -> None:
        self.by_id: dict[str, SessionRow] = {}
        self.by_digest: dict[tuple[str, bytes], TurnRow] = {}
        self.kept: list[CapsuleRow] = []

    def sessions(self) -> list[SessionRow]:
        return list(self.by_id.values())

    def turns(self, most_bytes: int | None = None, /) -> list[TurnRow]:
        return list(self.by_digest.values())

    def capsules(self) -> list[CapsuleRow]:
        return self.kept

    def put_session(self, row: SessionRow, /) -> None:
        self.by_id[row.id] = row

    def drop_session(self, session_id: str, /) -> None:
        self.by_id.pop(session_id, None)

    def put_turn(self, row: TurnRow, /) -> None:
        self.by_digest[(row.namespace, row.digest)] = row

    def drop_turns(self, namespace: str, digests: Sequence[bytes], /) -> None:
        for digest in digests:
            self.by_digest.pop((namespace, digest), None)


class Store:
    """Knows the capsules that it was given."""

    def __init__(self) -> None:
        self.keys: set[CapsuleKey] = set()

    def adopt(self, rows: Iterable[CapsuleRow], /) -> int:
        self.keys |= {row.key for row in rows}
        return len(self.keys)

    def holds(self, key: CapsuleKey, /) -> bool:
        return key in self.keys


MESSAGES = (user("16 "), Message("assistant", "17 ", reasoning=""))
CHAIN = chain_of(MESSAGES)
KEY = CapsuleKey("key/a", 6, b"d" * 16)
SPANS = (Span(SpanKind.PREFILL, 0, 4), Span(SpanKind.DECODE, 4, 7))


def a_session(session_id: str = "one") -> Session:
    journal = Journal(ids([3, 16, 1, 2, 17, 1, 1]), SPANS)
    journal.chain = CHAIN
    journal.mark(3, 1)
    return Session(
        session_id,
        "key/a",
        journal,
        time.monotonic(),
        newest=KEY,
        parent_id="parent",
        conversation=Conversation(MESSAGES),
        chain=CHAIN,
        record=TurnRecord(MESSAGES, "text", ids([3, 16, 1, 2, 17, 1])),
        turns=[TurnEnd(6, 2)],
    )


def left_behind(*sessions: Session) -> Shelf:
    """What a process leaves that had these sessions."""
    shelf = Shelf()
    archive = Archive(Transcripts(), shelf)
    for session in sessions:
        assert session.record is not None
        archive.turn_ended(session.namespace, CHAIN[2], session.record)
        archive.session_changed(session)
    shelf.kept = [CapsuleRow(KEY, SPANS, (), None, pinned=False, used_at=time.time())]
    return shelf


def revived(shelf: Shelf, ttl_s: float = 3600.0) -> tuple[SessionRegistry, Transcripts]:
    sessions, transcripts = SessionRegistry(8, ttl_s), Transcripts()
    revive(sessions, transcripts, Store(), shelf, time.time())
    return sessions, transcripts


def test_a_session_comes_back_as_it_was() -> None:
    before = a_session()
    sessions, transcripts = revived(left_behind(before))
    back = sessions.named("one")
    assert back is not None
    assert replace(session_row(back), used_at=0) == replace(session_row(before), used_at=0)
    assert back.newest == KEY
    assert abs(back.last_used_at - before.last_used_at) < 5
    known = transcripts.session("one")
    assert known is not None
    assert (known.namespace, known.conversation) == ("key/a", before.conversation)
    record = transcripts.longest("key/a", CHAIN)
    assert record is not None
    assert record is back.record
    assert record is known.record
    assert np.array_equal(record.tokens, ids([3, 16, 1, 2, 17, 1]))
    back.journal.append([5], SpanKind.PREFILL)  # it is not a view of what cannot be written


def test_the_journal_of_a_cancelled_turn_comes_back_without_its_marks() -> None:
    session = a_session()
    session.journal.chain = chain_of((user("another "), user("conversation ")))
    sessions, transcripts = revived(left_behind(session))
    back, known = sessions.named("one"), transcripts.session("one")
    assert back is not None
    assert known is not None
    assert (back.journal.marks, back.turns) == ((), [])
    assert (back.chain, back.conversation) == (CHAIN, session.conversation)
    assert known.record is back.record is not None, "found by the conversation's own chain"


def test_a_capsule_that_did_not_come_back_is_nobodys_newest() -> None:
    shelf = left_behind(a_session())
    shelf.kept = []
    back = revived(shelf)[0].named("one")
    assert back is not None
    assert back.newest is None


def test_what_was_idle_for_longer_than_the_ttl_leaves_the_manifest() -> None:
    shelf = left_behind(a_session())
    shelf.by_id["one"] = replace(shelf.by_id["one"], used_at=time.time() - 7200)
    key = ("key/a", CHAIN[2])
    shelf.by_digest[key] = replace(shelf.by_digest[key], used_at=time.time() - 7200)
    sessions, transcripts = revived(shelf)
    assert len(sessions) == len(transcripts) == 0
    assert shelf.by_id == {}
    assert shelf.by_digest == {}


def test_a_clock_that_was_set_back_makes_nothing_newer_than_now() -> None:
    shelf = left_behind(a_session())
    shelf.by_id["one"] = replace(shelf.by_id["one"], used_at=time.time() + 7200)
    back = revived(shelf)[0].named("one")
    assert back is not None
    assert back.last_used_at <= time.monotonic()


def test_a_row_that_can_not_be_read_costs_itself_alone(caplog: pytest.LogCaptureFixture) -> None:
    shelf = left_behind(a_session(), a_session("two"))
    shelf.by_id["one"] = replace(shelf.by_id["one"], conversation="{")
    sessions, _ = revived(shelf)
    assert [session.id for session in sessions.all()] == ["two"]
    assert "one" not in shelf.by_id
    assert [record for record in caplog.records if "session one" in record.getMessage()]


def test_the_most_recently_used_sessions_come_back_when_there_are_too_many() -> None:
    shelf = left_behind(*(a_session(name) for name in "abcdefghijk"))
    for age, name in enumerate("abcdefghijk"):
        shelf.by_id[name] = replace(shelf.by_id[name], used_at=time.time() - age)
    sessions, _ = revived(shelf)
    assert [session.id for session in sessions.all()] == list("hgfedcba")


def test_a_record_that_leaves_memory_leaves_the_disk() -> None:
    record = a_session().record
    assert record is not None
    shelf = Shelf()
    archive = Archive(Transcripts(budget_bytes=record_bytes(record)), shelf)
    archive.turn_ended("key/a", b"old", record)
    archive.turn_ended("key/a", b"new", replace(record, tokens=record.tokens.copy()))
    assert list(shelf.by_digest) == [("key/a", b"new")]
    archive.turn_ended("key/a", b"huge", replace(record, text="x" * 10_000))
    assert ("key/a", b"huge") not in shelf.by_digest


def test_a_session_that_is_gone_is_known_to_nobody() -> None:
    shelf, transcripts = Shelf(), Transcripts()
    archive = Archive(transcripts, shelf)
    archive.session_changed(a_session())
    assert transcripts.session("one") is not None
    archive.session_gone("one")
    assert transcripts.session("one") is None
    assert shelf.by_id == {}
