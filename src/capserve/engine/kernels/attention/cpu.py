"""Prefill attention on CPU without a mask: the keys before the chunk, all seen, and the chunk's own
triangle, each by torch's flash kernel, joined by their log-sum-exps. A masked call over all keys
takes 1.4 times as long (docs/log.md, 2026-12-01)."""

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def prefill(q: Tensor, k: Tensor, v: Tensor, first: int, start: int) -> Tensor:
    """As `reference.prefill`."""
    tokens, heads, dim = q.shape
    kv_heads = k.shape[0]
    group = heads // kv_heads
    end = start + tokens
    own_k, own_v = (x[:, start:end].repeat_interleave(group, 0).unsqueeze(0) for x in (k, v))
    own, own_lse = _flash(q.transpose(0, 1).unsqueeze(0), own_k, own_v, 0.0, True)
    own = own[0]  # [Hq, T, D]
    if start > first:
        # no mask: the queries of a group may stand side by side, so that keys are not copied
        folded = q.view(tokens, kv_heads, group, dim).permute(1, 2, 0, 3)
        folded = folded.reshape(1, kv_heads, group * tokens, dim)
        past, past_lse = _flash(
            folded, k[:, first:start].unsqueeze(0), v[:, first:start].unsqueeze(0)
        )
        past = past.reshape(heads, tokens, dim)
        share = torch.sigmoid(
            past_lse.reshape(heads, tokens, 1) - own_lse.reshape(heads, tokens, 1)
        ).to(q.dtype)
        own = own + (past - own) * share
    return own.transpose(0, 1)
