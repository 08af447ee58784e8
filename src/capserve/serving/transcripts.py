"""Which finished turn does an incoming conversation continue?

An index from the digest of a message chain to the finished turn with these messages, per namespace.
The worker writes it on a clean end; the api's text thread reads it to take over the journal's own
tokens for messages that mean the same. Bounded in bytes; the least recently used record leaves
first. Records are frozen values, so only the index itself needs the lock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from capserve.text.prompt import TurnRecord


class Transcripts:
    """Thread-safe. Sizes are bytes."""

    def __init__(self, budget_bytes: int = 64 << 20) -> None:
        self.budget_bytes = budget_bytes
        self._records: OrderedDict[tuple[str, bytes], TurnRecord] = OrderedDict()
        self._used_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._records)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def publish(self, namespace: str, digest: bytes, record: TurnRecord) -> None:
        """Make `record` findable by its chain digest. One larger than the budget is not kept."""
        # The array crosses a thread border: whoever reads it must not be able to change it.
        record.tokens.flags.writeable = False
        size = record_bytes(record)
        with self._lock:
            self._forget((namespace, digest))
            if size > self.budget_bytes:
                return
            self._records[(namespace, digest)] = record
            self._used_bytes += size
            while self._used_bytes > self.budget_bytes:
                self._forget(next(iter(self._records)))

    def longest(self, namespace: str, chain: Sequence[bytes]) -> TurnRecord | None:
        """The record whose messages are the longest start of the chain's, or None."""
        with self._lock:
            for digest in reversed(chain):
                key = (namespace, digest)
                if key in self._records:
                    self._records.move_to_end(key)
                    return self._records[key]
        return None

    def _forget(self, key: tuple[str, bytes]) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            self._used_bytes -= record_bytes(record)


def record_bytes(record: TurnRecord) -> int:
    """Bytes that a record keeps alive, near enough for a budget: text, tokens, message strings."""
    messages = sum(
        len(m.content) + len(m.reasoning or "") + sum(len(c.arguments) for c in m.tool_calls)
        for m in record.messages
    )
    return record.tokens.nbytes + 4 * (len(record.text) + messages)
