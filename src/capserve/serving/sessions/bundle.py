"""How does one session stand in a file, and is this file one?

A tar archive that any tool can list: `session.json`, `journal.bin` (int32, little endian), a
safetensors file for each part of its capsules, and at the end `checksums.json` with a SHA-256 of
each. `pieces` writes it as a stream, part by part. `read` checks a whole file before it believes
any of it: only plain members under exactly the names that `session.json` calls for, every checksum,
and the engine's fingerprint. Nothing is unpacked to a path.

The checksums prove that nothing was torn. They can't prove that a state belongs to its tokens: a
file is to be trusted like a checkpoint.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import Any

import numpy as np
import orjson

from capserve.engine.seam import EngineLimits, TokenArray
from capserve.errors import CapsuleError, InvalidRequestError
from capserve.serving.capsules.rows import TurnEnd
from capserve.serving.journal import Span, SpanKind, TurnMark
from capserve.serving.sessions.conversation_json import conversation_json, conversation_of
from capserve.serving.sessions.orders import Exported, PackedCapsule
from capserve.text.messages import Conversation

FORMAT = "capserve-session"
VERSION = 1

BLOCK = tarfile.BLOCKSIZE
PIECE_BYTES = 1 << 20
"""Largest piece of a stream: what lies in memory beside the parts themselves."""

MAX_MEMBERS = 20_000
"""A context of 262,144 tokens has 512 KV parts; the rest is small states of boundaries."""
JSON_BYTES_PER_TOKEN = 32
"""Of the longest journal that fits: text in escapes, and the spans and parts of every state."""
LEAST_JSON_BYTES = 4 << 20
MAX_ENDS = 20_000
"""Marks, and turns: whoever shows or cuts the session goes through them between two steps."""

SESSION, JOURNAL, CHECKSUMS = "session.json", "journal.bin", "checksums.json"
_NAME = re.compile(r"session\.json|journal\.bin|checksums\.json|parts/[0-9a-f]{32}\.safetensors")


# -- writing -----------------------------------------------------------------------------------


def pieces(exported: Exported) -> Iterator[bytes | memoryview]:
    """The file, piece by piece. Each part is packed when its turn has come."""
    checksums: dict[str, str] = {}

    def member(name: str, content: list[memoryview]) -> Iterator[bytes | memoryview]:
        size = sum(piece.nbytes for piece in content)
        info = tarfile.TarInfo(name)
        info.size = size
        yield info.tobuf(tarfile.USTAR_FORMAT)
        digest = sha256()
        for whole in content:
            flat = whole.cast("B")
            for start in range(0, flat.nbytes, PIECE_BYTES):
                piece = flat[start : start + PIECE_BYTES]
                digest.update(piece)
                yield piece
        yield bytes(-size % BLOCK)
        checksums[name] = digest.hexdigest()

    yield from member(SESSION, [memoryview(_session_json(exported))])
    journal = np.ascontiguousarray(exported.tokens, dtype="<i4")
    yield from member(JOURNAL, [memoryview(journal.tobytes())])
    for part in {part.name: part for c in exported.capsules for part in c.parts}.values():
        yield from member(_part_name(part.name.hex()), list(part.pack()))
    yield from member(CHECKSUMS, [memoryview(json.dumps(checksums).encode())])
    yield bytes(2 * BLOCK)


def _part_name(name: str) -> str:
    return f"parts/{name}.safetensors"


def _session_json(exported: Exported) -> bytes:
    value = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": exported.fingerprint,
        "model": exported.model,
        "session_id": exported.session_id,
        "tokens": len(exported.tokens),
        "spans": _spans_value(exported.spans),
        "marks": [[mark.position, mark.messages] for mark in exported.marks],
        "turns": [[turn.position, turn.messages] for turn in exported.turns],
        "conversation": conversation_json(exported.conversation),
        "capsules": [
            {
                "position": capsule.position,
                "spans": _spans_value(capsule.spans),
                "parts": [part.name.hex() for part in capsule.parts],
            }
            for capsule in exported.capsules
        ],
    }
    return orjson.dumps(value)


def _spans_value(spans: tuple[Span, ...]) -> list[list[Any]]:
    return [[span.kind.value, span.start, span.end] for span in spans]


# -- reading -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bundle:
    """What a file holds, checked. Parts are views into it: it must outlive them."""

    session_id: str
    """Of the session that was exported; the imported one gets an id of its own."""
    tokens: TokenArray
    spans: tuple[Span, ...]
    marks: tuple[TurnMark, ...]
    turns: tuple[TurnEnd, ...]
    conversation: Conversation | None
    capsules: tuple[PackedCapsule, ...]


def read(data: memoryview, engine: EngineLimits) -> Bundle:
    """The session in `data`, a whole file.

    Raises CapsuleError (400) for a file that is torn, changed or no such file, and
    InvalidRequestError naming both fingerprints for one of another model or version.
    """
    members = _members(data)
    most_bytes = LEAST_JSON_BYTES + JSON_BYTES_PER_TOKEN * engine.max_positions
    value = _session_value(members, most_bytes)
    fingerprint = value.get("fingerprint")
    if fingerprint != engine.fingerprint:
        raise InvalidRequestError(
            f"The session was exported from an engine with fingerprint {str(fingerprint)[:64]!r}; "
            f"this one has {engine.fingerprint!r}. Model, dtype, prefill chunk, device kind and "
            "versions must be the same.",
            param="fingerprint",
        )
    _check_sums(members, most_bytes)
    try:
        return _bundle(value, members, engine)
    except (KeyError, TypeError, ValueError) as error:
        raise _bad(f"{SESSION} does not fit the rest: {error}") from None


def _bad(why: str) -> CapsuleError:
    return CapsuleError(f"This is no whole exported session: {why}.")


def _members(data: memoryview) -> dict[str, memoryview]:
    """Every member by its name. Headers are read one by one, so that no size is believed."""
    members: dict[str, memoryview] = {}
    at = 0
    while True:
        header = bytes(data[at : at + BLOCK])
        if len(header) < BLOCK:
            raise _bad(f"it ends after {len(data)} bytes, inside the archive")
        if header == bytes(BLOCK):
            break
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
        except (tarfile.HeaderError, ValueError) as error:
            raise _bad(f"byte {at} begins no archive member ({error})") from None
        start = at + BLOCK
        if info.type != tarfile.REGTYPE or not _NAME.fullmatch(info.name):
            raise _bad(f"it has a member {info.name[:80]!r}, which no export has")
        if info.name in members or len(members) >= MAX_MEMBERS:
            raise _bad(f"it has {info.name} twice, or more than {MAX_MEMBERS} members")
        if not 0 <= info.size <= len(data) - start:
            raise _bad(f"{info.name} should have {info.size} bytes, {len(data) - start} are left")
        members[info.name] = data[start : start + info.size]
        at = start + info.size + -info.size % BLOCK
    for needed in (SESSION, JOURNAL, CHECKSUMS):
        if needed not in members:
            raise _bad(f"it has no {needed}")
    return members


def _json(members: Mapping[str, memoryview], name: str, most_bytes: int) -> dict[str, Any]:
    """Small before it is read: values of JSON take many times the bytes that they are written in,
    and nobody else's thread runs while they are made."""
    if members[name].nbytes > most_bytes:
        raise _bad(f"{name} has {members[name].nbytes} bytes, {most_bytes} are the most")
    try:
        value = orjson.loads(members[name])
    except orjson.JSONDecodeError as error:
        raise _bad(f"{name} is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise _bad(f"{name} holds no object")
    return value


def _session_value(members: Mapping[str, memoryview], most_bytes: int) -> dict[str, Any]:
    value = _json(members, SESSION, most_bytes)
    if value.get("format") != FORMAT or value.get("version") != VERSION:
        raise _bad(
            f"its format is {str(value.get('format'))[:64]!r} version "
            f"{str(value.get('version'))[:64]!r}; this server reads {FORMAT!r} version {VERSION}"
        )
    return value


def _check_sums(members: Mapping[str, memoryview], most_bytes: int) -> None:
    sums = _json(members, CHECKSUMS, most_bytes)
    named = sums.keys() | {CHECKSUMS}
    if named != members.keys():
        odd = sorted(map(str, named ^ members.keys()))[0]
        raise _bad(f"members and checksums differ in {odd[:80]!r}")
    for name, content in members.items():
        if name != CHECKSUMS and sha256(content).hexdigest() != sums[name]:
            raise _bad(f"{name} has not the bytes that its checksum was made of")


def _bundle(
    value: Mapping[str, Any], members: Mapping[str, memoryview], engine: EngineLimits
) -> Bundle:
    """Raises KeyError, TypeError or ValueError where something does not fit."""
    raw = members[JOURNAL]
    if raw.nbytes % 4 or raw.nbytes // 4 != value["tokens"]:
        raise ValueError(f"{raw.nbytes} bytes of journal for {value['tokens']!r} tokens")
    tokens = np.frombuffer(raw, dtype="<i4").astype(np.int32)
    length = len(tokens)
    if length > engine.max_positions:
        raise ValueError(f"{length} tokens, this server has room for {engine.max_positions}")
    if length and not 0 <= int(tokens.min()) <= int(tokens.max()) < engine.vocab_size:
        raise ValueError(f"token ids must be 0 to {engine.vocab_size - 1}")
    conversation = _conversation(value["conversation"])
    messages = 0 if conversation is None else len(conversation.messages)
    capsules = tuple(_capsule(entry, members, length) for entry in value["capsules"])
    positions = [capsule.position for capsule in capsules]
    if positions != sorted(set(positions)):
        raise ValueError("capsules do not ascend")
    named = {_part_name(part) for entry in value["capsules"] for part in entry["parts"]}
    if named | {SESSION, JOURNAL, CHECKSUMS} != members.keys():
        raise ValueError("it has parts that no capsule names")
    return Bundle(
        session_id=str(value["session_id"]),
        tokens=tokens,
        spans=_spans(value["spans"], length),
        marks=tuple(TurnMark(*pair) for pair in _ends(value["marks"], length, messages)),
        turns=tuple(TurnEnd(*pair) for pair in _ends(value["turns"], length, messages)),
        conversation=conversation,
        capsules=capsules,
    )


def _conversation(text: Any) -> Conversation | None:
    if isinstance(text, str) and text:
        orjson.loads(text)  # a ValueError for what no request can have brought, as lone surrogates
    return conversation_of(text)


def _capsule(
    entry: Mapping[str, Any], members: Mapping[str, memoryview], length: int
) -> PackedCapsule:
    position = _number(entry["position"], length)
    parts = tuple(members[_part_name(part)] for part in entry["parts"])
    return PackedCapsule(position, _spans(entry["spans"], position), parts)


def _spans(value: Any, length: int) -> tuple[Span, ...]:
    """Spans that cover `[0, length)` without a gap."""
    spans = tuple(Span(SpanKind(kind), start, end) for kind, start, end in value)
    at = 0
    for span in spans:
        if _number(span.start, length) != at or _number(span.end, length) <= at:
            raise ValueError(f"a span [{span.start}, {span.end}) does not begin at {at}")
        at = span.end
    if at != length:
        raise ValueError(f"spans cover {at} of {length} tokens")
    return spans


def _ends(value: Any, length: int, messages: int) -> list[tuple[int, int]]:
    """(position, messages) pairs, each behind the one before; those past the conversation are left
    out. Something ends at each: no position is 0, and neither is a count of messages."""
    if len(value) > MAX_ENDS:
        raise ValueError(f"{len(value)} marks or turns, {MAX_ENDS} are the most")
    pairs = [(_number(position, length, 1), _number(count, 2**31, 1)) for position, count in value]
    if any(before[0] >= after[0] for before, after in pairwise(pairs)):
        raise ValueError("marks or turns do not ascend")
    return [pair for pair in pairs if pair[1] <= messages]


def _number(value: Any, most: int, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{str(value)[:40]} is no number from {least} to {most}")
    return value
