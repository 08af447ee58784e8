"""How does text become token ids when most of it was seen before?

Text is split at the added tokens (`<|im_start|>`, `<think>`, ...). The library encodes each piece
between them on its own, so the ids of a piece depend on nothing outside it: they are memoised, and
a resent history costs one look-up per piece. The result equals the library's encoding of the whole.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer

from capserve.errors import CheckpointError, InvalidRequestError

TokenArray = npt.NDArray[np.int32]

_NFC_JOINS = 4
"""Most characters that NFC joins to one: a base and three combining marks, as in Greek."""

MEMO_BYTES = 64 << 20
"""A 50k-token history takes about 0.6 MB here: room for a hundred of them."""

ENTRY_OVERHEAD_BYTES = 300
"""Key, array header and table slot of one memo entry, so that many tiny pieces are bounded too."""


@dataclass(frozen=True)
class Encoding:
    """Tokens of a text, with the borders at which text and tokens may be cut alike.

    A border is a start or an end of an added token, or an end of the text: encoding both sides of
    it on their own gives the same ids. `chars` and `offsets` are parallel and ascending.
    """

    tokens: TokenArray
    chars: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    """Characters at which an added token starts: a subset of `chars`."""

    def token_offset(self, char: int) -> int:
        """Tokens before the border `char`. AssertionError when it is no border."""
        i = int(np.searchsorted(self.chars, char))
        is_border = i < len(self.chars) and self.chars[i] == char
        assert is_border, f"character {char} is no border"
        return int(self.offsets[i])

    def floor(self, char: int) -> int:
        """The last border at or before `char`."""
        return int(self.chars[np.searchsorted(self.chars, char, side="right") - 1])

    def floor_start(self, char: int) -> int:
        """The last character at or before `char` at which an added token starts; 0 if none."""
        i = int(np.searchsorted(self.starts, char, side="right"))
        return int(self.starts[i - 1]) if i else 0


@dataclass(frozen=True, slots=True)
class TokenizerCounters:
    """What was really tokenized, and what came from the memo. Bytes are UTF-8 bytes.

    A segment is the text between two added tokens; one that stands several times in a text counts
    once.
    """

    segments_encoded: int
    segments_reused: int
    bytes_encoded: int
    bytes_reused: int


class Tokenizer:
    """A byte-level BPE with added tokens. Every method may be called from any thread."""

    def __init__(self, library: LibraryTokenizer, *, memo_bytes: int = MEMO_BYTES) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        added: dict[int, AddedToken] = dict(library.get_added_tokens_decoder())
        self.specials: Mapping[str, int] = MappingProxyType(
            {token.content: id_ for id_, token in sorted(added.items())}
        )
        """Every added token's text and id, control tokens and markup alike."""
        self.control_ids = frozenset(id_ for id_, token in added.items() if token.special)
        """Ids that are never text (`special: true` in the checkpoint)."""
        vocab: dict[str, int] = library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self._ids = vocab
        self._bytes = _byte_table(vocab, self.specials, self.vocab_size)
        self._longest = max(len(spelling) for spelling in self._bytes)
        self._marks = {text: np.array([id_], dtype=np.int32) for text, id_ in self.specials.items()}
        self._border = _border_pattern(added.values())
        self._memo: OrderedDict[str, tuple[TokenArray, int]] = OrderedDict()
        self._memo_limit = memo_bytes
        self._memo_bytes = 0
        self._lock = threading.Lock()
        self._counts = [0, 0, 0, 0]

    @classmethod
    def from_dir(cls, path: str | Path, *, memo_bytes: int = MEMO_BYTES) -> Tokenizer:
        """Read `tokenizer.json` of a checkpoint directory.

        Raises CheckpointError when it is missing, broken, or no byte-level BPE without a prefix
        space: only there is every piece between added tokens independent of its neighbours.
        """
        file = Path(path) / "tokenizer.json"
        try:
            description = json.loads(file.read_text(encoding="utf-8"))
            library = LibraryTokenizer.from_file(str(file))
        except FileNotFoundError:
            raise CheckpointError(f"{file} does not exist", param="model") from None
        except Exception as error:  # the library raises nothing more exact
            raise CheckpointError(f"{file} can't be read: {error}", param="model") from error
        if not _is_plain_byte_level(description):
            raise CheckpointError(
                f"{file}: expected a byte-level BPE without prefix space, "
                f"found model {description.get('model', {}).get('type')!r}",
                param="model",
            )
        return cls(library, memo_bytes=memo_bytes)

    def least_tokens(self, chars: int) -> int:
        """A lower bound on the tokens of any text of `chars` characters, without reading it.

        A token spells at most the longest token's bytes, and normalization may join a few
        characters to one.
        """
        return -(-chars // (self._longest * _NFC_JOINS))

    def surely_exceeds(self, text: str, most_tokens: int) -> bool:
        """True only when `text` has more than `most_tokens` tokens, which are not kept.

        Texts of ordinary density are not looked at. The others are read in slices for as long as
        it takes, since one call of the library holds some hundred bytes for every token.
        """
        if len(text) <= _CHARS_PER_TOKEN * most_tokens:
            return False
        # A cut changes the tokens next to it: the count must pass the limit by a wide margin.
        enough = most_tokens + most_tokens // 4 + 1000
        seen = 0
        for start in range(0, len(text), _SLICE_CHARS):
            piece = text[start : start + _SLICE_CHARS]
            _utf8_length(piece)  # refuses a lone surrogate
            [encoding] = self._library.encode_batch_fast([piece], add_special_tokens=False)
            seen += len(encoding)
            if seen > enough:
                return True
        return False

    def encode(self, text: str) -> TokenArray:
        """Ids of `text`, added tokens recognised, nothing put before or after.

        Raises InvalidRequestError for a lone surrogate, which no UTF-8 text can hold.
        """
        return self.encode_with_borders(text).tokens

    def encode_with_borders(self, text: str) -> Encoding:
        pieces = self._border.split(text) if self._border else [text]
        arrays = self._look_up(pieces)
        # re.split with one group alternates: text, mark, text, mark, ..., text.
        chars = np.zeros(len(pieces) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)), out=chars[1:])
        offsets = np.zeros(len(pieces) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, arrays), np.int64, len(arrays)), out=offsets[1:])
        return Encoding(np.concatenate(arrays), chars, offsets, chars[1:-1:2])

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes of a token; b"" for an id that the vocabulary does not have."""
        return self._bytes[token] if 0 <= token < self.vocab_size else b""

    def id_of(self, token: str) -> int | None:
        """Id of a token by its text for added tokens, by its vocabulary entry otherwise."""
        return self._ids.get(token)

    @functools.cached_property
    def lacking(self) -> npt.NDArray[np.int8]:
        """[vocab_size]: bytes that the last character of each token lacks. A token of one or two
        bytes that only go on with a character has minus their number."""
        return np.array([_lacking(spelling) for spelling in self._bytes], dtype=np.int8)

    @property
    def counters(self) -> TokenizerCounters:
        with self._lock:
            return TokenizerCounters(*self._counts)

    @property
    def memo_bytes(self) -> int:
        """Bytes that the memo accounts for; never above its limit."""
        with self._lock:
            return self._memo_bytes

    def _look_up(self, pieces: Sequence[str]) -> list[TokenArray]:
        """Ids of each piece; those not in the memo are encoded in one call of the library."""
        found: dict[str, TokenArray] = {"": _EMPTY, **self._marks}
        missing: dict[str, int] = {}
        reused = reused_bytes = 0
        with self._lock:
            for piece in pieces:
                if piece in found:
                    continue
                known = self._memo.get(piece)
                if known is None:
                    missing[piece] = _utf8_length(piece)
                else:
                    self._memo.move_to_end(piece)
                    found[piece] = known[0]
                    reused += 1
                    reused_bytes += known[1]
        if missing:
            # The batch call, because `encode` holds the GIL for as long as it takes: 0.9 s for a
            # megabyte, in which nothing else in the process would run.
            batch = self._library.encode_batch_fast(list(missing), add_special_tokens=False)
            for piece, encoding in zip(missing, batch, strict=True):
                ids = np.array(encoding.ids, dtype=np.int32)
                ids.flags.writeable = False
                found[piece] = ids
        with self._lock:
            self._counts[0] += len(missing)
            self._counts[1] += reused
            self._counts[2] += sum(missing.values())
            self._counts[3] += reused_bytes
            for piece, size in missing.items():
                self._remember(piece, found[piece], size)
        return [found[piece] for piece in pieces]

    def _remember(self, piece: str, ids: TokenArray, size: int) -> None:
        if piece in self._memo:  # another thread was faster
            return
        self._memo[piece] = (ids, size)
        self._memo_bytes += _entry_bytes(piece, ids)
        while self._memo_bytes > self._memo_limit:
            old_piece, (old_ids, _) = self._memo.popitem(last=False)
            self._memo_bytes -= _entry_bytes(old_piece, old_ids)


_CHARS_PER_TOKEN = 4
"""About what prose and code have: a text with more of them than fit is likely to be too long."""

_SLICE_CHARS = 1 << 17

_EMPTY: TokenArray = np.empty(0, dtype=np.int32)
_EMPTY.flags.writeable = False


def _utf8_length(piece: str) -> int:
    try:
        return len(piece.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"messages: a lone surrogate (U+{ord(piece[error.start]):04X}) is not text",
            param="messages",
        ) from None


def _entry_bytes(piece: str, ids: TokenArray) -> int:
    # A str takes one to four bytes a character; ASCII, the common case, takes one.
    width = 1 if piece.isascii() else 4
    return len(piece) * width + ids.nbytes + ENTRY_OVERHEAD_BYTES


def missing_bytes(data: bytes) -> int:
    """Bytes of UTF-8 that the last character of `data` lacks; 0 when it is whole, or is none."""
    for have, byte in enumerate(reversed(data[-3:]), start=1):
        if byte >= 0xC0:  # the first byte of a character of two to four
            return max(0, (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) - have)
        if byte < 0x80:
            break
    return 0


def _lacking(spelling: bytes) -> int:
    goes_on = all(0x80 <= byte < 0xC0 for byte in spelling)
    return -len(spelling) if goes_on and len(spelling) < 3 else missing_bytes(spelling)


def _border_pattern(added: Iterable[AddedToken]) -> re.Pattern[str] | None:
    """One pattern for the added tokens that match wherever their text stands, longest first.

    A token with a condition on its surroundings (single_word, lstrip, rstrip) or that matches after
    normalization only stays inside its piece, where the library recognises it.
    """
    words = sorted(
        (
            t.content
            for t in added
            if t.content and not (t.single_word or t.lstrip or t.rstrip or t.normalized)
        ),
        key=len,
        reverse=True,
    )
    if not words:
        return None
    # A common head outside the alternation lets the regex engine search for it as a literal.
    head = words[0]
    while not all(word.startswith(head) for word in words):
        head = head[:-1]
    tails = "|".join(re.escape(word[len(head) :]) for word in words)
    return re.compile(f"({re.escape(head)}(?:{tails}))")


def _is_plain_byte_level(description: Mapping[str, object]) -> bool:
    model = description.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        return False
    pre = description.get("pre_tokenizer")
    steps = pre.get("pretokenizers", [pre]) if isinstance(pre, dict) else []
    levels = [s for s in steps if isinstance(s, dict) and s.get("type") == "ByteLevel"]
    return bool(levels) and not any(s.get("add_prefix_space") for s in levels)


def _byte_table(
    vocab: Mapping[str, int], specials: Mapping[str, int], size: int
) -> tuple[bytes, ...]:
    """Bytes of every id. Byte-level BPE spells each byte as one printable character: bytes that are
    printable in Latin-1 stand for themselves, the others follow from U+0100 on in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    spelled = {chr(byte): byte for byte in printable}
    spelled.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    table = [b""] * size
    for token, id_ in vocab.items():
        if token in specials or not all(char in spelled for char in token):
            table[id_] = token.encode("utf-8")
        else:
            table[id_] = bytes(spelled[char] for char in token)
    return tuple(table)
