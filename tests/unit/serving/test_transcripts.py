"""Finished turns are found by what their messages mean, in their own namespace alone."""

from __future__ import annotations

import threading

import pytest
from serving_harness import ids

from capserve.serving.sessions.transcripts import Transcripts, record_bytes
from capserve.text.messages import Conversation, Message
from capserve.text.prompt import TurnRecord


def record(text: str, tokens: int = 10) -> TurnRecord:
    return TurnRecord((Message("user", text),), text, ids([1] * tokens))


CHAIN = (b"none", b"one", b"two", b"three")


def test_the_record_of_the_longest_start_is_found() -> None:
    transcripts = Transcripts()
    one, two = record("1"), record("2")
    transcripts.publish("k/a", b"one", one)
    transcripts.publish("k/a", b"two", two)
    assert transcripts.longest("k/a", CHAIN) is two
    assert transcripts.longest("k/a", CHAIN[:2]) is one
    assert transcripts.longest("k/a", CHAIN[:1]) is None
    assert transcripts.longest("k/b", CHAIN) is None, "a namespace saw another's text"


def test_the_newest_of_equal_conversations_wins_and_counts_once() -> None:
    transcripts = Transcripts()
    transcripts.publish("k/a", b"one", record("first"))
    newer = record("second")
    transcripts.publish("k/a", b"one", newer)
    assert transcripts.longest("k/a", CHAIN) is newer
    assert transcripts.used_bytes == record_bytes(newer)


def test_the_least_recently_used_record_leaves_when_the_budget_is_full() -> None:
    size = record_bytes(record("x"))
    transcripts = Transcripts(budget_bytes=2 * size)
    transcripts.publish("k/a", b"one", record("x"))
    transcripts.publish("k/a", b"two", record("x"))
    assert transcripts.longest("k/a", CHAIN[:2]) is not None
    transcripts.publish("k/a", b"three", record("x"))
    assert transcripts.longest("k/a", CHAIN[:2]) is not None
    assert transcripts.longest("k/a", (b"two",)) is None
    assert transcripts.used_bytes == 2 * size
    transcripts.publish("k/a", b"huge", record("x", tokens=10_000))
    assert transcripts.longest("k/a", (b"huge",)) is None
    assert len(transcripts) == 2, "one that can never fit emptied the index"


def test_a_superseded_record_leaves_before_the_oldest() -> None:
    size = record_bytes(record("x"))
    transcripts = Transcripts(budget_bytes=2 * size)
    transcripts.publish("k/a", b"other", record("x"))
    transcripts.publish("k/a", b"one", record("x"))
    transcripts.publish("k/a", b"two", record("x"), supersedes=b"one")
    assert transcripts.longest("k/a", (b"one",)) is None
    assert transcripts.longest("k/a", (b"other",)) is not None
    assert transcripts.longest("k/a", (b"two",)) is not None
    transcripts.publish("k/b", b"three", record("x"), supersedes=b"two")
    assert transcripts.longest("k/a", (b"two",)) is not None, "another namespace's went first"


def test_text_is_charged_by_what_it_takes() -> None:
    tokens = record("x").tokens.nbytes
    assert record_bytes(record("a" * 100)) == tokens + 2 * 100
    for text in ("é" * 100, "語" * 100, "🦫" * 100):
        assert record_bytes(record(text)) == tokens + 2 * 400 >= tokens + 2 * len(text.encode())


def test_a_published_record_can_not_be_changed() -> None:
    transcripts = Transcripts()
    transcripts.publish("k/a", b"one", record("x"))
    found = transcripts.longest("k/a", CHAIN)
    assert found is not None
    with pytest.raises(ValueError, match="read-only"):
        found.tokens[0] = 2


def test_one_thread_writes_while_others_read() -> None:
    transcripts = Transcripts(budget_bytes=5 * record_bytes(record("x")))
    digests = [bytes([n]) for n in range(20)]
    errors: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(300):
                transcripts.longest("k/a", digests)
        except BaseException as error:  # noqa: BLE001 - shown by the assert below
            errors.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for n in range(1000):
        transcripts.publish("k/a", digests[n % 20], record("x"))
    for reader in readers:
        reader.join(10.0)
    assert errors == []
    assert transcripts.used_bytes == sum(
        record_bytes(kept) for kept in transcripts._records.values()
    )


def test_publishing_tells_which_records_left() -> None:
    size = record_bytes(record("1"))
    transcripts = Transcripts(budget_bytes=2 * size)
    assert transcripts.publish("k/a", b"one", record("1")) == []
    assert transcripts.publish("k/a", b"two", record("2")) == []
    assert transcripts.publish("k/a", b"three", record("3")) == [("k/a", b"one")]
    assert transcripts.publish("k/a", b"huge", record("4", tokens=10_000)) == [("k/a", b"huge")]


def test_a_session_is_known_by_its_id_until_it_is_dropped() -> None:
    transcripts, told = Transcripts(), record("told")
    transcripts.set_session("s", "k/a", Conversation(told.messages), told)
    known = transcripts.session("s")
    assert known is not None
    assert (known.namespace, known.record) == ("k/a", told)
    transcripts.drop_session("s")
    assert transcripts.session("s") is None
    transcripts.drop_session("s")
