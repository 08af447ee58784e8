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
