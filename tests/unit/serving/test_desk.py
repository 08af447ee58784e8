"""Sessions are listed, forked, cut back, pinned, dropped and carried elsewhere by their owner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
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

from capserve.errors import CapserveError, CapsuleError, ConflictError, InvalidRequestError
from capserve.serving.capsules.keeper import Keeper
from capserve.serving.capsules.rows import CapsuleKey
from capserve.serving.journal import Journal
from capserve.serving.sessions import bundle, intake
from capserve.serving.sessions.archive import Archive
from capserve.serving.sessions.desk import OverBudgetError, SessionDesk, SessionNotFoundError
from capserve.serving.sessions.orders import (
    CapsuleImported,
    Deleted,
    DeleteSession,
    Exported,
    ExportSession,
    Forked,
    ForkSession,
    ImportCapsule,
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
from capserve.serving.sessions.registry import MAX_UNDONE, Session
from capserve.testing.fake_engine import FakeEngine, fake_limits
from capserve.text.messages import Conversation, Message

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
    )


def taken_in(o: Office, found: bundle.Bundle, namespace: str) -> Imported:
    """Every order of an import, one by one, as the api asks them."""
    orders = intake.steps(taken_over(found, namespace), found.capsules)
    try:
        order = next(orders)
        while True:
            try:
                result = o.order(order, object)
            except CapserveError as error:
                order = orders.throw(error)
            else:
                order = orders.send(result)
    except StopIteration as end:
        done: Imported = end.value
        return done


def packed(o: Office, session_id: str, *, every: bool = False) -> bytes:
    exported = o.order(ExportSession(OWNER, session_id, every), Exported)
    return b"".join(bundle.pieces(exported))


def unpacked(o: Office, file: bytes) -> bundle.Bundle:
    return bundle.read(memoryview(file), o.s.engine.limits)


@pytest.mark.parametrize("every", [False, True])
def test_an_exported_session_goes_on_elsewhere_as_it_would_have_here(every: bool) -> None:
    with office() as o, office() as elsewhere:
        session_id, messages = o.talk(2)
        exported = o.order(ExportSession(OWNER, session_id, every), Exported)
        assert len(exported.capsules) == (len(o.show(session_id).boundaries or ()) if every else 1)
        found = unpacked(elsewhere, packed(o, session_id, every=every))
        done = taken_in(elsewhere, found, "key/new")
        assert (done.capsules, done.known, done.refused) == (len(exported.capsules), 0, None)
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
        done = taken_in(small, unpacked(small, packed(o, session_id)), "key/new")
        assert done.capsules == 0
        assert done.refused is not None
        prompt = make_prompt([*messages, user("99 ")])
        end = finished(small.s.ask(prompt, namespace="key/new", session_id=done.session.id)[0])
        assert end.message == finished(o.s.ask(prompt)[0]).message
        assert end.metrics.cached_tokens == 0


def test_an_import_leaves_a_state_that_is_there_as_it_is() -> None:
    with office() as o:
        session_id, _ = o.talk(1)
        o.order(PinSession(OWNER, session_id), Pinned)
        before = o.show(session_id).boundaries or ()
        names = [part.name for part in o.s.store.get(newest(o, session_id)).capsule.parts]
        done = taken_in(o, unpacked(o, packed(o, session_id, every=True)), "key/a")
        assert (done.capsules, done.known, done.refused) == (0, len(before), None)
        assert done.session.id != session_id
        after = o.show(session_id).boundaries or ()
        assert [(b.position, b.pinned) for b in after] == [(b.position, b.pinned) for b in before]
        kept = o.s.store.get(newest(o, session_id)).capsule.parts
        assert [part.name for part in kept] == names


def newest(o: Office, session_id: str) -> CapsuleKey:
    session = o.s.sessions.named(session_id)
    assert session is not None
    assert session.newest is not None
    return session.newest


def test_an_import_gives_way_between_any_two_of_its_states() -> None:
    with office() as o, office() as elsewhere:
        session_id, _ = o.talk(3)
        found = unpacked(elsewhere, packed(o, session_id, every=True))
        orders = list(one_by_one(found))
        assert [len(getattr(order, "keys", ())) for order in orders] == [0] * len(orders)
        assert len(orders) == len(found.capsules) + 1 > 3


def one_by_one(found: bundle.Bundle) -> Iterator[SessionOrder]:
    orders = intake.steps(taken_over(found, "key/new"), found.capsules)
    order = next(orders)
    while isinstance(order, ImportCapsule):
        yield order
        order = orders.send(CapsuleImported(kept=True, known=False, refused=None))
    yield order


def test_an_import_that_fails_half_way_leaves_nothing_behind() -> None:
    with office() as o, office() as elsewhere:
        session_id, _ = o.talk(2)
        found = unpacked(elsewhere, packed(o, session_id, every=True))
        *good, last = found.capsules
        torn = replace(last, parts=(memoryview(b"torn"), *last.parts[1:]))
        bad = replace(found, capsules=(*good, torn))
        with pytest.raises(CapsuleError):
            taken_in(elsewhere, bad, "key/new")
        assert len(elsewhere.s.store.entries_in("key/new")) == 0
        assert len(elsewhere.s.sessions) == 0


@pytest.mark.parametrize(
    "error", [MemoryError("no"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_an_import_without_memory_is_refused_and_the_server_goes_on(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    with office() as o, office() as elsewhere:
        session_id, _ = o.talk(1)
        found = unpacked(elsewhere, packed(o, session_id))

        def fails(*_: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(elsewhere.s.engine, "unpack", fails)
            with pytest.raises(OverBudgetError, match="no memory"):
                taken_in(elsewhere, found, "key/new")
        assert taken_in(elsewhere, found, "key/new").capsules == 1


def test_a_delete_takes_what_was_undone_before_too_unless_another_session_has_it() -> None:
    for shared in (False, True):
        with office() as o:
            session_id, messages = o.talk(2)
            digest = WordRecords().chain(Conversation(tuple(messages)))[-1]
            assert o.s.transcripts.longest("key/a", [digest]) is not None
            if shared:
                o.order(ForkSession(OWNER, session_id), Forked)
            o.order(UndoSession(OWNER, session_id), Undone)
            o.order(DeleteSession(OWNER, session_id), Deleted)
            assert (len(o.s.store.entries_in("key/a")) > 0) == shared
            assert (o.s.transcripts.longest("key/a", [digest]) is not None) == shared


def test_what_is_remembered_as_undone_is_bounded() -> None:
    session = Session("one", "key/a", Journal(), 0.0)
    for batch in range(4):
        keys = [CapsuleKey("key/a", batch * MAX_UNDONE + i, b"d" * 16) for i in range(MAX_UNDONE)]
        session.remember_undone(keys, [b"%d" % key.position for key in keys])
    assert list(session.undone.keys) == keys
    assert len(session.undone.turns) == MAX_UNDONE


def test_every_fork_that_is_listed_is_there_however_many_sessions_are_busy() -> None:
    with office(max_active_sessions=4) as o:
        session_id, _ = o.talk(1)
        other = o.s.sessions.create("key/a", Journal(), 0.0)
        other.busy = True
        with pytest.raises(InvalidRequestError, match="n must be 1 to 2, got 3"):
            o.order(ForkSession(OWNER, session_id, 3), Forked)
        forks = o.order(ForkSession(OWNER, session_id, 2), Forked).sessions
        assert all(o.s.sessions.named(fork.id) is not None for fork in forks)
        everybody = o.s.sessions.all()
        for session in everybody:
            session.busy = True
        with pytest.raises(OverBudgetError, match="4 of at most 4"):
            o.order(ForkSession(OWNER, session_id, turns=0), Forked)
        for session in everybody:
            session.busy = False


def test_an_export_is_no_use_of_a_state() -> None:
    with office() as o:
        session_id, _ = o.talk(2)
        keys = o.s.store.entries_in("key/a")
        used_at = [o.s.store.entry(key).used_at for key in keys]
        exported = o.order(ExportSession(OWNER, session_id, every_boundary=True), Exported)
        assert len(exported.capsules) == len(keys) > 2
        assert [o.s.store.entry(key).used_at for key in keys] == used_at
