"""What is written stays, is read back right or not at all, and is counted to the byte."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_harness import FINGERPRINT, ROOMY, FakePart, key, save

from capserve.errors import CapsuleError, StartupError
from capserve.serving.disk import files as disk_files
from capserve.serving.disk import state as disk_state
from capserve.serving.disk.tier import DiskTier

SMALL, A, B = FakePart("small", 400), FakePart("a", 3000), FakePart("b", 5000)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    opened = DiskTier.open(tmp_path / "d", FINGERPRINT, ROOMY)
    yield opened
    opened.close(5)


def reopen(tier: DiskTier, fingerprint: str = FINGERPRINT, budget: int = ROOMY) -> DiskTier:
    tier.close(5)
    return DiskTier.open(tier.directory, fingerprint, budget)


def file_of(tier: DiskTier, part: FakePart) -> Path:
    name = part.name.hex()
    return tier.directory / "parts" / name[:2] / f"{name}.safetensors"


def test_a_flushed_capsule_is_there_after_a_restart(tier: DiskTier) -> None:
    wrote = save(tier, "one", [SMALL, A], based_on=key("base", 40), pinned=True)
    assert tier.flush(5)
    assert tier.holds(wrote.key)
    tier = reopen(tier)
    assert tier.capsules() == [wrote]
    assert tier.capsules()[0].rebuild_tokens == 60
    assert [bytes(tier.read(part.name)) for part in (SMALL, A)] == [SMALL.content, A.content]
    tier.check()
    tier.close(5)


def test_nobody_else_may_look_into_the_directory(tier: DiskTier) -> None:
    save(tier, "one", [SMALL])
    assert tier.flush(5)
    for path in [tier.directory, *tier.directory.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_part_that_two_capsules_share_is_written_once_and_leaves_with_the_last(
    tier: DiskTier,
) -> None:
    one = save(tier, "one", [SMALL, A])
    two = save(tier, "two", [B, A])
    assert tier.flush(5)
    assert tier.used_bytes == 400 + 3000 + 5000
    assert tier.footprint(one.key).exclusive_bytes == 400
    assert tier.footprint(one.key).shared_bytes == 3000
    tier.forget(one.key)
    assert not tier.holds(one.key)
    tier.check()
    assert tier.used_bytes == 3000 + 5000
    assert not file_of(tier, SMALL).exists()
    tier.forget(two.key)
    tier.check()
    assert tier.used_bytes == 0
    assert tier.take_evicted() == [], "what was forgotten was not evicted"


def test_saving_does_not_wait_for_the_disk(tier: DiskTier) -> None:
    packing, may_go = threading.Event(), threading.Event()

    class Slow(FakePart):
        def pack(self):  # type: ignore[no-untyped-def]
            packing.set()
            assert may_go.wait(5)
            return super().pack()

    made = save(tier, "slow", [Slow("slow")])
    assert packing.wait(5)
    assert not tier.holds(made.key)
    assert tier.pending_bytes == 1000
    assert not tier.flush(0.01)
    may_go.set()
    assert tier.flush(5)
    assert tier.holds(made.key)
    assert tier.pending_bytes == 0


def test_the_oldest_waiting_saves_are_given_up_when_too_much_waits(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path / "d", FINGERPRINT, ROOMY, pending_bytes=2500)
    packing, may_go = threading.Event(), threading.Event()

    class Slow(FakePart):
        def pack(self):  # type: ignore[no-untyped-def]
            packing.set()
            assert may_go.wait(5)
            return super().pack()

    save(tier, "slow", [Slow("slow", 100)])
    assert packing.wait(5)
    rows = [save(tier, str(n), [FakePart(str(n), 1000)]) for n in range(4)]
    assert tier.pending_bytes == 2100
    assert tier.dropped_saves == 2
    may_go.set()
    assert tier.flush(5)
    assert [tier.holds(r.key) for r in rows] == [False, False, True, True]
    assert tier.take_evicted() == [rows[0].key, rows[1].key]
    tier.check()
    tier.close(5)


def test_a_second_opener_is_refused_with_the_first_ones_pid(tier: DiskTier) -> None:
    with pytest.raises(StartupError, match=f"{tier.directory} .*{os.getpid()}"):
        DiskTier.open(tier.directory, FINGERPRINT, ROOMY)
    tier.close(5)
    DiskTier.open(tier.directory, FINGERPRINT, ROOMY).close(5)


@pytest.mark.parametrize("harm", ["torn", "flipped", "foreign", "missing", "longer"])
def test_a_bad_file_is_never_loaded_and_takes_its_capsules_along(
    harm: str, tier: DiskTier, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = save(tier, "one", [SMALL, A]), save(tier, "two", [B, A])
    other = save(tier, "other", [FakePart("c")])
    assert tier.flush(5)
    path = file_of(tier, A)
    match harm:
        case "torn":
            path.write_bytes(A.content[:-1])
        case "flipped":
            path.write_bytes(A.content[:1500] + b"\0" + A.content[1501:])
        case "foreign":
            path.write_bytes(FakePart("z", 3000).content)
        case "missing":
            path.unlink()
        case "longer":
            path.write_bytes(A.content + b"x")
    bad = list(tier.verify())
    assert [(found.name, found.capsules) for found in bad] == [(A.name, 2)]
    assert tier.holds(one.key), "verify leaves things as they are"
    with caplog.at_level(logging.WARNING), pytest.raises(CapsuleError, match=A.name.hex()):
        tier.read(A.name)
    assert len(caplog.records) == 1
    assert not tier.holds(one.key)
    assert not tier.holds(two.key)
    assert tier.flush(5)
    assert not path.exists()
    assert sorted(tier.take_evicted(), key=str) == sorted([one.key, two.key], key=str)
    tier.check()
    assert tier.used_bytes == 1000
    tier = reopen(tier)
    assert [r.key for r in tier.capsules()] == [other.key]
    again = save(tier, "one", [SMALL, A])
    assert tier.flush(5)
    assert tier.holds(again.key)
    assert bytes(tier.read(A.name)) == A.content
    tier.check()
    tier.close(5)


def test_a_part_that_is_not_there_is_an_error_that_names_it(tier: DiskTier) -> None:
    with pytest.raises(CapsuleError, match=A.name.hex()):
        tier.read(A.name)


def test_leftovers_of_a_crash_are_removed_and_foreign_files_are_left_alone(
    tier: DiskTier, caplog: pytest.LogCaptureFixture
) -> None:
    save(tier, "one", [SMALL, A])
    assert tier.flush(5)
    tier.close(5)
    leftover = file_of(tier, B)
    leftover.parent.mkdir(exist_ok=True)
    leftover.write_bytes(b"whole, but never listed")
    torn = leftover.with_name(leftover.name + ".tmp")
    torn.write_bytes(b"half")
    foreign = tier.directory / "parts" / "notes.txt"
    foreign.write_text("mine")
    with caplog.at_level(logging.WARNING):
        tier = reopen(tier)
        assert tier.flush(5)
    assert not leftover.exists()
    assert not torn.exists()
    assert foreign.read_text() == "mine"
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "2 files" in lines[0]
    assert "notes.txt" in lines[1]
    tier.check()
    tier.close(5)


def test_another_engines_store_is_dropped_as_a_whole(
    tier: DiskTier, caplog: pytest.LogCaptureFixture
) -> None:
    save(tier, "one", [SMALL, A])
    assert tier.flush(5)
    with caplog.at_level(logging.WARNING):
        tier = reopen(tier, "engine-2")
    assert len([r for r in caplog.records if "engine-1" in r.getMessage()]) == 1
    assert tier.capsules() == []
    tier.check()
    assert not file_of(tier, A).exists()
    tier.close(5)


@pytest.mark.parametrize("content", [b"no database at all" * 100, b"", None])
def test_a_damaged_manifest_is_set_aside_and_the_store_starts_empty(
    content: bytes | None, tier: DiskTier, caplog: pytest.LogCaptureFixture
) -> None:
    for n in range(200):
        save(tier, str(n), [FakePart(str(n), 50)])
    assert tier.flush(5)
    tier.close(5)
    manifest = tier.directory / "manifest.sqlite3"
    whole = manifest.read_bytes()
    # None: the header is whole, the pages behind it are not.
    manifest.write_bytes(whole[:4096] + b"\xff" * 60_000 if content is None else content)
    with caplog.at_level(logging.WARNING):
        tier = reopen(tier)
    aside = tier.directory / "manifest.corrupt-1"
    # An empty file is an empty database: nothing to set aside.
    assert aside.exists() == (content != b"")
    assert len([r for r in caplog.records if "set aside" in r.getMessage()]) == (content != b"")
    assert tier.capsules() == []
    tier.check()
    kept = save(tier, "new", [SMALL])
    tier.check()
    tier = reopen(tier)
    assert [r.key for r in tier.capsules()] == [kept.key]
    tier.close(5)


def test_a_capsule_whose_parts_no_row_knows_is_dropped_alone(
    tier: DiskTier, caplog: pytest.LogCaptureFixture
) -> None:
    save(tier, "one", [SMALL, A])
    two = save(tier, "two", [B])
    assert tier.flush(5)
    tier.close(5)
    with sqlite3.connect(tier.directory / "manifest.sqlite3") as db:
        db.execute("DELETE FROM parts WHERE name = ?", (A.name,))
    db.close()
    with caplog.at_level(logging.WARNING):
        tier = reopen(tier)
    assert [r.key for r in tier.capsules()] == [two.key]
    assert any("1 capsules without" in r.getMessage() for r in caplog.records)
    tier.check()
    assert tier.used_bytes == 5000
    tier.close(5)


def test_a_pin_and_a_use_outlive_the_process(tier: DiskTier) -> None:
    one, two = save(tier, "one", [SMALL], used_at=1.0), save(tier, "two", [A], used_at=2.0)
    tier.set_pinned(one.key, True)
    assert tier.flush(5)
    tier.touch(one.key)
    tier = reopen(tier)
    assert [r.key for r in tier.capsules()] == [two.key, one.key], "not in the order of use"
    assert [r.pinned for r in tier.capsules()] == [False, True]
    tier.set_pinned(one.key, False)
    tier = reopen(tier)
    assert [r.pinned for r in tier.capsules()] == [False, False]
    tier.close(5)


def test_a_capsule_that_is_saved_again_with_other_parts_replaces_the_first(
    tier: DiskTier,
) -> None:
    save(tier, "one", [SMALL, A])
    assert tier.flush(5)
    again = save(tier, "one", [SMALL, B])
    tier.check()
    assert tier.capsules() == [again]
    assert tier.used_bytes == 5400
    tier.forget(again.key)
    second = save(tier, "one", [SMALL, B])
    tier.check()
    assert tier.holds(second.key)
    tier = reopen(tier)
    assert tier.capsules() == [second]
    tier.close(5)


def test_a_large_part_is_written_in_bounded_pieces(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = disk_files._write

    def write(fd: int, data: memoryview) -> int:
        sizes.append(len(data))
        return real(fd, data[: 1 << 20])  # a short write is no error

    monkeypatch.setattr(disk_files, "_write", write)
    big = FakePart("big", 20 << 20)
    save(tier, "big", [big])
    assert tier.flush(20)
    assert max(sizes) <= disk_files.PIECE_BYTES
    assert bytes(tier.read(big.name)) == big.content


def test_a_part_found_bad_while_its_capsule_waits_to_be_saved_again_leaves_no_half_row(
    tier: DiskTier,
) -> None:
    save(tier, "one", [SMALL, A])
    assert tier.flush(5)
    packing, may_go = threading.Event(), threading.Event()

    class Slow(FakePart):
        def pack(self):  # type: ignore[no-untyped-def]
            packing.set()
            assert may_go.wait(5)
            return super().pack()

    save(tier, "slow", [Slow("slow")])
    assert packing.wait(5)
    save(tier, "one", [SMALL, A])
    file_of(tier, A).write_bytes(b"bad")
    with pytest.raises(CapsuleError):
        tier.read(A.name)
    may_go.set()
    tier.check()
    held = {r.key for r in tier.capsules()}
    tier = reopen(tier)
    assert {r.key for r in tier.capsules()} == held
    tier.check()
    tier.close(5)


@pytest.mark.parametrize("seed", range(12))
def test_after_any_program_the_next_process_finds_what_this_one_held(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    budget = rng.choice([20_000, 60_000, ROOMY])
    real, fails, now = disk_files._write, [False], [1e9]

    def write(fd: int, data: memoryview) -> int:
        if fails[0] and rng.random() < 0.5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(disk_files, "_write", write)
    monkeypatch.setattr(disk_state.time, "monotonic", lambda: now[0])
    tier = DiskTier.open(tmp_path / "d", FINGERPRINT, budget)
    labels = [str(n) for n in range(12)]
    saved, told = set(), set()
    for _ in range(120):
        label = rng.choice(labels)
        match rng.randrange(12):
            case 0 | 1 | 2 | 3 | 4:
                shared = [FakePart(f"shared {n}", 4000) for n in range(rng.randrange(3))]
                own = FakePart(f"{label} {rng.randrange(2)}", rng.choice([500, 3000]))
                saved.add(save(tier, label, [own, *shared], position=rng.choice([50, 100])).key)
            case 5:
                tier.forget(key(label, 100))
                saved.discard(key(label, 100))
            case 6:
                tier.set_pinned(key(label, 100), rng.random() < 0.3)
            case 7:
                tier.touch(key(label, 50))
            case 8:
                fails[0] = not fails[0] and rng.random() < 0.4
                now[0] += 100
            case 9:
                tier.flush(5)
            case 10 if rows := tier.capsules():
                part = rng.choice(rng.choice(rows).parts)
                if rng.random() < 0.3:
                    for path in tier.directory.rglob(f"{part.name.hex()}.safetensors"):
                        path.write_bytes(b"bad")
                with contextlib.suppress(CapsuleError):
                    tier.read(part.name)
            case 11 if rng.random() < 0.2:
                tier.close(5)
                tier = DiskTier.open(tmp_path / "d", FINGERPRINT, budget)
                saved = {r.key for r in tier.capsules()}
                told = set()
    fails[0] = False
    now[0] += 100
    saved.add(save(tier, "last", [FakePart("last")]).key)
    for bad in list(tier.verify()):
        with contextlib.suppress(CapsuleError):
            tier.read(bad.name)
    if not tier.flush(5):  # a write failed in this very moment
        now[0] += 100
        saved.add(save(tier, "last", [FakePart("last")]).key)
    tier.check()
    held = {r.key: r.pinned for r in tier.capsules()}
    assert held.keys() <= saved
    told |= set(tier.take_evicted())
    assert saved - held.keys() <= told, "a capsule left, and nobody was told"
    tier = reopen(tier, budget=budget)
    assert {r.key: r.pinned for r in tier.capsules()} == held
    assert list(tier.verify()) == []
    tier.check()
    tier.close(5)
