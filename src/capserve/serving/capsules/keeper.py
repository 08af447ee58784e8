"""How does the live state become a capsule, and how does a capsule become a session's state again?

The one place where engine, store and sessions meet. Worker thread only.
"""

from __future__ import annotations

import logging
import time
from hashlib import blake2b

import numpy as np

from capserve.engine.seam import Capsule, Engine
from capserve.serving.capsules.catalog import Loss
from capserve.serving.capsules.rows import CapsuleKey
from capserve.serving.capsules.store import CapsuleStore
from capserve.serving.capsules.tiers import out_of_memory
from capserve.serving.journal import DIGEST_BYTES, Journal, Span, clip, prefix_digests
from capserve.serving.prefix import PrefixPlan
from capserve.serving.sessions.registry import Session, SessionRegistry
from capserve.text.prompt import Prompt

log = logging.getLogger("capserve.worker")


class Keeper:
    def __init__(self, engine: Engine, store: CapsuleStore, sessions: SessionRegistry) -> None:
        self._engine = engine
        self._store = store
        self._sessions = sessions

    # -- boundaries ---------------------------------------------------------------------------

    def keep(self, session: Session, *, pin: bool = False) -> str | None:
        """Put the live state, which is `session`'s, into the store.

        Returns None when it is kept (and pinned, if asked for), else why not. A refusal costs
        reuse later, never the turn.
        """
        key = self._key(session)
        if self._store.in_memory(key) and not self._is_better(session, key):
            self._store.use(key)
            refusal = self._store.pin(key) if pin else None
        else:
            # One that lies on disk alone is copied all the same: that is cheaper than a read.
            made = self._copy(session, key)
            if isinstance(made, str):
                return made
            # The newest so far may make room for a newer one of the same session.
            self._store.protect(None)
            spans = clip(session.journal.spans, key.position)
            refusal = self._store.put(key, made, spans, based_on=session.newest, pin=pin)
            if not self._store.holds(key):
                self._store.protect(session.newest)
                return refusal
        self._make_newest(session, key)
        return refusal

    def find_pin(self, namespace: str, prompt: Prompt, position: int, *, exact: bool) -> str | None:
        """Pin the capsule at `position` of the prompt when there is one; None when it is unknown.

        One that was refused for lack of room counts as known: reading the prompt from before the
        pin, turn after turn, to be refused again would cost more than the pin could save. With
        `exact`, a state that no exact plan may start from counts as unknown: one that may takes its
        place when the prompt has been read.
        """
        digest = prefix_digests(prompt.tokens, [position])[0]
        key = CapsuleKey(namespace, position, digest)
        if self._store.holds(key) and (not exact or self._store.exact(key)):
            refusal = self._store.pin(key)
            return "pinned" if refusal is None else f"refused: {refusal}"
        if self._store.loss(key) is Loss.OVER_BUDGET:
            return f"refused: no room for it in {self._store.budget_bytes} bytes"
        return None

    def boundaries(self, session: Session) -> list[CapsuleKey]:
        """Every capsule that starts this session's journal, whoever made it; ascending."""
        tokens = session.journal.tokens
        positions = [p for p in self._store.positions(session.namespace) if p <= len(tokens)]
        digests = prefix_digests(tokens, positions)
        keys = [
            CapsuleKey(session.namespace, position, digest)
            for position, digest in zip(positions, digests, strict=True)
        ]
        return [key for key in keys if self._store.holds(key)]

    # -- a turn's start -----------------------------------------------------------------------

    def take_up(
        self, plan: PrefixPlan, namespace: str, prompt: Prompt, named: Session | None = None
    ) -> tuple[Session, int]:
        """Make the planned state live; returns the session it now belongs to, and the bytes moved
        from the tier that it came from.

        With `named`, that session gets the state, whoever's it was: its journal becomes the first
        `plan.position` tokens of the prompt. Afterwards
        `engine.position == len(session.journal) == plan.position`.

        Raises CapsuleLostError when the planned capsule can't be read back from disk. Nothing has
        changed then, but that no session is hot and the store no longer lists it: plan again.
        """
        self._sessions.clear_hot()
        now = time.monotonic()
        spans: tuple[Span, ...] | None = None
        moved_bytes = 0
        if plan.capsule is not None:
            taken = self._store.get(plan.capsule)
            moved_bytes = self._engine.restore(taken.capsule)
            if taken.read_bytes is not None:
                moved_bytes = taken.read_bytes
            spans = taken.spans
        elif plan.session_id is None:
            self._engine.reset()
        source_id = plan.session_id or plan.parent_id
        source = None if source_id is None else self._sessions.get(source_id)
        if plan.session_id is not None and source is not None and named in (None, source):
            assert not source.busy, "a parked turn's session is continued by nobody else"
            source.journal.drop_pending(plan.position, spans)
            session = source
        else:
            if spans is None:  # the live state is the source's own, or empty
                spans = () if source is None else source.journal.spans
            journal = Journal(np.array(prompt.tokens[: plan.position]), clip(spans, plan.position))
            if source is not None:
                journal.keep_marks(source.journal.marks, plan.position)
            if named is None:
                session = self._sessions.create(namespace, journal, now)
            else:
                session = named
                session.journal = journal
                session.newest = None if source is None else source.newest
        self._sessions.touch(session, now)
        if plan.capsule is not None:
            session.newest = plan.capsule
        self._protect_newest(session)
        self._sessions.trim()
        assert self._engine.position == len(session.journal) == plan.position
        session.journal.chain = prompt.chain
        return session, moved_bytes

    # -- a turn that makes way ----------------------------------------------------------------

    def park(self, session: Session) -> CapsuleKey | None:
        """Keep the live state, `session`'s in the middle of its turn, until `unpark` or `release`.

        At a chunk's end of a prefill, or at an accept boundary: the journal may hold the pending
        token, the state does not. The key is the parked turn's own name for it: no plan finds it,
        so that exact mode never starts from a decoded state. None when there is no room; then
        nothing was evicted, and the turn should go on.
        """
        key = self._key(session)
        spans = tuple(clip(session.journal.spans, key.position))
        if self._store.hold_equal(key, spans):
            return key
        parked = _parked_key(key, spans)
        if self._store.in_memory(parked):
            self._store.hold(parked)
            return parked
        made = self._copy(session, key)
        if isinstance(made, str):
            return None
        refusal = self._store.put_parked(parked, key, made, spans, based_on=session.newest)
        return parked if refusal is None else None

    def unpark(self, session: Session, key: CapsuleKey) -> int:
        """Make the parked state live again and end its hold; returns the bytes moved."""
        self._sessions.clear_hot()
        moved_bytes = self._engine.restore(self._store.get(key).capsule)
        self._store.release(key, keep=False)
        assert self._engine.position == key.position
        session.journal.assert_in_step(key.position)
        self._protect_newest(session)
        return moved_bytes

    def release(self, key: CapsuleKey, *, keep: bool = False) -> None:
        """The parked turn is over without `unpark`. With `keep` its state becomes a boundary like
        any other, so that a retry resumes there: `AutoPrefixPolicy.on_commit` says whether."""
        self._store.release(key, keep=keep)

    # -- upkeep -------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Between units of work: what was unused for too long goes, the accounts are checked."""
        self._sessions.expire(now)
        # While a turn runs nothing is hot, and its newest is what it may need next.
        if self._sessions.hot is None and not any(s.busy for s in self._sessions.all()):
            self._store.protect(None)
        self._store.expire(self._sessions.idle_ttl_s)
        self._store.note_disk()
        self._store.save_again()
        self._store.check_some()

    def _is_better(self, session: Session, key: CapsuleKey) -> bool:
        """Is the live state exact, and the one that is kept under its name not?"""
        grid = self._engine.limits.grid
        return session.journal.bit_exact(key.position, grid) and not (
            key.position % grid or self._store.exact(key)
        )

    def _key(self, session: Session) -> CapsuleKey:
        position = self._engine.position
        session.journal.assert_in_step(position)
        tokens = session.journal.tokens[:position]
        return CapsuleKey(session.namespace, position, prefix_digests(tokens, [position])[0])

    def _copy(self, session: Session, key: CapsuleKey) -> Capsule | str:
        """A snapshot, with room made for its fixed part; or why there is none."""
        # The fixed part alone may be too much: then don't even copy it.
        fixed_bytes = self._engine.limits.small_state_bytes
        if fixed_bytes > self._store.largest_budget_bytes:
            self._store.note_refusal(key)
            return f"needs {fixed_bytes} bytes, the budget is {self._store.largest_budget_bytes}"
        # Before the copy, so that both never exist together. The newest stays for it: the copy
        # shares its KV.
        self._store.protect(session.newest)
        self._store.spare(fixed_bytes)
        try:
            return self._engine.snapshot()
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            log.warning("no memory for a capsule of %d tokens: %s", key.position, error)
            self._store.note_refusal(key)
            return f"the machine has no memory for the state of {key.position} tokens"

    def _make_newest(self, session: Session, key: CapsuleKey) -> None:
        session.newest = key
        self._store.protect(key)

    def _protect_newest(self, session: Session) -> None:
        self._store.protect(session.newest)


def _parked_key(key: CapsuleKey, spans: tuple[Span, ...]) -> CapsuleKey:
    """The same tokens computed in other pieces are another state, in its last bits."""
    fold = blake2b(key.digest, digest_size=DIGEST_BYTES, person=b"parked")
    fold.update(repr(spans).encode())
    return CapsuleKey(key.namespace, key.position, fold.digest())
