"""What of the server's memory outlives the process?

Three kinds of rows, frozen values: a capsule (its parts are files), a session, a finished turn. The
disk tier keeps them; `sessions/archive.py` and `capsules/store.py` make them and take them back.
Times are Unix seconds, since a monotonic clock starts anew with the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from capserve.serving.journal import Span, TurnMark
from capserve.text.prompt import TurnRecord


@dataclass(frozen=True, slots=True)
class CapsuleKey:
    """The name of a capsule by its content."""

    namespace: str
    position: int
    digest: bytes
    """blake2b of the int32 bytes of the tokens before `position`."""


@dataclass(frozen=True, slots=True)
class PartRow:
    """A part as a file: `nbytes` are those that it takes in memory (CapsulePart.nbytes)."""

    name: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class CapsuleRow:
    key: CapsuleKey
    spans: tuple[Span, ...]
    parts: tuple[PartRow, ...]
    """The small state first, as in `Capsule.parts`."""
    based_on: CapsuleKey | None
    """The boundary before it in the journal that it was taken from: what its rebuild starts at."""
    pinned: bool
    used_at: float

    @property
    def rebuild_tokens(self) -> int:
        """Tokens to read again when it is gone and `based_on` is not."""
        return self.key.position - (self.based_on.position if self.based_on else 0)


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """A finished turn of a session: its journal up to here is its first `messages` messages."""

    position: int
    messages: int


@dataclass(frozen=True, slots=True)
class SessionRow:
    id: str
    namespace: str
    parent_id: str | None
    tokens: bytes
    """The journal, int32 little endian."""
    spans: tuple[Span, ...]
    marks: tuple[TurnMark, ...]
    turns: tuple[TurnEnd, ...]
    chain: tuple[bytes, ...]
    newest: CapsuleKey | None
    conversation: str
    """The conversation at its tip as JSON (`conversation_json`); "" when it has none."""
    used_at: float


@dataclass(frozen=True, slots=True)
class TurnRow:
    """A record of `Transcripts`: found by namespace and chain digest."""

    namespace: str
    digest: bytes
    supersedes: bytes | None
    record: TurnRecord
    used_at: float
