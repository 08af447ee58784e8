"""The definition."""

from __future__ import annotations

import torch
from torch import Tensor

from capserve.engine.kernels.rms_norm.reference import normed


def embed_rows(tokens: Tensor, table: Tensor, out: Tensor, rows: int) -> None:
    out[:rows] = _looked_up(tokens, table, rows).to(out.dtype)


def mtp_input(
    tokens: Tensor,
    table: Tensor,
    hidden: Tensor,
    e_scale: Tensor,
    h_scale: Tensor,
    eps: float,
    out: Tensor,
    rows: int,
) -> None:
    embedded = normed(_looked_up(tokens, table, rows), e_scale, eps)
    out[:rows] = torch.cat([embedded, normed(hidden[:rows], h_scale, eps)], -1).to(out.dtype)


def _looked_up(tokens: Tensor, table: Tensor, rows: int) -> Tensor:
    return table[tokens[:rows].long().clamp(0, table.shape[0] - 1)]
