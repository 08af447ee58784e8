"""How does a matrix whose tiles do not come out even keep every multiprocessor reading to the end?

A fixed number of programs share the (tile, step of K) units in equal contiguous runs: "stream-K"
(Osama, Merrill, Cecka, Garland and Owens 2023). Who takes which unit follows from the shape and the
card alone, so a row keeps its bits in any company. One loop goes over a program's run, so that its
loads stay in flight across the end of a tile.

A tile that lies in one run is finished there. Of one that is cut, every program leaves its partial
sums in scratch and counts itself in; whoever comes last adds all parts in the order of K, which
makes the bits independent of who that is, and sets the counter back to zero for the next launch.
Nobody waits for anybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from capserve.engine.kernels import launch
from capserve.engine.kernels.rows_matmul.pieces import (
    ROW_TILE,
    activations,
    begin,
    dot,
    epilogue,
    nothing,
    residual,
    scaled,
    weights,
)
from capserve.engine.weights import BLOCK

MAX_PROGRAMS = 2
"""A multiprocessor's, of the split form."""

MAX_COLUMNS = 128
MAX_TILES = 1 << 15

_SIDE = tl.constexpr(BLOCK)
_AT_ONCE = tl.constexpr(4)
"""Parts of a tile that are on their way together. Rarely are there more."""


def slot_floats(columns: int, swiglu: bool) -> int:
    """One part of a tile. A run has two slots: an even one for the tile that it begins within, an
    odd one for the tile that it ends within."""
    return (columns * (2 if swiglu else 1) + 1) * ROW_TILE.value


@dataclass(frozen=True)
class Scratch:
    """What the launches of one device leave to each other: nothing, once each has ended. So one
    serves all matrices, as long as launches follow one another: on one stream, or in a graph of
    one. Dependent launch is no exception: it is touched after the wait only."""

    partials: Tensor
    """[2 * programs, slot_floats] f32."""
    counters: Tensor
    """[MAX_TILES] int32, zero between launches."""


@cache
def scratch(device: torch.device) -> Scratch:
    """Made at the first use, which must not be under capture: a graph's memory is its own, and
    would get the zeros at every replay. `graphs.py` runs everything once before it captures."""
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
    programs = MAX_PROGRAMS * max(launch.multiprocessors(device), 64)
    floats = slot_floats(MAX_COLUMNS, swiglu=True)
    made = Scratch(
        torch.zeros(2 * programs * floats, dtype=torch.float32, device=device),
        torch.zeros(MAX_TILES, dtype=torch.int32, device=device),
    )
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the next launch may stand on another stream
    return made


@triton.jit
def _begins(program, units, programs):
    return program * units // programs


@triton.jit
def _owner(unit, units, programs):
    """The program whose run has the unit."""
    return ((unit + 1) * programs - 1) // units


@triton.jit
def _places(BN: tl.constexpr, SWAP: tl.constexpr):
    r = tl.arange(0, ROW_TILE)
    n = tl.arange(0, BN)
    if SWAP:
        return n[:, None] * ROW_TILE + r[None, :]
    else:
        return r[:, None] * BN + n[None, :]


@triton.jit
def _scale_at(weight_scale, unit, below, BN: tl.constexpr, STEPS: tl.constexpr):
    """Of the unit's tile, or of the one `below` rows of W further down."""
    return weight_scale + (unit // STEPS * BN + below) // _SIDE * STEPS + unit % STEPS


@triton.jit
def split(x, weight, raw, weight_scale, norm_scale, out, partials, counters, program, programs,
          rows, N, out_N, eps, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
          NORM: tl.constexpr, RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr, FP8: tl.constexpr,
          SWAP: tl.constexpr, TMA: tl.constexpr, AHEAD: tl.constexpr, SECTOR: tl.constexpr,
          EVEN_N: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """The run of one program over the N columns of out that W gives; FP8: BK is 128."""
    EVEN_K: tl.constexpr = K % BK == 0
    STEPS: tl.constexpr = (K + BK - 1) // BK
    SLOT: tl.constexpr = (BN * (2 if SWIGLU else 1) + 1) * ROW_TILE
    units = tl.cdiv(N, BN) * STEPS
    lo = _begins(program, units, programs)
    hi = _begins(program + 1, units, programs)
    if FP8:  # the next scale is fetched while this one's tile is multiplied
        scale = tl.load(_scale_at(weight_scale, lo, 0, BN, STEPS))
        if SWIGLU:
            u_scale = tl.load(_scale_at(weight_scale, lo, N, BN, STEPS))
    begin(raw, lo // STEPS * BN, lo % STEPS * BK, N, K, BN, SWIGLU, AHEAD, SECTOR, False, PDL)
    r = tl.arange(0, ROW_TILE)
    at = _places(BN, SWAP)
    acc = nothing(BN, SWAP)
    other = acc
    squares = tl.zeros([ROW_TILE, BK], tl.float32)
    for unit in tl.range(lo, hi):
        tile = unit // STEPS
        step = unit % STEPS
        n0 = tile * BN
        k0 = step * BK
        rows_of_x = activations(x, rows, k0, K, BK, EVEN_K)
        if NORM:
            rows_of_x, squares = scaled(rows_of_x, squares, norm_scale, k0, K, BK, EVEN_K)
        w = weights(weight, n0, k0, N, K, BN, BK, TMA, EVEN_N, EVEN_K)
        if FP8:
            following = tl.minimum(unit + 1, hi - 1)
            next_scale = tl.load(_scale_at(weight_scale, following, 0, BN, STEPS))
            acc += dot(rows_of_x, w, nothing(BN, SWAP), SWAP) * scale
            scale = next_scale
        else:
            acc = dot(rows_of_x, w, acc, SWAP)
        if SWIGLU:
            u = weights(weight, n0 + N, k0, 2 * N, K, BN, BK, TMA, EVEN_N, EVEN_K)
            if FP8:
                next_u_scale = tl.load(_scale_at(weight_scale, following, N, BN, STEPS))
                other += dot(rows_of_x, u, nothing(BN, SWAP), SWAP) * u_scale
                u_scale = next_u_scale
            else:
                other = dot(rows_of_x, u, other, SWAP)
        if (step == STEPS - 1) | (unit == hi - 1):
            total = tl.sum(squares, 1)
            if (step == STEPS - 1) & (unit - lo >= STEPS - 1):
                kept = residual(out, rows, n0, out_N, BN, RESIDUAL, SWAP)
                epilogue(acc, other, total, kept, out, rows, n0, out_N, eps, K, BN, NORM,
                         RESIDUAL, SWIGLU, SWAP)  # fmt: skip
            else:
                begun = (lo <= tile * STEPS).to(tl.int32)
                slot = partials + (2 * program + begun) * SLOT
                if NORM:
                    tl.store(slot + r, total)
                tl.store(slot + ROW_TILE + at, acc)
                if SWIGLU:
                    tl.store(slot + ROW_TILE + ROW_TILE * BN + at, other)
            acc = nothing(BN, SWAP)
            other = nothing(BN, SWAP)
            squares = tl.zeros([ROW_TILE, BK], tl.float32)

    # one thread counts in for all, so all stores come before: both tiles at once, as one round trip
    # to the counters takes as long as reading 3 MB
    tl.debug_barrier()
    end = tl.arange(0, 2)
    tiles = tl.where(end == 0, lo, hi - 1) // STEPS
    cut = (lo > tiles * STEPS) | (hi < (tiles + 1) * STEPS)
    cut = cut & ((end == 0) | (tiles != lo // STEPS))
    others = _owner((tiles + 1) * STEPS - 1, units, programs) - _owner(
        tiles * STEPS, units, programs
    )
    before = tl.atomic_add(counters + tiles, 1, mask=cut, sem="acq_rel", scope="gpu")
    complete = (cut & (before == others)).to(tl.int32)
    for which in tl.static_range(2):
        if tl.sum(tl.where(end == which, complete, 0), 0) > 0:
            tile = (lo if which == 0 else hi - 1) // STEPS
            first = _owner(tile * STEPS, units, programs)
            last = _owner((tile + 1) * STEPS - 1, units, programs)
            kept = residual(out, rows, tile * BN, out_N, BN, RESIDUAL, SWAP)
            acc = nothing(BN, SWAP)
            other = acc
            total = tl.zeros([ROW_TILE], tl.float32)
            for some in tl.range(first, last + 1, _AT_ONCE):
                for one in tl.static_range(_AT_ONCE):
                    real = some + one <= last
                    part = tl.minimum(some + one, last)
                    slot = partials + (2 * part + (part == first).to(tl.int32)) * SLOT
                    # past the first-level cache, which knows nothing of other programs
                    acc += tl.load(slot + ROW_TILE + at, mask=real, other=0.0,
                                   cache_modifier=".cg")  # fmt: skip
                    if SWIGLU:
                        other += tl.load(slot + ROW_TILE + ROW_TILE * BN + at, mask=real,
                                         other=0.0, cache_modifier=".cg")  # fmt: skip
                    if NORM:
                        total += tl.load(slot + r, mask=real, other=0.0,
                                         cache_modifier=".cg")  # fmt: skip
            tl.store(counters + tile, 0)
            epilogue(acc, other, total, kept, out, rows, tile * BN, out_N, eps, K, BN, NORM,
                     RESIDUAL, SWIGLU, SWAP)  # fmt: skip
