"""A decode step's attention on the card, in two launches.

`_partials`: one program per (split, KV head). It prepares the queries of all rows and heads of its
group (norm, rotary), writes k and v of those rows whose slots lie in its own blocks,
and runs the online softmax over its blocks. The new slots are thus read by the program that wrote
them, and no launch is spent on preparing. `_join`: one program per (row, head) adds the splits up
in their order and applies the gate.

Why a row's bits depend on its position alone: the tile is the same for any number of rows; a
split's blocks and their order are absolute; a block, or a split, of which a row sees nothing
changes nothing in it (its weights are exactly 0, the rescaling is exactly 1). Slots beyond the
step's last row may hold anything: they are loaded as zeros. A later row, if it is finite, never
reaches an earlier one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from capserve.engine.kernels import launch
from capserve.engine.kernels.attention.plan import Scratch, power_of_two
from capserve.engine.layers.linear import MAX_ROWS

SECTOR_BYTES = 32
"""What the L2 cache fetches at the least."""

JOINED = 64
"""Splits that `_join` holds in registers at a time: all of them on a card of today, so that it
waits for memory once."""


@triton.jit
def normed_rotated(x, scale, cos, sin, position, real, eps, D: tl.constexpr, HALF: tl.constexpr):
    """N heads: x [N] pointers to D elements, scale [N] pointers to D f32; position [N], the row of
    cos and sin; real [N], which of the N exist. -> two of [N, D / 2 HALF, HALF] f32.

    A head is taken as [D / 2 HALF, 2, HALF]: the two results are both sides of that 2. So the two
    of a rotary pair lie in one place, and only group 0 has an angle other than 0.
    """
    at = _places(D, HALF)
    exists = real[:, None, None]
    a = tl.load(x[:, None, None] + at, mask=exists, other=0.0).to(tl.float32)
    b = tl.load(x[:, None, None] + HALF + at, mask=exists, other=0.0).to(tl.float32)
    squares = tl.sum(tl.sum(a * a + b * b, 2), 1)
    r = tl.rsqrt(squares / D + eps)[:, None, None]
    a = a * r * tl.load(scale[:, None, None] + at, mask=exists, other=0.0)
    b = b * r * tl.load(scale[:, None, None] + HALF + at, mask=exists, other=0.0)
    angle = position[:, None, None] * HALF + at
    turned = (at < HALF) & exists
    c = tl.load(cos + angle, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
    return a * c - b * s, b * c + a * s


@triton.jit
def store_heads(target, a, b, real, D: tl.constexpr, HALF: tl.constexpr):
    """What `normed_rotated` gave, to target [N] pointers to D elements."""
    to = target[:, None, None] + _places(D, HALF)
    tl.store(to, a.to(target.dtype.element_ty), mask=real[:, None, None])
    tl.store(to + HALF, b.to(target.dtype.element_ty), mask=real[:, None, None])


@triton.jit
def _places(D: tl.constexpr, HALF: tl.constexpr):
    GROUPS: tl.constexpr = D // (2 * HALF)
    at = tl.arange(0, GROUPS)[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    return at[None, :, :]


@triton.jit
def attend(
    q,
    k_head,
    v_head,
    last_seen,
    first,
    end,
    block,
    step,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax of q [TILE, D] over the blocks `block`, `block + step`, ... below `end`.

    k_head, v_head: [P, D]. Row t sees the slots [first, last_seen[t]]; slots from `end` on are not
    read. -> m [TILE], the largest score times log2(e), the sum of the weights
    exp2(score - m) [TILE] and o [TILE, D]; -inf, 0 and 0 for a row that saw nothing.
    """
    TILE: tl.constexpr = q.shape[0]
    dims = tl.arange(0, D)
    m = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    o = tl.zeros([TILE, D], tl.float32)
    to_log2: tl.constexpr = 1.4426950408889634 / (D**0.5)
    for b in tl.range(block, tl.cdiv(end, BLOCK), step, num_stages=STAGES):
        slots = b * BLOCK + tl.arange(0, BLOCK)
        at = slots[:, None] * D + dims[None, :]
        present = ((slots >= first) & (slots < end))[:, None]
        k = tl.load(k_head + at, mask=present, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * to_log2
        seen = (slots[None, :] >= first) & (slots[None, :] <= last_seen[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf is NaN
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(m - base)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(v_head + at, mask=present, other=0.0)
        o = tl.dot(weights.to(v.dtype), v, o * shrink[:, None], input_precision="ieee")
        m = m_new
    return m, total, o


@triton.jit
def _touch(block, count, D: tl.constexpr, BLOCK: tl.constexpr, APART: tl.constexpr):
    """Asks the L2 cache for the first `count` slots of a block [BLOCK, D]; nothing waits."""
    at = tl.arange(0, BLOCK * D // APART) * APART
    tl.load(block + at, mask=at < count * D, other=0.0, volatile=True)


@triton.jit(do_not_specialize=["offset", "first", "rows"])
def _partials(
    qkvg,
    scales,
    cos,
    sin,
    kv,
    start,
    o_part,
    ml_part,
    eps,
    offset,
    first,
    rows,
    positions,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    NEW: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    TOUCHED: tl.constexpr,
    APART: tl.constexpr,
    PDL: tl.constexpr,
):
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    GROUP: tl.constexpr = HQ // HKV
    WIDTH: tl.constexpr = (2 * HQ + 2 * HKV) * D
    k_head = kv + kv_head.to(tl.int64) * positions * D
    v_head = kv + (HKV + kv_head).to(tl.int64) * positions * D
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        # A hint: the start of the step before may still stand there, and what is loaded is not
        # used. Slots are in range whatever is read.
        near = tl.minimum(tl.load(start, volatile=True) + offset, positions)
        for i in tl.static_range(TOUCHED):
            b = split + i * SPLITS
            _touch(k_head + b * BLOCK * D, near - b * BLOCK, D, BLOCK, APART)
            _touch(v_head + b * BLOCK * D, near - b * BLOCK, D, BLOCK, APART)
        tl.extra.cuda.gdc_wait()
    begin = tl.load(start, volatile=True) + offset  # never what was cached before the wait
    end = tl.minimum(begin + rows, positions)
    if split * BLOCK >= end:
        return

    # Queries: tile row t is row t // GROUP of the step, head t % GROUP of the group. They go
    # through this program's part of the scratch: the compiler keeps what it computed itself in
    # registers, and then has too few of them to run matmuls one behind the other.
    t = tl.arange(0, TILE)
    row, head = t // GROUP, kv_head * GROUP + t % GROUP
    real = t < rows * GROUP
    last_seen = begin + row
    part = (kv_head * SPLITS + split) * TILE + t
    q_a, q_b = normed_rotated(
        qkvg + row * WIDTH + head * D,
        scales + head * D,
        cos,
        sin,
        last_seen,
        real & (last_seen < positions),
        eps,
        D,
        HALF,
    )
    staged = o_part + (kv_head * SPLITS + split) * (TILE * D)
    staged = staged.to(tl.pointer_type(kv.dtype.element_ty)) + t * D
    store_heads(staged, q_a, q_b, real, D, HALF)

    # new slots in this program's blocks: at most two blocks hold the step's rows
    dims = tl.arange(0, D)[None, :]
    if (begin // BLOCK % SPLITS == split) | ((end - 1) // BLOCK % SPLITS == split):
        n = tl.arange(0, NEW)
        slot = begin + n
        mine = (slot < end) & (slot // BLOCK % SPLITS == split)
        x = qkvg + n * WIDTH + (HQ + kv_head) * D
        scale = scales + (HQ + kv_head) * D + n * 0
        k_a, k_b = normed_rotated(x, scale, cos, sin, slot, mine, eps, D, HALF)
        store_heads(k_head + slot * D, k_a, k_b, mine, D, HALF)
        v = tl.load(x[:, None] + HKV * D + dims, mask=mine[:, None], other=0.0)
        tl.store(v_head + slot[:, None] * D + dims, v, mask=mine[:, None])

    tl.debug_barrier()  # below, each thread reads what others have written: queries and new slots
    q = tl.load(staged[:, None] + dims, mask=real[:, None], other=0.0)

    m, total, o = attend(q, k_head, v_head, last_seen, first, end, split, SPLITS, D, BLOCK, STAGES)
    tl.store(ml_part + part, m, mask=real)
    tl.store(ml_part + HKV * SPLITS * TILE + part, total, mask=real)
    tl.store(o_part + part[:, None] * D + dims, o, mask=real[:, None])


@triton.jit(do_not_specialize=["offset"])
def _join(
    o_part,
    ml_part,
    qkvg,
    start,
    out,
    offset,
    positions,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    GROUP: tl.constexpr = HQ // HKV
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    dims = tl.arange(0, D)
    width: tl.constexpr = (2 * HQ + 2 * HKV) * D
    gate = tl.load(qkvg + row * width + (HQ + 2 * HKV + head) * D + dims).to(tl.float32)
    position = tl.minimum(tl.load(start) + offset + row, positions - 1)
    part = (head // GROUP) * SPLITS * TILE + row * GROUP + head % GROUP
    o = joined(
        o_part + part * D,
        ml_part + part,
        HKV * SPLITS * TILE,
        tl.minimum(position // BLOCK + 1, SPLITS),
        TILE,
        D,
        SPLITS_PADDED,
        CHUNK,
    )
    o = o / (1.0 + tl.exp(-gate))
    tl.store(out + (row * HQ + head) * D + dims, o.to(out.dtype.element_ty))


@triton.jit
def joined(
    o_part,
    ml_part,
    sums_at,
    count,
    TILE: tl.constexpr,
    D: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The first `count` splits of one row and head, in their order -> [D] f32.

    o_part, ml_part: where its values of split 0 lie; those of a split lie TILE rows further. Splits
    from `count` on saw nothing of the row and left nothing.
    """
    dims = tl.arange(0, D)
    s = tl.arange(0, SPLITS_PADDED)
    m = tl.load(ml_part + s * TILE, mask=s < count, other=float("-inf"))
    sums = tl.load(ml_part + sums_at + s * TILE, mask=s < count, other=0.0)
    top = tl.max(m, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(sums * tl.exp2(m - top), 0)
    o = tl.zeros([D], tl.float32)
    for first in range(0, count, CHUNK):
        c = first + tl.arange(0, CHUNK)
        weight = tl.exp2(tl.load(ml_part + c * TILE, mask=c < count, other=float("-inf")) - top)
        at = c[:, None] * (TILE * D) + dims[None, :]
        values = tl.load(o_part + at, mask=(c < count)[:, None], other=0.0)
        o += tl.sum(values * weight[:, None], 0)
    return tl.where(total > 0.0, o / total, 0.0)


def rows_attention(
    qkvg: Tensor,
    scales: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    start: Tensor,
    offset: int,
    first: int,
    rows: int,
    out: Tensor,
    scratch: Scratch,
) -> None:
    """Rows [start + offset, start + offset + rows) of a decode step; see the package's docstring
    for what every tensor is. Writes `kv` at those positions and the first `rows` rows of `out`.

    A row at a position that `kv` has no slot for writes no KV; what comes out for it is
    meaningless, and it changes nothing in the others.
    """
    plan = scratch.plan
    positions, half = kv.shape[2], cos.shape[1]
    both = plan.heads + plan.kv_heads
    assert 1 <= rows <= MAX_ROWS
    assert kv.shape == (2, plan.kv_heads, positions, plan.dim)
    assert kv.is_contiguous()
    assert qkvg.shape[1] == 2 * both * plan.dim
    assert qkvg.is_contiguous()
    assert qkvg.dtype == kv.dtype
    assert scales.shape == (both, plan.dim)
    assert scales.is_contiguous()
    assert out.shape[1] == plan.heads * plan.dim
    assert out.is_contiguous()
    assert cos.shape == sin.shape == (cos.shape[0], half)
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert half == power_of_two(half), "rotary dims of the family are powers of two"
    assert start.dtype == torch.int32
    shared = {
        "HQ": plan.heads,
        "HKV": plan.kv_heads,
        "D": plan.dim,
        "TILE": plan.tile,
        "SPLITS": plan.splits,
        "BLOCK": plan.block,
        "PDL": launch.PDL,
        "launch_pdl": launch.PDL,
    }
    _partials[plan.splits, plan.kv_heads](
        qkvg,
        scales,
        cos,
        sin,
        kv,
        start,
        scratch.o,
        scratch.ml,
        eps,
        offset,
        first,
        rows,
        positions,
        HALF=half,
        NEW=power_of_two(MAX_ROWS),
        STAGES=plan.stages,
        TOUCHED=plan.touched,
        APART=SECTOR_BYTES // kv.element_size(),
        num_warps=plan.warps,
        **shared,
    )
    _join[plan.heads, rows](
        scratch.o,
        scratch.ml,
        qkvg,
        start,
        out,
        offset,
        positions,
        SPLITS_PADDED=power_of_two(plan.splits),
        CHUNK=min(JOINED, power_of_two(plan.splits)),
        num_warps=8 if plan.dim > 64 else 4,
        **shared,
    )
