"""Sessions and turns come back as they were, the newest row of each, within their budget."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from disk_harness import FINGERPRINT, ROOMY, FakePart, key, save

from capserve.serving.capsules.rows import SessionRow, TurnEnd, TurnRow
from capserve.serving.disk.codec import row_check
from capserve.serving.disk.manifest import Manifest
from capserve.serving.disk.tier import DiskTier
from capserve.serving.journal import Span, SpanKind, TurnMark
from capserve.text.messages import Message, ToolCall
from capserve.text.prompt import TurnRecord

SESSION = SessionRow(
    id="s-1",
    namespace="k/a",
    parent_id="s-0",
    tokens=np.arange(7, dtype="<i4").tobytes(),
    spans=(Span(SpanKind.PREFILL, 0, 5), Span(SpanKind.DECODE, 5, 7)),
    marks=(TurnMark(5, 2), TurnMark(7, 3)),
    turns=(TurnEnd(7, 3),),
    chain=(b"0" * 16, b"1" * 16),
    newest=key("tip", 6),
    conversation='{"messages": ["…"]}',
    used_at=12.5,
)


def turn(digest: str, size: int = 10, supersedes: str | None = None, at: float = 1.0) -> TurnRow:
    messages = (
        Message("system", "be \ud800 brief", name="n", breakpoint=True),
        Message("assistant", "", reasoning="", tool_calls=(ToolCall("f", '{"a": 1 }', "c1"),)),
        Message("tool", "done", tool_call_id="c1"),
    )
    record = TurnRecord(
        messages,
        "x" * size + "\udfff",
        np.array([1, 2, 3], dtype=np.int32),
        ({"type": "function", "function": {"name": "f", "b": 1, "a": [2]}},),
        {"enable_thinking": False},
    )
    older = None if supersedes is None else supersedes.encode()
    return TurnRow("k/a", digest.encode(), older, record, at)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    opened = DiskTier.open(tmp_path / "d", FINGERPRINT, ROOMY)
    yield opened
    opened.close(5)


def test_a_session_comes_back_as_it_was(tier: DiskTier) -> None:
    bare = replace(SESSION, id="s-2", parent_id=None, newest=None, chain=(), used_at=1.0)
    tier.put_session(SESSION)
    tier.put_session(bare)
    tier.close(5)
    again = DiskTier.open(tier.directory, FINGERPRINT, ROOMY)
    assert again.sessions() == [bare, SESSION]
    again.drop_session("s-2")
    assert again.flush(5)
    assert again.sessions() == [SESSION]
    again.close(5)


def test_a_turn_comes_back_as_it_was(tier: DiskTier) -> None:
    wrote = turn("one")
    tier.put_turn(wrote)
    assert tier.flush(5)
    (found,) = tier.turns()
    assert (found.namespace, found.digest, found.supersedes) == ("k/a", b"one", None)
    assert found.record.messages == wrote.record.messages
    assert found.record.messages[0].breakpoint
    assert found.record.text == wrote.record.text
    assert found.record.tokens.dtype == np.int32
    assert found.record.tokens.tolist() == [1, 2, 3]
    assert repr(found.record.tools) == repr(wrote.record.tools), "the order of keys counts"
    assert found.record.template_kwargs == {"enable_thinking": False}
    tier.drop_turns("k/other", [b"one"])
    assert tier.flush(5)
    assert len(tier.turns()) == 1
    tier.drop_turns("k/a", [b"one"])
    assert tier.flush(5)
    assert tier.turns() == []


def test_a_newer_row_of_a_session_takes_the_place_of_one_that_waits(tier: DiskTier) -> None:
    packing, may_go = threading.Event(), threading.Event()

    class Slow(FakePart):
        def pack(self):  # type: ignore[no-untyped-def]
            packing.set()
            assert may_go.wait(5)
            return super().pack()

    save(tier, "slow", [Slow("slow")])
    assert packing.wait(5)
    before = tier.pending_bytes
    for n in range(50):
        tier.put_session(replace(SESSION, used_at=float(n)))
    assert tier.pending_bytes == before + len(SESSION.tokens) + len(SESSION.conversation)
    may_go.set()
    assert tier.flush(5)
    assert [row.used_at for row in tier.sessions()] == [49.0]
    assert tier.pending_bytes == 0


def test_superseded_turns_leave_before_the_oldest(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path)

    def put(row: TurnRow, budget: int) -> list[bytes]:
        manifest.begin()
        manifest.put_turn(row, budget)
        manifest.commit()
        return sorted(found for (found,) in manifest._db.execute("SELECT digest FROM turns"))

    put(turn("a", 1000, at=1.0), ROOMY)
    size = manifest.turn_bytes
    put(turn("b", 1000, at=2.0), ROOMY)
    assert put(turn("c", 1000, supersedes="b", at=3.0), 2 * size) == [b"a", b"c"]
    assert put(turn("d", 1000, at=4.0), 2 * size) == [b"c", b"d"]
    assert put(turn("d", 1000, at=5.0), 2 * size) == [b"c", b"d"], "counted twice"
    assert put(turn("huge", 100_000), 2 * size) == [b"c", b"d"], "it emptied the table"
    assert manifest.turn_bytes == 2 * size
    manifest.close()


def test_the_newest_turns_are_read_when_not_all_are_wanted(tier: DiskTier) -> None:
    for n in range(5):
        tier.put_turn(turn(str(n), 10_000, at=float(n)))
    assert tier.flush(5)
    assert [row.digest for row in tier.turns(most_bytes=25_000)] == [b"3", b"4"]
    assert len(tier.turns()) == 5


@pytest.mark.parametrize("damage", ["spans = x'00'", "used_at = 3.0", "id = x'ff'"])
def test_a_damaged_session_is_dropped_alone(
    damage: str, tier: DiskTier, caplog: pytest.LogCaptureFixture
) -> None:
    saved = save(tier, "one", [FakePart("one")])
    tier.put_session(SESSION)
    other = replace(SESSION, id="s-2", used_at=99.0)
    tier.put_session(other)
    tier.put_turn(turn("kept"))
    assert tier.flush(5)
    with sqlite3.connect(tier.directory / "manifest.sqlite3") as db:
        db.execute(f"UPDATE sessions SET {damage} WHERE used_at = 12.5")
    db.close()
    assert tier.sessions() == [other]
    assert len(caplog.records) == 1
    assert tier.flush(5)
    assert tier.sessions() == [other]
    assert len(caplog.records) == 1, "it was not removed"
    assert tier.holds(saved.key)
    assert [row.digest for row in tier.turns()] == [b"kept"]
    tier.check()


@pytest.mark.parametrize("rest", [b"{}", b"[" * 100_000, b'{"messages": [{"later": null}]}'])
def test_a_turn_that_makes_no_sense_is_dropped_alone(rest: bytes, tier: DiskTier) -> None:
    saved = save(tier, "one", [FakePart("one")])
    tier.put_turn(turn("bad", at=1.0))
    tier.put_turn(turn("good", at=2.0))
    tier.put_session(SESSION)
    assert tier.flush(5)
    with sqlite3.connect(tier.directory / "manifest.sqlite3") as db:
        found = db.execute("SELECT * FROM turns WHERE digest = x'626164'").fetchone()
        columns = (*found[:5], rest, found[6])
        db.execute(
            "UPDATE turns SET rest = ?, row_check = ? WHERE digest = x'626164'",
            (rest, row_check(*columns)),
        )
    db.close()
    assert [row.digest for row in tier.turns()] == [b"good"]
    assert tier.flush(5)
    tier.close(5)
    again = DiskTier.open(tier.directory, FINGERPRINT, ROOMY)
    assert [row.key for row in again.capsules()] == [saved.key]
    assert again.sessions() == [SESSION]
    assert [row.digest for row in again.turns()] == [b"good"]
    again.close(5)


def test_damaged_capsules_and_parts_go_and_the_others_stay(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path / "d", FINGERPRINT, ROOMY)
    rows = [save(tier, str(n), [FakePart(str(n))]) for n in range(4)]
    tier.close(5)
    with sqlite3.connect(tmp_path / "d" / "manifest.sqlite3") as db:
        db.execute("UPDATE capsules SET spans = x'00' WHERE digest = ?", (rows[0].key.digest,))
        db.execute("UPDATE parts SET nbytes = 7 WHERE name = ?", (FakePart("1").name,))
        db.execute(
            "UPDATE capsules SET position = position + 1 WHERE digest = ?", (rows[2].key.digest,)
        )
    db.close()
    tier = DiskTier.open(tmp_path / "d", FINGERPRINT, ROOMY)
    assert [row.key for row in tier.capsules()] == [rows[3].key]
    tier.check()
    tier.close(5)
