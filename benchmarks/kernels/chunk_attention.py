"""Which kernel should a whole chunk of the prefill grid attend through, and what does it cost?

Ours is cuDNN's in pieces, joined and gated in one kernel; the peer is torch's flash kernel and the
gate. Both are bound by arithmetic: names give the operations, and shares of the copy bandwidth mean
nothing. Every case makes as many plans as its start has digits, some tenths of a second each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.kernels import Case, Launch
from benchmarks.kernels.attention import DTYPE, SHAPES, Shape
from capserve.engine.kernels.attention import card, cudnn

PLACES = (
    (1024, 0),
    (1024, 7168),
    (2048, 0),
    (2048, 2048),
    (2048, 6144),
    (2048, 30720),
    (4096, 0),
    (4096, 4096),
    (8192, 0),
)
"""(tokens, start)."""


def launches(
    shape: Shape, tokens: int, start: int, device: torch.device, flash: bool, _: Any = None
) -> Sequence[Launch]:
    q = torch.randn(tokens, shape.heads, shape.dim, device=device).to(DTYPE)
    qkvg = torch.randn(tokens, shape.width, device=device).to(DTYPE)
    size = (2, shape.kv_heads, start + tokens, shape.dim)
    k, v = torch.randn(size, device=device).to(DTYPE)
    if flash:
        return [lambda: card.gate_mul(card.flash_prefill(q, k, v, 0, start), qkvg)]
    return [lambda: cudnn.whole_chunk(q, k, v, qkvg, start)]


def cases(device: torch.device) -> Iterable[Case]:
    shape = SHAPES[0]
    kv = torch.empty(2, shape.kv_heads, 2048, shape.dim, dtype=DTYPE, device=device)
    if not cudnn.takes(2048, shape.heads, kv):
        return
    for tokens, start in PLACES:
        giga = 4 * tokens * (start + tokens / 2) * shape.heads * shape.dim / 1e9
        yield Case(
            f"{shape.name} chunk at {start}, {giga:.0f} Gflop",
            tokens,
            shape.kv_bytes(start + tokens) + 3 * tokens * shape.heads * shape.dim * DTYPE.itemsize,
            partial(launches, shape, tokens, start, device, False),
            peer=partial(launches, shape, tokens, start, device, True),
        )
