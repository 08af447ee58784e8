"""What is the execution state, where does it live, and how many bytes is it?

All buffers are allocated once, at start, at fixed addresses. Byte formulas stand beside the
allocations that they describe; a test compares both (E9).

Names: T tokens, R rows of one verify, C conv channels, W taps, D head dim, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from capserve.engine.kernels.gated_delta.reference import fold
from capserve.engine.models.config import ModelConfig
from capserve.engine.seam import MAX_DRAFTS

MAX_ROWS = MAX_DRAFTS + 1


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the state of one model in one dtype: formulas, not measurements."""

    recurrent: int
    conv: int
    hidden: int
    kv_per_token: int

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype) -> StateBytes:
        size = dtype.itemsize
        per_layer = (
            config.linear_num_value_heads * config.linear_key_head_dim
        ) * config.linear_value_head_dim
        taps = config.linear_conv_kernel_dim - 1
        kv_layers = config.full_layers + config.mtp_layers
        return cls(
            recurrent=config.linear_layers * per_layer * 4,
            conv=config.linear_layers * taps * config.conv_dim * size,
            hidden=config.hidden_size * size,
            kv_per_token=kv_layers * 2 * config.num_key_value_heads * config.head_dim * size,
        )

    @property
    def small_state(self) -> int:
        """Everything of a capsule that does not grow with its position."""
        return self.recurrent + self.conv + self.hidden

    def buffers(self, config: ModelConfig, dtype: torch.dtype, positions: int) -> int:
        """Bytes of the static buffers of a `State` with room for `positions` tokens."""
        size = dtype.itemsize
        linear = config.linear_layers
        heads, key, value = (
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        )
        rows = linear * MAX_ROWS * heads * (key + value + 1) * 4
        conv_rows = linear * MAX_ROWS * config.conv_dim * size
        scratch = heads * key * value * 4
        backlog = (MAX_ROWS - 1) * config.hidden_size * size
        return (
            self.small_state + self.kv_per_token * positions + rows + conv_rows + scratch + backlog
        )


class State:
    """The live buffers. Mechanism only: the model writes them, the runtime moves them."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, positions: int
    ) -> None:
        self.config = config
        self.max_positions = positions
        self.taps = config.linear_conv_kernel_dim - 1
        linear, heads = config.linear_layers, config.linear_num_value_heads
        key, value = config.linear_key_head_dim, config.linear_value_head_dim

        def buffer(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.kv = buffer(
            config.full_layers + config.mtp_layers,
            2,
            config.num_key_value_heads,
            positions,
            config.head_dim,
        )
        """[layers, k|v, Hkv, P, D]; the MTP layer is the last. Its slot p holds the pair of token p
        and the hidden state of position p - 1, so that slots [0, p) depend on tokens [0, p) alone;
        slot 0 is never seen."""
        self.recurrent = buffer(linear, heads, key, value, dtype=torch.float32)
        self.conv = buffer(linear, self.taps + MAX_ROWS, config.conv_dim)
        """[layers, W-1 + R, C]: the last W-1 inputs, then those of the rows under verification."""
        self.hidden = buffer(MAX_ROWS, config.hidden_size)
        """Final-normed hidden states [R, hidden]: the last row in use is that of position - 1, the
        rows before it wait for their MTP slots to be built. Settled, it is row 0."""

        # rows under verification: what `fold` needs to land on an accepted one
        self.row_k = buffer(linear, MAX_ROWS, heads, 1, key, dtype=torch.float32)
        self.row_d = buffer(linear, MAX_ROWS, heads, 1, value, dtype=torch.float32)
        self.row_decay = buffer(linear, MAX_ROWS, heads, 1, 1, dtype=torch.float32)
        self.scratch = buffer(heads, key, value, dtype=torch.float32)
        self.accepted_rows = 0
        """Rows of the last verify that are part of the state but not yet folded in."""

    @property
    def nbytes(self) -> int:
        """Bytes of all static buffers, measured."""
        return sum(t.numel() * t.element_size() for t in vars(self).values() if torch.is_tensor(t))

    def reset(self) -> None:
        """The state before token 0. KV needs no clearing: nothing beyond the position is read."""
        self.recurrent.zero_()
        self.conv.zero_()
        self.accepted_rows = 0

    def settle(self) -> None:
        """Fold the accepted rows of the last verify into the recurrent and convolution state.

        Bit for bit what the rows did to their scratch copy. Deferred to here so that a verify
        reads the recurrent state once and writes it once, whatever is accepted.
        """
        if not self.accepted_rows:
            return
        flat = self.recurrent.flatten(0, 1)  # [L * Hv, Dk, Dv]
        for r in range(self.accepted_rows):
            fold(
                self.row_k[:, r].flatten(0, 1),
                self.row_d[:, r].flatten(0, 1),
                self.row_decay[:, r].flatten(0, 1),
                flat,
            )
        last = slice(self.accepted_rows, self.accepted_rows + self.taps)
        self.conv[:, : self.taps] = self.conv[:, last].clone()
        self.accepted_rows = 0
