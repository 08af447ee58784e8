"""A failing disk switches writing off and nothing else; a kill leaves no row without its parts."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from disk_harness import FINGERPRINT, ROOMY, FakePart, key, save

from capserve.errors import CapsuleError, StartupError
from capserve.serving.capsules.rows import SessionRow
from capserve.serving.disk import files as disk_files
from capserve.serving.disk import writer as disk_writer
from capserve.serving.disk.tier import DiskTier

HERE = Path(__file__).parent


def test_a_full_disk_switches_writing_off_until_it_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = DiskTier.open(tmp_path / "d", FINGERPRINT, ROOMY)
    kept = save(tier, "kept", [FakePart("kept")])
    gone = save(tier, "gone", [FakePart("gone")])
    assert tier.flush(5)
    real, full = disk_files._write, [True]

    def write(fd: int, data: memoryview) -> int:
        if full[0] and len(data) > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(disk_files, "_write", write)
    with caplog.at_level(logging.ERROR):
        lost = save(tier, "lost", [FakePart("fits", 900), FakePart("large", 9000)])
        assert not tier.flush(5)
    assert len(caplog.records) == 1
    assert tier.fault is not None
    assert tier.fault == "No space left on device", "anybody may ask: no path, no sizes"
    assert FakePart("large").name.hex() in caplog.text
    assert "9,000 bytes needed" in caplog.text
    assert "bytes free" in caplog.text
    assert not list(tier.directory.rglob("*.tmp"))
    assert tier.used_bytes == 2000, "half a capsule stayed"
    assert tier.pending_bytes == 0
    assert tier.take_evicted() == [lost.key]
    assert bytes(tier.read(FakePart("kept").name)) == FakePart("kept").content

    tier.forget(gone.key)
    save(tier, "too soon", [FakePart("too soon")])
    assert not tier.holds(key("too soon"))
    assert tier.dropped_saves == 2

    full[0] = False
    monkeypatch.setattr(disk_writer.time, "monotonic", lambda: 1e12)
    again = save(tier, "lost", [FakePart("fits", 900), FakePart("large", 9000)])
    assert tier.flush(5)
    assert tier.fault is None
    assert tier.holds(again.key)
    tier.check()
    tier.close(5)
    tier = DiskTier.open(tmp_path / "d", FINGERPRINT, ROOMY)
    assert {r.key for r in tier.capsules()} == {kept.key, again.key}, "a forget was lost"
    tier.close(5)


LIMITED = """
import resource, sys
sys.path.insert(0, {here!r})
from pathlib import Path
from disk_harness import FINGERPRINT, ROOMY, FakePart, save
from capserve.serving.disk.tier import DiskTier
tier = DiskTier.open(Path({directory!r}), FINGERPRINT, ROOMY)
save(tier, "small", [FakePart("small")])
assert tier.flush(5)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
save(tier, "large", [FakePart("large", 500_000)])
assert not tier.flush(5)
print(tier.fault)
assert bytes(tier.read(FakePart("small").name)) == FakePart("small").content
tier.close(5)
"""


def test_an_error_that_the_kernel_makes_is_told_and_leaves_no_file(tmp_path: Path) -> None:
    code = LIMITED.format(here=str(HERE), directory=str(tmp_path / "d"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stdout
    assert "500,000 bytes needed" in done.stderr
    tier = DiskTier.open(tmp_path / "d", FINGERPRINT, ROOMY)
    assert [r.key for r in tier.capsules()] == [key("small")]
    tier.check()
    tier.close(5)


def fill(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A disk that takes no part while the one value is true."""
    real, full = disk_files._write, [True]

    def write(fd: int, data: memoryview) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(disk_files, "_write", write)
    return full


def session(name: str) -> SessionRow:
    return SessionRow(name, "k/a", None, b"", (), (), (), (), None, "", 1.0)


def test_what_is_deleted_during_a_fault_stays_deleted_after_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier.open(tmp_path / "d", FINGERPRINT, ROOMY)
    tier.put_session(session("secret"))
    forgotten = save(tier, "forgotten", [FakePart("forgotten")])
    assert tier.flush(5)
    fill(monkeypatch)
    save(tier, "lost", [FakePart("lost")])
    assert not tier.flush(5)
    tier.drop_session("secret")
    tier.forget(forgotten.key)
    tier.put_session(session("new"))
    tier.close(5)
    tier = DiskTier.open(tmp_path / "d", FINGERPRINT, ROOMY)
    assert [row.id for row in tier.sessions()] == ["new"], "a row waits for the end of a fault"
    assert tier.capsules() == []
    tier.close(5)


def test_a_removal_is_tried_again_when_it_is_time_though_no_save_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_writer, "RETRY_S", 0.1)
    tier = DiskTier.open(tmp_path / "d", FINGERPRINT, ROOMY)
    tier.put_session(session("secret"))
    assert tier.flush(5)
    fill(monkeypatch)
    save(tier, "lost", [FakePart("lost")])
    tier.flush(5)
    tier.drop_session("secret")
    with tier._state.condition:
        assert tier._state.condition.wait_for(lambda: not len(tier._state.queue), 5)
    tier.flush(5)
    assert tier.sessions() == []
    tier.close(5)


def test_an_error_in_one_part_is_no_end_and_gives_the_directory_to_nobody(tmp_path: Path) -> None:
    class Once(FakePart):
        def pack(self):  # type: ignore[no-untyped-def]
            raise MemoryError("once")

    tier = DiskTier.open(tmp_path / "d", FINGERPRINT, ROOMY)
    broken = save(tier, "broken", [Once("broken")])
    assert not tier.flush(5)
    with pytest.raises(StartupError, match="in use by process"):
        DiskTier.open(tmp_path / "d", FINGERPRINT, ROOMY)
    assert tier.take_evicted() == [broken.key]
    assert tier.take_given_up() == [], "it would fail again"
    tier._state.retry_at = 0.0
    kept = save(tier, "kept", [FakePart("kept")])
    assert tier.flush(5)
    assert tier.holds(kept.key)
    tier.check()
    tier.close(5)
    DiskTier.open(tmp_path / "d", FINGERPRINT, ROOMY).close(5)


def test_a_writer_that_has_died_keeps_the_directory_until_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier.open(tmp_path / "d", FINGERPRINT, ROOMY)
    save(tier, "one", [FakePart("one")])
    assert tier.flush(5)

    def break_down(error: Exception, batch: object) -> None:
        raise AssertionError("planted") from error

    monkeypatch.setattr(tier._writer, "_failed", break_down)
    fill(monkeypatch)
    save(tier, "two", [FakePart("two")])
    assert not tier.flush(5)
    assert tier.fault == "AssertionError: planted"
    with pytest.raises(StartupError, match="in use by process"):
        DiskTier.open(tmp_path / "d", FINGERPRINT, ROOMY)
    assert bytes(tier.read(FakePart("one").name)) == FakePart("one").content
    tier.close(5)
    DiskTier.open(tmp_path / "d", FINGERPRINT, ROOMY).close(5)


def test_the_newest_save_waits_though_it_is_larger_than_all_that_may_wait(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path / "d", FINGERPRINT, ROOMY, pending_bytes=500)
    large = save(tier, "large", [FakePart("large", 9000)])
    assert tier.flush(5)
    assert tier.holds(large.key)
    tier.close(5)


def test_a_bad_file_is_unlinked_by_the_writer_and_not_when_it_was_written_anew(
    tmp_path: Path,
) -> None:
    tier = DiskTier.open(tmp_path / "d", FINGERPRINT, ROOMY)
    part = FakePart("part")
    save(tier, "one", [part])
    assert tier.flush(5)
    path = tier._files.path(part.name)
    packing, may_go = threading.Event(), threading.Event()

    class Slow(FakePart):
        def pack(self):  # type: ignore[no-untyped-def]
            packing.set()
            assert may_go.wait(5)
            return super().pack()

    path.write_bytes(b"torn")
    save(tier, "slow", [Slow("slow")])
    assert packing.wait(5)
    with pytest.raises(CapsuleError):
        tier.read(part.name)
    again = save(tier, "again", [part])
    may_go.set()
    assert tier.flush(5)
    assert tier.holds(again.key)
    assert bytes(tier.read(part.name)) == part.content
    path.write_bytes(b"torn")
    with pytest.raises(CapsuleError):
        tier.read(part.name)
    assert tier.flush(5)
    assert not path.exists()
    tier.check()
    tier.close(5)


def test_a_part_that_can_not_be_packed_stops_the_tier_with_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(FakePart):
        def pack(self):  # type: ignore[no-untyped-def]
            raise RuntimeError("the card is gone")

    tier = DiskTier.open(tmp_path / "d", FINGERPRINT, ROOMY)
    save(tier, "one", [FakePart("one")])
    assert tier.flush(5)
    save(tier, "broken", [Broken("broken")])
    assert not tier.flush(5)
    assert tier.fault is not None
    assert "the card is gone" in tier.fault
    assert "Traceback" in caplog.text
    assert bytes(tier.read(FakePart("one").name)) == FakePart("one").content
    tier.close(5)


WRITER = """
import itertools, random, sys, time
sys.path.insert(0, {here!r})
from pathlib import Path
from disk_harness import FINGERPRINT, FakePart, key, save
from capserve.serving.disk.tier import DiskTier
rng = random.Random({seed})
tier = DiskTier.open(Path({directory!r}), FINGERPRINT, 400_000)
held = [r.key for r in tier.capsules()]
print("ready", flush=True)
for n in itertools.count():
    tail = FakePart(f"{seed}-{{n}}", rng.randrange(100, 30_000))
    shared = [FakePart(f"shared-{{i}}", 20_000) for i in range(rng.randrange(4))]
    held.append(save(tier, f"{seed}-{{n}}", [tail, *shared], pinned=rng.random() < 0.02).key)
    if rng.random() < 0.3:
        tier.forget(held.pop(rng.randrange(len(held))))
    if rng.random() < 0.1:
        tier.flush(1)
        kept = tier.capsules()
        print(len(kept), flush=True)
    if tier.pending_bytes > 300_000:
        tier.flush(1)
"""


@pytest.mark.parametrize("first", [0, 5, 10, 15, 20])
def test_a_kill_at_any_moment_leaves_a_store_whose_every_row_can_be_read(
    first: int, tmp_path: Path
) -> None:
    rng = random.Random(first)
    listed = 0
    for seed in range(first, first + 5):
        directory = tmp_path / "d"
        code = WRITER.format(here=str(HERE), directory=str(directory), seed=seed)
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0, 0.4))  # the moment of the kill, not a wait for something
        writer.send_signal(signal.SIGKILL)
        writer.wait(10)
        writer.stdout.close()
        tier = DiskTier.open(directory, FINGERPRINT, 400_000)
        rows = tier.capsules()
        listed += len(rows)
        tier.check()
        for wrote in rows:
            for part in wrote.parts:
                assert len(tier.read(part.name)) == part.nbytes
        assert list(tier.verify()) == []
        assert tier.used_bytes <= 400_000
        tier.close(5)
    assert listed > 0, "nothing was ever written, so nothing was shown"
