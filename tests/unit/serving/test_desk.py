"""Sessions are listed, forked, cut back, pinned, dropped and carried elsewhere by their owner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from serving_harness import (
    WAIT_S,
    Serving,
    WordRecords,
    finished,
    make_prompt,
    serving,
    some_words,
    system,
    user,
)

from capserve.errors import ConflictError, InvalidRequestError
from capserve.serving import bundle
from capserve.serving.archive import Archive
from capserve.serving.desk import OverBudgetError, SessionDesk, SessionNotFoundError
from capserve.serving.keeper import Keeper
from capserve.serving.orders import (
    Deleted,
    DeleteSession,
    Exported,
    ExportSession,
    Forked,
    ForkSession,
    Imported,
    ImportSession,
    ListSessions,
    Pinned,
    PinSession,
    SessionInfo,
    SessionOrder,
    SessionPage,
    ShowSession,
    Undone,
    UndoSession,
)
from capserve.testing.fake_engine import FakeEngine, fake_limits
from capserve.text.messages import Message

OWNER = "key"
FRAME = 5
"""Tokens around a new message's own: the pending one and the end of the reply before it, its role
and its end, and the generation prompt."""
SYSTEM, QUESTION = system(some_words(150)), user(some_words(20, seed=1))

R = TypeVar("R")


class LateDesk:
    """A desk that is made once the things it works on are there."""

    desk: SessionDesk | None = None

    def execute(self, order: Any, /) -> Any:
        assert self.desk is not None
        return self.desk.execute(order)


class Office:
    """A worker with a desk, and short ways to both."""

    def __init__(self, s: Serving) -> None:
        self.s = s

    def order(self, order: SessionOrder, kind: type[R]) -> R:
        result = self.s.worker.order(order).result(WAIT_S)
        assert isinstance(result, kind)
        return result

    def talk(self, turns: int, namespace: str = "key/a") -> tuple[str, list[Message]]:
        """A session of some turns: its id and its messages."""
        messages, session_id = [SYSTEM], ""
        for turn in range(turns):
            messages.append(user(some_words(20, seed=turn + 1)))
            end = finished(self.ask(messages, namespace))
            messages.append(end.message)
            session_id = end.metrics.session_id or ""
        return session_id, messages

    def ask(self, messages: list[Message], namespace: str = "key/a", **options: Any) -> Any:
        prompt = self.s.build(messages, namespace)
        return self.s.ask(prompt, namespace=namespace, **options)[0]

    def show(self, session_id: str) -> SessionInfo:
        return self.order(ShowSession(OWNER, session_id), SessionInfo)

    def tokens(self, session_id: str) -> list[int]:
        session = self.s.sessions.named(session_id)
        assert session is not None
        return session.journal.tokens.tolist()


@contextmanager
def office(**options: Any) -> Iterator[Office]:
    late = LateDesk()
    with serving(desk=late, **options) as s:
        keeper = Keeper(s.engine, s.store, s.sessions)
        late.desk = SessionDesk(
            s.engine,
            s.store,
            keeper,
            s.sessions,
            s.transcripts,
            Archive(s.transcripts),
            WordRecords(),
        )
        yield Office(s)


def test_a_session_shows_every_state_on_its_journal_and_where_messages_end() -> None:
    with office() as o:
        session_id, messages = o.talk(2)
        info = o.show(session_id)
        assert (info.turns, info.messages, info.hot, info.busy) == (2, len(messages), True, False)
        assert info.tokens == len(o.tokens(session_id))
        assert info.boundaries is not None
        positions = [b.position for b in info.boundaries]
        assert positions == sorted(positions)
        assert positions[-1] in (info.tokens, info.tokens - 1)
        ends = [(b.kind, b.messages) for b in info.boundaries if b.messages is not None]
        assert ends == [("prompt_end", 2), ("turn_end", 3), ("prompt_end", 4), ("turn_end", 5)]
        assert all(b.tier == "host" and b.nbytes > 0 for b in info.boundaries)


def test_a_list_goes_page_by_page_from_the_most_recently_used() -> None:
    with office() as o:
        ids = [o.talk(1, f"key/{name}")[0] for name in "abc"]
        first = o.order(ListSessions(OWNER, limit=2), SessionPage)
        assert [info.id for info in first.sessions] == [ids[2], ids[1]]
        assert first.has_more
        assert first.sessions[0].boundaries is None
        rest = o.order(ListSessions(OWNER, limit=2, after=ids[1]), SessionPage)
        assert ([info.id for info in rest.sessions], rest.has_more) == ([ids[0]], False)


def test_one_owner_never_sees_anothers_sessions() -> None:
    with office() as o:
        session_id, _ = o.talk(1)
        assert o.order(ListSessions("other"), SessionPage).sessions == ()
        for order in (
            ShowSession("other", session_id),
            ForkSession("other", session_id),
            UndoSession("other", session_id),
            PinSession("other", session_id),
            DeleteSession("other", session_id),
            ExportSession("other", session_id),
            ListSessions("other", after=session_id),
        ):
            with pytest.raises(SessionNotFoundError):
                o.order(order, object)
        assert o.show(session_id).turns == 1


def test_forks_are_independent_and_none_of_them_reads_the_shared_part_again() -> None:
    with office() as o:
        source, messages = o.talk(2)
        before = o.tokens(source)
        done = o.order(ForkSession(OWNER, source, n=3), Forked)
        assert len({info.id for info in done.sessions} | {source}) == 4
        for seed, fork in enumerate(done.sessions):
            assert (fork.parent_id, fork.tokens, fork.turns) == (source, len(before), 2)
            asked = [*messages, user(some_words(10, seed=50 + seed))]
            end = finished(o.ask(asked, session_id=fork.id))
            assert end.metrics.session_id == fork.id
            assert end.metrics.new_prefill_tokens <= 10 + FRAME
            assert o.tokens(fork.id)[: len(before)] == before
            assert o.show(fork.id).turns == 3
        assert o.tokens(source) == before, "a branch wrote into its parent"


@pytest.mark.parametrize("turns", [1, 2])
def test_an_undo_goes_back_by_turns_and_what_follows_is_restored(turns: int) -> None:
    with office() as o:
        session_id, messages = o.talk(3)
        o.talk(1, "key/other")  # so that the session is not hot
        done = o.order(UndoSession(OWNER, session_id, turns), Undone)
        kept = len(messages) - 2 * turns
        assert (done.removed_turns, done.session.messages) == (turns, kept)
        assert done.session.turns == 3 - turns
        asked = [*messages[:kept], user(some_words(9, seed=70))]
        end = finished(o.ask(asked, session_id=session_id))
        assert end.metrics.session_id == session_id
        assert end.metrics.new_prefill_tokens <= 9 + FRAME
        assert o.show(session_id).turns == 3 - turns + 1


def test_an_undo_of_the_hot_session_never_leaves_the_state_leading() -> None:
    with office() as o:
        session_id, messages = o.talk(2)
        assert o.show(session_id).hot
        o.order(UndoSession(OWNER, session_id), Undone)
        assert not o.show(session_id).hot
        again = finished(o.ask(messages[:4], session_id=session_id))
        assert again.message == messages[4], "the same question had another answer"


def test_what_was_undone_can_be_taken_up_again_by_resending_it() -> None:
    with office() as o:
        session_id, messages = o.talk(2)
        o.order(UndoSession(OWNER, session_id), Undone)
        end = finished(o.ask([*messages, user(some_words(7, seed=71))]))
        assert end.metrics.new_prefill_tokens <= 7 + FRAME


def test_an_undo_of_more_turns_than_there_are_names_both_numbers() -> None:
    with office() as o:
        session_id, _ = o.talk(2)
        with pytest.raises(InvalidRequestError, match=r"at most 2.*got 3") as refusal:
            o.order(UndoSession(OWNER, session_id, turns=3), Undone)
        assert refusal.value.param == "turns"
        assert o.show(session_id).turns == 2
        assert o.order(UndoSession(OWNER, session_id, turns=2), Undone).session.tokens == 0


def test_a_fork_from_any_boundary_and_a_refusal_that_names_those_there_are() -> None:
    with office() as o:
        session_id, _ = o.talk(2)
        boundaries = o.show(session_id).boundaries or ()
        ends = [b for b in boundaries if b.messages is not None]
        for boundary in ends:
            order = ForkSession(OWNER, session_id, boundary=boundary.position)
            [fork] = o.order(order, Forked).sessions
            assert fork.messages == boundary.messages
            assert fork.tokens - boundary.position == (boundary.kind == "turn_end")
        with pytest.raises(InvalidRequestError) as refusal:
            o.order(ForkSession(OWNER, session_id, boundary=77), Forked)
        assert all(str(b.position) in refusal.value.message for b in ends)
        assert "77" in refusal.value.message


def test_the_number_of_forks_is_bounded_by_both_numbers() -> None:
    with office(max_active_sessions=5) as o:
        session_id, _ = o.talk(1)
        with pytest.raises(InvalidRequestError, match="1 to 4, got 5"):
            o.order(ForkSession(OWNER, session_id, n=5), Forked)
        forks = o.order(ForkSession(OWNER, session_id, n=4), Forked).sessions
        alive = {session.id for session in o.s.sessions.all()}
        assert {fork.id for fork in forks} <= alive
        assert session_id in alive


def test_a_pin_lies_where_it_was_asked_for_and_can_be_released() -> None:
    with office() as o:
        session_id, _ = o.talk(2)
        boundaries = o.show(session_id).boundaries or ()
        first, newest = boundaries[0].position, boundaries[-1].position
        order = PinSession(OWNER, session_id, first)
        assert o.order(order, Pinned) == Pinned(first, pinned=True)
        assert o.order(PinSession(OWNER, session_id), Pinned).position == newest
        pins = [b.pinned for b in o.show(session_id).boundaries or ()]
        assert pins[0]
        assert pins[-1]
        assert sum(pins) == 2
        o.order(PinSession(OWNER, session_id, first, pinned=False), Pinned)
        assert not (o.show(session_id).boundaries or ())[0].pinned
        with pytest.raises(InvalidRequestError, match=f"{newest}.*got 3"):
            o.order(PinSession(OWNER, session_id, 3), Pinned)


def test_a_delete_takes_the_states_that_nobody_else_goes_through() -> None:
    with office() as o:
        source, messages = o.talk(2)
        [fork] = o.order(ForkSession(OWNER, source, turns=1), Forked).sessions
        o.order(PinSession(OWNER, source), Pinned)
        there = o.show(source).boundaries or ()
        shared = [b.position for b in there if b.position < fork.tokens]
        done = o.order(DeleteSession(OWNER, source), Deleted)
        assert done.capsules == len(there) - len(shared) > 0
        left = [b.position for b in o.show(fork.id).boundaries or ()]
        assert left == shared
        assert o.s.transcripts.session(source) is None
        with pytest.raises(SessionNotFoundError):
            o.show(source)
        # And what it said is not known any more: the second turn is read again.
        end = finished(o.ask([*messages, user("99 ")]))
        assert end.metrics.cached_tokens < fork.tokens + 1
        assert o.s.transcripts.session(fork.id) is not None


def test_a_busy_session_is_neither_cut_nor_dropped_nor_exported() -> None:
    engine = FakeEngine(fake_limits())
    with office(engine=engine) as o:
        session_id, messages = o.talk(1)
        session = o.s.sessions.named(session_id)
        assert session is not None
        session.busy = True
        for order in (
            UndoSession(OWNER, session_id),
            DeleteSession(OWNER, session_id),
            ExportSession(OWNER, session_id),
        ):
            with pytest.raises(ConflictError):
                o.order(order, object)
        [fork] = o.order(ForkSession(OWNER, session_id), Forked).sessions
        assert fork.messages == len(messages)
        session.busy = False


def taken_over(found: bundle.Bundle, namespace: str) -> ImportSession:
    conversation = found.conversation
    assert conversation is not None
    return ImportSession(
        owner=OWNER,
        namespace=namespace,
        tokens=found.tokens,
        spans=found.spans,
        marks=found.marks,
        turns=found.turns,
        conversation=conversation,
        chain=WordRecords().chain(conversation),
        record=None,
        capsules=found.capsules,
    )


@pytest.mark.parametrize("every", [False, True])
def test_an_exported_session_goes_on_elsewhere_as_it_would_have_here(every: bool) -> None:
    with office() as o, office() as elsewhere:
        session_id, messages = o.talk(2)
        exported = o.order(ExportSession(OWNER, session_id, every), Exported)
        assert len(exported.capsules) == (len(o.show(session_id).boundaries or ()) if every else 1)
        file = b"".join(bundle.pieces(exported))
        found = bundle.read(memoryview(file), elsewhere.s.engine.limits)
        done = elsewhere.order(taken_over(found, "key/new"), Imported)
        assert (done.capsules, done.refused) == (len(exported.capsules), None)
        assert done.session.id != session_id
        assert elsewhere.tokens(done.session.id) == o.tokens(session_id)
        asked = [*messages, user(some_words(9, seed=80))]
        prompt = make_prompt(asked)
        here = finished(o.s.ask(prompt)[0])
        there = finished(
            elsewhere.s.ask(prompt, namespace="key/new", session_id=done.session.id)[0]
        )
        assert there.message == here.message
        assert there.metrics.new_prefill_tokens <= 9 + FRAME


def test_a_pin_without_room_is_refused_with_both_numbers() -> None:
    with office() as o:
        session_id, _ = o.talk(1)
        largest = (o.show(session_id).boundaries or ())[-1].nbytes
    with office(budget_bytes=int(largest * 1.5)) as o:
        session_id, _ = o.talk(1)
        with pytest.raises(OverBudgetError, match=r"needs \d+ bytes.*\d+") as refusal:
            o.order(PinSession(OWNER, session_id), Pinned)
        assert (refusal.value.status, refusal.value.code) == (503, "over_budget")
        assert not any(b.pinned for b in o.show(session_id).boundaries or ())


def test_an_import_without_room_says_so_and_what_is_missing_is_read_again() -> None:
    with office() as o, office(budget_bytes=1) as small:
        session_id, messages = o.talk(1)
        exported = o.order(ExportSession(OWNER, session_id), Exported)
        file = b"".join(bundle.pieces(exported))
        found = bundle.read(memoryview(file), small.s.engine.limits)
        done = small.order(taken_over(found, "key/new"), Imported)
        assert done.capsules == 0
        assert done.refused is not None
        prompt = make_prompt([*messages, user("99 ")])
        end = finished(small.s.ask(prompt, namespace="key/new", session_id=done.session.id)[0])
        assert end.message == finished(o.s.ask(prompt)[0]).message
        assert end.metrics.cached_tokens == 0
