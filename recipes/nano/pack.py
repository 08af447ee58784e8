"""How do conversations become training rows?

Whole conversations lie end to end in rows of a fixed length; library code fills the rest, so there
is no padding. Each token knows where its document starts: the model forgets there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from recipes.nano.dialogs import Loss, Renderer, make_sample
from recipes.nano.tokenizer import library_texts
from recipes.nano.words import Rng

CODE_SHARE = 0.15
"""Of all tokens. Code teaches what source looks like; more of it costs replies."""

POOL = 24
"""Conversations waiting for a gap that fits them."""


@dataclass(frozen=True)
class Rows:
    """A batch. `start` is the index of the token's document in its row."""

    ids: npt.NDArray[np.int64]  # [B, T]
    loss: npt.NDArray[np.uint8]  # [B, T], values of Loss
    start: npt.NDArray[np.int64]  # [B, T]


def encode(tokenizer: Tokenizer, pieces: list[tuple[str, Loss]]) -> tuple[list[int], list[int]]:
    """Token ids and loss classes. Pieces begin at control tokens or line ends, where cutting the
    text changes no token (a test compares with the whole)."""
    ids: list[int] = []
    classes: list[int] = []
    texts = [text for text, _ in pieces]
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    for encoding, (_, kind) in zip(encodings, pieces, strict=True):
        ids += encoding.ids
        classes += [kind] * len(encoding.ids)
    return ids, classes


class Packer:
    """Endless rows of `length` tokens from a seed."""

    def __init__(self, tokenizer: Tokenizer, seed: str, length: int, code_files: int) -> None:
        self._tokenizer, self._length = tokenizer, length
        self._rng, self._renderer = Rng(seed), Renderer()
        self._pool: list[tuple[list[int], list[int]]] = []
        texts = list(library_texts(code_files))
        self._code = [
            encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)
        ]

    def batches(self, size: int) -> Iterator[Rows]:
        while True:
            rows = [self._row() for _ in range(size)]
            ids, loss, start = (np.stack(column) for column in zip(*rows, strict=True))
            yield Rows(ids, loss, start)

    def _row(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        ids: list[int] = []
        loss: list[int] = []
        start: list[int] = []
        while (room := self._length - len(ids)) > 0:
            document = None if self._rng.random() < CODE_SHARE else self._conversation(room)
            if document is None:
                code = self._stretch(min(room, self._rng.randint(100, 600)))
                document = code, [int(Loss.CODE)] * len(code)
            start += [len(ids)] * len(document[0])
            ids += document[0]
            loss += document[1]
        return np.array(ids), np.array(loss, dtype=np.uint8), np.array(start)

    def _conversation(self, room: int) -> tuple[list[int], list[int]] | None:
        """The next waiting conversation that fits into `room` tokens, or None."""
        while len(self._pool) < POOL:
            pieces = self._renderer.pieces(make_sample(self._rng))
            document = encode(self._tokenizer, pieces)
            if len(document[0]) <= self._length:
                self._pool.append(document)
        for i, document in enumerate(self._pool):
            if len(document[0]) <= room:
                return self._pool.pop(i)
        return None

    def _stretch(self, tokens: int) -> list[int]:
        source = self._rng.choice(self._code)
        at = self._rng.randrange(max(1, len(source) - tokens))
        return source[at : at + tokens]
