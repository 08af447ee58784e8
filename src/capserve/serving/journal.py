"""What has been committed, and how was each part of it computed?

A journal is the committed token ids of a session as one int32 array that grows in place, with the
spans that say how the state absorbed them (exactness belongs to the segmentation: a cold run of
the same spans gives the same bits), and with marks that say which messages end where.

Prefix comparison and prefix digests live here too, because all of them must stay array work:
at 262,144 tokens a Python loop costs 100-200 ms and numpy 0.1-2 ms. With hundreds of journals that
share a long prefix even that is too much, so a journal remembers a digest of each of its first
1024, 2048, ... tokens: two histories are then compared by a few digests and one block of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

import numpy as np

from capserve.engine.seam import TokenArray

DIGEST_BYTES = 16
"""128 bits: no collision by accident, and a namespace never spans two API keys."""

_FIRST_BLOCK = 1024
"""Tokens of the first comparison; most unrelated histories differ inside it."""


BLOCK_TOKENS = 1024
"""Between two digests that a journal remembers of itself."""


def lcp(a: TokenArray, b: TokenArray, start: int = 0) -> int:
    """Length of the longest common prefix of two token arrays, in tokens. The first `start` are
    known to be equal."""
    limit = min(len(a), len(b))
    block = _FIRST_BLOCK
    while start < limit:
        end = min(limit, start + block)
        differs = a[start:end] != b[start:end]
        if differs.any():
            return start + int(differs.argmax())
        start, block = end, block * 4
    return limit


def prefix_digests(tokens: TokenArray, positions: Sequence[int]) -> list[bytes]:
    """Digest of `tokens[:p]` for each p of `positions` (ascending), reading the tokens once."""
    data = np.ascontiguousarray(tokens, dtype=np.int32).view(np.uint8).data
    fold = blake2b(digest_size=DIGEST_BYTES)
    digests: list[bytes] = []
    done = 0
    for position in positions:
        assert done <= position <= len(tokens), "positions must ascend and lie in the tokens"
        fold.update(data[done * 4 : position * 4])
        done = position
        digests.append(fold.copy().digest())
    return digests


def block_digests(tokens: TokenArray) -> list[bytes]:
    """What `JournalView.blocks` would be if these were a journal's tokens."""
    return prefix_digests(tokens, range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS))


class SpanKind(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Span:
    """`[start, end)` was absorbed in one `extend` (prefill), or decided step by step (decode)."""

    kind: SpanKind
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TurnMark:
    """The first `messages` messages of the conversation end at `position` or before it."""

    position: int
    messages: int


@dataclass(frozen=True, slots=True)
class JournalView:
    """A session's journal as a pure function sees it."""

    session_id: str
    namespace: str
    tokens: TokenArray
    chain: tuple[bytes, ...] = ()
    marks: tuple[TurnMark, ...] = ()
    busy: bool = False
    """A turn works on it, running or parked: others may branch from it, none may go on in it."""
    blocks: Sequence[bytes] = ()
    """Digest of the first BLOCK_TOKENS tokens, of the first two times as many, and so on; may end
    early. They spare a comparison of tokens, and are never needed."""

    def shares(self, tokens: TokenArray, blocks: Sequence[bytes]) -> int:
        """Length of the longest common prefix with `tokens`, whose `block_digests` are `blocks`."""
        # Equal digests of a prefix mean that all shorter ones are equal: the last one is searched.
        low, high = 0, min(len(self.blocks), len(blocks))
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks[middle - 1] == blocks[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return lcp(self.tokens, tokens, low * BLOCK_TOKENS)


class Journal:
    """Append-only but for the pending token, which the next turn may decide differently."""

    def __init__(self, tokens: TokenArray | None = None, spans: Iterable[Span] = ()) -> None:
        given = np.empty(0, dtype=np.int32) if tokens is None else tokens
        self._buffer = np.empty(max(1024, 2 * len(given)), dtype=np.int32)
        self._buffer[: len(given)] = given
        self._length = len(given)
        self._spans = list(spans)
        self.chain: tuple[bytes, ...] = ()
        """chain[i]: digest of the first i messages, as the last turn knew the conversation."""
        self._marks: list[TurnMark] = []
        self._blocks: list[bytes] = []
        self._fold = blake2b(digest_size=DIGEST_BYTES)
        covered = self._spans[-1].end if self._spans else 0
        assert covered == self._length, f"spans cover {covered} of {self._length} tokens"

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> TokenArray:
        """A read-only view. Later appends never change what it shows."""
        view = self._buffer[: self._length]
        view.flags.writeable = False
        return view

    @property
    def blocks(self) -> Sequence[bytes]:
        """For `JournalView.blocks`. Reads what was appended since the last call."""
        data = self._buffer.view(np.uint8).data
        for start in range(len(self._blocks) * BLOCK_TOKENS, self._length, BLOCK_TOKENS):
            end = start + BLOCK_TOKENS
            if end > self._length:
                break
            self._fold.update(data[start * 4 : end * 4])
            self._blocks.append(self._fold.copy().digest())
        return self._blocks

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(self._spans)

    @property
    def marks(self) -> tuple[TurnMark, ...]:
        return tuple(self._marks)

    def append(self, tokens: TokenArray | Sequence[int], kind: SpanKind) -> None:
        """Commit `tokens`. A prefill call is a span of its own; decode steps make one together."""
        count = len(tokens)
        assert count > 0
        end = self._length + count
        if end > len(self._buffer):
            grown = np.empty(max(end, 2 * len(self._buffer)), dtype=np.int32)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        self._buffer[self._length : end] = tokens
        last = self._spans[-1] if self._spans else None
        if last is not None and kind is SpanKind.DECODE and last.kind is SpanKind.DECODE:
            self._spans[-1] = Span(kind, last.start, end)
        else:
            self._spans.append(Span(kind, self._length, end))
        self._length = end

    def drop_pending(self, position: int, spans: Iterable[Span] | None = None) -> None:
        """Forget the token that the state never absorbed; the next prefill brings it or another.

        `spans` replace the journal's own when the state comes from a capsule: the same tokens may
        have been computed in other pieces there.
        """
        self.assert_in_step(position)
        if position < self._length:
            # A view handed out before must not see the next token: it may still be compared.
            self._buffer = self._buffer.copy()
            self._length = position
            if len(self._blocks) * BLOCK_TOKENS > position:
                # A new list, since views have the old one.
                self._blocks, self._fold = [], blake2b(digest_size=DIGEST_BYTES)
        self._spans = clip(self._spans if spans is None else spans, position)

    def mark(self, position: int, messages: int) -> None:
        if not self._marks or position > self._marks[-1].position:
            self._marks.append(TurnMark(position, messages))

    def keep_marks(self, marks: Iterable[TurnMark], position: int) -> None:
        """Take over the marks of the journal that this one branched from, up to `position`."""
        self._marks = [mark for mark in marks if mark.position <= position]

    def bit_exact(self, position: int, grid: int) -> bool:
        """True when `[0, position)` was prefilled from grid points only, as a cold run would."""
        return all(
            span.kind is SpanKind.PREFILL and span.start % grid == 0
            for span in self._spans
            if span.start < position
        )

    def assert_in_step(self, engine_position: int) -> None:
        """The state holds the journal but for at most the pending token, and never more."""
        ahead = self._length - engine_position
        assert ahead in (0, 1), f"journal {self._length} tokens, state {engine_position}"


def clip(spans: Iterable[Span], position: int) -> list[Span]:
    """The spans of `[0, position)`; one that crosses it is cut."""
    return [
        Span(span.kind, span.start, min(span.end, position))
        for span in spans
        if span.start < position
    ]
