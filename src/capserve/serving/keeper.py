"""How does the live state become a capsule, and how does a capsule become a session's state again?

The one place where engine, store and sessions meet. Worker thread only.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from capserve.engine.seam import Engine
from capserve.serving.capsules import CapsuleKey, CapsuleStore, Loss
from capserve.serving.journal import Journal, Span, clip, prefix_digests
from capserve.serving.prefix import PrefixPlan
from capserve.serving.sessions import Session, SessionRegistry
from capserve.text.prompt import Prompt

log = logging.getLogger("capserve.worker")


class Keeper:
    def __init__(self, engine: Engine, store: CapsuleStore, sessions: SessionRegistry) -> None:
        self._engine = engine
        self._store = store
        self._sessions = sessions

    def keep(self, session: Session, *, pin: bool = False) -> str | None:
        """Put the live state, which is `session`'s, into the store.

        Returns None when it is kept (and pinned, if asked for), else why not. A refusal costs
        reuse later, never the turn.
        """
        position = self._engine.position
        session.journal.assert_in_step(position)
        tokens = session.journal.tokens[:position]
        key = CapsuleKey(session.namespace, position, prefix_digests(tokens, [position])[0])
        refusal = None
        if not self._store.holds(key):
            # The fixed part alone may be too much: then don't even copy it.
            fixed_bytes = self._engine.limits.small_state_bytes
            if fixed_bytes > self._store.budget_bytes:
                self._store.note_refusal(key)
                return f"needs {fixed_bytes} bytes, the budget is {self._store.budget_bytes}"
            # Before the copy, so that both never exist together. The newest stays for it: the copy
            # shares its KV.
            self._store.protect(session.newest)
            self._store.spare(fixed_bytes)
            try:
                capsule = self._engine.snapshot()
            except (MemoryError, RuntimeError) as error:
                if not _out_of_memory(error):
                    raise
                log.warning("no memory for a capsule of %d tokens: %s", position, error)
                self._store.note_refusal(key)
                return f"the machine has no memory for the state of {position} tokens"
            # The newest so far may make room for a newer one of the same session.
            self._store.protect(None)
            spans = clip(session.journal.spans, position)
            refusal = self._store.put(key, capsule, spans, pin=pin)
            if not self._store.holds(key):
                self._store.protect(session.newest)
                return refusal
        else:
            self._store.get(key)  # used again
            if pin:
                refusal = self._store.pin(key)
        self._make_newest(session, key)
        return refusal

    def find_pin(self, namespace: str, prompt: Prompt, position: int) -> str | None:
        """Pin the capsule at `position` of the prompt when there is one; None when it is unknown.

        One that was refused for lack of room counts as known: reading the prompt from before the
        pin, turn after turn, to be refused again would cost more than the pin could save.
        """
        digest = prefix_digests(prompt.tokens, [position])[0]
        key = CapsuleKey(namespace, position, digest)
        if self._store.holds(key):
            refusal = self._store.pin(key)
            return "pinned" if refusal is None else f"refused: {refusal}"
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
            self._make_newest(session, plan.capsule)
        self._sessions.trim()
        assert self._engine.position == len(session.journal) == plan.position
        session.journal.chain = prompt.chain
        return session, moved_bytes

    def expire(self, now: float) -> None:
        """Upkeep between turns: what was unused for too long goes, and the accounts are checked."""
        self._sessions.expire(now)
        if self._sessions.hot is None:
            self._store.protect(None)
        self._store.expire(self._sessions.idle_ttl_s)
        self._store.check()

    def _make_newest(self, session: Session, key: CapsuleKey) -> None:
        session.newest = key
        self._store.protect(key)


def _out_of_memory(error: Exception) -> bool:
    """Allocators say so in two ways: by type, or only in words."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in said or "can't allocate" in said
