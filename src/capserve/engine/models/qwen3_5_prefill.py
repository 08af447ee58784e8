"""What does a card run for a chunk of a prompt?

The network of `Qwen35.absorb` with torch's matmuls and attention, and kernels of our own for what
lies between them: residual and norm in one pass, the delta net between its projections, keys and
values written where they stay. Of the MTP layer only its keys and values are made: nobody asks for
the drafts of a prompt.

A short chunk is over sooner than the host can launch it, so the host looks up nothing a layer that
it can look up once: views of the state, and for each chunk the buffers and shapes of all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from capserve.engine.kernels.attention import cudnn
from capserve.engine.kernels.attention.card import gate_mul, prefill, prepare
from capserve.engine.kernels.gated_delta import prefill_scratch_elements
from capserve.engine.kernels.gated_delta.chunked_triton import Layer as DeltaLayer
from capserve.engine.kernels.gated_delta.chunked_triton import delta_prefill
from capserve.engine.kernels.rms_norm.triton import norm_residual
from capserve.engine.kernels.rows_input.triton import embed_rows, mtp_input
from capserve.engine.kernels.silu_mul.triton import silu_mul
from capserve.engine.layers.linear import Linear
from capserve.engine.models.config import ModelConfig
from capserve.engine.models.qwen3_5 import DeltaNet, FullAttention, Layer, Qwen35
from capserve.engine.state import State


class ChunkNetwork:
    """Absorbs chunks of up to `tokens` tokens. Holds the delta rule's scratch, for all layers."""

    def __init__(self, model: Qwen35, state: State, tokens: int) -> None:
        config = model.config
        self._model, self._hidden, self._tokens = model, state.hidden, tokens
        elements, sums = self.scratch_elements(config, tokens)
        if model.dtype == torch.float32:
            elements = sums = 0  # goes through the definition, which takes no scratch
        self._scratch = torch.empty(elements, dtype=model.dtype, device=model.device)
        self._sums = torch.empty(sums, device=model.device)
        self._delta_shape = (
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        )
        self._first_norm = _norm_of(model.layers[0])
        following = [_norm_of(layer) for layer in model.layers[1:]]
        following.append((model.norm.scale, model.norm.eps))
        self._blocks = [
            _Block(
                _mixer(layer, model, state),
                (layer.after.scale, layer.after.eps),
                layer.mlp.gate_up,
                layer.mlp.down,
                after,
            )
            for layer, after in zip(model.layers, following, strict=True)
        ]
        self._mtp = None if model.mtp is None else _mixer(model.mtp.layer, model, state)
        self._kv = state.kv[0]
        self._by_cudnn = cudnn.takes(tokens, config.num_attention_heads, self._kv)

    @staticmethod
    def scratch_elements(config: ModelConfig, tokens: int) -> tuple[int, int]:
        """Elements in the model's dtype and in float32."""
        return prefill_scratch_elements(
            tokens,
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        )

    def warm_up(self) -> None:
        """Run what a live chunk may come to, whatever its length and place: each size class of the
        matmuls, each form of attention, each of cuDNN's plans. Changes the state."""
        positions = self._kv.shape[2]
        most = min(self._tokens, positions)
        lengths = [1 << i for i in range(most.bit_length())]
        tokens = torch.zeros(max(8, most), dtype=torch.int32, device=self._hidden.device)
        for count in [*lengths, most]:
            self.absorb(tokens[:count], 0)
        self.absorb(tokens[3:8], 0)  # Triton has other kernels where tokens are not aligned
        if not self._by_cudnn:
            return
        keys, values = self._kv
        config = self._model.config
        q = keys.new_zeros(most, config.num_attention_heads, config.head_dim)
        qkvg = keys.new_zeros(most, q[0].numel())
        start = most
        while start + most <= positions:
            cudnn.whole_chunk(q, keys, values, qkvg, start)
            start *= 2

    def absorb(self, tokens: Tensor, start: int) -> Tensor:
        """As `Qwen35.absorb`: tokens [T] int32 at `start`; final-normed hidden states [T, D]."""
        count = len(tokens)
        table = self._model.embedding
        x = table.new_empty(count, table.shape[1])
        # row 0 the hidden state of position start - 1, behind it what is normed last
        shifted = table.new_empty(count + 1, table.shape[1])
        y = shifted[1:]
        call = _Call(self, count, start)
        embed_rows(tokens, table, x, count)
        norm_residual(x, None, *self._first_norm, y, count)
        for block in self._blocks:
            mixer = block.mixer
            mixed = call.delta(mixer, y) if isinstance(mixer, _Delta) else call.attend(mixer, y)
            norm_residual(x, mixed, *block.after, y, count)
            gate_up = block.gate_up(y)
            silu_mul(gate_up, call.inner)
            del gate_up
            norm_residual(x, block.down(call.inner), *block.following, y, count)
        if self._mtp is not None:
            shifted[0] = self._hidden[0]
            skip = 1 if start == 0 else 0  # slot 0 is never seen
            if count > skip:
                self._mtp_slots(tokens[skip:], shifted[skip:], start + skip, count - skip)
        return y

    def _mtp_slots(self, tokens: Tensor, hidden: Tensor, start: int, count: int) -> None:
        """tokens at [start, start + count), hidden [>= count, D] of the positions before them."""
        mtp, mixer = self._model.mtp, self._mtp
        assert mtp is not None
        assert isinstance(mixer, _Attention)
        table = self._model.embedding
        pair = hidden.new_empty(count, 2 * hidden.shape[1])
        embedding, before = mtp.embedding_norm, mtp.hidden_norm
        mtp_input(tokens, table, hidden, embedding.scale, before.scale, before.eps, pair, count)
        x = mtp.fc(pair)
        y = torch.empty_like(x)
        norm_residual(x, None, *_norm_of(mtp.layer), y, count)
        _attention_inputs(mixer, y, start)


Norm = tuple[Tensor, float]
"""Final scale and epsilon."""


@dataclass(frozen=True, slots=True)
class _Delta:
    entry: Linear
    out: Linear
    constants: dict[str, Any]
    """What `DeltaLayer` takes beside projected and out."""


@dataclass(frozen=True, slots=True)
class _Attention:
    entry: Linear
    out: Linear
    norm: Norm
    """Of q and k."""
    cos: Tensor
    sin: Tensor
    kv: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class _Block:
    """One layer, and the norm that comes after it."""

    mixer: _Delta | _Attention
    after: Norm
    gate_up: Linear
    down: Linear
    following: Norm


class _Call:
    """What all layers of one chunk share: buffers that each uses in its turn, and shapes."""

    def __init__(self, network: ChunkNetwork, count: int, start: int) -> None:
        model = network._model
        config, table = model.config, model.embedding
        self.start, self.count = start, count
        self.inner = table.new_empty(count, config.intermediate_size)
        self._whole = network._by_cudnn and count == network._tokens and start % count == 0
        self._delta_out = table.new_empty(count, config.value_dim)
        self._delta_rule = delta_prefill(
            network._delta_shape,
            config.linear_conv_kernel_dim,
            count,
            start,
            network._scratch,
            network._sums,
        )

    def delta(self, mixer: _Delta, y: Tensor) -> Tensor:
        out = self._delta_out
        self._delta_rule(DeltaLayer(projected=mixer.entry(y), out=out, **mixer.constants))
        return mixer.out(out)

    def attend(self, mixer: _Attention, y: Tensor) -> Tensor:
        qkvg, q = _attention_inputs(mixer, y, self.start)
        if self._whole:
            return mixer.out(cudnn.whole_chunk(q, mixer.keys, mixer.values, qkvg, self.start))
        return mixer.out(gate_mul(prefill(q, mixer.keys, mixer.values, 0, self.start), qkvg))


def _attention_inputs(mixer: _Attention, y: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Writes keys and values; -> the projection [T, q | k | v | gate], and q [T, Hq, D]."""
    qkvg = mixer.entry(y)
    return qkvg, prepare(qkvg, *mixer.norm, mixer.cos, mixer.sin, mixer.kv, start, len(y))


def _norm_of(layer: Layer) -> Norm:
    return layer.before.scale, layer.before.eps


def _mixer(layer: Layer, model: Qwen35, state: State) -> _Delta | _Attention:
    mixer = layer.mixer
    if isinstance(mixer, FullAttention):
        norm, kv = mixer.qk_norm, state.kv[mixer.slot]
        return _Attention(
            mixer.qkvg, mixer.out, (norm.scale, norm.eps), *model.rotary.tables, kv, *kv
        )
    assert isinstance(mixer, DeltaNet)
    constants = {
        "conv": state.conv[mixer.slot],
        "conv_weight": mixer.taps,
        "rate": mixer.rate,
        "dt_bias": mixer.dt_bias,
        "norm": mixer.norm.scale,
        "eps": mixer.norm.eps,
        "recurrent": state.recurrent[mixer.slot],
    }
    return _Delta(mixer.projections, mixer.out, constants)
