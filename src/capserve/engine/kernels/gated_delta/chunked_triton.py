"""How does a chunk of a prompt pass a gated delta net on a GPU, with the same bits however cut?

The chunked form of `reference.chunked`, on absolute sub-chunks of 64, in four kernels (Triton):
  features  convolution, SiLU and q/k norm, laid on the sub-chunks with zeros in front and behind;
  solve     per (sub-chunk, head): A = strict_lower(beta k k^T * D), U = (I + A)^-1 beta v and
            W = (I + A)^-1 beta exp(G) k. The inverse goes by blocks of 16: forward substitution
            inside the diagonal ones, and from them the rest by four small matmuls;
  states    the only sequential one, per (head, part of Dv): V' = U - W S, S <- exp(G_L) S + ...;
  outputs   per (sub-chunk, head): o, its norm and its gate; beside them the last W-1 inputs are
            kept for the next call.

For bfloat16: its products add up in float32, the inverse takes TF32 and is rounded once, and the
state stays in float32, in registers inside a call and in `recurrent` between calls. Nothing of a
sub-chunk depends on where in the call it stands, so a call that is cut at multiples of 64 gives the
same bits. A float32 model goes through the definition instead: its tiles of 128 x 128 fit neither
registers nor shared memory, and only small models are served so.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from capserve.engine.kernels.gated_delta import prefill_scratch_elements, reference
from capserve.engine.kernels.gated_delta.triton import _sigmoid, _softplus

SUB = 64
BLOCK = 16
"""Diagonal blocks that are inverted by substitution, row by row."""


@triton.jit(do_not_specialize=["tokens", "front"])
def _features(
    projected, conv, conv_weight, qk, value, tokens, front,
    C: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    W: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)  # q heads, k heads, v heads
    place = tl.program_id(1) * BT + tl.arange(0, BT)
    if head < 2 * HK:
        x = _conv_tile(projected, conv, conv_weight, place - front, tokens, head * DK, DK,
                       C, HV, DV, W)  # fmt: skip
        x = x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
        x = x * tl.where(head < HK, DK**-0.5, 1.0)
        x_at = (place[:, None].to(tl.int64) * (2 * HK) + head) * DK + tl.arange(0, DK)[None, :]
        tl.store(qk + x_at, x.to(qk.dtype.element_ty))
    else:
        h = head - 2 * HK
        y = _conv_tile(projected, conv, conv_weight, place - front, tokens, 2 * HK * DK + h * DV,
                       DV, C, HV, DV, W)  # fmt: skip
        y_at = (place[:, None].to(tl.int64) * HV + h) * DV + tl.arange(0, DV)[None, :]
        tl.store(value + y_at, y.to(value.dtype.element_ty))


@triton.jit
def _conv_tile(projected, conv, weight, token, tokens, first, D: tl.constexpr, C: tl.constexpr,
               HV: tl.constexpr, DV: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """silu of the convolution [BT, D] of channels [first, first + D); 0 outside the call."""
    WIDTH: tl.constexpr = C + HV * DV + 2 * HV
    token = token[:, None]
    channel = first + tl.arange(0, D)[None, :]
    inside = (token >= 0) & (token < tokens)
    x = tl.zeros([token.shape[0], D], tl.float32)
    for t in tl.static_range(W):
        at = token + (t - (W - 1))
        old = tl.load(conv + (at + (W - 1)) * C + channel, mask=inside & (at < 0), other=0.0)
        new = tl.load(
            projected + at.to(tl.int64) * WIDTH + channel, mask=inside & (at >= 0), other=0.0
        )
        tap = tl.load(weight + t * C + channel)
        x = tl.fma(tl.where(at < 0, old, new).to(tl.float32), tap + tl.zeros_like(x), x)
    return x * _sigmoid(x)


@triton.jit
def _inverse(system, BLOCK: tl.constexpr):
    """(I + system)^-1 [N, N] f32 of a strictly lower triangle.

    With the diagonal blocks D and the blocks below them L, I + system = D (I + M), M = D^-1 L,
    and M^4 = 0 for N = 4 BLOCK, so the inverse is (I - M) (I + M^2) D^-1.
    """
    N: tl.constexpr = system.shape[0]
    PARTS: tl.constexpr = N // BLOCK
    tl.static_assert(PARTS == 4)
    outer = tl.arange(0, PARTS)
    diagonal = outer[:, None, None, None] == outer[None, None, :, None]
    blocks = tl.reshape(system, (PARTS, BLOCK, PARTS, BLOCK))
    own = tl.sum(tl.where(diagonal, blocks, 0.0), 2)  # [4, 16, 16]
    line = tl.arange(0, BLOCK)
    identity = tl.where(line[:, None] == line[None, :], 1.0, 0.0)
    inverse = tl.broadcast_to(identity[None, :, :], own.shape)
    at = line[None, :, None]
    for i in range(1, BLOCK):
        row = tl.sum(tl.where(at == i, own, 0.0), 1)  # [4, 16], nothing from column i on
        known = tl.sum(row[:, :, None] * inverse, 1)  # [4, 16]
        inverse = tl.where(at == i, inverse - known[:, None, :], inverse)
    spread = tl.where(diagonal, tl.expand_dims(inverse, 2), 0.0)
    inverse = tl.reshape(spread, (N, N))
    below = tl.reshape(tl.where(diagonal, 0.0, blocks), (N, N))
    m = tl.dot(inverse, below, input_precision="tf32")
    n = tl.arange(0, N)
    unit = tl.where(n[:, None] == n[None, :], 1.0, 0.0)
    square = tl.dot(m, m, input_precision="tf32")
    series = tl.dot(unit - m, unit + square, input_precision="tf32")
    return tl.dot(series, inverse, input_precision="tf32")


@triton.jit(do_not_specialize=["tokens", "front"])
def _solve(
    projected, rate, dt_bias, qk, value, w, grown, tokens, front,
    C: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    SUB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`value` holds v and then U; writes w and the inclusive sum G of g."""
    h = tl.program_id(0)
    WIDTH: tl.constexpr = C + HV * DV + 2 * HV
    n = tl.arange(0, SUB)
    place = tl.program_id(1).to(tl.int64) * SUB + n
    token = place - front
    inside = (token >= 0) & (token < tokens)
    gates = projected + token * WIDTH + (C + HV * DV) + h
    b = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(gates + HV, mask=inside, other=0.0).to(tl.float32)
    g = tl.where(inside, tl.load(rate + h) * _softplus(a + tl.load(dt_bias + h)), 0.0)
    beta = tl.where(inside, _sigmoid(b), 0.0)
    total = tl.cumsum(g, 0)
    tl.store(grown + place * HV + h, total)

    k_at = (place * (2 * HK) + HK + h // (HV // HK)) * DK
    k = tl.load(qk + k_at[:, None] + tl.arange(0, DK)[None, :])
    kk = tl.dot(k, tl.trans(k), input_precision="tf32")
    lower = n[:, None] > n[None, :]
    decay = tl.exp(tl.where(lower, total[:, None] - total[None, :], 0.0))
    system = tl.where(lower, beta[:, None] * kk * decay, 0.0)
    inverse = _inverse(system, BLOCK)
    v_at = value + (place * HV + h)[:, None] * DV + tl.arange(0, DV)[None, :]
    v = tl.load(v_at)
    u = tl.dot((inverse * beta[None, :]).to(v.dtype), v, input_precision="tf32")
    tl.store(v_at, u.to(v.dtype))
    scale = beta * tl.exp(total)
    x = tl.dot((inverse * scale[None, :]).to(k.dtype), k, input_precision="tf32")
    w_at = (place * HV + h)[:, None] * DK + tl.arange(0, DK)[None, :]
    tl.store(w + w_at, x.to(k.dtype))


@triton.jit(do_not_specialize=["chunks"])
def _states(
    recurrent, qk, value, w, grown, states, chunks,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    SUB: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`value` holds U and then V'; writes the state at the start of each sub-chunk."""
    h = tl.program_id(0)
    j = tl.program_id(1) * BV + tl.arange(0, BV)
    i = tl.arange(0, DK)
    n = tl.arange(0, SUB).to(tl.int64)
    tile = h * (DK * DV) + i[:, None] * DV + j[None, :]
    state = tl.load(recurrent + tile)
    for c in tl.range(chunks, num_stages=STAGES):
        place = c * SUB + n
        row = place * HV + h
        w_tile = tl.load(w + row[:, None] * DK + i[None, :])
        k_at = (place * (2 * HK) + HK + h // (HV // HK)) * DK
        k = tl.load(qk + k_at[:, None] + i[None, :])
        v_at = value + row[:, None] * DV + j[None, :]
        u = tl.load(v_at)
        total = tl.load(grown + row)
        last = tl.load(grown + (c * SUB + (SUB - 1)) * HV + h)
        narrow = state.to(k.dtype)
        tl.store(states + tile, narrow)
        states += HV * DK * DV
        fresh = u.to(tl.float32) - tl.dot(w_tile, narrow, input_precision="tf32")
        tl.store(v_at, fresh.to(k.dtype))
        kept = (fresh * tl.exp(last - total)[:, None]).to(k.dtype)
        added = tl.dot(tl.trans(k), kept, input_precision="tf32")
        state = state * tl.exp(last) + added
    tl.store(recurrent + tile, state)


@triton.jit
def _keep_history(projected, conv, tokens, first, C: tl.constexpr, WIDTH: tl.constexpr,
                  W: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr):  # fmt: skip
    """The last W-1 inputs of channels [first, first + BC), for the next call."""
    c = first + tl.arange(0, BC)[None, :]
    t = tl.arange(0, BT)[:, None]
    at = tokens + t - (W - 1)
    used = (t < W - 1) & (c < C)
    old = tl.load(conv + (at + (W - 1)) * C + c, mask=used & (at < 0), other=0.0)
    new = tl.load(projected + at.to(tl.int64) * WIDTH + c, mask=used & (at >= 0), other=0.0)
    tl.debug_barrier()  # a short call moves old rows over others: all are read first
    tl.store(conv + t * C + c, tl.where(at < 0, old, new), mask=used)


@triton.jit(do_not_specialize=["tokens", "front"])
def _outputs(
    projected, conv, norm, eps, qk, value, grown, states, out, tokens, front,
    C: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    W: tl.constexpr, SUB: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    c = tl.program_id(1).to(tl.int64)
    WIDTH: tl.constexpr = C + HV * DV + 2 * HV
    if c == tl.num_programs(1) - 1:  # a launch less
        _keep_history(projected, conv, tokens, h * BC, C, WIDTH, W, BC, BT)
        return
    n = tl.arange(0, SUB)
    i = tl.arange(0, DK)
    j = tl.arange(0, DV)[None, :]
    place = c * SUB + n
    q_at = (place * (2 * HK) + h // (HV // HK)) * DK
    q = tl.load(qk + q_at[:, None] + i[None, :])
    k = tl.load(qk + q_at[:, None] + HK * DK + i[None, :])
    state = tl.load(states + (c * HV + h) * (DK * DV) + i[:, None] * DV + j)
    total = tl.load(grown + place * HV + h)
    fresh = tl.load(value + (place * HV + h)[:, None] * DV + j)
    o = tl.dot(q, state, input_precision="tf32") * tl.exp(total)[:, None]
    seen = n[:, None] >= n[None, :]
    decay = tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0))
    inside = tl.dot(q, tl.trans(k), input_precision="tf32")
    inside = tl.where(seen, inside * decay, 0.0)
    o += tl.dot(inside.to(k.dtype), fresh, input_precision="tf32")

    token = (place - front)[:, None]
    used = (token >= 0) & (token < tokens)
    z = tl.load(projected + token * WIDTH + C + h * DV + j, mask=used, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(o * o, 1) / DV + eps)
    y = o * scale[:, None] * tl.load(norm + j) * (z * _sigmoid(z))
    tl.store(out + (token * HV + h) * DV + j, y.to(out.dtype.element_ty), mask=used)


class Config(NamedTuple):
    """Blocks, warps and pipeline stages of the four kernels."""

    features_tokens: int
    features_warps: int
    solve_warps: int
    states_values: int
    """Columns of a head's state that one program of the sequential kernel carries along."""
    states_warps: int
    states_stages: int
    outputs_warps: int


CONFIG = Config(32, 4, 4, 32, 4, 2, 4)  # two programs of `states` fit a multiprocessor
"""Bits depend on neither blocks nor stages."""


class Layer(NamedTuple):
    """What the kernels take of one layer; shapes as in the package's docstring."""

    projected: torch.Tensor
    conv: torch.Tensor
    conv_weight: torch.Tensor
    rate: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float
    recurrent: torch.Tensor
    out: torch.Tensor


class Prefill:
    """A chunk's shapes, and scratch cut to them: made once, and run for every layer in turn."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        taps: int,
        tokens: int,
        start: int,
        scratch: torch.Tensor,
        sums: torch.Tensor,
        config: Config = CONFIG,
    ) -> None:
        """shape: Hk, Hv, Dk, Dv. start: absolute position of the chunk's first token."""
        key_heads, heads, key, value = shape
        self._config = config
        self._tokens, self._front, self._sums = tokens, start % SUB, sums
        self._chunks = -(-(self._front + tokens) // SUB)
        self._places = self._chunks * SUB
        need, need_sums = prefill_scratch_elements(tokens, *shape)
        assert scratch.numel() >= need
        assert sums.numel() >= need_sums
        qk, keys, values = 2 * key_heads * key, heads * key, heads * value
        sizes = [self._places * n for n in (qk, values, keys)]
        self._qk, self._v, self._w, self._states = torch.split(
            scratch[:need], [*sizes, need - sum(sizes)]
        )
        self._channels, self._taps = qk + values, taps
        self._width = self._channels + values + 2 * heads
        self._sizes = {"HK": key_heads, "HV": heads, "DK": key, "DV": value}
        self._grid = heads, self._chunks
        self._part = min(config.states_values, value)
        self._kept = triton.next_power_of_2(-(-self._channels // heads))
        """Channels whose history one head's program keeps."""
        self._kept_taps = triton.next_power_of_2(max(1, taps - 1))

    def __call__(self, layer: Layer) -> None:
        """Writes layer.out [T, Hv Dv] and moves layer.recurrent and layer.conv on."""
        assert layer.projected.shape == (self._tokens, self._width)
        assert layer.projected.is_contiguous()
        assert layer.out.is_contiguous()
        assert layer.conv_weight.shape == (self._taps, self._channels)
        self.features(layer)
        self.solve(layer)
        self.states(layer)
        self.outputs(layer)

    def features(self, layer: Layer) -> None:
        sizes, config = self._sizes, self._config
        block = config.features_tokens
        _features[(2 * sizes["HK"] + sizes["HV"], self._places // block)](
            layer.projected, layer.conv, layer.conv_weight, self._qk, self._v,
            self._tokens, self._front,
            C=self._channels, W=self._taps, BT=block, **sizes, num_warps=config.features_warps,
        )  # fmt: skip

    def solve(self, layer: Layer) -> None:
        _solve[self._grid](
            layer.projected, layer.rate, layer.dt_bias, self._qk, self._v, self._w, self._sums,
            self._tokens, self._front,
            C=self._channels, SUB=SUB, BLOCK=BLOCK, **self._sizes,
            num_warps=self._config.solve_warps, num_stages=1,
        )  # fmt: skip

    def states(self, layer: Layer) -> None:
        sizes, config, part = self._sizes, self._config, self._part
        _states[(sizes["HV"], sizes["DV"] // part)](
            layer.recurrent, self._qk, self._v, self._w, self._sums, self._states, self._chunks,
            SUB=SUB, BV=part, STAGES=config.states_stages, **sizes, num_warps=config.states_warps,
        )  # fmt: skip

    def outputs(self, layer: Layer) -> None:
        heads, chunks = self._grid
        _outputs[heads, chunks + 1](
            layer.projected, layer.conv, layer.norm, layer.eps, self._qk, self._v, self._sums,
            self._states, layer.out, self._tokens, self._front,
            C=self._channels, W=self._taps, SUB=SUB, BC=self._kept, BT=self._kept_taps,
            **self._sizes, num_warps=self._config.outputs_warps, num_stages=1,
        )  # fmt: skip


LEAST_DIM = 64
"""Every published size has heads of 128. With 16 and 32, compiled for compute capability 9.0,
`_solve` read beyond its shared memory (compute-sanitizer, docs/log.md)."""


def delta_prefill(
    shape: tuple[int, int, int, int],
    taps: int,
    tokens: int,
    start: int,
    scratch: torch.Tensor,
    sums: torch.Tensor,
) -> Callable[[Layer], None]:
    """What takes each layer of a chunk through `reference.delta_prefill`; shape: Hk, Hv, Dk, Dv.

    scratch, in the model's dtype, and sums, float32: as many elements as `prefill_scratch_elements`
    says, or more; one of each for all layers. float32, and heads of less than `LEAST_DIM`, go
    through the definition itself, which allocates, and whose last bits depend on how a call is cut.
    """
    if scratch.dtype == torch.float32 or min(shape[2:]) < LEAST_DIM:
        return lambda layer: reference.delta_prefill(*layer, start=start)
    return Prefill(shape, taps, tokens, start, scratch, sums)
