"""A session's file is taken whole or not at all."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capserve.errors import CapsuleError, InvalidRequestError
from capserve.serving.capsules.rows import TurnEnd
from capserve.serving.journal import Span, SpanKind, TurnMark
from capserve.serving.sessions import bundle
from capserve.serving.sessions.orders import Exported, ExportedCapsule
from capserve.testing.fake_engine import fake_limits
from capserve.text.messages import Conversation, Message

LIMITS = replace(fake_limits(), fingerprint="ours")
SPANS = (Span(SpanKind.PREFILL, 0, 6), Span(SpanKind.DECODE, 6, 10))


@dataclass(frozen=True)
class Part:
    name: bytes
    content: bytes

    def pack(self) -> list[memoryview]:
        half = len(self.content) // 2
        return [memoryview(self.content[:half]), memoryview(self.content[half:])]


SHARED = Part(b"s" * 16, b"kv" * 700_000)
EXPORTED = Exported(
    session_id="one",
    fingerprint="ours",
    model="fake",
    tokens=np.arange(16, 26, dtype=np.int32),
    spans=SPANS,
    marks=(TurnMark(6, 1),),
    turns=(TurnEnd(9, 2),),
    conversation=Conversation((Message("user", "q"), Message("assistant", "a", reasoning=""))),
    capsules=(
        ExportedCapsule(6, SPANS[:1], (Part(b"a" * 16, b"small"), SHARED)),
        ExportedCapsule(10, SPANS, (Part(b"b" * 16, b"other"), SHARED)),
    ),
)
FILE = b"".join(bundle.pieces(EXPORTED))


def read(data: bytes) -> bundle.Bundle:
    return bundle.read(memoryview(data), LIMITS)


def test_a_file_gives_back_what_was_exported() -> None:
    found = read(FILE)
    assert found.tokens.tolist() == EXPORTED.tokens.tolist()
    assert (found.spans, found.marks, found.turns) == (SPANS, EXPORTED.marks, EXPORTED.turns)
    assert found.conversation == EXPORTED.conversation
    assert [c.position for c in found.capsules] == [6, 10]
    assert bytes(found.capsules[1].parts[0]) == b"other"
    assert bytes(found.capsules[0].parts[1]) == SHARED.content


def test_any_tar_tool_can_list_it_and_a_shared_part_is_there_once() -> None:
    with tarfile.open(fileobj=io.BytesIO(FILE), mode="r:") as tar:
        names = tar.getnames()
        member = tar.extractfile("parts/" + (b"s" * 16).hex() + ".safetensors")
        assert member is not None
        assert member.read() == SHARED.content
    assert names[:2] == ["session.json", "journal.bin"]
    assert names[-1] == "checksums.json"
    assert len(names) == len(set(names)) == 6


def test_it_is_written_in_pieces_of_a_bounded_size() -> None:
    sizes = [len(piece) for piece in bundle.pieces(EXPORTED)]
    assert max(sizes) <= bundle.PIECE_BYTES < len(FILE)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(FILE) - 1))
def test_a_file_cut_anywhere_is_one_clear_refusal(length: int) -> None:
    if not any(FILE[length:]):
        read(FILE[: length + bundle.BLOCK])  # only the end's own zeros are missing
        return
    with pytest.raises(CapsuleError, match="no whole exported session"):
        read(FILE[:length])


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(FILE) - 1025), st.integers(1, 255))
def test_a_changed_byte_is_never_taken_for_the_session(at: int, change: int) -> None:
    data = bytearray(FILE)
    data[at] ^= change
    try:
        found = read(bytes(data))
    except (CapsuleError, InvalidRequestError):
        return
    # Padding and the names of owners in a header mean nothing; all else must be as it was.
    assert found.conversation == EXPORTED.conversation
    assert bytes(found.capsules[0].parts[1]) == SHARED.content
    assert found.tokens.tolist() == EXPORTED.tokens.tolist()


@pytest.mark.parametrize("garbage", [b"x", b"\0" * 4096, b"garbage" * 1000, FILE[512:]])
def test_garbage_is_one_clear_refusal(garbage: bytes) -> None:
    with pytest.raises(CapsuleError, match="no whole exported session"):
        read(garbage)


def test_another_engines_file_is_refused_with_both_fingerprints() -> None:
    with pytest.raises(InvalidRequestError, match=r"'theirs'.*'ours'"):
        read(b"".join(bundle.pieces(replace(EXPORTED, fingerprint="theirs"))))


def rewritten(change: dict[str, object], extra: dict[str, bytes] | None = None) -> bytes:
    """The file with other values in session.json, and right checksums."""
    with tarfile.open(fileobj=io.BytesIO(FILE), mode="r:") as tar:
        files = {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
    files["session.json"] = json.dumps(json.loads(files["session.json"]) | change).encode()
    files |= extra or {}
    del files["checksums.json"]
    sums = {name: sha256(content).hexdigest() for name, content in files.items()}
    files["checksums.json"] = json.dumps(sums).encode()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 11},
        {"spans": [["prefill", 0, 6], ["decode", 7, 10]]},
        {"spans": [["prefill", 0, 6]]},
        {"spans": [["dream", 0, 10]]},
        {"spans": 5},
        {"marks": [[6, 1], [5, 1]]},
        {"marks": [[11, 1]]},
        {"marks": [[6, 1], [6, 1]]},
        {"marks": [[0, 1]]},
        {"turns": [[9, 2], [9, 2]]},
        {"turns": [[2, 0]]},
        {"turns": [[True, 2]]},
        {"turns": [[1.5, 2]]},
        {"conversation": "{}"},
        {"conversation": '{"messages":[{"role":"root","content":""}],"tools":[]}'},
        {"capsules": [{"position": 11, "spans": [], "parts": []}]},
        {"capsules": [{"position": 6, "spans": [["prefill", 0, 6]], "parts": ["00" * 16]}]},
        {"capsules": []},
        {"conversation": '{"messages":[],"tools":[{"a":NaN}],"template_kwargs":null}'},
        {"conversation": '{"messages":[],"tools":["\\ud800"],"template_kwargs":null}'},
        {"conversation": "[" * 100_000},
        {"conversation": 7},
        {"version": 2},
        {"format": "other"},
    ],
)
def test_values_that_do_not_fit_each_other_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(CapsuleError, match="no whole exported session"):
        read(rewritten(change))


@pytest.mark.parametrize("ends", ["marks", "turns"])
def test_there_are_never_more_marks_or_turns_than_a_step_can_wait_for(ends: str) -> None:
    count = bundle.MAX_ENDS + 1
    with pytest.raises(CapsuleError, match=f"{count} marks or turns, {bundle.MAX_ENDS}"):
        read(rewritten({ends: [[5, 2]] * count}))


def test_json_that_no_session_needs_is_refused_before_it_is_read() -> None:
    most = bundle.LEAST_JSON_BYTES + bundle.JSON_BYTES_PER_TOKEN * LIMITS.max_positions
    with pytest.raises(CapsuleError, match=rf"session.json has \d+ bytes, {most} are the most"):
        read(rewritten({"spans": [[]] * (most // 4)}))


def test_the_longest_session_fits_what_may_be_read() -> None:
    length = LIMITS.max_positions
    spans = tuple(Span(SpanKind.PREFILL, start, start + 1) for start in range(length))
    long = replace(
        EXPORTED,
        tokens=np.full(length, 17, dtype=np.int32),
        spans=spans,
        marks=(TurnMark(length, 1),),
        turns=(),
        capsules=(ExportedCapsule(length, spans[:], (SHARED,)),),
    )
    assert len(read(b"".join(bundle.pieces(long))).spans) == length


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "parts/../x.safetensors", "extra"])
def test_a_member_under_any_other_name_is_refused(name: str) -> None:
    with pytest.raises(CapsuleError, match="which no export has"):
        read(rewritten({}, {name: b"x"}))


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    journal = np.full(10, LIMITS.vocab_size, dtype="<i4").tobytes()
    with pytest.raises(CapsuleError, match=f"0 to {LIMITS.vocab_size - 1}"):
        read(rewritten({}, {"journal.bin": journal}))


def test_a_link_is_refused() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", format=tarfile.USTAR_FORMAT) as tar:
        info = tarfile.TarInfo("session.json")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(info)
    with pytest.raises(CapsuleError, match="which no export has"):
        read(out.getvalue())
