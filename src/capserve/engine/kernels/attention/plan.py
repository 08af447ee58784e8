"""How is the attention of a decode step cut into programs, and what scratch does that take?

One program per (KV head, split). All rows of the step and all query heads of the group fit one tile
of a matmul, so the KV is read once. Split s of S takes the blocks s, s + S, s + 2S, ... of `block`
slots, by absolute slot: where a row's sums are cut depends neither on how long the context is nor
on how many rows there are (I7).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from capserve.engine.kernels import launch
from capserve.engine.layers.linear import MAX_ROWS
from capserve.errors import StartupError

MIN_TILE = 16
"""The fewest rows of a matmul tile on tensor cores."""


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have; without bound in the interpreter."""
    if device.type != "cuda":
        return 1 << 30
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 48 << 10))


def fits(tile: int, block: int, stages: int, dim: int, size: int, device: torch.device) -> bool:
    """Whether a tile of queries and `stages` blocks of k and v find room, elements of `size`
    bytes; 2 KiB are for reductions."""
    return (tile + 2 * stages * block) * dim * size + 2048 <= shared_bytes(device)


@dataclass(frozen=True)
class Plan:
    """Everything that decides the shape of the kernels, and with it a row's last bits."""

    heads: int
    kv_heads: int
    dim: int
    splits: int
    block: int
    """Slots of KV that a program reads at a time. At least MAX_ROWS."""
    warps: int
    stages: int
    """Depth of the software pipeline over blocks."""
    touched: int
    """Blocks that a program asks the L2 cache for while the kernel before it still runs."""

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0
        assert self.dim >= 16
        assert self.dim == power_of_two(self.dim), "head dims of the family are powers of two"
        assert self.block == power_of_two(self.block)
        assert self.block >= MAX_ROWS, "a step's rows span two blocks at most"

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def tile(self) -> int:
        """Rows of the matmul tile: (row, head of the group) pairs, padded."""
        return power_of_two(max(MIN_TILE, MAX_ROWS * self.group))

    @property
    def scratch_bytes(self) -> int:
        return 4 * self.kv_heads * self.splits * self.tile * (self.dim + 2)

    @classmethod
    def of(
        cls, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> Plan:
        """The plan for a card: one program on each multiprocessor, blocks that fit its memory."""
        splits = max(1, launch.multiprocessors(device) // kv_heads)
        tile = power_of_two(max(MIN_TILE, MAX_ROWS * heads // kv_heads))
        narrow = dtype != torch.float32
        wide = ((32, 2), (16, 2), (16, 1))
        blocks = ((64, 3), (64, 2), (32, 3), (32, 2), (16, 2)) if narrow else wide
        fit = (form for form in blocks if fits(tile, *form, dim, dtype.itemsize, device))
        found = next(fit, None)
        if found is None:
            raise StartupError(
                f"attention with {heads} heads of {dim} in {dtype} needs more than this card's "
                f"{shared_bytes(device):,} bytes of shared memory; --device cpu runs it"
            )
        block, stages = found
        warps = 8 if tile > 64 or (dim > 64 and not narrow) else 4
        return cls(heads, kv_heads, dim, splits, block, warps, stages, touched=1)


@dataclass(frozen=True)
class Scratch:
    """What the splits of one call leave for the kernel that joins them. Calls that run one after
    another share it; nothing in it outlives a call, so it needs no clearing."""

    plan: Plan
    o: Tensor
    """[Hkv, S, tile, D] f32: sums of exp2(score - m) v."""
    ml: Tensor
    """[2, Hkv, S, tile] f32: the largest score, in powers of two, and the sum of the weights."""

    @classmethod
    def allocate(cls, plan: Plan, device: torch.device | str) -> Scratch:
        shape = (plan.kv_heads, plan.splits, plan.tile)
        o = torch.empty(*shape, plan.dim, dtype=torch.float32, device=device)
        return cls(plan, o, torch.empty(2, *shape, dtype=torch.float32, device=device))
