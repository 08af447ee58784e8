"""What is the execution state, where does it live, and how many bytes is it?

All buffers are allocated once, at start, at fixed addresses. Byte formulas stand beside the
allocations that they describe; a test compares both (E9).

Names: T tokens, R rows of one verify, C conv channels, W taps, D head dim, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from capserve.engine.history import SEGMENT_TOKENS
from capserve.engine.kernels.causal_conv.reference import shifts
from capserve.engine.kernels.gated_delta.cpu import fold_rows
from capserve.engine.kernels.gated_delta.reference import fold
from capserve.engine.layers.linear import MAX_ROWS, ROW_TILE
from capserve.engine.models.config import ModelConfig

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the state of one model in one dtype: formulas, not measurements."""

    recurrent: int
    conv: int
    hidden: int
    history: int
    """Of a capsule only: the tokens of its last, partial segment."""
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
            history=2 * SEGMENT_TOKENS * 4,
            kv_per_token=kv_layers * 2 * config.num_key_value_heads * config.head_dim * size,
        )

    @property
    def small_state(self) -> int:
        """Everything of a capsule that does not grow with its position."""
        return self.recurrent + self.conv + self.hidden + self.history

    def buffers(
        self, config: ModelConfig, dtype: torch.dtype, positions: int, *, on_card: bool
    ) -> int:
        """Bytes of the static buffers of a `State` with room for `positions` tokens."""
        size = dtype.itemsize
        linear = config.linear_layers
        heads, key, value = (
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        )
        kept = key + value + 1  # what a row leaves for the fold; on the host q stands beside k
        conv_rows = linear * MAX_ROWS * config.conv_dim * size
        waiting = (MAX_ROWS - 1) * config.hidden_size * size
        fixed = conv_rows + waiting
        if on_card:
            fixed += linear * MAX_ROWS * heads * kept * 4
        else:
            fixed += linear * MAX_ROWS * heads * (key + kept) * 4
            fixed += heads * key * value * 4 + MAX_ROWS * heads * value * 4  # scratch, o
            fixed += ROW_TILE * 2 * heads * size  # gates
        small = self.recurrent + self.conv + self.hidden
        return small + self.kv_per_token * positions + fixed


@dataclass(frozen=True)
class RowViews:
    """What one linear layer reads and writes for R rows; see `State.rows`."""

    conv_new: Tensor
    """[R, C]: where the rows' convolution inputs go."""
    conv_shifted: tuple[Tensor, ...]
    """W views [R, C] of the window."""
    qk: Tensor
    """[R, q|k, Hv, 1, Dk] f32"""
    decay: Tensor
    """[R, Hv, 1, 1] f32"""
    gates: Tensor
    """[R, 2 Hv] of the tile"""
    o: Tensor
    """[R, Hv, Dv] f32"""
    steps: tuple[tuple[Tensor, ...], ...]
    """For each row q, k, decay, d, o without the row axis."""
    recurrent: Tensor
    """[Hv, Dk, Dv] f32"""


class State:
    """The live buffers. Mechanism only: the model writes them, the runtime moves them."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        positions: int,
        *,
        for_card: bool = False,
    ) -> None:
        """for_card: with the row buffers of `card_decode.py` instead of `decode.py`'s."""
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

        self.accepted_rows = 0
        """Rows of the last verify that are part of the state. Row 0, the pending token's, landed at
        once, since it is always accepted; the others are folded in by `settle`."""
        self.compiled: list[tuple[Array, ...]] | None = None
        """Each linear layer's buffers as kernels/gated_delta/cpu.py takes them; None where torch's
        form runs."""
        if for_card:
            # all accepted rows are folded by the card's next step, which counts them itself
            self.row_k = buffer(linear, MAX_ROWS, heads, key, dtype=torch.float32)
            self.row_d = buffer(linear, MAX_ROWS, heads, value, dtype=torch.float32)
            self.row_decay = buffer(linear, MAX_ROWS, heads, dtype=torch.float32)
            return
        # rows under verification: what `fold` needs to land on an accepted one
        self.row_qk = buffer(linear, MAX_ROWS, 2, heads, 1, key, dtype=torch.float32)
        self.row_d = buffer(linear, MAX_ROWS, heads, 1, value, dtype=torch.float32)
        self.row_decay = buffer(linear, MAX_ROWS, heads, 1, 1, dtype=torch.float32)
        self.row_o = buffer(MAX_ROWS, heads, 1, value, dtype=torch.float32)
        self.scratch = buffer(heads, key, value, dtype=torch.float32)
        self.gates = buffer(ROW_TILE, 2 * heads)
        """One tile of gate inputs [b | a]; rows beyond those in use hold old, finite values."""
        self._views: dict[tuple[int, int], RowViews] = {}
        if device.type == "cpu" and dtype == torch.float32:
            self.compiled = [self._arrays(slot) for slot in range(linear)]

    @property
    def nbytes(self) -> int:
        """Bytes of all static buffers, measured."""
        return sum(t.nbytes for t in vars(self).values() if torch.is_tensor(t))

    def _arrays(self, slot: int) -> tuple[Array, ...]:
        """conv, recurrent, scratch, qk, d, decay of a linear layer, sharing the buffers' memory."""
        tensors = (self.row_qk[slot], self.row_d[slot], self.row_decay[slot])
        return tuple(
            tensor.numpy()
            for tensor in (self.conv[slot], self.recurrent[slot], self.scratch, *tensors)
        )

    def rows(self, slot: int, count: int) -> RowViews:
        """Views of a linear layer's buffers for `count` rows, made once: the buffers stay."""
        views = self._views.get((slot, count))
        if views is None:
            window = self.conv[slot, : self.taps + count]
            views = RowViews(
                conv_new=window[self.taps :],
                conv_shifted=shifts(window, self.taps + 1),
                qk=self.row_qk[slot, :count],
                decay=self.row_decay[slot, :count],
                gates=self.gates[:count],
                o=self.row_o[:count].squeeze(2),
                steps=tuple(
                    (
                        *self.row_qk[slot, r].unbind(0),
                        self.row_decay[slot, r],
                        self.row_d[slot, r],
                        self.row_o[r],
                    )
                    for r in range(count)
                ),
                recurrent=self.recurrent[slot],
            )
            self._views[slot, count] = views
        return views

    def reset(self) -> None:
        """The state before token 0. KV needs no clearing: nothing beyond the position is read.
        Nor is a hidden state read there, but a capsule holds one, and its bytes follow from its
        name (E10)."""
        self.recurrent.zero_()
        self.conv.zero_()
        self.hidden[0].zero_()
        self.accepted_rows = 0

    def settle(self) -> None:
        """Fold the accepted rows of the last verify into the recurrent and convolution state.

        Bit for bit what the rows did to their scratch copy. Deferred to here so that a verify
        reads the recurrent state once and writes it once, whatever is accepted.
        """
        if not self.accepted_rows:
            return
        if self.compiled is not None:
            if self.accepted_rows > 1:
                everything = (self.recurrent, self.row_qk, self.row_d, self.row_decay)
                fold_rows(*(tensor.numpy() for tensor in everything), self.accepted_rows)
            self._shift_conv()
            return
        flat = self.recurrent.flatten(0, 1)  # [L * Hv, Dk, Dv]
        for r in range(1, self.accepted_rows):
            fold(
                self.row_qk[:, r, 1].flatten(0, 1),
                self.row_d[:, r].flatten(0, 1),
                self.row_decay[:, r].flatten(0, 1),
                flat,
            )
        self._shift_conv()

    def _shift_conv(self) -> None:
        last = slice(self.accepted_rows, self.accepted_rows + self.taps)
        self.conv[:, : self.taps] = self.conv[:, last].clone()
        self.accepted_rows = 0
