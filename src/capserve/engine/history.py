"""By what name does a state's content go?

A state's bits follow from the tokens it absorbed and from how each was absorbed, so that is what a
name digests (E10). How: matrix products of a prefill chunk may round otherwise in a chunk of
another length or start, so a prefilled token carries the length of its chunk, and the first of a
chunk carries it negated; a decoded row has the same bits in any company (I7), whatever was drafted
beside it, so it carries 0. Positions follow from the order. Names are chained from segment to
segment: that of segment i digests the one before it and the segment's own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal

import numpy as np
import numpy.typing as npt

from capserve.engine.seam import TokenArray

SEGMENT_TOKENS = 512
"""Small enough that a tail copy is cheap, large enough that a 256k journal has 512 segments."""

DECODED = 0
"""How a decoded row was absorbed."""

ROOT = blake2b(b"capserve history 1", digest_size=16).digest()
"""The name before the first segment."""

Kind = Literal["kv", "small"]
Tail = npt.NDArray[np.int32]
"""[tokens | how, 512]: what was absorbed since the last full segment; zeros beyond the position."""


def empty_tail() -> Tail:
    return np.zeros((2, SEGMENT_TOKENS), np.dtype("<i4"))


def name_of(kind: Kind, after: bytes, position: int, tail: Tail) -> bytes:
    """The 16-byte name of the part of that kind that ends at `position`.

    `after` is the name of the last full segment before it; of `tail` the first tokens count, those
    after that segment.
    """
    length = position % SEGMENT_TOKENS
    if kind == "kv" and length == 0:
        length = SEGMENT_TOKENS
    digest = blake2b(after, digest_size=16, person=kind.encode())
    digest.update(position.to_bytes(8, "little"))
    digest.update(tail[0, :length].tobytes())
    digest.update(tail[1, :length].tobytes())
    return digest.digest()


def renamed(name: bytes, apart: bytes) -> bytes:
    """Another name for each `apart` (at most 64 bytes), that no history of one's own comes by."""
    return blake2b(name, digest_size=16, key=apart, person=b"apart").digest()


class History:
    """What was absorbed so far: the names of the full segments, and the tokens after them."""

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.tail = empty_tail()
        self.position = 0
        self.root = ROOT
        """`ROOT`, but for a history that began with foreign bytes (`renamed`)."""

    @property
    def after(self) -> bytes:
        """The name of the last full segment."""
        return self.names[-1] if self.names else self.root

    def reset(self) -> None:
        self.names, self.tail, self.position, self.root = [], empty_tail(), 0, ROOT

    def restore(self, names: Sequence[bytes], tail: Tail, position: int, root: bytes) -> None:
        """Go on from a state kept earlier; `names` are those of its full segments."""
        assert len(names) == position // SEGMENT_TOKENS
        self.root = root
        self.names, self.tail, self.position = list(names), tail.copy(), position

    def prefilled(self, chunk: TokenArray) -> None:
        """One prefill chunk was absorbed."""
        how = np.full(len(chunk), len(chunk), np.int32)
        how[0] = -len(chunk)
        self._append(chunk, how)

    def decoded(self, tokens: Sequence[int]) -> None:
        """These rows of a verify were accepted."""
        self._append(np.array(tokens, np.int32), np.full(len(tokens), DECODED, np.int32))

    def name(self, kind: Kind) -> bytes:
        """Of the part of that kind that ends at the position and is no full segment."""
        return name_of(kind, self.after, self.position, self.tail)

    def _append(self, tokens: TokenArray, how: TokenArray) -> None:
        done = 0
        while done < len(tokens):
            filled = self.position % SEGMENT_TOKENS
            count = min(SEGMENT_TOKENS - filled, len(tokens) - done)
            self.tail[0, filled : filled + count] = tokens[done : done + count]
            self.tail[1, filled : filled + count] = how[done : done + count]
            done += count
            self.position += count
            if filled + count == SEGMENT_TOKENS:
                self.names.append(name_of("kv", self.after, self.position, self.tail))
                self.tail[:] = 0
