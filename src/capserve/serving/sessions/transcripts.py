"""Which finished turn does an incoming conversation continue, and what has a named session said?

An index from the digest of a message chain to the finished turn with these messages, per namespace,
and one from a session's id to its conversation. The worker writes them on a clean end; the api's
text thread reads them to take over the journal's own tokens for messages that mean the same, and to
put new messages after those of a session that a request names. Records are bounded in bytes; the
least recently used one leaves first, and before it one whose conversation went on in a newer
record. All values are frozen, so only the indexes themselves need the lock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from capserve.text.messages import Conversation
from capserve.text.prompt import TurnRecord


@dataclass(frozen=True, slots=True)
class KnownSession:
    """What the text thread needs to know of a live session."""

    namespace: str
    conversation: Conversation | None
    """Up to its last finished turn; None when it has finished none."""
    record: TurnRecord | None
    """Of that turn, or of the last one before it that has a record."""


class Transcripts:
    """Thread-safe. Sizes are bytes."""

    def __init__(self, budget_bytes: int = 64 << 20) -> None:
        self.budget_bytes = budget_bytes
        self._records: OrderedDict[tuple[str, bytes], TurnRecord] = OrderedDict()
        self._sessions: dict[str, KnownSession] = {}
        self._used_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._records)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    # -- finished turns -----------------------------------------------------------------------

    def publish(
        self,
        namespace: str,
        digest: bytes,
        record: TurnRecord,
        supersedes: bytes | None = None,
    ) -> list[tuple[str, bytes]]:
        """Make `record` findable by its chain digest. One larger than the budget is not kept.

        `supersedes`: digest of the record that this one goes on from. Only a branch or a retry
        still asks for that one, so it is the first to leave.
        Returns which records left, each by namespace and digest.
        """
        # The array crosses a thread border: whoever reads it must not be able to change it.
        record.tokens.flags.writeable = False
        size = record_bytes(record)
        gone: list[tuple[str, bytes]] = []
        with self._lock:
            self._forget((namespace, digest))
            if size > self.budget_bytes:
                return [(namespace, digest)]
            self._records[(namespace, digest)] = record
            self._used_bytes += size
            if supersedes is not None and (namespace, supersedes) in self._records:
                self._records.move_to_end((namespace, supersedes), last=False)
            while self._used_bytes > self.budget_bytes:
                gone.append(next(iter(self._records)))
                self._forget(gone[-1])
        return gone

    def longest(self, namespace: str, chain: Sequence[bytes]) -> TurnRecord | None:
        """The record whose messages are the longest start of the chain's, or None."""
        with self._lock:
            for digest in reversed(chain):
                key = (namespace, digest)
                if key in self._records:
                    self._records.move_to_end(key)
                    return self._records[key]
        return None

    def forget(self, namespace: str, digest: bytes) -> None:
        """Drop one record; nothing happens when it is not there."""
        with self._lock:
            self._forget((namespace, digest))

    def _forget(self, key: tuple[str, bytes]) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            self._used_bytes -= record_bytes(record)

    # -- sessions by name ---------------------------------------------------------------------

    def set_session(
        self,
        session_id: str,
        namespace: str,
        conversation: Conversation | None,
        record: TurnRecord | None,
    ) -> None:
        """What a request that names this session continues from now on."""
        with self._lock:
            self._sessions[session_id] = KnownSession(namespace, conversation, record)

    def drop_session(self, session_id: str) -> None:
        with self._lock:
            self._sessions.pop(session_id, None)

    def session(self, session_id: str) -> KnownSession | None:
        with self._lock:
            return self._sessions.get(session_id)


def record_bytes(record: TurnRecord) -> int:
    """Bytes that a record keeps alive, near enough for a budget: text, tokens, message strings."""
    texts = [record.text]
    for message in record.messages:
        texts += (message.content, message.reasoning or "")
        texts += (call.arguments for call in message.tool_calls)
    return record.tokens.nbytes + sum(map(_text_bytes, texts))


def _text_bytes(text: str) -> int:
    """ASCII takes 1 byte a character; anything else 4 at the most."""
    return len(text) if text.isascii() else 4 * len(text)
