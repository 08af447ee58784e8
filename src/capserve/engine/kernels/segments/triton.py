"""How do many segments reach the live buffer at the card's copy bandwidth?

A table of addresses, one entry a segment, lies on the card; each program copies one piece of one
row (layer, k or v, head), which is contiguous on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE_BYTES = 32768
"""Of one program: a few vector loads a thread in flight."""


@triton.jit
def _place(kv, table, outer, row, D: tl.constexpr, PIECE: tl.constexpr):
    """kv: any element; table int64 [n, 3]: address, first slot, slots. Grid (pieces, outer, n)."""
    i = tl.program_id(2).to(tl.int64)
    o = tl.program_id(1).to(tl.int64)
    address = tl.load(table + i * 3)
    start = tl.load(table + i * 3 + 1)
    length = tl.load(table + i * 3 + 2) * D
    at = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    inside = at < length
    source = tl.multiple_of(address.to(kv.dtype), 16)
    x = tl.load(source + o * length + at, mask=inside)
    tl.store(kv + o * row + start * D + at, x, mask=inside)


def place(kv: Tensor, segments: Sequence[Tensor], starts: Sequence[int]) -> None:
    """As `reference.place`, for segments on the card. They must outlive the launch."""
    if not segments:
        return
    assert kv.is_contiguous()
    assert all(segment.is_contiguous() and segment.dtype == kv.dtype for segment in segments)
    layers, two, heads, positions, dim = kv.shape
    outer = layers * two * heads
    entries = [
        (segment.data_ptr(), start, segment.shape[3])
        for segment, start in zip(segments, starts, strict=True)
    ]
    table = torch.tensor(entries, dtype=torch.int64).to(kv.device)
    piece = triton.next_power_of_2(PIECE_BYTES // kv.element_size())
    longest = max(slots for _, _, slots in entries) * dim
    grid = (triton.cdiv(longest, piece), outer, len(entries))
    _place[grid](kv, table, outer, positions * dim, D=dim, PIECE=piece, num_warps=8)
