"""Which tile reads which matrix fastest?

Found by `python -m benchmarks.kernels rows_matmul --tune`; a shape that is not in the table takes
the default of its form. A tile decides speed and, through the order of a sum over K, bits: it
depends on the matrix alone, never on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from capserve.engine.kernels import launch
from capserve.engine.weights import (
    BLOCK,
    BlockFp8Weight,
    PlainWeight,
    SplitWeight,
    Weight,
    shape_of,
)


@dataclass(frozen=True)
class Tile:
    columns: int
    """Outputs of a program; for swiglu twice as many rows of W."""
    depth: int
    """Inputs at a time. 128 for FP8, whose scales change there."""
    stages: int
    """Tiles of W on their way."""
    warps: int
    swap: bool = False
    """Let W be the left side of the matrix product; pays from 64 columns."""
    tma: bool = False
    """Let the copy engine of compute capability 9.0 fetch W."""
    ahead: int = 0
    """Inputs of a program's part of W that are brought into the cache before the wait for the
    kernel in front; a power of two."""
    split: int = 0
    """Programs a multiprocessor that share all tiles evenly, which cuts tiles along K; 0: as many
    programs as tiles."""


_TABLE: dict[tuple[str, int, int, bool], Tile] = {
    # 27B: delta in, attention in, mixer out, gate and up, down, fc of the MTP head, head, and the
    # part of the head that drafts read
    ("bf16", 16480, 5120, False): Tile(128, 256, 3, 4, swap=True, tma=True),
    ("bf16", 14336, 5120, False): Tile(64, 256, 4, 4, swap=True, tma=True, ahead=256),
    ("bf16", 5120, 6144, False): Tile(128, 128, 6, 4, swap=True, tma=True, ahead=64),
    ("bf16", 34816, 5120, True): Tile(64, 256, 3, 4, swap=True, tma=True, ahead=256, split=1),
    ("bf16", 5120, 17408, False): Tile(128, 256, 3, 4, tma=True, ahead=64, split=1),
    ("bf16", 5120, 10240, False): Tile(64, 256, 4, 4, swap=True, tma=True, ahead=256, split=1),
    ("bf16", 248077, 5120, False): Tile(64, 256, 5, 4, swap=True, tma=True, ahead=64),
    ("bf16", 98304, 5120, False): Tile(64, 256, 5, 4, swap=True, tma=True, ahead=64),
    ("fp8", 16480, 5120, False): Tile(128, BLOCK, 4, 8, swap=True, tma=True, ahead=128),
    ("fp8", 14336, 5120, False): Tile(128, BLOCK, 7, 8, swap=True, tma=True),
    ("fp8", 5120, 6144, False): Tile(64, BLOCK, 7, 4, swap=True, tma=True, ahead=64),
    ("fp8", 34816, 5120, True): Tile(128, BLOCK, 3, 4, swap=True, tma=True),
    ("fp8", 5120, 17408, False): Tile(32, BLOCK, 11, 2),
}
"""(form, N, K, swiglu) -> tile, for cards of compute capability 9.0."""

_HOPPER = {
    "bf16": Tile(32, 256, 4, 4, tma=True, ahead=512),
    "bf16 norm": Tile(64, 128, 4, 4, swap=True, tma=True, ahead=256),
    "bf16 swiglu": Tile(64, 64, 4, 4, swap=True, tma=True, ahead=256),
    "fp8": Tile(64, BLOCK, 6, 2, ahead=1024),
    "fp8 norm": Tile(64, BLOCK, 6, 4, swap=True, tma=True, ahead=512),
    "fp8 swiglu": Tile(64, BLOCK, 4, 4, swap=True, tma=True, ahead=512),
}
"""For compute capability 9.0 beyond the table. On 10.0 Triton 3.6 fails to compile the transposed
form of two products, and 12.0 has half the shared memory: they take the others' tiles."""

_OTHERS = {
    "bf16": Tile(32, 128, 4, 2),
    "bf16 norm": Tile(64, 128, 3, 4),
    "bf16 swiglu": Tile(32, 128, 3, 4),
    "fp8": Tile(64, BLOCK, 4, 2),
    "fp8 norm": Tile(64, BLOCK, 4, 4),
    "fp8 swiglu": Tile(32, BLOCK, 4, 4),
}

_FLOAT32 = {"f32": Tile(32, 32, 3, 4), "f32 fp8": Tile(16, BLOCK, 2, 4)}
"""float32 runs on the plain units, whose code is unrolled over the depth: small tiles."""


def form_of(weight: Weight, dtype: torch.dtype) -> str:
    """`dtype`: of x, in which the products are made."""
    match weight:
        case PlainWeight():
            return "bf16" if dtype is torch.bfloat16 else "f32"
        case BlockFp8Weight() | SplitWeight():
            return "fp8" if dtype is torch.bfloat16 else "f32 fp8"


def tile_for(
    weight: Weight, dtype: torch.dtype, swiglu: bool, normed: bool, device: torch.device
) -> Tile:
    form = form_of(weight, dtype)
    if form in _FLOAT32:
        return _FLOAT32[form]
    kind = f"{form} swiglu" if swiglu else f"{form} norm" if normed else form
    if launch.capability(device)[0] == 9:
        return _TABLE.get((form, *shape_of(weight), swiglu), _HOPPER[kind])
    return _OTHERS[kind]
