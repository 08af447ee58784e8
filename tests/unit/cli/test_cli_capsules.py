"""`capserve capsules` shows, checks and removes what a server left, and never under a server."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

from capserve.cli.main import main
from capserve.serving.capsules.rows import CapsuleKey, CapsuleRow, PartRow, SessionRow
from capserve.serving.disk.tier import DiskTier
from capserve.serving.journal import Span, SpanKind, prefix_digests

Run = Callable[..., tuple[int, str, str]]


@dataclass(frozen=True)
class Part:
    label: str
    nbytes: int
    tier: str = "host"

    @property
    def name(self) -> bytes:
        return blake2b(self.label.encode(), digest_size=16).digest()

    def pack(self) -> list[memoryview]:
        return [memoryview(self.label.encode().ljust(self.nbytes, b"."))]


def _session(name: str, tokens: list[int]) -> SessionRow:
    data = np.array(tokens, dtype="<i4").tobytes()
    return SessionRow(name, "k/a", None, data, (), (), (), (), None, "", 1.0)


def _capsule(tokens: list[int], used_at: float, pinned: bool, parts: list[Part]) -> CapsuleRow:
    (digest,) = prefix_digests(np.array(tokens, dtype=np.int32), [len(tokens)])
    return CapsuleRow(
        CapsuleKey("k/a", len(tokens), digest),
        (Span(SpanKind.PREFILL, 0, len(tokens)),),
        tuple(PartRow(part.name, part.nbytes) for part in parts),
        None,
        pinned,
        used_at,
    )


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Two stores; in the first, sessions s-1 and s-2 share two tokens, and a third capsule is
    nobody's."""
    base = tmp_path / "capsules"
    shared, now = Part("shared", 5000), time.time()
    first = DiskTier.open(base / "aaaa", "engine-1", 1 << 30)
    for tokens, used_at, pinned, label in (
        ([1, 2], now, False, "both"),
        ([1, 2, 3], now - 7200, False, "one"),
        ([1, 2, 4], now - 7200, True, "two"),
        ([9], now - 90_000, False, "none"),
    ):
        parts = [Part(label, 100), shared] if label != "none" else [Part(label, 100)]
        first.save(_capsule(tokens, used_at, pinned, parts), parts)
    first.put_session(_session("s-1", [1, 2, 3, 5]))
    first.put_session(_session("s-2", [1, 2, 4, 5]))
    first.close(5)
    second = DiskTier.open(base / "bbbb", "engine-2", 1 << 30)
    second.save(_capsule([7, 7], now, False, [Part("other", 70)]), [Part("other", 70)])
    second.close(5)
    return base


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, base: Path) -> Run:
    monkeypatch.setenv("COLUMNS", "200")

    def call(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["capsules", *argv, "--dir", str(base)])
        out = capsys.readouterr()
        return int(left.value.code or 0), out.out, out.err

    return call


def listed(run: Run) -> list[dict[str, object]]:
    code, out, _ = run("ls", "--json")
    assert code == 0
    found: list[dict[str, object]] = json.loads(out)
    return found


def test_ls_shows_every_store_with_bytes_pins_and_sessions(run: Run) -> None:
    rows = listed(run)
    assert [(r["store"], r["position"], r["sessions"], r["pinned"]) for r in rows] == [
        ("aaaa", 1, [], False),
        ("aaaa", 3, ["s-1"], False),
        ("aaaa", 3, ["s-2"], True),
        ("aaaa", 2, ["s-1", "s-2"], False),
        ("bbbb", 2, [], False),
    ]
    assert [(r["exclusive_bytes"], r["shared_bytes"]) for r in rows] == [
        (100, 0),
        (100, 5000),
        (100, 5000),
        (100, 5000),
        (70, 0),
    ]
    code, out, _ = run("ls")
    assert code == 0
    assert "5 capsules" in out
    assert "s-1, s-2" in out
    assert str(rows[0]["key"])[:12] in out
    assert out.count("5,000") == 3


def test_rm_by_key_removes_that_capsule_and_its_own_bytes(run: Run, base: Path) -> None:
    one = listed(run)[1]
    code, out, _ = run("rm", str(one["key"])[:10])
    assert code == 0
    assert "1 capsules removed, 100 bytes freed" in out
    assert one["key"] not in [r["key"] for r in listed(run)]
    assert len(list(base.rglob("*.safetensors"))) == 5
    code, _, err = run("rm", str(one["key"])[:10])
    assert code == 2
    assert str(one["key"])[:10] in err


def test_rm_of_a_session_spares_what_another_one_has(run: Run, base: Path) -> None:
    code, out, _ = run("rm", "--session", "s-1")
    assert code == 0
    assert "1 capsules removed" in out
    assert [r["sessions"] for r in listed(run)] == [[], ["s-2"], ["s-2"], []]
    assert run("rm", "--session", "s-1")[0] == 2


def test_rm_older_than_spares_pins_and_what_was_used(run: Run) -> None:
    code, out, _ = run("rm", "--older-than", "1h")
    assert code == 0
    assert "2 capsules removed, 200 bytes freed" in out
    assert [(r["position"], r["pinned"]) for r in listed(run)] == [
        (3, True),
        (2, False),
        (2, False),
    ]
    code, _, err = run("rm", "--older-than", "soon")
    assert code == 2
    assert "'soon'" in err


def test_rm_all_leaves_nothing(run: Run, base: Path) -> None:
    code, out, _ = run("rm", "--all")
    assert code == 0
    assert "5 capsules removed, 5,470 bytes freed" in out
    assert listed(run) == []
    assert list(base.rglob("*.safetensors")) == []
    tier = DiskTier.open(base / "aaaa", "engine-1", 1 << 30)
    assert tier.sessions() == []
    tier.close(5)


def test_rm_wants_exactly_one_choice(run: Run) -> None:
    assert "got 0" in run("rm")[2]
    assert "got 2" in run("rm", "ab", "--all")[2]
    assert "hexadecimal" in run("rm", "xyz")[2]
    assert len(listed(run)) == 5


def test_verify_tells_each_bad_file_and_ends_with_1(run: Run, base: Path) -> None:
    code, out, _ = run("verify")
    assert (code, out) == (0, "6 parts read, 0 bad\n")
    name = Part("shared", 5000).name.hex()
    path = base / "aaaa" / "parts" / name[:2] / f"{name}.safetensors"
    data = bytearray(path.read_bytes())
    data[2500] ^= 1
    path.write_bytes(data)
    code, out, _ = run("verify")
    assert code == 1
    assert f"{path}: its checksum is wrong; 3 capsules need it" in out
    assert "6 parts read, 1 bad" in out
    assert len(listed(run)) == 5, "a check removed something"


def test_a_store_that_a_server_has_is_an_error_with_its_pid(run: Run, base: Path) -> None:
    tier = DiskTier.open(base / "bbbb", "engine-2", 1 << 30)
    for argv in (["ls"], ["verify"], ["rm", "--all"]):
        code, _, err = run(*argv)
        assert code == 2
        assert f"process {os.getpid()}" in err
    tier.close(5)
    assert len(listed(run)) == 5, "one store was emptied before the other was found in use"


def test_a_directory_that_is_not_there_is_one_clear_line(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["capsules", "ls", "--dir", str(tmp_path / "nowhere")])
    assert left.value.code == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("harm", ["format", "bytes", "row"])
def test_a_look_changes_nothing_in_a_store_that_it_can_not_read(
    harm: str, run: Run, base: Path
) -> None:
    manifest = base / "bbbb" / "manifest.sqlite3"
    if harm == "bytes":
        manifest.write_bytes(b"this was a manifest" * 1000)
    else:
        with sqlite3.connect(manifest) as db:
            if harm == "format":
                db.execute("UPDATE meta SET value = '0' WHERE name = 'format'")
            else:
                db.execute("UPDATE capsules SET spans = x'00'")
        db.close()

    def files() -> dict[str, bytes]:
        found = [path for path in (base / "bbbb").rglob("*") if path.is_file()]
        return {str(path): path.read_bytes() for path in found if path.name != "LOCK"}

    before = files()
    for argv in (["ls"], ["verify"]):
        code, _, err = run(*argv)
        if harm != "row":
            assert code == 2
            assert "was left alone" in err
        assert files() == before
