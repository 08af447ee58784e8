"""The file form of a part, against the safetensors library."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.numpy

from capserve.engine.packing import FORMAT, Label, Layout, header, joined, read
from capserve.errors import CapsuleError

NAMES = (bytes(range(16)), bytes(range(16, 32)), bytes(range(32, 48)))
LABEL = Label("kv", 512, 600, "ab" * 16, *NAMES)
UNNAMED = Label("kv", 512, 600, "ab" * 16, b"", b"", b"")
LAYOUTS = {"one": Layout("F32", (2, 3)), "two": Layout("I32", (4,)), "none": Layout("U8", (0,))}
ONE = np.arange(6, dtype=np.float32).reshape(2, 3)
TWO = np.arange(4, dtype=np.int32)


def packed() -> memoryview:
    pieces = [header(LABEL, LAYOUTS), ONE.tobytes(), TWO.tobytes()]
    return joined([memoryview(piece) for piece in pieces])


def test_the_library_reads_what_is_written() -> None:
    tensors = safetensors.numpy.load(bytes(packed()))
    assert tensors.keys() == LAYOUTS.keys()
    assert np.array_equal(tensors["one"], ONE)
    assert np.array_equal(tensors["two"], TWO)


def test_what_is_read_is_a_view_of_what_was_given() -> None:
    data = packed()
    label, views = read(data, UNNAMED, LAYOUTS)
    assert label == LABEL
    assert bytes(views["one"]) == ONE.tobytes()
    assert bytes(views["two"]) == TWO.tobytes()
    assert all(view.obj is data.obj for view in views.values())


def test_any_view_of_the_bytes_will_do() -> None:
    data = packed()
    padded = np.zeros(2 * len(data), np.uint8)
    padded[::2] = np.frombuffer(data, np.uint8)
    strided = memoryview(padded)[::2]
    signed = memoryview(np.frombuffer(data, np.int8))
    for view in (strided, signed):
        label, views = read(view, UNNAMED, LAYOUTS)
        assert label == LABEL
        assert bytes(views["two"]) == TWO.tobytes()


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        (Label("small", 512, 600, "ab" * 16, b"", b"", b""), ("kind", "'kv'", "'small'")),
        (Label("kv", 0, 600, "ab" * 16, b"", b"", b""), ("start", "'512'", "'0'")),
        (Label("kv", 512, 601, "ab" * 16, b"", b"", b""), ("end", "'600'", "'601'")),
        (Label("kv", 512, 600, "cd" * 16, b"", b"", b""), ("fingerprint", "abab", "cdcd")),
    ],
)
def test_a_refusal_says_what_differs_and_both_values(
    expected: Label, words: tuple[str, ...]
) -> None:
    with pytest.raises(CapsuleError) as caught:
        read(packed(), expected, LAYOUTS)
    assert all(word in caught.value.message for word in words)


def test_another_shape_type_or_version_is_refused_with_both_values() -> None:
    with pytest.raises(CapsuleError, match=r"one is .*\[2, 3\].*, not .*\[3, 2\]"):
        read(packed(), UNNAMED, LAYOUTS | {"one": Layout("F32", (3, 2))})
    with pytest.raises(CapsuleError, match=r"two is .*I32.*, not .*F32"):
        read(packed(), UNNAMED, LAYOUTS | {"two": Layout("F32", (4,))})
    older = bytes(packed()).replace(f'"format":"{FORMAT}"'.encode(), b'"format":"0"')
    with pytest.raises(CapsuleError, match=f"format is '0', not '{FORMAT}'"):
        read(memoryview(older), UNNAMED, LAYOUTS)


def test_a_header_of_absurd_length_is_refused_before_it_is_parsed() -> None:
    for length in (2**63, 1 << 17):
        data = length.to_bytes(8, "little") + bytes(1 << 18)
        with pytest.raises(CapsuleError, match=f"header of {length} bytes"):
            read(memoryview(data), UNNAMED, LAYOUTS)


@pytest.mark.parametrize("text", [b"[" * 60_000, b"\xff\xfe", b'{"a":', b"null", b"[]", b"{}"])
def test_a_header_that_is_no_header_is_refused(text: bytes) -> None:
    with pytest.raises(CapsuleError):
        read(memoryview(len(text).to_bytes(8, "little") + text), UNNAMED, LAYOUTS)
