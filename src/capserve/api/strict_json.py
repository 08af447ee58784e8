"""Is this body JSON, and if not, which field is to blame?
orjson is strict and fast but knows only a byte offset. When it refuses, the lenient parser of the
standard library reads a body of ordinary size once more, to find what is legal in no JSON and yet
common: NaN, infinities (`1e999`) and lone surrogates. The client is then told the field's name.
"""

from __future__ import annotations

import json
import math
from typing import Any

import orjson

from capserve.errors import InvalidRequestError

MAX_DEPTH = 240
"""Levels of nesting. The parser follows 1,024, the writer 254, and Python's own recursion ends
somewhere below 1,000, a little elsewhere on each thread: what was taken here must be readable by
all that comes after it, a few levels deeper in an answer, a stored reply or a session's file."""

_SPARE_DEPTH = 254 - MAX_DEPTH

MAX_SECOND_LOOK_BYTES = 1 << 20
"""Finding the field to blame takes some hundred bytes for each byte of a body made for it."""


def parse_object(body: bytes) -> dict[str, Any]:
    """`body` as a JSON object, or an `InvalidRequestError` that names the field to blame.

    It is at most `MAX_DEPTH` levels deep. Numbers beyond 64 bits come out as floats, which no
    integer field takes.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        param, fault = _find_fault(body) if len(body) <= MAX_SECOND_LOOK_BYTES else (None, "")
        if param is not None:
            raise InvalidRequestError(f"{param} {fault}.", param=param) from None
        raise InvalidRequestError(f"The request body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"The request body must be a JSON object, got {type_name(value)}."
        )
    if _is_deep(value):
        raise too_deep("The request body")
    return value


def too_deep(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{what} has JSON that is nested more than {MAX_DEPTH} levels deep.")


def _is_deep(value: object) -> bool:
    wrapped = value
    for _ in range(_SPARE_DEPTH):
        wrapped = [wrapped]
    try:
        orjson.dumps(wrapped)  # the fastest way to ask: a third of the time that reading takes
    except orjson.JSONEncodeError:
        return True
    return False


def type_name(value: object) -> str:
    """The JSON word for the type of `value`."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


def _find_fault(body: bytes) -> tuple[str | None, str]:
    """(path, what is wrong there) of the first value that no JSON may hold."""
    try:
        root = json.loads(body.decode())
    except (ValueError, RecursionError):
        return None, ""
    # Breadth first and without recursion: the body may be as deep as its sender likes.
    level: list[tuple[str, Any]] = [("", root)]
    while level:
        below: list[tuple[str, Any]] = []
        for path, value in level:
            if isinstance(value, float) and not math.isfinite(value):
                return path or "the body", f"must be a finite number, got {value}"
            if isinstance(value, str) and _is_broken(value):
                return path or "the body", "has a lone surrogate, which is no Unicode text"
            if isinstance(value, list):
                below += [(f"{path}[{i}]", item) for i, item in enumerate(value)]
            elif isinstance(value, dict):
                for key, item in value.items():
                    if _is_broken(key):
                        return path or "the body", "has a key with a lone surrogate"
                    below.append((f"{path}.{key}" if path else key, item))
        level = below
    return None, ""


def _is_broken(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
