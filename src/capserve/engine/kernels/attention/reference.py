"""Attention in torch's own scaled_dot_product_attention: prefill with a mask, decode row by row."""

import torch
from torch import Tensor
from torch.nn import functional


def prefill(q: Tensor, k: Tensor, v: Tensor, first: int, start: int) -> Tensor:
    """q [T, Hq, D] at positions [start, start + T); k, v [Hkv, L, D] with L >= start + T; keys
    before `first` <= start are never seen. -> [T, Hq, D]."""
    tokens = q.shape[0]
    keys = slice(first, start + tokens)
    seen = torch.ones(tokens, start + tokens - first, dtype=torch.bool, device=q.device)
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k[:, keys].unsqueeze(0),
        v[:, keys].unsqueeze(0),
        attn_mask=seen.tril(start - first),
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def rows(q: Tensor, k: Tensor, v: Tensor, first: int, start: int) -> Tensor:
    """q [R, Hq, D] at positions [start, start + R); k, v [Hkv, L, D] with L >= start + R.

    One call a row over exactly the keys that the row sees: the same call whatever else is in the
    step, hence the same bits (I7). Reads the KV R times; a fused kernel must not.
    """
    count, heads, dim = q.shape
    kv_heads = k.shape[0]
    grouped = q.reshape(count, 1, kv_heads, heads // kv_heads, dim)
    each = []
    for r in range(count):
        seen = slice(first, start + r + 1)
        each.append(
            functional.scaled_dot_product_attention(grouped[r], k[None, :, seen], v[None, :, seen])
        )
    return (each[0] if count == 1 else torch.cat(each)).reshape(count, heads, dim)


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
    """What comes before attention, of `count` rows at [start, start + count): q and k normed and
    rotated, k and v into `kv`. Tensors as in the package's docstring. -> q [count, Hq, D]."""
    kv_heads, dim = kv.shape[1], kv.shape[3]
    both = scales.shape[0]
    heads = both - kv_heads
    half = cos.shape[1]
    x = qkvg[:count, : both * dim].reshape(count, both, dim).float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scales
    c, s = (table[start : start + count, None].float() for table in (cos, sin))
    a, b = x[..., :half], x[..., half : 2 * half]
    x = torch.cat([a * c - b * s, b * c + a * s, x[..., 2 * half :]], -1).to(kv.dtype)
    v = qkvg[:count, both * dim : (both + kv_heads) * dim].reshape(count, kv_heads, dim)
    kv[0, :, start : start + count] = x[:, heads:].transpose(0, 1)
    kv[1, :, start : start + count] = v.transpose(0, 1)
    return x[:, :heads]


def gate_mul(o: Tensor, qkvg: Tensor) -> Tensor:
    """o [T, Hq, D] times sigmoid of the last Hq D columns of qkvg [>= T, ...] -> [T, Hq D]."""
    flat = o.flatten(1)
    gate = qkvg[: len(flat), -flat.shape[1] :]
    return (flat.float() * gate.float().sigmoid()).to(o.dtype)


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
    count: int,
    out: Tensor,
) -> None:
    """A decode step's attention of `count` rows; see the package's docstring."""
    begin = int(start) + offset
    q = prepare(qkvg, scales, eps, cos, sin, kv, begin, count)
    o = rows(q, kv[0], kv[1], first, begin)
    out[:count] = gate_mul(o, qkvg)
