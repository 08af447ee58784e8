"""Where can a capsule lie, and how do bytes get there?

On CPU there is host memory alone. On CUDA there is the card's, where snapshots are made, and the
host's, pinned so that the card copies without a detour. Copies to and from pinned memory are
queued; `wait` is called before anybody else reads or reuses it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from capserve.engine.kernels.segments.reference import place

HOST = "host"
GPU = "gpu"

_log = logging.getLogger(__name__)


class Tiers:
    """The memories of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"
        self.names: tuple[str, ...] = (GPU, HOST) if self._on_cuda else (HOST,)
        self._pins = self._on_cuda

    def copy(self, tensor: Tensor, tier: str) -> Tensor:
        """A contiguous copy of its own in that tier; complete after `wait`."""
        assert tier in self.names, f"tier {tier!r} is none of {self.names}"
        if tier == GPU:
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        else:
            kept = self._host_memory(tensor.shape, tensor.dtype)
        return kept.copy_(tensor, non_blocking=self._on_cuda)

    def from_bytes(self, data: memoryview, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of its own with these bytes, in host memory."""
        kept = self._host_memory(shape, dtype)
        # NumPy lets other threads run while it copies, and knows no bfloat16: hence bytes
        np.copyto(kept.reshape(-1).view(torch.uint8).numpy(), np.frombuffer(data, np.uint8))
        return kept

    def place(self, kv: Tensor, segments: Sequence[tuple[int, Tensor]]) -> None:
        """KV segments [layers, 2, Hkv, n, D] into `kv` [layers, 2, Hkv, P, D], each from its first
        slot on; complete after `wait`."""
        starts, tensors = [start for start, _ in segments], [kept for _, kept in segments]
        if all(kept.is_cuda for kept in tensors) and tensors:
            from capserve.engine.kernels.segments.triton import place as place_on_card

            place_on_card(kv, tensors, starts)
        else:
            place(kv, tensors, starts)

    def wait(self) -> None:
        """Until every copy that was queued is done."""
        if self._on_cuda:
            torch.cuda.current_stream(self._device).synchronize()

    def _host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._pins:
            try:
                return torch.empty(shape, dtype=dtype, pin_memory=True)
            except RuntimeError as error:  # the system's limit of locked memory
                self._pins = False
                _log.warning("host memory can't be pinned, copies go through pages: %s", error)
        return torch.empty(shape, dtype=dtype)
