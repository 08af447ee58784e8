"""How does the live state become a capsule, and how does a capsule become a session's state again?

The one place where engine, store and sessions meet. Worker thread only.
"""

from __future__ import annotations

import time

import numpy as np

from capserve.engine.seam import Engine
from capserve.serving.capsules import CapsuleKey, CapsuleStore, Loss
from capserve.serving.journal import Journal, Span, clip, prefix_digests
from capserve.serving.prefix import PrefixPlan
from capserve.serving.sessions import Session, SessionRegistry
from capserve.text.prompt import Prompt


class Keeper:
    def __init__(self, engine: Engine, store: CapsuleStore, sessions: SessionRegistry) -> None:
        self._engine = engine
        self._store = store
        self._sessions = sessions

    def keep(self, session: Session, *, pin: bool = False) -> str | None:
        """Put the live state, which is `session`'s, into the store.

        Returns None when it is kept, else why not. A refusal costs reuse later, never the turn.
        """
        position = self._engine.position
        session.journal.assert_in_step(position)
        tokens = session.journal.tokens[:position]
        key = CapsuleKey(session.namespace, position, prefix_digests(tokens, [position])[0])
        if not self._store.holds(key):
            # The fixed part alone may be too much: then don't even copy it.
            fixed_bytes = self._engine.limits.small_state_bytes
            if fixed_bytes > self._store.budget_bytes:
                self._store.note_refusal(key)
                return f"needs {fixed_bytes} bytes, the budget is {self._store.budget_bytes}"
            spans = clip(session.journal.spans, position)
            # The newest so far may make room for a newer one of the same session.
            self._store.protect(None)
            refusal = self._store.put(key, self._engine.snapshot(), spans, pin=pin)
            if refusal is not None:
                self._store.protect(session.newest)
                return refusal
        else:
            self._store.get(key)  # used again
            if pin:
                self._store.pin(key)
        self._own(session, key)
        return None

    def find_pin(self, namespace: str, prompt: Prompt, position: int) -> str | None:
        """Pin the capsule at `position` of the prompt when there is one; None when it is unknown.

        One that was refused for lack of room counts as known: reading the prompt from before the
        pin, turn after turn, to be refused again would cost more than the pin could save.
        """
        digest = prefix_digests(prompt.tokens, [position])[0]
        key = CapsuleKey(namespace, position, digest)
        if self._store.holds(key):
            self._store.pin(key)
            return "pinned"
        if self._store.loss(key) is Loss.OVER_BUDGET:
            return f"refused: no room for it in {self._store.budget_bytes} bytes"
        return None

    def take_up(self, plan: PrefixPlan, namespace: str, prompt: Prompt) -> tuple[Session, int]:
        """Make the planned state live; returns the session it now belongs to and bytes moved.

        Afterwards `engine.position == len(session.journal) == plan.position`.
        """
        self._sessions.clear_hot()
        now = time.monotonic()
        spans: tuple[Span, ...] = ()
        moved_bytes = 0
        if plan.capsule is not None:
            entry = self._store.get(plan.capsule)
            moved_bytes = self._engine.restore(entry.capsule)
            spans = entry.spans
        elif plan.session_id is None:
            self._engine.reset()
        if plan.session_id is not None:
            session = self._sessions.get(plan.session_id)
            session.journal.drop_pending(plan.position, None if plan.capsule is None else spans)
            self._sessions.touch(session, now)
        else:
            journal = Journal(np.array(prompt.tokens[: plan.position]), spans)
            if plan.parent_id is not None:
                parent = self._sessions.get(plan.parent_id)
                journal.keep_marks(parent.journal.marks, plan.position)
            session = self._sessions.create(namespace, journal, now)
        if plan.capsule is not None:
            self._own(session, plan.capsule)
        # Only now: the session that goes may be the one that owned the capsule until here.
        self.drop(self._sessions.trim())
        assert self._engine.position == len(session.journal) == plan.position
        session.journal.chain = prompt.chain
        return session, moved_bytes

    def drop(self, orphans: list[CapsuleKey]) -> None:
        """Let go of capsules that no session owns any more; pins stay."""
        self._store.expire(orphans)

    def expire(self, now: float) -> None:
        """What idle time is for: old sessions go, and the accounts are checked."""
        self.drop(self._sessions.expire(now))
        if self._sessions.hot is None:
            self._store.protect(None)
        self._store.check()

    def _own(self, session: Session, key: CapsuleKey) -> None:
        self._sessions.own(session, key)
        self._store.protect(key)
