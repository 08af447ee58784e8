"""Random inputs of a gated delta net's kernels, with poison wherever nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from capserve.engine.kernels.gated_delta import prefill_scratch_elements, rows_scratch_floats
from tests.kernels.tolerance import poisoned

MAX_ROWS = 9
TAPS = 4
EPS = 1e-6


@dataclass
class Layer:
    """The constants and the state of one layer, and shapes for its inputs."""

    key_heads: int
    heads: int
    key: int
    value: int
    dtype: torch.dtype
    conv_weight: Tensor
    rate: Tensor
    dt_bias: Tensor
    norm: Tensor
    recurrent: Tensor
    conv: Tensor
    """[W-1 + MAX_ROWS, C]; NaN from row W-1 on."""

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key + self.heads * self.value

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.key_heads, self.heads, self.key, self.value

    @property
    def device(self) -> torch.device:
        return self.recurrent.device

    def clone(self) -> Layer:
        return replace(self, recurrent=self.recurrent.clone(), conv=self.conv.clone())

    def constants(self) -> dict[str, Any]:
        names = ("conv_weight", "rate", "dt_bias", "norm")
        return {name: getattr(self, name) for name in names} | {"eps": EPS}

    def tokens(self, count: int) -> Tensor:
        """`projected` [count, C + Hv Dv + 2 Hv]."""
        width = self.channels + self.heads * (self.value + 2)
        return torch.randn(count, width, device=self.device).to(self.dtype)

    def out(self, count: int) -> Tensor:
        return poisoned(count, self.heads * self.value, dtype=self.dtype, device=self.device)

    def row_buffers(self) -> dict[str, Tensor]:
        def buffer(*shape: int) -> Tensor:
            return poisoned(*shape, dtype=torch.float32, device=self.device)

        return {
            "row_k": buffer(MAX_ROWS, self.heads, self.key),
            "row_d": buffer(MAX_ROWS, self.heads, self.value),
            "row_decay": buffer(MAX_ROWS, self.heads),
        }

    def rows_scratch(self) -> Tensor:
        count = rows_scratch_floats(MAX_ROWS, self.heads, self.key, self.value)
        return poisoned(count, dtype=torch.float32, device=self.device)

    def prefill_scratch(self, tokens: int) -> dict[str, Tensor]:
        narrow, wide = prefill_scratch_elements(tokens, *self.shape)
        return {
            "scratch": poisoned(narrow, dtype=self.dtype, device=self.device),
            "sums": poisoned(wide, dtype=torch.float32, device=self.device),
        }


def random_layer(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, decay: float = 1.0
) -> Layer:
    """shape: Hk, Hv, Dk, Dv. decay: the size of `rate`, 0.001 to 16 in real layers."""
    key_heads, heads, key, value = shape
    channels = 2 * key_heads * key + heads * value
    conv = torch.randn(TAPS - 1 + MAX_ROWS, channels, device=device)
    conv[TAPS - 1 :] = float("nan")
    return Layer(
        *shape,
        dtype=dtype,
        conv_weight=torch.randn(TAPS, channels, device=device) * 0.5,
        rate=-decay * (torch.rand(heads, device=device) + 0.01),
        dt_bias=torch.randn(heads, device=device),
        norm=torch.rand(value, device=device) + 0.5,
        recurrent=torch.randn(heads, key, value, device=device) * 0.3,
        conv=conv.to(dtype),
    )
