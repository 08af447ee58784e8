"""How do the rows of a decode step pass a gated delta net on a GPU, and how are they kept?

Two kernels (Triton; sm_80 and newer). `delta_rows` is everything between a layer's two projections
for 1 to 9 rows: one program a value head, which holds the head's whole state in registers, runs the
rows on it one after the other and throws it away. `fold_rows` repeats, once a step and for all
layers, what the accepted rows did, from their saved k, d and decay. Both do `decay * S`, rounded,
and then one fused multiply-add with k and d, written out as such, so that no compiler chooses and
the bits agree.

So a step reads the state twice and writes it once: 35 us more for the 27B than a kernel that folds
and verifies in one read, paid for having no second buffer and no order to keep between layers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from capserve.engine.kernels import launch
from capserve.engine.kernels.gated_delta import rows_scratch_floats

TILE = 16
"""Rows that are computed together before and after the delta rule, however many are in use."""

ROWS_WARPS = 8
"""Each warp carries Dv / 8 columns of a head's state: 64 registers a thread for 128 x 128."""


class FoldConfig(NamedTuple):
    keys: int = 32
    """Rows of a head's state that one program folds."""
    warps: int = 4
    channels: int = 1024
    """Convolution channels that one program moves."""


FOLD = FoldConfig()


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """log(1 + e^x); the quotient makes good what 1 + e^x lost of a small e^x."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    y = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, y)


@triton.jit
def _taps(weight, channel, C: tl.constexpr, W: tl.constexpr):
    """The weights [TILE, D] of each tap, as a tuple: constants, read before the wait."""
    taps = ()
    for t in tl.static_range(W):
        taps = taps + (tl.load(weight + t * C + channel),)  # noqa: RUF005
    return taps


@triton.jit
def _convolve(projected, conv, taps, channel, row, rows, C: tl.constexpr, WIDTH: tl.constexpr,
              W: tl.constexpr):  # fmt: skip
    """silu of the convolution and the rows' own inputs, both [TILE, D]."""
    x = tl.zeros(channel.shape, tl.float32)
    for t in tl.static_range(W - 1):
        at = row + (t - (W - 1))  # row of `projected`; before it: the history
        used = row < rows
        old = tl.load(conv + (row + t) * C + channel, mask=used & (at < 0), other=0.0)
        new = tl.load(projected + at * WIDTH + channel, mask=used & (at >= 0), other=0.0)
        x = tl.fma(tl.where(at < 0, old, new).to(tl.float32), taps[t], x)
    own = tl.load(projected + row * WIDTH + channel, mask=row < rows, other=0.0)
    x = tl.fma(own.to(tl.float32), taps[W - 1], x)
    return x * _sigmoid(x), own


@triton.jit(do_not_specialize=["rows"])
def _delta_rows(
    projected, conv, conv_weight, rate, dt_bias, norm, eps, recurrent,
    row_k, row_d, row_decay, scratch, out, rows,
    C: tl.constexpr, HV: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    W: tl.constexpr, TILE: tl.constexpr, MAX_ROWS: tl.constexpr, WARPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    KEY_DIM: tl.constexpr = HV // GROUP * DK
    WIDTH: tl.constexpr = C + HV * DV + 2 * HV
    query = scratch
    value = query + MAX_ROWS * HV * DK
    raw = value + MAX_ROWS * HV * DV
    strength = raw + MAX_ROWS * HV * DV
    overlap = strength + MAX_ROWS * HV

    if PDL:
        gdc_launch_dependents()
    line = tl.arange(0, TILE)
    row = line[:, None]
    i = tl.arange(0, DK)[None, :]
    j = tl.arange(0, DV)[None, :]
    q_at = (h // GROUP) * DK + i + row * 0  # [TILE, D] channels
    k_at = KEY_DIM + q_at
    v_at = 2 * KEY_DIM + h * DV + j + row * 0
    q_taps = _taps(conv_weight, q_at, C, W)
    k_taps = _taps(conv_weight, k_at, C, W)
    v_taps = _taps(conv_weight, v_at, C, W)
    head_rate = tl.load(rate + h)
    head_bias = tl.load(dt_bias + h)
    if PDL:
        # The state into the cache, a load a sector: volatile, so that it is neither left out nor
        # kept in the multiprocessor's own cache, where what a fold still writes would not be seen.
        # Its result is dropped.
        sector = tl.arange(0, DK * DV // 8) * 8
        tl.load(recurrent + h * (DK * DV) + sector, volatile=True)
        gdc_wait()

    # One warp holds all keys of VI values, and has each in lanes (KI) and registers (KO): in this
    # order Triton lays [KI, DV/VI, KO, VI] so, and a sum over keys needs no other warp.
    VI: tl.constexpr = min(DV, max(4, DV // WARPS))
    KI: tl.constexpr = min(DK, 128 // VI)
    KO: tl.constexpr = DK // KI
    ki = tl.arange(0, KI)[:, None, None, None]
    vo = tl.arange(0, DV // VI)[None, :, None, None]
    ko = tl.arange(0, KO)[None, None, :, None]
    vi = tl.arange(0, VI)[None, None, None, :]
    key = ko * KI + ki
    state = tl.load(recurrent + (h * DK + key) * DV + (vo * VI + vi))

    used = row < rows
    x, own = _convolve(projected, conv, q_taps, q_at, row, rows, C, WIDTH, W)
    owner = used & (h % GROUP == 0)
    tl.store(conv + (W - 1 + row) * C + q_at, own, mask=owner)
    q = x * (tl.rsqrt(tl.sum(x * x, 1) + 1e-6) * DK**-0.5)[:, None]
    x, own = _convolve(projected, conv, k_taps, k_at, row, rows, C, WIDTH, W)
    tl.store(conv + (W - 1 + row) * C + k_at, own, mask=owner)
    k = x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
    x, own = _convolve(projected, conv, v_taps, v_at, row, rows, C, WIDTH, W)
    tl.store(conv + (W - 1 + row) * C + v_at, own, mask=used)
    head = row * HV + h
    tl.store(query + head * DK + i, q, mask=used)
    tl.store(row_k + head * DK + i, k, mask=used)
    tl.store(value + head * DV + j, x, mask=used)

    b_at = projected + line * WIDTH + (C + HV * DV) + h
    b = tl.load(b_at, mask=line < rows, other=0.0).to(tl.float32)
    a = tl.load(b_at + HV, mask=line < rows, other=0.0).to(tl.float32)
    decay = tl.exp(head_rate * _softplus(a + head_bias))
    tl.store(row_decay + line * HV + h, decay, mask=line < rows)
    tl.store(strength + line * HV + h, _sigmoid(b), mask=line < rows)
    tl.store(overlap + line * HV + h, tl.sum(q * k, 1), mask=line < rows)
    z = tl.load(projected + row * WIDTH + C + h * DV + j, mask=used, other=0.0).to(tl.float32)
    tl.debug_barrier()  # from here on any thread reads what another has stored

    spread = tl.broadcast_to(vo * VI + vi, (KI, DV // VI, 1, VI))
    flat = tl.arange(0, DV // VI)[:, None] * VI + tl.arange(0, VI)[None, :]
    k = tl.load(row_k + h * DK + key)  # [KI, 1, KO, 1]
    q = tl.load(query + h * DK + key)
    v = tl.load(value + h * DV + flat)
    for r in range(rows):
        at = r * HV + h
        factor = tl.load(row_decay + at)
        beta = tl.load(strength + at)
        kq = tl.load(overlap + at)
        ahead = tl.minimum(r + 1, rows - 1) * HV + h  # in flight while this row is computed
        next_k = tl.load(row_k + ahead * DK + key)
        next_q = tl.load(query + ahead * DK + key)
        next_v = tl.load(value + ahead * DV + flat)
        state = state * factor
        seen = tl.sum(tl.sum(state * k, 2), 0)  # [DV/VI, VI]
        read = tl.sum(tl.sum(state * q, 2), 0)
        d = beta * (v - seen)
        # (S + k d^T)^T q, without a second pass over S
        o = tl.fma(tl.zeros_like(d) + kq, d, read)
        wide_d = tl.broadcast_to(d[None, :, None, :], state.shape)
        state = tl.fma(tl.broadcast_to(k, state.shape), wide_d, state)
        # in the state's own layout, by its first lanes: nothing moves between threads
        d = tl.broadcast_to(d[None, :, None, :], (KI, DV // VI, 1, VI))
        o = tl.broadcast_to(o[None, :, None, :], (KI, DV // VI, 1, VI))
        tl.store(row_d + at * DV + spread, d, mask=ki == 0)
        tl.store(raw + at * DV + spread, o, mask=ki == 0)
        k = next_k
        q = next_q
        v = next_v
    tl.debug_barrier()
    o = tl.load(raw + head * DV + j, mask=used, other=0.0)
    scale = tl.rsqrt(tl.sum(o * o, 1) / DV + eps)
    y = o * scale[:, None] * tl.load(norm + j) * (z * _sigmoid(z))
    tl.store(out + row * (HV * DV) + h * DV + j, y.to(out.dtype.element_ty), mask=used)


def delta_rows(
    projected: torch.Tensor,
    conv: torch.Tensor,
    conv_weight: torch.Tensor,
    rate: torch.Tensor,
    dt_bias: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    recurrent: torch.Tensor,
    row_k: torch.Tensor,
    row_d: torch.Tensor,
    row_decay: torch.Tensor,
    scratch: torch.Tensor,
    out: torch.Tensor,
    rows: int,
    warps: int = ROWS_WARPS,
) -> None:
    """See `reference.delta_rows`. scratch: `rows_scratch_floats` of float32, one for all layers."""
    taps, channels = conv_weight.shape
    heads, key, value = recurrent.shape
    most = row_k.shape[0]
    key_heads = (channels - heads * value) // (2 * key)
    assert 1 <= rows <= most <= TILE
    assert conv.shape[0] >= taps - 1 + rows
    assert projected.shape[1] == channels + heads * value + 2 * heads
    assert projected.is_contiguous()
    assert conv.is_contiguous()
    assert recurrent.is_contiguous()
    assert scratch.numel() >= rows_scratch_floats(most, heads, key, value)
    _delta_rows[(heads,)](
        projected, conv, conv_weight, rate, dt_bias, norm, eps, recurrent,
        row_k, row_d, row_decay, scratch, out, rows,
        C=channels, HV=heads, GROUP=heads // key_heads, DK=key, DV=value, W=taps, TILE=TILE,
        MAX_ROWS=most, WARPS=warps, PDL=launch.PDL, num_warps=warps, num_stages=1, **_pdl(),
    )  # fmt: skip


@triton.jit
def _fold_rows(
    recurrent, conv, row_k, row_d, row_decay, accepted,
    LAYERS: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    TAPS: tl.constexpr, SLOTS: tl.constexpr, MAX_ROWS: tl.constexpr, BK: tl.constexpr,
    BC: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    PARTS: tl.constexpr = DK // BK
    STATES: tl.constexpr = LAYERS * HV * PARTS
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    count = tl.load(accepted)
    if count > 0:
        if pid < STATES:
            i = (pid % PARTS) * BK + tl.arange(0, BK)
            j = tl.arange(0, DV)
            head = pid // PARTS
            layer = head // HV
            h = head % HV
            tile = recurrent + (head * DK + i)[:, None] * DV + j[None, :]
            state = tl.load(tile)
            for r in range(count):
                at = (layer * MAX_ROWS + r) * HV + h
                k = tl.load(row_k + at * DK + i)
                d = tl.load(row_d + at * DV + j)
                state = state * tl.load(row_decay + at)
                wide_k = tl.broadcast_to(k[:, None], state.shape)
                wide_d = tl.broadcast_to(d[None, :], state.shape)
                state = tl.fma(wide_k, wide_d, state)
            tl.store(tile, state)
        else:
            PIECES: tl.constexpr = (C + BC - 1) // BC
            piece = pid - STATES
            c = (piece % PIECES) * BC + tl.arange(0, BC)
            t = tl.arange(0, BT)
            base = conv + (piece // PIECES) * (SLOTS * C) + t[:, None] * C + c[None, :]
            inside = (t < TAPS)[:, None] & (c < C)[None, :]
            x = tl.load(base + count * C, mask=inside)
            tl.debug_barrier()  # the rows overlap: all are read before any is written
            tl.store(base, x, mask=inside)


def fold_rows(
    recurrent: torch.Tensor,
    conv: torch.Tensor,
    row_k: torch.Tensor,
    row_d: torch.Tensor,
    row_decay: torch.Tensor,
    accepted: torch.Tensor,
    config: FoldConfig = FOLD,
) -> None:
    """See `reference.fold_rows`; all layers in one launch, `accepted` [1] int32 on the device."""
    layers, heads, key, value = recurrent.shape
    slots, channels = conv.shape[1:]
    most = row_k.shape[1]
    taps = slots - most
    assert recurrent.is_contiguous()
    assert conv.is_contiguous()
    assert accepted.dtype == torch.int32
    part = min(config.keys, key)
    states = layers * heads * (key // part)
    pieces = layers * -(-channels // config.channels)
    _fold_rows[(states + pieces,)](
        recurrent, conv, row_k, row_d, row_decay, accepted,
        LAYERS=layers, HV=heads, DK=key, DV=value, C=channels, TAPS=taps, SLOTS=slots,
        MAX_ROWS=most, BK=part, BC=config.channels, BT=triton.next_power_of_2(taps),
        PDL=launch.PDL, num_warps=config.warps, num_stages=1, **_pdl(),
    )  # fmt: skip


def _pdl() -> dict[str, bool]:
    """Launch option, which the interpreter doesn't know."""
    return {"launch_pdl": True} if launch.PDL else {}
