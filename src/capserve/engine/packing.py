"""What does a capsule's part look like as a file?

A safetensors file: 8 bytes of header length, a JSON header padded to 8 with blanks, and the bytes
of each tensor one after another. It is written here instead of by the library so that a tensor's
memory is handed out as it is, not copied, and so that the header has one form only: a reader knows
every byte of the header it expects but for the two names, and refuses any other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from capserve.errors import CapsuleError

FORMAT = "1"
"""Version of the form and of the naming; part of every header and of the fingerprint."""

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 1 << 16

ELEMENT_BYTES: Mapping[str, int] = {"F32": 4, "BF16": 2, "I32": 4, "U8": 1}
"""By the format's own names of element types."""


@dataclass(frozen=True)
class Layout:
    """A tensor of a part: its element type by the format's name, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class Label:
    """What a part says of itself."""

    kind: str
    """`kv` or `small`."""
    start: int
    end: int
    """Its positions are [start, end)."""
    fingerprint: str
    """`EngineLimits.fingerprint` of the engine that made it."""
    name: bytes
    after: bytes
    """Name of the full KV part before it; `root` when there is none."""
    root: bytes
    """Name of the empty history that it began with (`History.root`)."""

    def words(self) -> str:
        """For messages."""
        return f"{self.kind} [{self.start}, {self.end})"

    def metadata(self) -> dict[str, str]:
        return {
            "format": FORMAT,
            "kind": self.kind,
            "start": str(self.start),
            "end": str(self.end),
            "fingerprint": self.fingerprint,
            "name": self.name.hex(),
            "after": self.after.hex(),
            "root": self.root.hex(),
        }


def header(label: Label, tensors: Mapping[str, Layout]) -> bytes:
    """The file up to the first tensor's bytes; tensors follow in this order, without gaps."""
    entries: dict[str, object] = {"__metadata__": label.metadata()}
    offset = 0
    for name, layout in tensors.items():
        end = offset + layout.nbytes
        entries[name] = {
            "dtype": layout.dtype,
            "shape": list(layout.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def joined(pieces: Sequence[memoryview]) -> memoryview:
    """What `pack` gave, as `unpack` takes it."""
    return memoryview(b"".join(pieces))


def read(
    data: memoryview, expected: Label, tensors: Mapping[str, Layout]
) -> tuple[Label, dict[str, memoryview]]:
    """The label in `data` and each tensor's bytes, as views into it.

    `expected` is what the label must say, its names aside. Raises CapsuleError naming what differs
    and both values.
    """
    what = f"capsule part {expected.words()}"
    data = data.cast("B") if data.contiguous else memoryview(data.tobytes())
    metadata, entries, start = _header_of(what, data)
    for field, value in expected.metadata().items():
        if field not in ("name", "after", "root") and metadata.get(field) != value:
            raise CapsuleError(f"{what}: {field} is {metadata.get(field)!r}, not {value!r}")
    label = Label(
        expected.kind,
        expected.start,
        expected.end,
        expected.fingerprint,
        _name(what, metadata, "name"),
        _name(what, metadata, "after"),
        _name(what, metadata, "root"),
    )
    wanted = header(label, tensors)
    if bytes(data[:start]) != wanted:
        own = json.loads(wanted[_LENGTH_BYTES:])
        for key in (own | entries).keys() - {"__metadata__"}:
            if entries.get(key) != own.get(key):
                raise CapsuleError(f"{what}: {key} is {entries.get(key)}, not {own.get(key)}")
        raise CapsuleError(f"{what}: a header of {start} bytes in another form, not {len(wanted)}")
    size = start + sum(layout.nbytes for layout in tensors.values())
    if len(data) != size:
        raise CapsuleError(f"{what}: {len(data)} bytes, not {size}")
    views: dict[str, memoryview] = {}
    for name, layout in tensors.items():
        views[name] = data[start : start + layout.nbytes]
        start += layout.nbytes
    return label, views


def _header_of(what: str, data: memoryview) -> tuple[dict[str, object], dict[str, object], int]:
    """Metadata, all entries, and where the tensors' bytes begin."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    room = min(len(data) - _LENGTH_BYTES, _MAX_HEADER_BYTES)
    if length > room:
        raise CapsuleError(
            f"{what}: a header of {length} bytes in {len(data)} bytes, at most {_MAX_HEADER_BYTES}"
        )
    end = _LENGTH_BYTES + length
    try:
        entries = json.loads(bytes(data[_LENGTH_BYTES:end]))
    except (ValueError, RecursionError) as error:
        raise CapsuleError(f"{what}: its header is no JSON: {error}") from None
    metadata = entries.get("__metadata__") if isinstance(entries, dict) else None
    if not isinstance(metadata, dict):
        raise CapsuleError(f"{what}: its header has no metadata object")
    return metadata, entries, end


def _name(what: str, metadata: dict[str, object], field: str) -> bytes:
    text = metadata.get(field)
    try:
        name = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        name = b""
    if len(name) != 16:
        raise CapsuleError(f"{what}: {field} is {text!r}, not 32 hex digits")
    return name
