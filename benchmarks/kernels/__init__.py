"""How near to the card's own memory bandwidth does each kernel of a step come?

    python -m benchmarks.kernels [op ...] [--tune] [--seconds 60] [--json FILE] [--match TEXT]

Every module of this package is one operation and has

    def cases(device: torch.device) -> Iterable[Case]

A case is one kernel at one real shape and one number of rows. Its time is the median over replays
of a CUDA graph of many launches, which take turns over input sets that together are larger than the
L2 cache: on one set, repeated launches would measure the cache. Memory is what `build` returns
holds, and is freed before the next case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

ROTATING_BYTES = 256 << 20
"""Input sets of one case together: four times the largest L2 cache in use today."""

Launch = Callable[[], object]


@dataclass(frozen=True)
class Case:
    name: str
    """What and where: `27B attention-in bf16`."""
    rows: int
    floor_bytes: int
    """What one launch must read and write at least: the formula of the kernel's docstring."""
    build: Callable[[Any], Sequence[Launch]]
    """Makes inputs and gives one launch for each input set. Takes a config of `configs`, or None
    for the one that the kernel's own table has."""
    peer: Callable[[], Sequence[Launch]] | None = None
    """The same by torch's own operations."""
    configs: Sequence[Any] = field(default=())
    """What `--tune` tries, likely ones first."""
    table_key: str = ""
    """Left side of the line that `--tune` prints for the kernel's table."""
    near: Callable[[Any], Sequence[Any]] | None = None
    """What `--tune` tries after `configs`: neighbours of the best so far."""


def sets_for(bytes_per_set: int) -> int:
    """How many input sets make launches read from memory instead of from the cache."""
    return max(2, -(-ROTATING_BYTES // max(1, bytes_per_set)))
