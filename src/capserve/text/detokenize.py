"""How do tokens become text without breaking a character in two?

Bytes of an unfinished character wait for the next token. What comes out, flush included, is what
`bytes.decode("utf-8", errors="replace")` of the whole would give, however the tokens were cut.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Iterable

from capserve.text.markup import KEPT_MARKS
from capserve.text.tokenizer import Tokenizer, missing_bytes


class Detokenizer:
    """One reply's decoder. Control tokens are no text; markup such as `<think>` is."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        kept = {tokenizer.specials[mark] for mark in KEPT_MARKS & tokenizer.specials.keys()}
        self._dropped = tokenizer.control_ids - kept
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def copy(self) -> Detokenizer:
        """One that goes on from here by itself."""
        twin = copy.copy(self)
        twin._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        twin._decoder.setstate(self._decoder.getstate())
        return twin

    @property
    def lacking(self) -> int:
        """Bytes that the last character lacks; 0 when it is whole."""
        return missing_bytes(self._decoder.getstate()[0])

    def feed(self, tokens: Iterable[int]) -> str:
        data = b"".join(self._token_bytes(t) for t in tokens if t not in self._dropped)
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What still waits; an unfinished character becomes U+FFFD. Feeding may go on after it."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
