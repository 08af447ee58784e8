"""What does a card launch for the rows of a decode step?

The network of `qwen3_5.py` for 1 to 9 rows, as a chain of fused kernels over static buffers: five
launches a layer. Weights, state and every position are read where they lie,
nothing is allocated and nothing waits for the host, so the chain can be captured in a graph. A
row's bits depend on no other row (I7). The definition is `Qwen35.verify` and `Qwen35.draft`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from capserve.engine.cursor import Cursor
from capserve.engine.kernels.attention.plan import Plan, Scratch
from capserve.engine.kernels.attention.triton import rows_attention
from capserve.engine.kernels.gated_delta import rows_scratch_floats
from capserve.engine.kernels.gated_delta.triton import delta_rows, fold_rows
from capserve.engine.kernels.rms_norm.triton import rows_norm
from capserve.engine.kernels.rows_input.triton import embed_rows, mtp_input
from capserve.engine.kernels.rows_matmul.triton import rows_matmul, rows_swiglu
from capserve.engine.layers.linear import MAX_ROWS
from capserve.engine.models.qwen3_5 import DeltaNet, FullAttention, Layer, Qwen35
from capserve.engine.state import State
from capserve.engine.weights import PlainWeight, Weight, shape_of

Project = Callable[[Weight, Tensor], None]
"""Multiplies what a layer normed by a matrix, into a buffer."""


@dataclass(frozen=True)
class Place:
    """Where the rows of a call stand: row r at `start` + `offset` + r."""

    start: Tensor
    """[1] int32 on the device."""
    offset: int = 0


class StepNetwork:
    """The launches of a step. The caller orders them: fold, drafts, verify."""

    def __init__(self, model: Qwen35, state: State) -> None:
        self._model, self._state = model, state
        config = model.config
        self._x = _rows(model, config.hidden_size)
        self._pair = _rows(model, 2 * config.hidden_size)
        self._inner = _rows(model, config.intermediate_size)
        self._mixers = _Mixers(model, state)

    def fold(self, cursor: Cursor) -> None:
        """The accepted rows of the last verify become part of the recurrent and conv state."""
        state = self._state
        fold_rows(
            state.recurrent, state.conv, state.row_k, state.row_d, state.row_decay, cursor.accepted
        )

    def verify(self, tokens: Tensor, place: Place, rows: int, hidden: Tensor) -> None:
        """tokens int32 [>= rows] on a folded state -> final-normed hidden states [>= rows, D]."""
        model = self._model
        embed_rows(tokens, model.embedding, self._x, rows)
        for layer in model.layers:
            self._layer(layer, place, rows, first=0)
        rows_norm(self._x, model.norm.scale, model.norm.eps, hidden, rows)

    def draft(self, tokens: Tensor, hidden: Tensor, place: Place, rows: int, out: Tensor) -> None:
        """MTP rows: tokens int32 [>= rows] at their slots, hidden states [>= rows, D] of the
        positions before -> out [>= rows, D], which the head turns into draft logits."""
        model, mtp = self._model, self._model.mtp
        assert mtp is not None
        embedding, before = mtp.embedding_norm, mtp.hidden_norm
        mtp_input(
            tokens, model.embedding, hidden, embedding.scale, before.scale, before.eps, self._pair,
            rows,
        )  # fmt: skip
        rows_matmul(self._pair, mtp.fc.form, self._x, rows)
        self._layer(mtp.layer, place, rows, first=mtp.FIRST_SLOT)
        rows_norm(self._x, mtp.norm.scale, mtp.norm.eps, out, rows)

    def logits(self, hidden: Tensor, out: Tensor, rows: int, ids: int | None = None) -> None:
        """hidden [>= rows, D] -> out [>= rows, ids] f32, of the first `ids`; all when None."""
        head = self._model.head.form
        if ids is not None and ids < shape_of(head)[0]:
            assert isinstance(head, PlainWeight), "the family's heads are plain"
            head = PlainWeight(head.weight[:ids])
        rows_matmul(hidden, head, out, rows)

    def _layer(self, layer: Layer, place: Place, rows: int, first: int) -> None:
        """The residual stream, in place. Norms are folded into the matmuls that follow them."""
        x, mlp = self._x, layer.mlp
        before, after = ((norm.scale, norm.eps) for norm in (layer.before, layer.after))

        def project(form: Weight, out: Tensor) -> None:
            rows_matmul(x, form, out, rows, norm=before)

        mixed = self._mixers.mix(layer.mixer, project, place, rows, first)
        rows_matmul(mixed, layer.mixer.out.form, x, rows, residual=True)
        rows_swiglu(x, mlp.gate_up.form, self._inner, rows, norm=after)
        rows_matmul(self._inner, mlp.down.form, x, rows, residual=True)


class _Mixers:
    """A layer's mixer between its two matmuls."""

    def __init__(self, model: Qwen35, state: State) -> None:
        config, self._state, self._model = model.config, state, model
        heads, value_heads = config.num_attention_heads, config.linear_num_value_heads
        both = heads + config.num_key_value_heads
        self._projected = _rows(model, config.conv_dim + config.value_dim + 2 * value_heads)
        self._delta_out = _rows(model, config.value_dim)
        self._qkvg = _rows(model, 2 * both * config.head_dim)
        self._attention_out = _rows(model, heads * config.head_dim)
        floats = rows_scratch_floats(
            MAX_ROWS, value_heads, config.linear_key_head_dim, config.linear_value_head_dim
        )
        self._delta_scratch = torch.zeros(floats, device=model.device)
        plan = Plan.of(
            heads, config.num_key_value_heads, config.head_dim, model.dtype, model.device
        )
        self._attention_scratch = Scratch.allocate(plan, model.device)

    def mix(
        self,
        mixer: DeltaNet | FullAttention,
        project: Project,
        place: Place,
        rows: int,
        first: int,
    ) -> Tensor:
        """-> what the output projection reads, [>= rows, its inputs]."""
        if isinstance(mixer, DeltaNet):
            return self._delta(mixer, project, rows)
        return self._attend(mixer, project, place, rows, first)

    def _delta(self, mixer: DeltaNet, project: Project, rows: int) -> Tensor:
        state, slot = self._state, mixer.slot
        project(mixer.projections.form, self._projected)
        delta_rows(
            self._projected,
            state.conv[slot],
            mixer.taps,
            mixer.rate,
            mixer.dt_bias,
            mixer.norm.scale,
            mixer.norm.eps,
            state.recurrent[slot],
            state.row_k[slot],
            state.row_d[slot],
            state.row_decay[slot],
            self._delta_scratch,
            self._delta_out,
            rows,
        )
        return self._delta_out

    def _attend(
        self, mixer: FullAttention, project: Project, place: Place, rows: int, first: int
    ) -> Tensor:
        project(mixer.qkvg.form, self._qkvg)
        cos, sin = self._model.rotary.tables
        rows_attention(
            self._qkvg,
            mixer.qk_norm.scale,
            mixer.qk_norm.eps,
            cos,
            sin,
            self._state.kv[mixer.slot],
            place.start,
            place.offset,
            first,
            rows,
            self._attention_out,
            self._attention_scratch,
        )
        return self._attention_out


def _rows(model: Qwen35, width: int) -> Tensor:
    return torch.zeros(MAX_ROWS, width, dtype=model.dtype, device=model.device)
