"""How does a prefill chunk attend on the card?

    q = prepare(qkvg, ...)              norms, rotary, k and v into the KV buffer: one launch
    o = prefill(q, k, v, first, start)
    y = gate_mul(o, qkvg)

Chunks of many tokens go through torch's flash kernel (Dao: FlashAttention-2, 2023): its causal
form is aligned to the last query and the last key, so it needs no mask when there is a past, and it
takes grouped heads as they are. A chunk of few tokens over a long past gives it too little to do,
and it has no float32: those go through a split form of our own, with the blocks of `triton.attend`.

Either way the bits depend on `start`, the number of tokens and the data alone, and chunks are cut
on the absolute grid (E4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from capserve.engine.kernels import launch
from capserve.engine.kernels.attention.plan import fits, power_of_two
from capserve.engine.kernels.attention.triton import (
    attend,
    joined,
    normed_rotated,
    store_heads,
)

SPLIT_TOKENS = 128
"""Up to here the split form is used also where the flash kernel could be."""

MAX_SPLITS = 64
"""Bounds what the splits leave in memory. The shape of the kernels does not depend on how many
splits there are: no number of tokens compiles anything in a live request."""

GATE_BLOCK = 1024


@dataclass(frozen=True)
class Form:
    """The shape of the split form's kernels, and with it the last bits of what they give."""

    tile: int
    """(token, head of the group) pairs of one program."""
    block: int
    warps: int
    stages: int
    splits: int | None = None
    """As many as keep every multiprocessor busy when None."""


def form_for(dtype: torch.dtype, dim: int, device: torch.device) -> Form:
    """The best form that fits the card's shared memory."""
    if dtype == torch.float32:
        wide = (Form(32, 32, 4, 2), Form(32, 16, 4, 2), Form(32, 16, 4, 1))
        return next(f for f in wide if fits(f.tile, f.block, f.stages, dim, 4, device))
    forms = (Form(128, 64, 8, 2), Form(128, 32, 8, 2), Form(64, 32, 4, 2), Form(64, 16, 4, 2))
    size = dtype.itemsize
    return next(f for f in forms if fits(f.tile, f.block, f.stages, dim, size, device))


_flash = torch.ops.aten._scaled_dot_product_flash_attention


@triton.jit(do_not_specialize=["start"])
def _prepare(
    qkvg,
    scales,
    cos,
    sin,
    kv,
    q_out,
    eps,
    start,
    positions,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
):
    """One program a token. HEADS, KV_HEADS: powers of two that hold HQ + HKV and HKV."""
    token = tl.program_id(0).to(tl.int64)
    slot = start + token
    x = qkvg + token * ((2 * HQ + 2 * HKV) * D)
    dims = tl.arange(0, D)[None, :]
    h = tl.arange(0, HEADS)
    real = h < HQ + HKV
    a, b = normed_rotated(x + h * D, scales + h * D, cos, sin, slot + h * 0, real, eps, D, HALF)
    store_heads(q_out + token * (HQ * D) + h * D, a, b, h < HQ, D, HALF)
    key_row = (h - HQ).to(tl.int64) * positions + slot
    store_heads(kv + key_row * D, a, b, real & (h >= HQ), D, HALF)
    g = tl.arange(0, KV_HEADS)
    v = tl.load(x + (HQ + HKV + g)[:, None] * D + dims, mask=(g < HKV)[:, None], other=0.0)
    value_row = (HKV + g).to(tl.int64) * positions + slot
    tl.store(kv + value_row[:, None] * D + dims, v, mask=(g < HKV)[:, None])


@triton.jit
def _gate_mul(o, qkvg, y, WIDTH: tl.constexpr, QUERY: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < QUERY
    x = tl.load(o + token * QUERY + i, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(qkvg + token * WIDTH + (WIDTH - QUERY) + i, mask=inside, other=0.0)
    x = x / (1.0 + tl.exp(-gate.to(tl.float32)))
    tl.store(y + token * QUERY + i, x.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "first", "start", "splits"])
def _partials(
    q,
    k,
    v,
    o_part,
    ml_part,
    tokens,
    first,
    start,
    splits,
    head_stride,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per (split, tile of (token, head of the group) pairs, KV head)."""
    split = tl.program_id(0)
    tile = tl.program_id(1)
    kv_head = tl.program_id(2)
    GROUP: tl.constexpr = HQ // HKV
    t = tl.arange(0, TILE)
    pair = tile * TILE + t
    token, head = pair // GROUP, kv_head * GROUP + pair % GROUP
    real = token < tokens
    end = start + tl.minimum(tokens, ((tile + 1) * TILE - 1) // GROUP + 1)
    if split * BLOCK >= end:
        return
    dims = tl.arange(0, D)[None, :]
    at = (token.to(tl.int64) * HQ + head)[:, None] * D + dims
    queries = tl.load(q + at, mask=real[:, None], other=0.0)
    base = kv_head.to(tl.int64) * head_stride
    seen = start + token
    m, total, o = attend(
        queries, k + base, v + base, seen, first, end, split, splits, D, BLOCK, STAGES
    )
    tiles = tl.num_programs(1)
    part = ((kv_head * tiles + tile) * splits + split).to(tl.int64) * TILE + t
    tl.store(ml_part + part, m, mask=real)
    tl.store(ml_part + HKV * tiles * splits * TILE + part, total, mask=real)
    tl.store(o_part + part[:, None] * D + dims, o, mask=real[:, None])


@triton.jit(do_not_specialize=["start", "splits", "tiles"])
def _join(
    o_part,
    ml_part,
    y,
    start,
    splits,
    tiles,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    head = tl.program_id(0)
    token = tl.program_id(1)
    GROUP: tl.constexpr = HQ // HKV
    pair = token * GROUP + head % GROUP
    tile = (head // GROUP) * tiles + pair // TILE
    part = (tile * splits).to(tl.int64) * TILE + pair % TILE
    count = tl.minimum((start + token) // BLOCK + 1, splits)
    sums_at = HKV * tiles * splits * TILE
    o = joined(o_part + part * D, ml_part + part, sums_at, count, TILE, D, SPLITS, CHUNK)
    at = (token.to(tl.int64) * HQ + head) * D + tl.arange(0, D)
    tl.store(y + at, o.to(y.dtype.element_ty))


def prepare(
    qkvg: Tensor,
    scales: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    start: int,
    count: int,
) -> Tensor:
    """As `reference.prepare`: k and v of `count` tokens into `kv`; -> q [count, Hq, D]."""
    _, kv_heads, positions, dim = kv.shape
    heads, half = scales.shape[0] - kv_heads, cos.shape[1]
    assert count >= 1
    assert start + count <= positions
    assert qkvg.shape[1] == 2 * (heads + kv_heads) * dim
    assert qkvg.is_contiguous()
    assert kv.is_contiguous()
    assert scales.is_contiguous()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    q = torch.empty(count, heads, dim, dtype=kv.dtype, device=kv.device)
    _prepare[(count,)](
        qkvg,
        scales,
        cos,
        sin,
        kv,
        q,
        eps,
        start,
        positions,
        HQ=heads,
        HKV=kv_heads,
        D=dim,
        HALF=half,
        HEADS=power_of_two(heads + kv_heads),
        KV_HEADS=power_of_two(kv_heads),
        num_warps=8 if dim > 64 else 4,
    )
    return q


def gate_mul(o: Tensor, qkvg: Tensor) -> Tensor:
    """As `reference.gate_mul`: o [T, Hq, D] times the sigmoid of the gate -> [T, Hq D]."""
    tokens, query = o.shape[0], o.shape[1] * o.shape[2]
    assert o.is_contiguous()
    assert qkvg.is_contiguous()
    y = torch.empty(tokens, query, dtype=o.dtype, device=o.device)
    grid = (tokens, triton.cdiv(query, GATE_BLOCK))
    _gate_mul[grid](o, qkvg, y, WIDTH=qkvg.shape[1], QUERY=query, BLOCK=GATE_BLOCK)
    return y


def prefill(q: Tensor, k: Tensor, v: Tensor, first: int, start: int) -> Tensor:
    """As `reference.prefill`: q [T, Hq, D], k, v [Hkv, P, D] -> [T, Hq, D], contiguous."""
    if q.dtype == torch.float32 or q.shape[0] <= SPLIT_TOKENS:
        return split_prefill(q, k, v, first, start)
    return flash_prefill(q, k, v, first, start)


def flash_prefill(q: Tensor, k: Tensor, v: Tensor, first: int, start: int) -> Tensor:
    """As `reference.prefill`, by torch's flash kernel; no float32."""
    keys = slice(first, start + q.shape[0])
    queries = q.transpose(0, 1).unsqueeze(0)
    out = _flash(queries, k[:, keys].unsqueeze(0), v[:, keys].unsqueeze(0), 0.0, True)[0]
    return out[0].transpose(0, 1).contiguous()  # its memory has that order: no copy


def split_prefill(
    q: Tensor, k: Tensor, v: Tensor, first: int, start: int, form: Form | None = None
) -> Tensor:
    """As `reference.prefill`: the keys in splits, so that few tokens keep a whole card busy."""
    tokens, heads, dim = q.shape
    kv_heads = k.shape[0]
    assert q.is_contiguous()
    assert k[0].is_contiguous()
    assert v[0].is_contiguous()
    assert k.stride() == v.stride()
    form = form or form_for(q.dtype, dim, q.device)
    tile = form.tile
    tiles = triton.cdiv(tokens * heads // kv_heads, tile)
    splits = form.splits or launch.multiprocessors(q.device) // (kv_heads * tiles)
    splits = max(1, min(splits, MAX_SPLITS))
    parts = kv_heads * tiles * splits * tile
    scratch = torch.empty(parts * (dim + 2), dtype=torch.float32, device=q.device)
    o_part, ml_part = scratch[: parts * dim], scratch[parts * dim :]
    shared = {"HQ": heads, "HKV": kv_heads, "D": dim, "TILE": tile, "BLOCK": form.block}
    _partials[splits, tiles, kv_heads](
        q,
        k,
        v,
        o_part,
        ml_part,
        tokens,
        first,
        start,
        splits,
        k.stride(0),
        STAGES=form.stages,
        num_warps=form.warps,
        **shared,
    )
    y = torch.empty_like(q)
    _join[heads, tokens](
        o_part,
        ml_part,
        y,
        start,
        splits,
        tiles,
        SPLITS=MAX_SPLITS,
        CHUNK=8,
        **shared,
    )
    return y
