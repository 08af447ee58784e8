"""What may be asked of sessions beside a turn, and what comes back?

Frozen values that cross to the worker's thread and back, like `WorkItem` and its events: an order
goes in by `EngineWorker.order`, is carried out by `SessionDesk` between two units of work, and its
result, or the `CapserveError` that the client is to see, resolves a future.

Every order carries its owner (`misses.owner_of` of the caller's namespace): a session of another
owner is not found, whatever its id. Positions and lengths are tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from capserve.engine.seam import TokenArray
from capserve.serving.capsules.rows import CapsuleKey, TurnEnd
from capserve.serving.journal import Span, TurnMark
from capserve.text.messages import Conversation
from capserve.text.prompt import TurnRecord

MAX_FORKS = 64
"""Of one order: each is a copy of the journal, made between two steps of whoever runs."""


# -- orders ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ListSessions:
    owner: str
    limit: int = 100
    after: str | None = None
    """Go on behind this session, the most recently used first."""


@dataclass(frozen=True, slots=True)
class ShowSession:
    owner: str
    session_id: str


@dataclass(frozen=True, slots=True)
class ForkSession:
    """`n` new sessions that go on from `boundary`, or from `turns` turns ago; default: the tip."""

    owner: str
    session_id: str
    n: int = 1
    boundary: int | None = None
    turns: int | None = None


@dataclass(frozen=True, slots=True)
class UndoSession:
    """Cut back to `boundary`, or by `turns` turns (default 1)."""

    owner: str
    session_id: str
    turns: int | None = None
    boundary: int | None = None


@dataclass(frozen=True, slots=True)
class PinSession:
    """Pin, or release, the capsule at `boundary`; default: the newest one."""

    owner: str
    session_id: str
    boundary: int | None = None
    pinned: bool = True


@dataclass(frozen=True, slots=True)
class DeleteSession:
    owner: str
    session_id: str


@dataclass(frozen=True, slots=True)
class ExportSession:
    owner: str
    session_id: str
    every_boundary: bool = False
    """Also the capsules before the newest one."""


@dataclass(frozen=True, slots=True)
class ImportCapsule:
    """Unpack one state that came in a file, and keep it under `key` if none is there."""

    owner: str
    key: CapsuleKey
    packed: PackedCapsule
    apart: bytes
    """As in `Engine.unpack`: 16 bytes, the same for all states of one file."""
    based_on: CapsuleKey | None
    """The boundary before it."""


@dataclass(frozen=True, slots=True)
class DropImported:
    """What an import has kept that could not be finished."""

    owner: str
    keys: tuple[CapsuleKey, ...]


@dataclass(frozen=True, slots=True)
class ImportSession:
    """A session that was read from a file and checked; it becomes a new one of `namespace`."""

    owner: str
    namespace: str
    tokens: TokenArray
    spans: tuple[Span, ...]
    marks: tuple[TurnMark, ...]
    turns: tuple[TurnEnd, ...]
    conversation: Conversation | None
    chain: tuple[bytes, ...]
    record: TurnRecord | None
    newest: CapsuleKey | None = None
    """The last of its states that is there."""

    def ending_at(self, newest: CapsuleKey | None) -> ImportSession:
        return replace(self, newest=newest)


@dataclass(frozen=True, slots=True)
class PackedCapsule:
    position: int
    spans: tuple[Span, ...]
    parts: tuple[memoryview, ...]
    """As `CapsulePart.pack` gave them, joined; the small state first."""


SessionOrder = (
    ListSessions
    | ShowSession
    | ForkSession
    | UndoSession
    | PinSession
    | DeleteSession
    | ExportSession
    | ImportCapsule
    | DropImported
    | ImportSession
)


# -- results -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Boundary:
    """A capsule on a session's journal."""

    position: int
    kind: str
    """`turn_end`, `prompt_end`, or `checkpoint` for any other."""
    messages: int | None
    """How many messages end here; None at a checkpoint, which lies inside one."""
    tier: str
    nbytes: int
    exclusive_bytes: int | None
    """Of memory, those that no other capsule shares: what its end would free. None when it lies on
    disk alone."""
    pinned: bool
    durable: bool
    """It is on disk, whatever happens to the process."""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    id: str
    parent_id: str | None
    tokens: int
    """Length of the journal."""
    messages: int
    turns: int
    last_used_at: float
    """Unix seconds."""
    hot: bool
    busy: bool
    """A turn is running or parked on it: it can't be cut, exported or deleted now."""
    boundaries: tuple[Boundary, ...] | None = None
    """Ascending; None in a list."""


@dataclass(frozen=True, slots=True)
class SessionPage:
    sessions: tuple[SessionInfo, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class Forked:
    sessions: tuple[SessionInfo, ...]


@dataclass(frozen=True, slots=True)
class Undone:
    session: SessionInfo
    removed_turns: int
    removed_tokens: int


@dataclass(frozen=True, slots=True)
class Pinned:
    position: int
    pinned: bool


@dataclass(frozen=True, slots=True)
class Deleted:
    id: str
    capsules: int
    """Dropped with it: those that no other live session goes through."""


class Packs(Protocol):
    """Of a `CapsulePart`, what a file needs. Any thread may call `pack`."""

    @property
    def name(self) -> bytes: ...
    def pack(self) -> Sequence[memoryview]: ...


@dataclass(frozen=True, slots=True)
class ExportedCapsule:
    position: int
    spans: tuple[Span, ...]
    parts: tuple[Packs, ...]


@dataclass(frozen=True, slots=True)
class Exported:
    """Everything that one file holds; immutable, so it may be written in any thread."""

    session_id: str
    fingerprint: str
    model: str
    tokens: TokenArray
    spans: tuple[Span, ...]
    marks: tuple[TurnMark, ...]
    turns: tuple[TurnEnd, ...]
    conversation: Conversation | None
    capsules: tuple[ExportedCapsule, ...]


@dataclass(frozen=True, slots=True)
class CapsuleImported:
    kept: bool
    known: bool
    """One of the same tokens was there already, and stays: it was computed here."""
    refused: str | None


@dataclass(frozen=True, slots=True)
class ImportDropped:
    capsules: int


@dataclass(frozen=True, slots=True)
class Imported:
    """What all orders of an import came to: `intake.steps`."""

    session: SessionInfo
    capsules: int
    """Kept from the file."""
    known: int
    """Left in the file, since there is one of the same tokens."""
    refused: str | None
    """Why a capsule found no room; the session is there, and what is missing is read again."""


SessionResult = (
    SessionPage
    | SessionInfo
    | Forked
    | Undone
    | Pinned
    | Deleted
    | Exported
    | CapsuleImported
    | ImportDropped
)
