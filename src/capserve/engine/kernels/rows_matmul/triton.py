"""On the card: every program owns some columns of W, reads them once and meets all rows with them.

The rows stand in a tile of 16, those beyond `rows` as zeros, so one code serves every row count.
What makes it fast is bytes in flight: a program keeps several tiles of W on their way, enough that
one program a multiprocessor already fills the memory's pipe. Then it does not matter that the
programs do not come out even: who is left at the end still reads at full speed, up to a point.
Beyond it the matrix is shared out evenly: `split.py`. Which tile in which form is best for a shape
is in `tiles.py`.

The head of a program's part of W is fetched into the L2 cache before the wait for the kernel in
front (see `launch.py`): weights do not depend on it, and at 15 to 80 microseconds a kernel the time
in which the memory has nothing to do between two kernels counts. One element of each 32-byte sector
is read, for its side effect.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda
from triton.tools.tensor_descriptor import TensorDescriptor

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
    widened,
)
from capserve.engine.kernels.rows_matmul.reference import Norm
from capserve.engine.kernels.rows_matmul.split import (
    MAX_COLUMNS,
    MAX_PROGRAMS,
    MAX_TILES,
    scratch,
    split,
)
from capserve.engine.kernels.rows_matmul.tiles import Tile, tile_for
from capserve.engine.weights import (
    BLOCK,
    BlockFp8Weight,
    PlainWeight,
    SplitWeight,
    Weight,
    shape_of,
)

__all__ = ["rows_matmul", "rows_swiglu", "widened"]

SECTOR_BYTES = 32
TAIL_COLUMNS = 32
"""Few enough that a tail's program is done in half the time of the others, in little memory."""

_SIDE = tl.constexpr(BLOCK)


@triton.jit
def _plain(x, weight, raw, norm_scale, out, rows, n0, N, out_n0, out_N, eps, K: tl.constexpr,
           BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
           SWIGLU: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, AHEAD: tl.constexpr,
           SECTOR: tl.constexpr, EVEN_N: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Columns [n0, n0 + BN) of a plain W; for swiglu also the BN that lie N further down."""
    EVEN_K: tl.constexpr = K % BK == 0
    begin(raw, n0, 0, N, K, BN, SWIGLU, AHEAD, SECTOR, EVEN_N and AHEAD <= K, PDL)
    kept = residual(out, rows, out_n0, out_N, BN, RESIDUAL, SWAP)
    acc = nothing(BN, SWAP)
    other = acc
    squares = tl.zeros([ROW_TILE, BK], tl.float32)
    for k0 in tl.range(0, K, BK):
        tile = activations(x, rows, k0, K, BK, EVEN_K)
        if NORM:
            tile, squares = scaled(tile, squares, norm_scale, k0, K, BK, EVEN_K)
        w = weights(weight, n0, k0, N, K, BN, BK, TMA, EVEN_N, EVEN_K)
        acc = dot(tile, w, acc, SWAP)
        if SWIGLU:
            u = weights(weight, n0 + N, k0, 2 * N, K, BN, BK, TMA, EVEN_N, EVEN_K)
            other = dot(tile, u, other, SWAP)
    epilogue(acc, other, tl.sum(squares, 1), kept, out, rows, out_n0, out_N, eps, K, BN, NORM,
             RESIDUAL, SWIGLU, SWAP)  # fmt: skip


@triton.jit
def _fp8(x, weight, raw, weight_scale, norm_scale, out, rows, n0, N, out_N, eps, K: tl.constexpr,
         BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
         SWIGLU: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, AHEAD: tl.constexpr,
         SECTOR: tl.constexpr, EVEN_N: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """The same for FP8: BK is 128, so a tile has one scale. The next tile's scale is fetched while
    this one is multiplied."""
    tl.static_assert(BK == _SIDE)
    EVEN_K: tl.constexpr = K % BK == 0
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    scales = weight_scale + n0 // _SIDE * BLOCKS
    scale = tl.load(scales)
    u_scales = weight_scale
    u_scale = scale
    if SWIGLU:
        u_scales = weight_scale + (N + n0) // _SIDE * BLOCKS
        u_scale = tl.load(u_scales)
    begin(raw, n0, 0, N, K, BN, SWIGLU, AHEAD, SECTOR, EVEN_N and AHEAD <= K, PDL)
    kept = residual(out, rows, n0, out_N, BN, RESIDUAL, SWAP)
    zero = nothing(BN, SWAP)
    acc = zero
    other = zero
    squares = tl.zeros([ROW_TILE, BK], tl.float32)
    for i in tl.range(0, BLOCKS):
        k0 = i * BK
        following = tl.minimum(i + 1, BLOCKS - 1)
        next_scale = tl.load(scales + following)
        tile = activations(x, rows, k0, K, BK, EVEN_K)
        if NORM:
            tile, squares = scaled(tile, squares, norm_scale, k0, K, BK, EVEN_K)
        w = weights(weight, n0, k0, N, K, BN, BK, TMA, EVEN_N, EVEN_K)
        acc += dot(tile, w, zero, SWAP) * scale
        scale = next_scale
        if SWIGLU:
            next_u_scale = tl.load(u_scales + following)
            u = weights(weight, n0 + N, k0, 2 * N, K, BN, BK, TMA, EVEN_N, EVEN_K)
            other += dot(tile, u, zero, SWAP) * u_scale
            u_scale = next_u_scale
    epilogue(acc, other, tl.sum(squares, 1), kept, out, rows, n0, out_N, eps, K, BN, NORM, RESIDUAL,
             SWIGLU, SWAP)  # fmt: skip


@triton.jit
def _head(x, weight, raw, weight_scale, norm_scale, out, partials, counters, program, programs,
          rows, N, out_N, eps, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
          NORM: tl.constexpr, RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr, FP8: tl.constexpr,
          SPLIT: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, AHEAD: tl.constexpr,
          SECTOR: tl.constexpr, EVEN_N: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    n0 = program * BN
    if SPLIT:
        split(x, weight, raw, weight_scale, norm_scale, out, partials, counters, program, programs,
              rows, N, out_N, eps, K, BN, BK, NORM, RESIDUAL, SWIGLU, FP8, SWAP, TMA, AHEAD,
              SECTOR, EVEN_N, PDL)  # fmt: skip
    elif FP8:
        _fp8(x, weight, raw, weight_scale, norm_scale, out, rows, n0, N, out_N, eps, K, BN, BK,
             NORM, RESIDUAL, SWIGLU, SWAP, TMA, AHEAD, SECTOR, EVEN_N, PDL)  # fmt: skip
    else:
        _plain(x, weight, raw, norm_scale, out, rows, n0, N, n0, out_N, eps, K, BN, BK, NORM,
               RESIDUAL, SWIGLU, SWAP, TMA, AHEAD, SECTOR, EVEN_N, PDL)  # fmt: skip


@triton.jit(do_not_specialize=["rows", "eps"])
def _rows_matmul(x, weight, raw, weight_scale, tail, norm_scale, out, partials, counters, rows, N,
                 TAIL_N, eps, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 NORM: tl.constexpr, RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr,
                 FP8: tl.constexpr, TAIL: tl.constexpr, SPLIT: tl.constexpr, SWAP: tl.constexpr,
                 TMA: tl.constexpr, AHEAD: tl.constexpr, SECTOR: tl.constexpr,
                 EVEN_N: tl.constexpr, TAIL_BN: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """weight: the head of W, or the copy engine's descriptor of it; raw: its memory; N: columns of
    out that it gives; TAIL_N: those of a plain tail below it. The tail's programs come first: of
    the split form's all end at the same time, and nothing may come after them."""
    if PDL:
        cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    if not TAIL:
        _head(x, weight, raw, weight_scale, norm_scale, out, partials, counters, program, programs,
              rows, N, N, eps, K, BN, BK, NORM, RESIDUAL, SWIGLU, FP8, SPLIT, SWAP, TMA, AHEAD,
              SECTOR, EVEN_N, PDL)  # fmt: skip
    else:
        tails = tl.cdiv(TAIL_N, TAIL_BN)
        if program < tails:
            n0 = program * TAIL_BN
            _plain(x, tail, tail, norm_scale, out, rows, n0, TAIL_N, N + n0, N + TAIL_N, eps, K,
                   TAIL_BN, BK, NORM, RESIDUAL, False, False, False, 0, SECTOR, False,
                   PDL)  # fmt: skip
        else:
            _head(x, weight, raw, weight_scale, norm_scale, out, partials, counters,
                  program - tails, programs - tails, rows, N, N + TAIL_N, eps, K, BN, BK, NORM,
                  RESIDUAL, False, FP8, SPLIT, SWAP, TMA, AHEAD, SECTOR, EVEN_N,
                  PDL)  # fmt: skip


def rows_matmul(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    rows: int,
    *,
    norm: Norm | None = None,
    residual: bool = False,
    tile: Tile | None = None,
) -> None:
    """out[:rows] (+)= N(x[:rows]) W^T; see the package. `tile`: another than the table's."""
    _launch(x, weight, out, rows, norm, residual, False, tile)


def rows_swiglu(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    rows: int,
    *,
    norm: Norm | None = None,
    tile: Tile | None = None,
) -> None:
    """out[:rows] = silu(N(x) G^T) * (N(x) U^T), W = [G; U] [2 I, K], out [>= rows, I]. An FP8 W
    needs I to be a multiple of 128."""
    _launch(x, weight, out, rows, norm, False, True, tile)


def _launch(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    rows: int,
    norm: Norm | None,
    residual: bool,
    swiglu: bool,
    tile: Tile | None,
) -> None:
    full_n, k = shape_of(weight)
    n = full_n // 2 if swiglu else full_n
    assert 1 <= rows <= ROW_TILE.value, rows
    assert x.is_contiguous() and x.shape[0] >= rows and x.shape[1] == k, (x.shape, k)  # noqa: PT018
    assert out.is_contiguous() and out.shape[0] >= rows and out.shape[1] == n, (out.shape, n)  # noqa: PT018
    scale, eps = norm if norm is not None else (x, 0.0)
    assert norm is None or (scale.dtype is torch.float32 and scale.numel() == k)
    tail_n = 0
    match weight:
        case PlainWeight(head):
            head_scale, tail = head, head
        case BlockFp8Weight(head, head_scale):
            tail = head
            assert not swiglu or n % BLOCK == 0, n
        case SplitWeight(BlockFp8Weight(head, head_scale), PlainWeight(tail)):
            assert not swiglu
            tail_n = tail.shape[0]
            n -= tail_n
    if not isinstance(weight, PlainWeight):
        head = launch.readable_fp8(head)
    if tile is None:
        tile = tile_for(weight, x.dtype, swiglu, norm is not None, x.device)
    columns = tile.columns
    aligned = k * head.element_size() % 16 == 0 and head.data_ptr() % 16 == 0
    tma = tile.tma and aligned and launch.capability(head.device) >= (9, 0)
    assert tail_n == 0 or n % columns == 0
    assert isinstance(weight, PlainWeight) or BLOCK % columns == 0, columns
    source = TensorDescriptor.from_tensor(head, [columns, tile.depth]) if tma else head
    tail_columns = min(columns, TAIL_COLUMNS)
    programs, tails = triton.cdiv(n, columns), triton.cdiv(tail_n, tail_columns)
    partials, counters = x, x
    if tile.split:
        assert tile.split <= MAX_PROGRAMS, tile
        assert columns <= MAX_COLUMNS, tile
        assert programs <= MAX_TILES, programs
        room = scratch(x.device)
        partials, counters = room.partials, room.counters
        units = programs * triton.cdiv(k, tile.depth)
        programs = min(units, max(1, tile.split * launch.multiprocessors(x.device) - tails))
        assert (programs + 1) * (units + 1) < 1 << 31, (programs, units)
    _rows_matmul[(programs + tails,)](
        x,
        source,
        head,
        head_scale,
        tail,
        scale,
        out,
        partials,
        counters,
        rows,
        n,
        tail_n,
        eps,
        K=k,
        BN=columns,
        BK=tile.depth,
        NORM=norm is not None,
        RESIDUAL=residual,
        SWIGLU=swiglu,
        FP8=not isinstance(weight, PlainWeight),
        TAIL=tail_n > 0,
        SPLIT=tile.split > 0,
        SWAP=tile.swap,
        TMA=tma,
        AHEAD=tile.ahead if tile.ahead <= k else 0,
        SECTOR=SECTOR_BYTES // head.element_size(),
        EVEN_N=n % columns == 0,
        TAIL_BN=tail_columns,
        PDL=launch.PDL,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=launch.PDL,
    )
