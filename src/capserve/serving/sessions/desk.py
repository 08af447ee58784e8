"""What happens to a session when its owner asks for it, beside a turn?

`SessionDesk.execute` carries out one order on the worker's thread, between two units of work. It
reads no state and prefills nothing: a fork is a copy of a journal, an undo cuts one back, and the
next turn finds its capsule by content, as any turn does. Capsules stay where they are, so that what
was undone can be taken up again by resending it; only a delete drops some.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import assert_never

import numpy as np

from capserve.engine.seam import Engine, TokenArray
from capserve.errors import ConflictError, InvalidRequestError, NotFoundError, UnavailableError
from capserve.serving.capsules.keeper import Keeper
from capserve.serving.capsules.store import CapsuleStore
from capserve.serving.capsules.tiers import out_of_memory
from capserve.serving.journal import Journal, clip, lcp
from capserve.serving.misses import owner_of
from capserve.serving.running.bench import Records
from capserve.serving.sessions.archive import Archive, unix_time
from capserve.serving.sessions.cuts import (
    End,
    chosen_end,
    end_at,
    ends_of,
    no_such_boundary,
    replies_of,
    shortened,
)
from capserve.serving.sessions.orders import (
    MAX_FORKS,
    Boundary,
    CapsuleImported,
    Deleted,
    DeleteSession,
    DropImported,
    Exported,
    ExportedCapsule,
    ExportSession,
    Forked,
    ForkSession,
    ImportCapsule,
    ImportDropped,
    ImportSession,
    ListSessions,
    Pinned,
    PinSession,
    SessionInfo,
    SessionOrder,
    SessionPage,
    SessionResult,
    ShowSession,
    Undone,
    UndoSession,
)
from capserve.serving.sessions.registry import Session, SessionRegistry
from capserve.serving.sessions.transcripts import Transcripts
from capserve.text.messages import Conversation
from capserve.text.prompt import Prompt, TurnRecord


class SessionNotFoundError(NotFoundError):
    """No session of this owner has that id."""

    code = "session_not_found"


class OverBudgetError(UnavailableError):
    """There is no room for what should be kept."""

    code = "over_budget"


class SessionDesk:
    """Worker thread only."""

    def __init__(
        self,
        engine: Engine,
        store: CapsuleStore,
        keeper: Keeper,
        sessions: SessionRegistry,
        transcripts: Transcripts,
        archive: Archive,
        records: Records,
    ) -> None:
        self._engine = engine
        self._store = store
        self._keeper = keeper
        self._sessions = sessions
        self._transcripts = transcripts
        self._archive = archive
        self._records = records

    def execute(self, order: SessionOrder) -> SessionResult:
        """Raises the `CapserveError` that the client is to see; then nothing has changed."""
        match order:
            case ListSessions():
                return self._list(order)
            case ShowSession():
                session = self._find(order.owner, order.session_id)
                return replace(self._info(session), boundaries=self._boundaries(session))
            case ForkSession():
                return self._fork(order)
            case UndoSession():
                return self._undo(order)
            case PinSession():
                return self._pin(order)
            case DeleteSession():
                return self._delete(order)
            case ExportSession():
                return self._export(order)
            case ImportCapsule():
                return self._import_capsule(order)
            case DropImported():
                return self._drop_imported(order)
            case ImportSession():
                return self._import(order)
            case _:
                assert_never(order)

    # -- looking ------------------------------------------------------------------------------

    def _find(self, owner: str, session_id: str) -> Session:
        session = self._sessions.named(session_id)
        if session is None or owner_of(session.namespace) != owner:
            raise SessionNotFoundError(
                f"There is no session {session_id[:64]!r}.", param="session_id"
            )
        return session

    def _list(self, order: ListSessions) -> SessionPage:
        newest_first = reversed(self._sessions.all())
        mine = [s for s in newest_first if owner_of(s.namespace) == order.owner]
        start = 0
        if order.after is not None:
            start = mine.index(self._find(order.owner, order.after)) + 1
        page = mine[start : start + order.limit]
        return SessionPage(tuple(map(self._info, page)), start + len(page) < len(mine))

    def _info(self, session: Session) -> SessionInfo:
        conversation = session.conversation
        return SessionInfo(
            id=session.id,
            parent_id=session.parent_id,
            tokens=len(session.journal),
            messages=0 if conversation is None else len(conversation.messages),
            turns=len(replies_of(session)),
            last_used_at=unix_time(session.last_used_at),
            hot=self._sessions.hot is session,
            busy=session.busy,
        )

    def _boundaries(self, session: Session) -> tuple[Boundary, ...]:
        ends = ends_of(session)
        found = []
        for key in self._keeper.boundaries(session):
            facts = self._store.describe(key)
            end = end_at(ends, key.position)
            found.append(
                Boundary(
                    position=key.position,
                    kind="checkpoint" if end is None else end.kind,
                    messages=None if end is None else end.messages,
                    tier=facts.tier,
                    nbytes=facts.nbytes,
                    exclusive_bytes=facts.exclusive_bytes,
                    pinned=facts.pinned,
                    durable=facts.durable,
                )
            )
        return tuple(found)

    # -- going back ---------------------------------------------------------------------------

    def _fork(self, order: ForkSession) -> Forked:
        source = self._find(order.owner, order.session_id)
        # Busy sessions stay, and so does the source: a branch must not make another one leave.
        staying = sum(session.busy or session is source for session in self._sessions.all())
        room = self._sessions.max_active - staying
        if room < 1:
            raise OverBudgetError(
                f"There is no room for a fork: {staying} of at most {self._sessions.max_active} "
                "sessions are busy, or the one to be forked.",
                retry_after_s=5.0,
            )
        most = min(MAX_FORKS, room)
        if not 1 <= order.n <= most:
            raise InvalidRequestError(f"n must be 1 to {most}, got {order.n}.", param="n")
        end = None
        if order.boundary is not None or order.turns is not None:
            end = chosen_end(source, order.boundary, order.turns)
        elif source.busy:
            # What a running turn has written so far is no tip yet: the branch begins before it.
            end = chosen_end(source, None, 0)
        now = time.monotonic()
        # The source was used, too: making room for its branches must not take it.
        self._sessions.touch(source, now)
        forks = [self._branch(source, end, now) for _ in range(order.n)]
        self._sessions.trim()
        for fork in forks:
            self._archive.session_changed(fork)
        return Forked(tuple(self._info(fork) for fork in forks))

    def _branch(self, source: Session, end: End | None, now: float) -> Session:
        journal = source.journal
        copy = Journal(np.array(journal.tokens), journal.spans)
        copy.keep_marks(journal.marks, len(journal))
        copy.chain = journal.chain
        fork = self._sessions.create(source.namespace, copy, now)
        fork.parent_id = source.id
        fork.newest = source.newest
        fork.conversation = source.conversation
        fork.chain = source.chain
        fork.record = source.record
        fork.turns = list(source.turns)
        if end is not None:
            self._cut(fork, end)
        return fork

    def _undo(self, order: UndoSession) -> Undone:
        session = self._idle(order.owner, order.session_id)
        turns = order.turns
        if order.boundary is None and turns is None:
            turns = 1
        end = chosen_end(session, order.boundary, turns)
        before = self._info(session)
        keys, digests = self._keeper.boundaries(session), _turn_digests(session)
        if self._sessions.hot is session and self._engine.position > end.position:
            self._sessions.clear_hot()
        self._cut(session, end)
        left = set(_turn_digests(session))
        session.remember_undone(
            (key for key in keys if key.position > end.position),
            (digest for digest in digests if digest not in left),
        )
        self._sessions.touch(session, time.monotonic())
        self._archive.session_changed(session)
        after = self._info(session)
        return Undone(after, before.turns - after.turns, before.tokens - after.tokens)

    def _cut(self, session: Session, end: End) -> None:
        """Everything that it knows, as it was when its journal ended at `end`."""
        journal, position = session.journal, end.position
        # The token that closed a turn is no part of its state, but of what its record goes on from.
        length = min(len(journal), position + (end.kind == "turn_end"))
        cut = Journal(np.array(journal.tokens[:length]), clip(journal.spans, length))
        marks = [
            m for m in journal.marks if m.messages <= end.messages and session.knows(m.messages)
        ]
        cut.keep_marks(marks, position)
        session.turns = [
            turn
            for turn in session.turns
            if turn.messages <= end.messages
            and turn.position <= position
            and session.knows(turn.messages)
        ]
        session.chain = cut.chain = session.chain[: end.messages + 1]
        session.journal = cut
        if session.conversation is not None:
            session.conversation = shortened(session.conversation, end.messages)
        session.record = self._record_of(session)
        if session.newest is None or session.newest.position > position:
            keys = self._keeper.boundaries(session)
            session.newest = keys[-1] if keys else None

    def _record_of(self, session: Session) -> TurnRecord | None:
        """The record that its next turn can go on from, kept or made anew."""
        if session.conversation is None:
            return None
        kept = self._transcripts.longest(session.namespace, session.chain)
        if not session.turns:
            return kept
        last = session.turns[-1]
        if kept is not None and len(kept.messages) >= last.messages:
            return kept
        conversation = shortened(session.conversation, last.messages)
        tokens = session.journal.tokens[: last.position + 1]
        return record_at(self._records, conversation, tokens) or kept

    # -- keeping and dropping -----------------------------------------------------------------

    def _pin(self, order: PinSession) -> Pinned:
        session = self._find(order.owner, order.session_id)
        keys = {key.position: key for key in self._keeper.boundaries(session)}
        if not keys:
            raise ConflictError("No state of this session is kept, so none can be pinned.")
        position = max(keys) if order.boundary is None else order.boundary
        if position not in keys and position - 1 in keys:
            position -= 1  # as for `boundary` elsewhere: the token that closed the turn
        if position not in keys:
            raise no_such_boundary(position, sorted(keys))
        if order.pinned:
            refusal = self._store.pin(keys[position])
            if refusal is not None:
                raise OverBudgetError(f"The pin is refused: {refusal}.", retry_after_s=60.0)
        else:
            self._store.unpin(keys[position])
        return Pinned(position, order.pinned)

    def _delete(self, order: DeleteSession) -> Deleted:
        session = self._idle(order.owner, order.session_id)
        keys, digests = self._keeper.boundaries(session), _turn_digests(session)
        self._sessions.drop(session)  # whoever watches the registry's ends tells the archive
        others = [s for s in self._sessions.all() if s.namespace == session.namespace]
        tokens = session.journal.tokens
        shared = max((lcp(s.journal.tokens, tokens) for s in others), default=0)
        alone = [key for key in keys if key.position > shared]
        undone = [key for key in session.undone.keys if key not in keys and self._store.holds(key)]
        if undone:
            theirs = {key for other in others for key in self._keeper.boundaries(other)}
            alone += [key for key in undone if key not in theirs]
        dropped = sum(self._store.drop(key) for key in alone)
        known = {digest for s in others for digest in (*s.chain, *s.journal.chain)}
        gone = dict.fromkeys([*digests, *session.undone.turns])
        self._archive.turns_gone(session.namespace, [d for d in gone if d not in known])
        return Deleted(session.id, dropped)

    def _idle(self, owner: str, session_id: str) -> Session:
        session = self._find(owner, session_id)
        if session.busy:
            raise ConflictError(
                f"Session {session.id} has a turn that is not over; wait for it, or cancel it.",
                param="session_id",
            )
        return session

    # -- to another server, and from one ------------------------------------------------------

    def _export(self, order: ExportSession) -> Exported:
        session = self._idle(order.owner, order.session_id)
        keys = self._keeper.boundaries(session)
        chosen = keys if order.every_boundary else keys[-1:]
        # Here only names and references: the bytes are read and packed by whoever writes the file.
        capsules = [
            ExportedCapsule(key.position, self._store.entry(key).spans, self._store.parts_of(key))
            for key in chosen
        ]
        journal = session.journal
        return Exported(
            session_id=session.id,
            fingerprint=self._engine.limits.fingerprint,
            model=self._engine.limits.model_name,
            tokens=journal.tokens,
            spans=journal.spans,
            marks=journal.marks,
            turns=tuple(session.turns),
            conversation=session.conversation,
            capsules=tuple(capsules),
        )

    def _import_capsule(self, order: ImportCapsule) -> CapsuleImported:
        key, packed = order.key, order.packed
        if self._store.holds(key):
            # One that was computed here, or an earlier import: the name is taken, pin and all.
            return CapsuleImported(kept=False, known=True, refused=None)
        try:
            capsule = self._engine.unpack(key.position, packed.parts, order.apart)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            raise OverBudgetError(f"There is no memory for the session: {error}.") from None
        refusal = self._store.put(key, capsule, packed.spans, based_on=order.based_on)
        kept = self._store.holds(key)
        return CapsuleImported(kept, known=False, refused=None if kept else refusal)

    def _drop_imported(self, order: DropImported) -> ImportDropped:
        there = [key for key in order.keys if self._store.holds(key)]
        return ImportDropped(sum(self._store.drop(key) for key in there))

    def _import(self, order: ImportSession) -> SessionInfo:
        journal = Journal(np.array(order.tokens), order.spans)
        journal.keep_marks(order.marks, len(journal))
        journal.chain = order.chain
        session = self._sessions.create(order.namespace, journal, time.monotonic())
        session.conversation = order.conversation
        session.chain = order.chain
        session.record = order.record
        session.turns = list(order.turns)
        if order.newest is not None and self._store.holds(order.newest):
            session.newest = order.newest
        if order.record is not None and len(order.chain) > len(order.record.messages):
            digest = order.chain[len(order.record.messages)]
            self._archive.turn_ended(order.namespace, digest, order.record)
        self._sessions.trim()
        self._archive.session_changed(session)
        return self._info(session)


def record_at(
    records: Records, conversation: Conversation, tokens: TokenArray
) -> TurnRecord | None:
    """The record of a turn that ended with `conversation`; `tokens` was the journal then, the token
    that closed the turn included.

    None when that is no basis for another turn: it does not end with the assistant's message.
    """
    *before, last = conversation.messages
    if last.role != "assistant" or not before:
        return None
    asked = replace(conversation, messages=tuple(before))
    prompt = Prompt(np.array(tokens), asked, (), system_end=0, prompt_end=0)
    return records.make_record(prompt, last, prompt.tokens)


def _turn_digests(session: Session) -> list[bytes]:
    chain = session.chain
    return [chain[turn.messages] for turn in session.turns if turn.messages < len(chain)]
