"""Of which parts are both forms of the kernel made: a program a tile, and the split form?

Device functions only. A tile of W is [BN, BK]; the rows of x stand in a tile of 16, those beyond
`rows` as zeros. SWAP: the accumulator is [BN, 16] instead of [16, BN].
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

ROW_TILE = tl.constexpr(16)


@triton.jit
def weights(weight, n0, k0, N, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
             TMA: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):  # fmt: skip
    """W[n0 : n0 + BN, k0 : k0 + BK], zeros outside. A wide matrix has more than 2^31 bytes."""
    if TMA:
        return weight.load([n0, k0])
    else:
        n = n0 + tl.arange(0, BN)
        k = k0 + tl.arange(0, BK)
        at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
        if EVEN_N and EVEN_K:
            return tl.load(at, eviction_policy="evict_first")
        elif EVEN_K:
            return tl.load(at, mask=(n < N)[:, None], other=0.0, eviction_policy="evict_first")
        else:
            inside = (n < N)[:, None] & (k < K)[None, :]
            return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def activations(x, rows, k0, K: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr):
    """x[0 : 16, k0 : k0 + BK], zeros outside."""
    r = tl.arange(0, ROW_TILE)
    k = k0 + tl.arange(0, BK)
    inside = (r < rows)[:, None]
    if not EVEN_K:
        inside = inside & (k < K)[None, :]
    return tl.load(x + r[:, None] * K + k[None, :], mask=inside, other=0.0)


@triton.jit
def scaled(tile, squares, norm_scale, k0, K: tl.constexpr, BK: tl.constexpr,
            EVEN_K: tl.constexpr):  # fmt: skip
    """x -> x * scale in x's type, and the squares so far."""
    k = k0 + tl.arange(0, BK)
    if EVEN_K:
        scale = tl.load(norm_scale + k)
    else:
        scale = tl.load(norm_scale + k, mask=k < K, other=0.0)
    wide = tile.to(tl.float32)
    return (wide * scale[None, :]).to(tile.dtype), squares + wide * wide


@triton.jit
def widened(w):
    """FP8 -> f32, exact; other types as they are. Bare bytes come from cards without FP8."""
    if w.dtype == tl.float8e4nv:
        # by way of f16: straight to bf16 the compiler takes a conversion of a quarter of the speed
        return w.to(tl.float16).to(tl.float32)
    elif w.dtype == tl.uint8:
        # e4m3 as the top of a float32 whose exponent is 120 too small, subnormals included
        bits = w.to(tl.int32)
        bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        return w


@triton.jit
def dot(x, w, acc, SWAP: tl.constexpr):
    """x [16, BK], w [BN, BK]: acc + x w^T, or transposed, where w stands on the side of the matrix
    unit that Hopper feeds from shared memory and that needs 64 rows."""
    w = widened(w).to(x.dtype)
    if SWAP:
        return tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        return tl.dot(x, tl.trans(w), acc, input_precision="ieee")


@triton.jit
def nothing(BN: tl.constexpr, SWAP: tl.constexpr):
    if SWAP:
        return tl.zeros([BN, ROW_TILE], tl.float32)
    else:
        return tl.zeros([ROW_TILE, BN], tl.float32)


@triton.jit
def _outputs(out, rows, n0, N, BN: tl.constexpr, SWAP: tl.constexpr):
    r = tl.arange(0, ROW_TILE)
    n = n0 + tl.arange(0, BN)
    if SWAP:
        at = out + r.to(tl.int64)[None, :] * N + n[:, None]
        return at, (r < rows)[None, :] & (n < N)[:, None]
    else:
        at = out + r.to(tl.int64)[:, None] * N + n[None, :]
        return at, (r < rows)[:, None] & (n < N)[None, :]


@triton.jit
def residual(out, rows, n0, N, BN: tl.constexpr, RESIDUAL: tl.constexpr, SWAP: tl.constexpr):
    """What out holds. Asked for early, it costs no round trip at the end."""
    if RESIDUAL:
        at, inside = _outputs(out, rows, n0, N, BN, SWAP)
        return tl.load(at, mask=inside, other=0.0)
    else:
        return 0.0


@triton.jit
def epilogue(acc, other, squares, kept, out, rows, n0, N, eps, K: tl.constexpr, BN: tl.constexpr,
             NORM: tl.constexpr, RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr,
             SWAP: tl.constexpr):  # fmt: skip
    """What stands around the products, and the store. squares: [16], summed over all of K; kept:
    of `residual`."""
    if NORM:
        factor = tl.rsqrt(squares / K + eps)
        if SWAP:
            factor = factor[None, :]
        else:
            factor = factor[:, None]
        acc = acc * factor
        if SWIGLU:
            other = other * factor
    if SWIGLU:
        acc = acc / (1.0 + tl.exp(-acc)) * other
    if RESIDUAL:
        acc += kept.to(tl.float32)
    at, inside = _outputs(out, rows, n0, N, BN, SWAP)
    tl.store(at, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def fetch(raw, n0, k0, N, K: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr,
          SECTOR: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """W[n0 : n0 + BN, k0 : k0 + AHEAD] into the cache. The load is volatile so that it is not left
    out, and nobody waits for its result. EVEN: all of it is inside."""
    n = n0 + tl.arange(0, BN)
    k = k0 + tl.arange(0, AHEAD // SECTOR) * SECTOR
    at = raw + n.to(tl.int64)[:, None] * K + k[None, :]
    if EVEN:
        tl.load(at, volatile=True)
    else:
        tl.load(at, mask=(n < N)[:, None] & (k < K)[None, :], volatile=True)


@triton.jit
def begin(raw, n0, k0, N, K: tl.constexpr, BN: tl.constexpr, SWIGLU: tl.constexpr,
          AHEAD: tl.constexpr, SECTOR: tl.constexpr, EVEN: tl.constexpr,
          PDL: tl.constexpr):  # fmt: skip
    """Fetch the head of this program's part of W, then wait for the kernel in front."""
    if PDL:
        if AHEAD > 0:
            fetch(raw, n0, k0, N, K, BN, AHEAD, SECTOR, EVEN)
            if SWIGLU:
                fetch(raw, n0 + N, k0, 2 * N, K, BN, AHEAD, SECTOR, EVEN)
        cuda.gdc_wait()
