"""What a session remembers of its turns, and how a turn names one."""

from __future__ import annotations

from serving_harness import (
    END,
    RecordingSink,
    Serving,
    cold_reply,
    failed,
    finished,
    make_prompt,
    serving,
    some_words,
    system,
    user,
)

from capserve.engine.seam import Sampling
from capserve.serving.sessions.archive import Archive
from capserve.serving.sessions.registry import Session
from capserve.serving.sessions.transcripts import Transcripts
from capserve.serving.turn import Finished, TurnEvent
from capserve.testing.fake_engine import FakeEngine, fake_limits
from capserve.text.messages import Conversation, Message
from capserve.text.output import OutputSpec
from capserve.text.prompt import TurnRecord

SYSTEM = system(some_words(150, seed=1))
QUESTION = user(some_words(60, seed=2))
SAMPLING = Sampling(end_tokens=(END,), drafts=3)


def scripted(*tokens: int) -> FakeEngine:
    return FakeEngine(fake_limits(), script=lambda context: tokens)


def session_of(s: Serving, done: Finished) -> Session:
    assert done.metrics.session_id is not None
    session = s.sessions.named(done.metrics.session_id)
    assert session is not None
    return session


def test_every_finished_turn_leaves_its_conversation_and_where_it_ended() -> None:
    with serving(engine=scripted(20, 21, END)) as s:
        talk = [SYSTEM, QUESTION]
        ends = []
        for seed in range(3):
            done = finished(s.ask(s.build(talk))[0])
            session = session_of(s, done)
            talk.append(done.message)
            assert session.conversation == Conversation(tuple(talk))
            ends.append((len(session.journal) - 1, len(talk)))  # the end token is pending
            assert [(end.position, end.messages) for end in session.turns] == ends
            assert session.record is not None
            assert session.record.messages == tuple(talk)
            talk.append(user(some_words(5, seed=seed)))
        assert len(s.sessions) == 1
        assert not session.busy


def test_a_turn_cut_by_its_length_or_by_a_stop_string_is_remembered_but_not_to_be_taken_over() -> (
    None
):
    for options in ({"max_tokens": 2}, {"output": OutputSpec(stop=("22 ",))}):
        with serving(engine=scripted(20, 21, 22, 23, END)) as s:
            done = finished(s.ask(make_prompt([QUESTION]), **options)[0])
            session = session_of(s, done)
            assert session.conversation == Conversation((QUESTION, done.message))
            assert [end.messages for end in session.turns] == [2]
            assert session.turns[0].position <= len(session.journal)
            assert session.record is None


def test_a_cancelled_turn_leaves_what_its_client_had_seen_before() -> None:
    with serving() as s:
        first = finished(s.ask(make_prompt([QUESTION]))[0])
        session = session_of(s, first)
        before = (session.conversation, list(session.turns))
        longer = make_prompt([QUESTION, first.message, user(some_words(300, seed=5))])
        gate = s.engine.hold("extend", 2)
        item, sink = s.submit(longer)
        gate.wait_arrived()
        assert session.busy
        item.cancel.cancel()
        gate.open()
        failed(sink.wait())
        assert (session.conversation, session.turns) == before
        assert not session.busy


def test_a_branch_takes_over_the_turns_before_it_and_names_its_parent() -> None:
    with serving(engine=scripted(20, 21, END)) as s:
        talk = [SYSTEM, QUESTION]
        talk.append(finished(s.ask(s.build(talk))[0]).message)
        talk.append(user(some_words(5, seed=5)))
        first = finished(s.ask(s.build(talk))[0])
        edited = [*talk[:-1], user(some_words(5, seed=6))]
        branch = finished(s.ask(s.build(edited))[0])
        assert branch.metrics.prefix_action == "truncate"
        parent, child = session_of(s, first), session_of(s, branch)
        assert child.parent_id == parent.id
        assert child.turns[:-1] == parent.turns[:1]
        assert [end.messages for end in child.turns] == [3, 5]


def test_a_named_session_goes_on_whatever_its_journal_holds() -> None:
    with serving() as s:
        first = finished(s.ask(make_prompt([SYSTEM, QUESTION]))[0])
        name = first.metrics.session_id
        for prompt in (
            make_prompt([SYSTEM, QUESTION, first.message, user(some_words(8))]),  # goes on
            make_prompt([SYSTEM, user(some_words(40, seed=4))]),  # an edit
            make_prompt([user(some_words(30, seed=9))]),  # another conversation
        ):
            end, sink = s.ask(prompt, session_id=name)
            assert finished(end).metrics.session_id == name
            assert sink.tokens == cold_reply(s.engine.limits, prompt, SAMPLING, 8)
            session = session_of(s, finished(end))
            assert session.conversation is not None
            assert session.conversation.messages[:-1] == prompt.conversation.messages
        assert len(s.sessions) == 1
        assert [end.messages for end in session.turns] == [2], "the edits left their turns"


def test_a_session_that_is_not_there_or_another_namespaces_is_not_found() -> None:
    with serving() as s:
        first = finished(s.ask(make_prompt([QUESTION]))[0])
        for options in (
            {"session_id": "nobody"},
            {"session_id": first.metrics.session_id, "namespace": "key/b"},
        ):
            error = failed(s.ask(make_prompt([QUESTION]), **options)[0])
            assert (error.status, error.param) == (404, "session_id")
        assert s.worker.health()["faults"] == 0
        again = finished(s.ask(make_prompt([QUESTION, first.message, QUESTION]))[0])
        assert again.metrics.prefix_action == "append", "a refused turn cost the hot state"


def test_turns_that_name_one_session_run_in_order_and_never_inside_each_other() -> None:
    ends: list[str] = []

    class Noting(RecordingSink):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def deliver(self, event: TurnEvent) -> None:
            super().deliver(event)
            if self.ends:
                ends.append(self.name)

    with serving(min_slice_ms=0.0) as s:
        first = finished(s.ask(make_prompt([QUESTION]))[0])
        name = first.metrics.session_id
        gate = s.engine.hold("extend", 2)
        long = make_prompt([user(some_words(2000, seed=3))])
        sinks = [s.submit(long, sink=Noting("long"), session_id=name)[1]]
        gate.wait_arrived()
        for label, session_id in (("same", name), ("same again", name), ("other", None)):
            prompt = make_prompt([user(some_words(10, seed=len(sinks)))])
            sinks.append(s.submit(prompt, sink=Noting(label), session_id=session_id)[1])
        gate.open()
        for sink in sinks:
            finished(sink.wait())
        assert ends == ["other", "long", "same", "same again"]


def test_what_a_turn_leaves_reaches_the_archive_before_its_client_hears_the_end() -> None:
    class Watched(Archive):
        def turn_ended(
            self,
            namespace: str,
            digest: bytes,
            record: TurnRecord,
            supersedes: bytes | None = None,
        ) -> None:
            told.append("turn")
            super().turn_ended(namespace, digest, record, supersedes)

        def session_changed(self, session: Session) -> None:
            assert session.conversation is not None
            told.append("session")
            super().session_changed(session)

        def session_gone(self, session_id: str) -> None:
            told.append("gone")

    class Listens(RecordingSink):
        def deliver(self, event: TurnEvent) -> None:
            if isinstance(event, Finished):
                told.append("news")
            super().deliver(event)

    told: list[str] = []
    archive = Watched(Transcripts())
    with serving(engine=scripted(20, 21, END), archive=archive, max_active_sessions=1) as s:
        finished(s.ask(make_prompt([QUESTION]), sink=Listens())[0])
        assert told == ["turn", "session", "news"]
        told.clear()
        finished(s.ask(make_prompt([QUESTION]), sink=Listens(), max_tokens=1)[0])
        assert told == ["gone", "session", "news"], "nothing to take over, and a session too many"


def test_the_reply_of_a_named_session_is_a_message_of_its_conversation() -> None:
    with serving(engine=scripted(20, 21, END)) as s:
        done = finished(s.ask(make_prompt([QUESTION]))[0])
        conversation = session_of(s, done).conversation
        assert conversation is not None
        assert conversation.messages[-1] == Message("assistant", "20 21 ")
