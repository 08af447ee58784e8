"""How are activations multiplied by a weight, so that a row's bits do not depend on its company?

Row invariance (ARCHITECTURE.md, I7) needs one reduction order for every row count. BLAS libraries
choose kernels by row count: MKL's sgemm gives other bits for 1 and 2 rows than for 4, and where the
count is no multiple of 4, other bits by a row's place. oneDNN with a weight packed once for a few
rows gave the same bits for every count from 1 to 512 and every place, and reads an 8192 x 256 head
for 4 rows 5 times faster (docs/log.md, 2026-12-01). Where it is missing, rows are padded to a tile.

bfloat16 on CPU is for tests: weights keep their bfloat16 values in float32 storage and each product
is rounded once to bfloat16, because the native bfloat16 matmul of CPUs without the instructions for
it took minutes where this takes seconds.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

ROW_TILE = 16
"""Rows that a decode call is padded to where the backend is not row-invariant by itself."""


def tiled(x: Tensor) -> Tensor:
    """x [R, N] padded with zero rows to a multiple of `ROW_TILE`.

    For elementwise functions of narrow rows: torch's CPU loops take 16 floats at a time by vector
    code and the rest by scalar code, whose exp, log and cos differ in the last bit. A padded tile
    has no rest, so a row's bits do not depend on its place.
    """
    rows = x.shape[0]
    if rows % ROW_TILE == 0:
        return x
    out = x.new_zeros(-(-rows // ROW_TILE) * ROW_TILE, *x.shape[1:])
    out[:rows] = x
    return out


_PACK_ROWS = 4
"""Row count that oneDNN packs for. Packed for 1 it takes another (GEMV) kernel."""


def _can_pack(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and (
        bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    )


class Linear:
    """y = x W^T, W [N, K], no bias: the family has none."""

    def __init__(self, weight: Tensor) -> None:
        assert weight.dim() == 2
        self.out_features, self.in_features = weight.shape
        self._packed = _can_pack(weight)
        if self._packed:
            wide = weight.float().contiguous()
            self._weight = torch.ops.mkldnn._reorder_linear_weight(wide, _PACK_ROWS)
        else:
            self._weight = weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """x [R, K] -> [R, N], R >= 1. Up to `ROW_TILE` rows are row-invariant."""
        if self._packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(
                x.float(), self._weight, None, "none", [], ""
            )
            return y.to(x.dtype)
        rows = x.shape[0]
        if rows >= ROW_TILE:
            return functional.linear(x, self._weight)
        padded = x.new_zeros(ROW_TILE, self.in_features)
        padded[:rows] = x
        return functional.linear(padded, self._weight)[:rows]
