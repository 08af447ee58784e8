"""How fast does a disk store open, write and read, and how much does its writing delay an engine?

Four questions, on the file system of `--dir`:

- Start-up: `DiskTier.open` on a manifest of 10,000 capsules with 20 parts each, most shared.
- Bandwidth: parts written (fsync, checksum and row included) and read back from the page cache
  (checksum included), against plain writes, plain reads and the checksum alone.
- Delay: a loop with about 1 ms of work in small numpy calls, each of which gives up the GIL and
  takes it again as the calls of an engine's step do, alone and while the store writes without a
  pause; and while it writes at the pace of a busy server.
- A save's cost to its caller.

The loop runs alone and disturbed in turns, so that other load of the machine falls on both.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from statistics import mean
from time import perf_counter, process_time
from typing import Any

import numpy as np

from benchmarks.card import card, spread, write
from capserve.serving.capsules.rows import CapsuleKey, CapsuleRow, PartRow
from capserve.serving.disk.files import PartFile
from capserve.serving.disk.manifest import Manifest
from capserve.serving.disk.tier import DiskTier
from capserve.serving.journal import Span, SpanKind

FINGERPRINT = "benchmark"
CAPSULES, PARTS = 10_000, 20
BUDGET_BYTES = 64 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Part:
    """Bytes in host memory, as an engine's capsule has them."""

    name: bytes
    data: memoryview
    tier: str = "host"

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def pack(self) -> Sequence[memoryview]:
        return (self.data,)


def name_of(label: str) -> bytes:
    return blake2b(label.encode(), digest_size=16).digest()


def make_part(label: str, nbytes: int, source: memoryview) -> Part:
    return Part(name_of(label), source[:nbytes])


def make_row(label: str, names: Sequence[tuple[bytes, int]], position: int) -> CapsuleRow:
    spans = [Span(SpanKind.PREFILL, at, min(at + 512, position)) for at in range(0, position, 512)]
    return CapsuleRow(
        key=CapsuleKey("caller/default", position, name_of("key " + label)),
        spans=tuple(spans),
        parts=tuple(PartRow(name, nbytes) for name, nbytes in names),
        based_on=None,
        pinned=False,
        used_at=float(len(label)),
    )


def start_up(directory: Path, rounds: int) -> dict[str, Any]:
    """Seconds to open, rows built. 100 conversations of 100 capsules: each shares 19 parts."""
    directory.mkdir()
    (directory / "parts").mkdir()
    manifest = Manifest(directory)
    manifest.set_meta(FINGERPRINT)
    manifest.begin()
    file = PartFile(MIB, b"0" * 16)
    parts = 0
    for n in range(CAPSULES):
        shared = [name_of(f"{n // 100} {segment}") for segment in range(PARTS - 1)]
        fresh = [name_of(f"small {n}"), *(shared if n % 100 == 0 else ())]
        for name in fresh:
            manifest.put_part(PartRow(name, MIB), file)
        parts += len(fresh)
        names = [(name, MIB) for name in (name_of(f"small {n}"), *shared)]
        manifest.put_capsule(make_row(str(n), names, 512 * (PARTS - 1)))
    manifest.commit()
    manifest.close()
    taken, cpu = [], []
    for _ in range(rounds):
        began, cpu_began = perf_counter(), process_time()
        tier = DiskTier.open(directory, FINGERPRINT, BUDGET_BYTES)
        rows = tier.capsules()
        taken.append(perf_counter() - began)
        cpu.append(process_time() - cpu_began)
        assert len(rows) == CAPSULES
        tier.close(60)
    size = (directory / "manifest.sqlite3").stat().st_size
    return {
        "capsules": CAPSULES,
        "parts_each": PARTS,
        "parts": parts,
        "manifest_bytes": size,
        "open_s": spread(taken),
        "open_cpu_s": spread(cpu),
    }


def bandwidth(base: Path, nbytes: int, count: int, source: memoryview) -> dict[str, Any]:
    """MB/s of `count` parts of `nbytes`, and of the same bytes without a store."""
    tier = DiskTier.open(base / f"bandwidth-{nbytes}", FINGERPRINT, BUDGET_BYTES)
    assert tier.flush(60)
    total = nbytes * count / 1e6
    parts = [make_part(f"{nbytes} {n}", nbytes, source) for n in range(count)]
    began = perf_counter()
    for n, part in enumerate(parts):
        tier.save(make_row(str(n), [(part.name, part.nbytes)], 100), [part])
    assert tier.flush(600)
    written = perf_counter() - began
    read = timed(lambda: [tier.read(part.name) for part in parts])
    tier.close(60)
    plain = base / f"plain-{nbytes}"
    plain.mkdir()

    def write_plainly() -> None:
        for n, part in enumerate(parts):
            fd = os.open(plain / str(n), os.O_WRONLY | os.O_CREAT)
            os.write(fd, part.data)
            os.fsync(fd)
            os.close(fd)

    return {
        "part_bytes": nbytes,
        "parts": count,
        "write_mb_per_s": total / written,
        "plain_write_mb_per_s": total / timed(write_plainly),
        "read_mb_per_s": total / read,
        "plain_read_mb_per_s": total
        / timed(lambda: [(plain / str(n)).read_bytes() for n in range(count)]),
        "checksum_mb_per_s": total
        / timed(lambda: [blake2b(part.data, digest_size=16).digest() for part in parts]),
    }


def timed(call: Callable[[], object]) -> float:
    began = perf_counter()
    call()
    return perf_counter() - began


class Loop:
    """About a millisecond of small numpy calls, over and over."""

    def __init__(self) -> None:
        self._a, self._b = np.ones(16_384, np.float32), np.ones(16_384, np.float32)
        self._calls = 1
        # The best of several: other load must not make the loop shorter.
        while min(timed(self._work) for _ in range(20)) < 1e-3:
            self._calls += max(1, self._calls // 10)

    def _work(self) -> None:
        for _ in range(self._calls):
            np.add(self._a, self._b, out=self._a)

    def run(self, seconds: float) -> list[float]:
        """Milliseconds of each iteration."""
        taken = []
        end = perf_counter() + seconds
        while perf_counter() < end:
            taken.append(timed(self._work) * 1e3)
        return taken


def delay(
    base: Path, label: str, nbytes: int, gap_s: float, source: memoryview, rounds: int
) -> dict[str, Any]:
    """The loop's milliseconds without and with a thread that saves a new part every `gap_s` seconds
    (0: as soon as the last one is written)."""
    tier = DiskTier.open(base / label.replace(" ", "-"), FINGERPRINT, BUDGET_BYTES)
    loop = Loop()
    alone: list[float] = []
    disturbed: list[float] = []
    saves: list[float] = []
    for round_ in range(rounds):
        alone += loop.run(1.5)
        stop = threading.Event()

        def feed(round_: int = round_, stop: threading.Event = stop) -> None:
            n = 0
            while not stop.wait(gap_s):
                part = make_part(f"{label} {round_} {n}", nbytes, source)
                row = make_row(f"{round_} {n}", [(part.name, nbytes)], 4096)
                began = perf_counter()
                tier.save(row, [part])
                saves.append((perf_counter() - began) * 1e6)
                if not gap_s:
                    tier.flush(60)
                n += 1

        feeder = threading.Thread(target=feed)
        feeder.start()
        disturbed += loop.run(1.5)
        stop.set()
        feeder.join()
        assert tier.flush(60)
    tier.close(60)
    return {
        "case": label,
        "part_bytes": nbytes,
        "gap_ms": gap_s * 1e3,
        "saves": len(saves),
        "alone_ms": {"mean": mean(alone), **spread(alone)},
        "writing_ms": {"mean": mean(disturbed), **spread(disturbed)},
        "added_ms_mean": mean(disturbed) - mean(alone),
        "save_us": spread(saves),
    }


def measure(where: Path | None, rounds: int) -> dict[str, Any]:
    data = np.random.default_rng(0).integers(0, 256, 64 * MIB, dtype=np.uint8)
    source = memoryview(data.data)
    with tempfile.TemporaryDirectory(dir=where) as name:
        base = Path(name)
        return {
            "card": card(threads=1),
            "start_up": start_up(base / "start-up", rounds),
            "bandwidth": [
                bandwidth(base, MIB // 2, 100, source),
                bandwidth(base, 64 * MIB, 4, source),
            ],
            "delay": [
                delay(base, "small parts, no pause", MIB // 2, 0.0, source, rounds),
                delay(base, "small parts, 10 a second", MIB // 2, 0.1, source, rounds),
                delay(base, "64 MiB parts, no pause", 64 * MIB, 0.0, source, rounds),
            ],
        }


def table(result: dict[str, Any]) -> str:
    opened = result["start_up"]
    lines = [
        f"open, {opened['capsules']:,} capsules x {opened['parts_each']} parts: "
        f"{opened['open_s']['p50'] * 1e3:,.0f} ms, of processor time "
        f"{opened['open_cpu_s']['p50'] * 1e3:,.0f} ms ({opened['manifest_bytes'] / 1e6:.1f} MB)",
        "",
        "| part | write MB/s | plain write | read MB/s | plain read | checksum |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['part_bytes']:,} | {row['write_mb_per_s']:,.0f} "
        f"| {row['plain_write_mb_per_s']:,.0f} | {row['read_mb_per_s']:,.0f} "
        f"| {row['plain_read_mb_per_s']:,.0f} | {row['checksum_mb_per_s']:,.0f} |"
        for row in result["bandwidth"]
    ]
    lines += [
        "",
        "| writing | saves | step alone ms | step ms | added | p95 alone | p95 | save us |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['case']} | {row['saves']} | {row['alone_ms']['mean']:.3f} "
        f"| {row['writing_ms']['mean']:.3f} | {row['added_ms_mean']:+.3f} "
        f"| {row['alone_ms']['p95']:.3f} | {row['writing_ms']['p95']:.3f} "
        f"| {row['save_us']['p50']:.0f} |"
        for row in result["delay"]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=None, help="On the file system to measure.")
    options = parser.parse_args()
    result = measure(options.dir, options.rounds)
    print(table(result))
    write("store", result)


if __name__ == "__main__":
    main()
