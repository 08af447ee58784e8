"""What does a restore cost per byte in each tier, beside the machine's own copy and read?

The engine alone, on nano and on a random model with a wider KV cache, so that bytes matter.

  swap    a whole capsule replaces an unrelated one of the same length, from a tier's memory
  undo    back to a capsule of the same history, 64 tokens after it: only what differs moves
  disk    read, checksum, unpack and restore, with the files in the page cache
  disk, dropped   the same after the files were dropped from the page cache, as far as the system
                  does that when asked (`posix_fadvise`)

The ceiling stands in the same round: one contiguous `copy_` of as many bytes out of the same kind
of memory; for the disk, one read of a file of that size in the same state of the page cache. A
disk restore also copies what it has read, twice, and takes its checksum.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.card import RESULTS, card, read_gb_per_s, spread, write
from benchmarks.plot import Series, log_log
from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import Capsule, TokenArray
from capserve.nano import checkpoint_dir
from capserve.serving.capsules.rows import CapsuleKey, CapsuleRow, PartRow
from capserve.serving.disk.tier import DiskTier
from capserve.serving.journal import Span, SpanKind, prefix_digests
from capserve.testing.tiny import SHAPES, TinyShape, write_checkpoint

UNDO_TOKENS = 64
POSITIONS = (512, 2048, 8192, 16384)
FLUSH_TIMEOUT_S = 300.0

WIDE = TinyShape(
    "wide",
    SHAPES["flat-tied"].config
    | {
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "max_position_embeddings": POSITIONS[-1] + UNDO_TOKENS,
    },
)
"""KV of 12 KiB a token and a small state of 3 MiB: wide heads on a trunk that reads quickly."""

Row = dict[str, Any]


class Bench:
    """One engine, two unrelated histories of it, and the capsules along both."""

    def __init__(self, name: str, path: Path, threads: int, rounds: int) -> None:
        self.name = name
        self.rounds = rounds
        self.engine = TorchEngine.load(
            path, max_model_len=POSITIONS[-1] + UNDO_TOKENS, threads=threads
        )
        self.cuda = self.engine.limits.device.startswith("cuda")
        draw = np.random.default_rng(0)
        size = (2, POSITIONS[-1] + UNDO_TOKENS)
        self.tokens = draw.integers(0, 256, size, dtype=np.int32)
        self.capsules = [self._capsules(tokens) for tokens in self.tokens]

    def _capsules(self, tokens: TokenArray) -> dict[int, Capsule]:
        self.engine.reset()
        kept = {}
        for position in POSITIONS:
            self.engine.extend(tokens[self.engine.position : position])
            kept[position] = self.engine.snapshot()
        return kept

    def rows(self) -> Iterator[Row]:
        for tier in self.engine.limits.tiers:
            for position in POSITIONS:
                yield self._swap(tier, position)
        for position in POSITIONS:
            yield self._undo(position)
        yield from self._from_disk()

    def _swap(self, tier: str, position: int) -> Row:
        one, other = (self.engine.move(kept[position], tier) for kept in self.capsules)
        taken, ceiling = [], []
        copy = self._copy_of(_bytes(one), tier)
        for i in range(2 * self.rounds + 2):
            ceiling.append(self._timed(copy))
            taken.append(self._timed(partial(self._restore, (one, other)[i % 2])))
        return self._row(f"{tier}, swap", position, _bytes(one), taken[2:], ceiling[2:])

    def _undo(self, position: int) -> Row:
        capsule = self.capsules[0][position]
        after = self.tokens[0][position : position + UNDO_TOKENS]
        self.engine.restore(capsule)
        self.engine.extend(after)
        moved = self.engine.restore(capsule)
        copy = self._copy_of(moved, self.engine.limits.tiers[0])
        taken, ceiling = [], []
        for _ in range(self.rounds + 1):
            self.engine.extend(after)
            ceiling.append(self._timed(copy))
            taken.append(self._timed(partial(self._restore, capsule)))
        tier = self.engine.limits.tiers[0]
        return self._row(f"{tier}, undo", position, moved, taken[1:], ceiling[1:])

    def _from_disk(self) -> Iterator[Row]:
        with tempfile.TemporaryDirectory(prefix="capserve-bench-") as name:
            folder = Path(name)
            tier = DiskTier.open(folder / "tier", self.engine.limits.fingerprint, 1 << 40)
            saved = {}
            for position in POSITIONS:
                capsule = self.engine.move(self.capsules[0][position], self.engine.limits.tiers[-1])
                saved[position] = _row_of(capsule, self.tokens[0])
                tier.save(saved[position], capsule.parts)
                # One by one: more than may wait would be given up.
                if not tier.flush(FLUSH_TIMEOUT_S) or tier.fault:
                    raise RuntimeError(f"the disk tier did not write: {tier.fault}")
            # A part that still lives in memory would be shared instead of read.
            del capsule
            self.capsules[0].clear()
            for dropped in (False, True):
                for position in POSITIONS:
                    yield self._read_back(tier, folder, saved[position], dropped)
            tier.close(FLUSH_TIMEOUT_S)

    def _read_back(self, tier: DiskTier, folder: Path, row: CapsuleRow, dropped: bool) -> Row:
        position = row.key.position
        size = sum(part.nbytes for part in row.parts)
        plain = folder / "plain"
        plain.write_bytes(os.urandom(min(size, 1 << 20)) * (size >> 20) + bytes(size % (1 << 20)))
        buffer = bytearray(plain.stat().st_size)
        other = self.capsules[1][position]

        steps: dict[str, list[float]] = {"read": [], "unpack": [], "restore": []}

        def load() -> None:
            began = perf_counter()
            parts = [tier.read(part.name) for part in row.parts]
            read = perf_counter()
            capsule = self.engine.unpack(position, parts)
            unpacked = perf_counter()
            self._restore(capsule)
            steps["read"].append((read - began) * 1e3)
            steps["unpack"].append((unpacked - read) * 1e3)
            steps["restore"].append((perf_counter() - unpacked) * 1e3)

        def read() -> None:
            with plain.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

        taken, ceiling = [], []
        for _ in range(self.rounds + 1):
            self.engine.restore(other)
            if dropped:
                for file in folder.rglob("*"):
                    _drop_from_cache(file)
            ceiling.append(self._timed(read))
            taken.append(self._timed(load))
        what = "disk, dropped" if dropped else "disk"
        medians = {name: median(times[1:]) for name, times in steps.items()}
        return self._row(what, position, size, taken[1:], ceiling[1:]) | {"steps_ms": medians}

    def _restore(self, capsule: Capsule) -> None:
        self.engine.restore(capsule)

    def _copy_of(self, size: int, tier: str) -> Callable[[], None]:
        """A copy of `size` bytes from the tier's kind of memory to the device's, alternating
        between two sources as a swap does."""
        device = self.engine.limits.device
        if self.cuda and tier == "gpu":
            sources = [torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2)]
        else:
            sources = [torch.ones(size, dtype=torch.uint8, pin_memory=self.cuda) for _ in range(2)]
        target = torch.zeros(size, dtype=torch.uint8, device=device)

        def copy() -> None:
            target.copy_(sources[0], non_blocking=True)
            sources.reverse()

        return copy

    def _timed(self, call: Callable[[], None]) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        began = perf_counter()
        call()
        if self.cuda:
            torch.cuda.synchronize()
        return (perf_counter() - began) * 1e3

    def _row(
        self, what: str, position: int, size: int, taken: list[float], ceiling: list[float]
    ) -> Row:
        ms, least = spread(taken), spread(ceiling)
        return {
            "engine": self.name,
            "what": what,
            "tokens": position,
            "bytes": size,
            "ms": ms,
            "ceiling_ms": least,
            "gb_per_s": size / ms["p50"] / 1e6,
            "ceiling_gb_per_s": size / least["p50"] / 1e6,
            "share_of_ceiling": least["p50"] / ms["p50"],
        }


def _bytes(capsule: Capsule) -> int:
    return sum(part.nbytes for part in capsule.parts)


def _row_of(capsule: Capsule, tokens: TokenArray) -> CapsuleRow:
    position = capsule.position
    digest = prefix_digests(tokens[:position], [position])[0]
    return CapsuleRow(
        key=CapsuleKey("bench", position, digest),
        spans=(Span(SpanKind.PREFILL, 0, position),),
        parts=tuple(PartRow(part.name, part.nbytes) for part in capsule.parts),
        based_on=None,
        pinned=False,
        used_at=time.time(),
    )


def _drop_from_cache(path: Path) -> None:
    if not path.is_file():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)  # what is not written yet can't be dropped
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def measure(rounds: int, threads: int) -> dict[str, Any]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="capserve-bench-") as name:
        wide = write_checkpoint(Path(name) / "wide", WIDE)
        for label, path in (("nano", checkpoint_dir()), ("wide", wide)):
            bench = Bench(label, path, threads, rounds)
            rows += bench.rows()
    return {
        "card": card(threads),
        "ceilings": {"copy_read_and_written_gb_per_s": read_gb_per_s()},
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    lines = [
        "| engine | from | tokens | MB | ms (min..max) | GB/s | ceiling GB/s | of ceiling "
        "| read + unpack + restore ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        ms = row["ms"]
        steps = " + ".join(f"{step:.1f}" for step in row.get("steps_ms", {}).values())
        lines.append(
            f"| {row['engine']} | {row['what']} | {row['tokens']:,} | {row['bytes'] / 1e6:.1f} "
            f"| {ms['p50']:.2f} ({ms['min']:.2f}..{ms['max']:.2f}) | {row['gb_per_s']:.2f} "
            f"| {row['ceiling_gb_per_s']:.2f} | {row['share_of_ceiling']:.0%} | {steps} |"
        )
    return "\n".join(lines)


def picture(result: dict[str, Any]) -> str:
    """Restore time over bytes, with the ceiling of each kind dashed (of the wide model)."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in result["rows"]:
        lines.setdefault((row["engine"], row["what"]), []).append(row)
    series = [
        Series(f"{engine}: {what}", [(row["bytes"], row["ms"]["p50"]) for row in rows])
        for (engine, what), rows in lines.items()
    ]
    series += [
        Series(
            f"ceiling: {what}",
            [(row["bytes"], row["ceiling_ms"]["p50"]) for row in rows],
            dashed=True,
        )
        for (engine, what), rows in lines.items()
        if engine == "wide" and not what.endswith("undo")
    ]
    return log_log("Restore time by bytes moved", "bytes", "milliseconds", series)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    result = measure(options.rounds, options.threads)
    print(table(result))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "restore.svg").write_text(picture(result), encoding="utf-8")
    write("restore", result)


if __name__ == "__main__":
    main()
