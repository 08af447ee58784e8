"""Which conversations are alive, and whose state is hot?

A session is a journal with the name of its newest capsule. Nobody has to name one: a turn continues
the session whose journal its prompt continues, and a divergence starts a new session beside the old
one, so that no older boundary is lost. Capsules outlive the sessions that made them: they are found
by content, and leave the store by its own rules. The hot mark says that the live state is this
session's, up to a position; only a clean exit sets it, and it is cleared before anything touches
the engine (P3).

One thread uses a registry.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from uuid import uuid4

from capserve.serving.capsules import CapsuleKey
from capserve.serving.journal import Journal, JournalView
from capserve.serving.prefix import HotView


@dataclass(eq=False)
class Session:
    id: str
    namespace: str
    journal: Journal
    last_used_at: float
    """`time.monotonic()` seconds."""
    newest: CapsuleKey | None = None
    """The capsule of its journal that was made or taken up last."""

    def view(self) -> JournalView:
        journal = self.journal
        return JournalView(self.id, self.namespace, journal.tokens, journal.chain, journal.marks)


class SessionRegistry:
    def __init__(self, max_active: int, idle_ttl_s: float) -> None:
        assert max_active >= 1
        self.max_active = max_active
        self.idle_ttl_s = idle_ttl_s
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # least recently used first
        self._hot: tuple[Session, int] | None = None

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session_id: str) -> Session:
        return self._sessions[session_id]

    def views(self) -> list[JournalView]:
        """All journals, the most recently used last."""
        return [session.view() for session in self._sessions.values()]

    def create(self, namespace: str, journal: Journal, now: float) -> Session:
        session = Session(uuid4().hex, namespace, journal, now)
        self._sessions[session.id] = session
        return session

    def touch(self, session: Session, now: float) -> None:
        session.last_used_at = now
        self._sessions.move_to_end(session.id)

    # -- the hot mark -------------------------------------------------------------------------

    def mark_hot(self, session: Session, position: int) -> None:
        """The live state is `session`'s, and its client has seen all of it."""
        session.journal.assert_in_step(position)
        assert session.id in self._sessions, "only a live session can be hot"
        self._hot = (session, position)

    def clear_hot(self) -> None:
        self._hot = None

    @property
    def hot(self) -> Session | None:
        return None if self._hot is None else self._hot[0]

    def hot_view(self, grid: int) -> HotView | None:
        if self._hot is None:
            return None
        session, position = self._hot
        return HotView(session.view(), position, session.journal.bit_exact(position, grid))

    # -- the end of sessions ------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Drop sessions idle for longer than the TTL."""
        self._drop([s for s in self._sessions.values() if now - s.last_used_at > self.idle_ttl_s])

    def trim(self) -> None:
        """Drop the least recently used beyond `max_active`."""
        surplus = max(0, len(self._sessions) - self.max_active)
        self._drop(list(self._sessions.values())[:surplus])

    def _drop(self, sessions: Iterable[Session]) -> None:
        for session in sessions:
            del self._sessions[session.id]
            if self.hot is session:
                self.clear_hot()
