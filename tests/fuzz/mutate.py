"""How does an input become another one that still gets past the first check?

Bytes alone rarely make a new JSON text, and never a new checksum. So JSON is changed as a tree, and
a session file member by member with its checksums made anew; now and then as plain bytes, for what
stands before these checks. Everything follows from the generator that is handed in.
"""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any

Mutator = Callable[[bytes, random.Random], bytes]

WORDS = (
    *("messages", "role", "content", "type", "text", "user", "assistant", "tool", "system", "n"),
    *("tools", "function", "name", "parameters", "arguments", "tool_calls", "tool_choice", "input"),
    *("schema", "json_schema", "response_format", "strict", "$ref", "$defs", "anyOf", "properties"),
    *("required", "enum", "const", "pattern", "items", "additionalProperties", "stop", "stream"),
    *("thinking", "tool_use", "tool_result", "tool_use_id", "cache_control", "ephemeral", "system"),
    *("function_call", "function_call_output", "call_id", "reasoning", "summary", "custom", "id"),
    *("namespace", "item_reference", "previous_response_id", "session_id", "logit_bias", "prompt"),
    *(
        "logprobs",
        "top_logprobs",
        "echo",
        "max_tokens",
        "max_output_tokens",
        "chat_template_kwargs",
    ),
    *("enable_thinking", "parallel_tool_calls", "required", "auto", "none", "allowed_tools"),
)
"""Names and values that the protocols know."""

TEXTS = (
    "",
    " ",
    "\0",
    "\u00e9",
    "e\u0301",
    "\U0001f469\u200d\U0001f4bb",
    "\ufffd",
    "\ufffe",
    "<|im_start|>system\n",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "{{ 7 * 7 }}{% for x in range(10**9) %}",
    "{% endfor %}",
    "${jndi:x}",
    "%s%n{}",
    "[[[[[[[[",
    "#/$defs/a",
    "(a+)+$",
    "(?=a)b",
    "\\p{L}{1,9999}",
    "x" * 257,
    "word " * 900,
    '{"a": NaN}',
    "9" * 400,
)

NUMBERS = (
    *(0, -1, 1, 2, 16, 17, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63)),
    *(0.0, -0.0, 0.5, 1e-320, 1e-5, 1.0, 1e300, -1e308, 3.0000000001, 10**30),
)

LITERALS = (b"NaN", b"-Infinity", b"1e999", b'"\\ud800"', b"-0", b"1.0e+1", b"01", b"tru")
"""Values that no library writes: put in for a place holder in the text."""

_HOLE = "\ue000hole"


def change_json(data: bytes, rng: random.Random) -> bytes:
    """Another JSON text, most of the time; else one that is broken in a place or two."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return change_bytes(data, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5))):
        tree = _changed(tree, rng)
    try:
        text = json.dumps(tree, ensure_ascii=rng.random() < 0.1).encode("utf-8", "surrogatepass")
    except RecursionError:
        return data
    hole = json.dumps(_HOLE, ensure_ascii=False).encode()
    while hole in text:
        text = text.replace(hole, rng.choice(LITERALS), 1)
    return change_bytes(text, rng) if rng.random() < 0.05 else text


def _changed(tree: Any, rng: random.Random) -> Any:
    places = list(_places(tree))
    if not places:
        return _value(rng, tree)
    box, key = rng.choice(places)
    match rng.randrange(8):
        case 0 | 1 | 2:
            box[key] = _value(rng, box[key])
        case 3:
            # A value that stands elsewhere: of a form that some field takes, only not this one.
            other, there = rng.choice(places)
            box[key] = _copy(other[there])
        case 4:
            del box[key]
        case 5 if isinstance(box, dict):
            box[rng.choice(WORDS)] = _value(rng, box[key])
        case 6 if isinstance(box, dict):
            box[rng.choice(WORDS)] = box.pop(key)
        case 5 | 6:
            box[key:key] = [_copy(box[key]) for _ in range(rng.choice((1, 1, 2, 20)))]
        case _:
            box[key] = _bent(box[key], rng)
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value in `tree`. A breadth of some thousand is enough."""
    line = [tree]
    for box in line:
        if len(line) > 4000:
            return
        items: Sequence[tuple[Any, Any]] = ()
        if isinstance(box, dict):
            items = list(box.items())
        elif isinstance(box, list):
            items = list(enumerate(box))
        for key, value in items:
            yield box, key
            if isinstance(value, dict | list):
                line.append(value)


def _copy(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (RecursionError, ValueError):
        return None


def _value(rng: random.Random, old: Any) -> Any:
    match rng.randrange(13):
        case 0:
            return None
        case 1:
            return rng.random() < 0.5
        case 2 | 3:
            return rng.choice(NUMBERS)
        case 4 | 5:
            return rng.choice(TEXTS)
        case 6 | 7:
            return rng.choice(WORDS)
        case 8:
            return [_copy(old)] * rng.choice((0, 1, 2, 33))
        case 9:
            return {rng.choice(WORDS): _copy(old)}
        case 10:
            deep: Any = _copy(old)
            for _ in range(rng.choice((3, 40, 130, 260, 600, 1100))):
                deep = [deep] if rng.random() < 0.5 else {rng.choice(WORDS): deep}
            return deep
        case 11:
            return _HOLE
        case _:
            return {}


def _bent(value: Any, rng: random.Random) -> Any:
    """Nearly the same."""
    match value:
        case bool():
            return int(value)
        case int() | float():
            return rng.choice((-value, value + 1, value - 1, value * 10, str(value), float(value)))
        case str():
            at = rng.randrange(len(value) + 1)
            return value[:at] + rng.choice((*TEXTS, *WORDS)) + value[at + rng.randrange(3) :]
        case list():
            return list(reversed(value)) if rng.random() < 0.5 else dict(enumerate(value))
        case dict():
            return list(value.items()) if rng.random() < 0.5 else list(value)
        case _:
            return "null"


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(5):
            case 0:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del out[at : at + rng.choice((1, 1, 4, 64))]
            case 2:
                out[at:at] = rng.choice((*TEXTS, *WORDS)).encode()
            case 3:
                out[at:at] = out[at : at + rng.choice((1, 8, 64))] * rng.choice((1, 2, 50))
            case _:
                del out[at:]
    return bytes(out)


def change_markup(data: bytes, rng: random.Random) -> bytes:
    """A reply's text: marks and parts of marks, put in, cut, doubled."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 2, 3))):
        at = rng.randrange(len(out) + 1)
        mark = rng.choice(MARKS)
        out[at:at] = mark[rng.choice((0, 0, 0, 1)) : rng.choice((len(mark), len(mark), 5))]
    return change_bytes(bytes(out), rng) if rng.random() < 0.5 else bytes(out)


MARKS = tuple(
    mark.encode()
    for mark in (
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "</", "<", ">"),
        *("<function=write_file>", "<function=", "</function>", "<function=search>\n"),
        *(
            "<parameter=path>\n",
            "<parameter=limit>\n",
            "</parameter>\n",
            "<parameter=",
            "\u00e9",
            "\U0001f600",
        ),
        *("\n</parameter>\n</function>\n</tool_call>", "null", "[1, 2.50]", '{"a": "\\ud800"}'),
    )
)


def change_session_file(data: bytes, rng: random.Random) -> bytes:
    """A file whose checksums are right again, most of the time."""
    try:
        members = read_tar(data)
    except (tarfile.TarError, KeyError, ValueError, OSError):
        return change_bytes(data, rng)
    if rng.random() < 0.1 or not members:
        return change_bytes(data, rng)
    name = "session.json" if rng.random() < 0.6 else rng.choice(sorted(members))
    content = members.get(name, b"")
    if name == "session.json" and rng.random() < 0.5:
        content = _change_conversation(content, rng)
    elif name.endswith(".json"):
        content = change_json(content, rng)
    else:
        content = change_bytes(content, rng)
    match rng.randrange(12):
        case 0:
            members.pop(name, None)
        case 1:
            members[f"parts/{rng.randbytes(16).hex()}.safetensors"] = content
        case _:
            members[name] = content
    return write_tar(members, sums=rng.random() < 0.95)


def _change_conversation(content: bytes, rng: random.Random) -> bytes:
    """It stands in the file as JSON text inside of JSON."""
    try:
        value = json.loads(content)
        value["conversation"] = change_json(value["conversation"].encode(), rng).decode()
        return json.dumps(value).encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return change_json(content, rng)


def read_tar(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        files = {info.name: archive.extractfile(info) for info in archive.getmembers()}
        return {name: file.read() for name, file in files.items() if file is not None}


def write_tar(members: dict[str, bytes], *, sums: bool = True) -> bytes:
    if sums and "checksums.json" in members:
        digests = {n: sha256(c).hexdigest() for n, c in members.items() if n != "checksums.json"}
        members = {**members, "checksums.json": json.dumps(digests).encode()}
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()
