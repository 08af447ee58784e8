"""How are activations multiplied by a weight, fast for a chunk and row-invariant for a step?

A chunk of a prefill goes through torch's matmul. A decode step's 1 to 9 rows must not: BLAS
libraries choose kernels by row count (MKL's sgemm gives other bits for 1 and 2 rows than for 4), so
they go through `kernels/rows_matmul`, which gives a row the same bits in any company (I7).
"""

from __future__ import annotations

from typing import assert_never

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from capserve.engine.kernels.rows_matmul.cpu import rows_matmul_bf16, rows_matmul_f32
from capserve.engine.seam import MAX_DRAFTS
from capserve.engine.weights import (
    BlockFp8Weight,
    PlainWeight,
    SplitWeight,
    Weight,
    bytes_of,
    dense,
)

MAX_ROWS = MAX_DRAFTS + 1
"""Rows of one verify. Calls with more are prefill, which promises the same bits on the grid only,
where every call has the same shape."""

ROW_TILE = 16
"""What narrow rows are padded to before exp, log or sigmoid: torch's CPU loops take 16 floats at a
time by vector code and the rest by scalar code, which differ in the last bit. A whole tile has no
rest, so a row's bits do not depend on its place."""


class Linear:
    """y = x W^T, W [N, K], no bias: the family has none."""

    def __init__(self, weight: Weight, dtype: torch.dtype | None = None) -> None:
        """dtype: of activations; that of the weight when None, for a plain one."""
        plain = isinstance(weight, PlainWeight)
        assert dtype is not None or plain, "a quantised weight says nothing of its activations"
        tensor = weight.tail.weight if isinstance(weight, SplitWeight) else weight.weight
        self._dtype = dtype or tensor.dtype
        self.form = weight
        """On CPU the plain float32 matrix that it stands for."""
        self._on_cpu = tensor.device.type == "cpu"
        if not self._on_cpu:
            return
        # A native bfloat16 matmul takes minutes on CPUs without the instructions for it: products
        # run in float32 and are rounded once.
        self._weight = dense(weight).contiguous()
        self.form = PlainWeight(self._weight)
        narrow = self._weight.bfloat16()
        self._exact_bf16 = bool(torch.equal(narrow.float(), self._weight))
        rows = narrow.view(torch.uint16) if self._exact_bf16 else self._weight
        self._rows_weight = rows.numpy()

    @staticmethod
    def element_bytes(device: torch.device, dtype: torch.dtype) -> int:
        """Bytes kept for one weight whose checkpoint is bfloat16: on CPU float32 for prefill and
        bfloat16 for decode."""
        return 6 if device.type == "cpu" else dtype.itemsize

    @property
    def step_bytes(self) -> int:
        """Bytes that a decode step must read of it."""
        return self._rows_weight.nbytes if self._on_cpu else bytes_of(self.form)

    def __call__(self, x: Tensor) -> Tensor:
        """x [R, K] -> [R, N]. On CPU up to `MAX_ROWS` rows are row-invariant; the rows of a card's
        step go through kernels/rows_matmul instead."""
        if not self._on_cpu:
            return _chunk_on_card(x, self.form)
        count = x.shape[0]
        plain = self._dtype is torch.float32
        wide = x if plain else x.float()
        if count > MAX_ROWS:
            return functional.linear(wide, self._weight).to(self._dtype)
        y = np.empty((count, self._weight.shape[0]), np.float32)
        kernel = rows_matmul_bf16 if self._exact_bf16 else rows_matmul_f32
        kernel(wide.numpy(), self._rows_weight, y)
        result = torch.from_numpy(y)
        return result if plain else result.to(self._dtype)


def _chunk_on_card(x: Tensor, weight: Weight) -> Tensor:
    match weight:
        case PlainWeight():
            return functional.linear(x, weight.weight)
        case BlockFp8Weight():
            from capserve.engine.kernels.fp8_matmul.triton import fp8_matmul  # needs Triton

            return fp8_matmul(x.contiguous(), weight)
        case SplitWeight(head, tail):
            return torch.cat([_chunk_on_card(x, head), _chunk_on_card(x, tail)], -1)
        case _:
            assert_never(weight)
