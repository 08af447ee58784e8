"""How does a row's value stand in a column?

Lists of numbers are packed arrays and a list of parts is one blob, because ten thousand capsules
have to be read in well under a second. Text is UTF-8 that may hold lone surrogates, which JSON
allows and a client may have sent. Nothing here is code: a file that somebody changed can hold
wrong values, never a program.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable

import numpy as np
from xxhash import xxh3_64_digest

from capserve.serving.capsules.rows import TurnEnd
from capserve.serving.journal import Span, SpanKind, TurnMark
from capserve.serving.sessions.conversation_json import (
    message_of,
    message_row,
    switches_of,
    tools_of,
)
from capserve.text.prompt import TurnRecord

NAME_BYTES = 16
"""Of a part's name and of a digest."""

UNREADABLE = (ValueError, TypeError, KeyError, RecursionError, struct.error)
"""What reading a column raises that was not packed here."""

_SPAN = struct.Struct("<?qq")
_PAIR = struct.Struct("<qq")


class _Spans(dict[tuple[bool, int, int], Span]):
    def __missing__(self, fields: tuple[bool, int, int]) -> Span:
        decoded, start, end = fields
        span = Span(SpanKind.DECODE if decoded else SpanKind.PREFILL, start, end)
        self[fields] = span
        return span


class SpanReader:
    """Spans from bytes. Journals share their starts, so each different span is made once."""

    def __init__(self) -> None:
        self._known = _Spans()

    def __call__(self, data: bytes) -> tuple[Span, ...]:
        return tuple(map(self._known.__getitem__, _SPAN.iter_unpack(data)))


def pack_spans(spans: Iterable[Span]) -> bytes:
    return b"".join(_SPAN.pack(s.kind is SpanKind.DECODE, s.start, s.end) for s in spans)


def pack_pairs(pairs: Iterable[TurnMark | TurnEnd]) -> bytes:
    return b"".join(_PAIR.pack(pair.position, pair.messages) for pair in pairs)


def unpack_marks(data: bytes) -> tuple[TurnMark, ...]:
    return tuple(TurnMark(*pair) for pair in _PAIR.iter_unpack(data))


def unpack_ends(data: bytes) -> tuple[TurnEnd, ...]:
    return tuple(TurnEnd(*pair) for pair in _PAIR.iter_unpack(data))


def cut_names(data: bytes) -> list[bytes]:
    """Names of NAME_BYTES each. Raises ValueError for a torn list."""
    if len(data) % NAME_BYTES:
        raise ValueError(f"{len(data)} bytes are no list of names of {NAME_BYTES} bytes")
    return [data[start : start + NAME_BYTES] for start in range(0, len(data), NAME_BYTES)]


def row_check(*columns: bytes | int | float | None) -> bytes:
    """A checksum of a row: to find damage, not malice."""
    blobs = [column for column in columns if isinstance(column, bytes)]
    shape = [len(column) if isinstance(column, bytes) else repr(column) for column in columns]
    return xxh3_64_digest(repr(shape).encode() + b"".join(blobs))


def pack_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def unpack_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def pack_record(record: TurnRecord) -> tuple[bytes, bytes, bytes]:
    """(text, tokens as int32 little endian, the rest as JSON)."""
    kwargs = None if record.template_kwargs is None else dict(record.template_kwargs)
    rest = {
        "messages": [message_row(message) for message in record.messages],
        "tools": [dict(tool) for tool in record.tools],
        "template_kwargs": kwargs,
    }
    tokens = np.ascontiguousarray(record.tokens, dtype="<i4").tobytes()
    return pack_text(record.text), tokens, json.dumps(rest).encode("ascii")


def unpack_record(text: bytes, tokens: bytes, rest: bytes) -> TurnRecord:
    """Raises one of UNREADABLE for what `pack_record` did not write."""
    fields = json.loads(rest)
    return TurnRecord(
        messages=tuple(message_of(message) for message in fields["messages"]),
        text=unpack_text(text),
        tokens=np.frombuffer(tokens, dtype="<i4").astype(np.int32, copy=False),
        tools=tools_of(fields["tools"]),
        template_kwargs=switches_of(fields["template_kwargs"]),
    )
