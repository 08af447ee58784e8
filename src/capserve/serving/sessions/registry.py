"""Which conversations are alive, and whose state is hot?

A session is a journal with the name of its newest capsule, and what its client has seen of it.
Nobody has to name one: a turn continues the session whose journal its prompt continues, and a
divergence starts a new session beside the old one, so that no older boundary is lost. Capsules
outlive the sessions that made them: they are found by content, and leave the store by its own
rules. The hot mark says that the live state is this session's, up to a position; only a clean exit
sets it, and it is cleared before anything touches the engine (P3). A session is busy while a turn
works on it, running or parked: nobody else goes on from it, and it never expires.

One thread uses a registry.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from capserve.serving.capsules.rows import CapsuleKey, TurnEnd
from capserve.serving.journal import Journal, JournalView
from capserve.serving.prefix import HotView
from capserve.text.messages import Conversation
from capserve.text.prompt import TurnRecord

MAX_UNDONE = 1024
"""States, and turns, that a session remembers to have undone: each takes some hundred bytes."""


@dataclass(eq=False)
class Undone:
    """What a session was cut back from: still to be found by content, and to go with it."""

    keys: dict[CapsuleKey, None] = field(default_factory=dict)
    turns: dict[bytes, None] = field(default_factory=dict)
    """Digests that their records are found by."""


def _shorten(known: dict[Any, None]) -> None:
    while len(known) > MAX_UNDONE:
        del known[next(iter(known))]


@dataclass(eq=False)
class Session:
    id: str
    namespace: str
    journal: Journal
    last_used_at: float
    """`time.monotonic()` seconds."""
    newest: CapsuleKey | None = None
    """The capsule of its journal that was made or taken up last."""
    parent_id: str | None = None
    """The session that it branched from, which may be gone."""
    busy: bool = False
    """A turn works on it, running or parked."""
    conversation: Conversation | None = None
    """What its client has seen: the messages that its last finished turn was asked with, and the
    reply. None before the first one."""
    chain: tuple[bytes, ...] = ()
    """chain[i]: digest of the first i messages of `conversation`. The journal has one of its own:
    a turn that was cancelled leaves the journal of what it was asked, and no message."""
    record: TurnRecord | None = None
    """The newest turn whose tokens can be taken over; it starts `conversation`."""
    turns: list[TurnEnd] = field(default_factory=list)
    """Its finished turns, in ascending order."""
    undone: Undone = field(default_factory=Undone)

    def remember_undone(self, keys: Iterable[CapsuleKey], turns: Iterable[bytes]) -> None:
        """These were its own until it was cut back; the oldest are forgotten beyond a bound."""
        self.undone.keys.update(dict.fromkeys(keys))
        self.undone.turns.update(dict.fromkeys(turns))
        _shorten(self.undone.keys)
        _shorten(self.undone.turns)

    def knows(self, messages: int) -> bool:
        """Are the first `messages` messages of its journal those of its conversation?"""
        ours, theirs = self.chain, self.journal.chain
        return messages < min(len(ours), len(theirs)) and ours[messages] == theirs[messages]

    def view(self) -> JournalView:
        journal = self.journal
        return JournalView(
            self.id,
            self.namespace,
            journal.tokens,
            journal.chain,
            journal.marks,
            self.busy,
            journal.blocks,
        )


class SessionRegistry:
    def __init__(self, max_active: int, idle_ttl_s: float) -> None:
        assert max_active >= 1
        self.max_active = max_active
        self.idle_ttl_s = idle_ttl_s
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # least recently used first
        self._hot: tuple[Session, int] | None = None
        self._gone: Callable[[str], None] = lambda session_id: None

    def watch_ends(self, gone: Callable[[str], None]) -> None:
        """`gone(session_id)` is called for each session that leaves, for whatever reason."""
        self._gone = gone

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session_id: str) -> Session:
        """Raises KeyError for one that is not alive."""
        return self._sessions[session_id]

    def named(self, session_id: str) -> Session | None:
        """The session that somebody from outside names; None when it is not alive."""
        return self._sessions.get(session_id)

    def all(self) -> list[Session]:
        """The most recently used last."""
        return list(self._sessions.values())

    def views(self) -> list[JournalView]:
        """All journals, the most recently used last."""
        return [session.view() for session in self._sessions.values()]

    def create(self, namespace: str, journal: Journal, now: float) -> Session:
        session = Session(uuid4().hex, namespace, journal, now)
        self.add(session)
        return session

    def add(self, session: Session) -> None:
        """Take in one that lived before, as the most recently used."""
        assert session.id not in self._sessions, f"session {session.id} is alive"
        self._sessions[session.id] = session

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

    def drop(self, session: Session) -> None:
        """Forget a session that nobody works on; its capsules stay."""
        assert not session.busy, f"a turn works on session {session.id}"
        self._drop([session])

    def expire(self, now: float) -> None:
        """Drop sessions idle for longer than the TTL."""
        self._drop(s for s in self.all() if not s.busy and now - s.last_used_at > self.idle_ttl_s)

    def trim(self) -> None:
        """Drop the least recently used beyond `max_active`; the busy ones stay, and count."""
        surplus = max(0, len(self._sessions) - self.max_active)
        # The newest is the one that room is made for; it is not busy yet.
        idle = [session for session in self.all()[:-1] if not session.busy]
        self._drop(idle[:surplus])

    def _drop(self, sessions: Iterable[Session]) -> None:
        for session in sessions:
            del self._sessions[session.id]
            if self.hot is session:
                self.clear_hot()
            self._gone(session.id)
