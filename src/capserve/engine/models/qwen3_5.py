"""What does the Qwen3.5 family's text model compute?

Layers of gated delta net (linear attention with a matrix state) and, every fourth, gated full
attention; dense SwiGLU; tied or untied head; one MTP layer that drafts from (hidden, next token).
The same code runs prefill (`absorb`) and decode (`verify`, then `State.settle`); they differ in the
form of the delta rule and of attention only. Maths as in transformers' `qwen3_5` modelling file;
for MTP as in the family's published checkpoints: embedding first, hidden after the final norm.

Tensor names in comments: T tokens, R rows, D hidden, Hq / Hkv attention heads, Hk / Hv delta heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from capserve.engine.kernels.attention import cpu as attention_cpu
from capserve.engine.kernels.attention import reference as attention
from capserve.engine.kernels.causal_conv.reference import causal_conv, shifts
from capserve.engine.kernels.gated_delta import reference as gated_delta
from capserve.engine.kernels.gated_delta.cpu import delta_rows
from capserve.engine.layers.linear import Linear
from capserve.engine.layers.norm import RmsNorm
from capserve.engine.layers.rotary import Angles, Rotary
from capserve.engine.models.assembly import Named, Weights, quantisable, stack
from capserve.engine.models.config import LINEAR, ModelConfig
from capserve.engine.state import State
from capserve.engine.weights import BLOCK, PlainWeight


@dataclass
class Span:
    """What all layers of one call share: where the tokens lie, their angles, the form."""

    start: int
    count: int
    angles: Angles
    rows: bool
    """Decode rows; otherwise prefill."""


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the text model and its MTP head: name (prefix `model.`) -> shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    full = {
        "self_attn.q_proj.weight": (2 * config.num_attention_heads * config.head_dim, hidden),
        "self_attn.k_proj.weight": (config.num_key_value_heads * config.head_dim, hidden),
        "self_attn.v_proj.weight": (config.num_key_value_heads * config.head_dim, hidden),
        "self_attn.o_proj.weight": (hidden, config.num_attention_heads * config.head_dim),
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
    }
    heads = config.linear_num_value_heads
    linear = {
        "linear_attn.in_proj_qkv.weight": (config.conv_dim, hidden),
        "linear_attn.in_proj_z.weight": (config.value_dim, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (config.conv_dim, 1, config.linear_conv_kernel_dim),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (config.linear_value_head_dim,),
        "linear_attn.out_proj.weight": (hidden, config.value_dim),
    }
    ffn = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for i, kind in enumerate(config.layer_types):
        mixer = linear if kind == LINEAR else full
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in (mixer | ffn).items()}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    if config.mtp_layers:
        shapes |= {f"mtp.layers.0.{name}": shape for name, shape in (full | ffn).items()}
        shapes |= {
            "mtp.fc.weight": (hidden, 2 * hidden),
            "mtp.norm.weight": (hidden,),
            "mtp.pre_fc_norm_embedding.weight": (hidden,),
            "mtp.pre_fc_norm_hidden.weight": (hidden,),
        }
    return shapes


def weight_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    vocab: int,
    *,
    matrix_bytes: int,
    quantised_bytes: int,
) -> int:
    """Bytes of the loaded weights: the embedding in `dtype`, matrices of `matrix_bytes` an element
    or, those that an FP8 checkpoint has quantised, of `quantised_bytes`; norms and gate constants
    in float32. The scales of an FP8 matrix are counted where its elements take one byte.

    `vocab`: rows of the head that are kept. A tied head is a second, packed copy of them.
    """
    total = 0
    for name, shape in tensor_shapes(config).items():
        count = 1
        for extent in shape:
            count *= extent
        if name == "lm_head.weight":
            count = vocab * config.hidden_size
        if len(shape) == 1 or name.endswith("conv1d.weight"):
            total += count * 4
        elif config.fp8 and quantisable(name):
            squares = -(-shape[0] // BLOCK) * -(-shape[1] // BLOCK)
            total += count * quantised_bytes + (4 * squares if quantised_bytes == 1 else 0)
        else:
            total += count * (dtype.itemsize if "embed_tokens" in name else matrix_bytes)
    if config.tie_word_embeddings:
        total += vocab * config.hidden_size * matrix_bytes
    return total


class Mlp:
    """down(silu(gate x) * up x)."""

    def __init__(self, weights: Named) -> None:
        self.gate_up = Linear(
            weights.stacked("mlp.gate_proj.weight", "mlp.up_proj.weight"), weights.dtype
        )
        self.down = Linear(weights.matrix("mlp.down_proj.weight"), weights.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(functional.silu(gate).mul_(up))


class FullAttention:
    """Grouped-query attention with per-head q/k norm, partial rotary and a sigmoid output gate."""

    def __init__(self, config: ModelConfig, weights: Named, slot: int) -> None:
        heads, kv_heads, dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.slot = slot
        # q_proj interleaves [query | gate] per head; one matrix, reordered: q, k, v, gate
        query, gate = weights.query_and_gate("self_attn.q_proj.weight", heads, dim)
        keys_values = (weights.matrix(f"self_attn.{name}_proj.weight") for name in "kv")
        self.qkvg = Linear(stack([query, *keys_values, gate], weights.dtype), weights.dtype)
        self.out = Linear(weights.matrix("self_attn.o_proj.weight"), weights.dtype)
        scales = [
            weights.scale("self_attn.q_norm.weight").expand(heads, dim),
            weights.scale("self_attn.k_norm.weight").expand(kv_heads, dim),
        ]
        self.qk_norm = RmsNorm(torch.cat(scales), config.rms_norm_eps)
        self.sizes = [heads * dim + kv_heads * dim, kv_heads * dim, heads * dim]

    def __call__(self, x: Tensor, state: State, span: Span, rotary: Rotary, first: int) -> Tensor:
        """x [T, D] at [span.start, span.start + T); slots before `first` are never seen."""
        end = span.start + span.count
        qk, v, gate = torch.split(self.qkvg(x), self.sizes, -1)
        qk = qk.reshape(span.count, self.heads + self.kv_heads, self.dim)
        qk = rotary.rotate(self.qk_norm(qk), span.angles)
        keys, values = state.kv[self.slot].unbind(0)  # [Hkv, P, dim]
        keys[:, span.start : end] = qk[:, self.heads :].transpose(0, 1)
        values[:, span.start : end] = v.reshape(-1, self.kv_heads, self.dim).transpose(0, 1)
        q = qk[:, : self.heads]
        if span.rows:
            o = attention.rows(q, keys, values, first, span.start)
        else:
            prefill = attention_cpu.prefill if q.device.type == "cpu" else attention.prefill
            o = prefill(q, keys, values, first, span.start)
        return self.out(o.reshape(span.count, -1) * gate.sigmoid())


class DeltaNet:
    """Gated delta net: short convolution, normalised q and k, delta rule, gated output norm."""

    def __init__(self, config: ModelConfig, weights: Named, slot: int) -> None:
        self.slot = slot
        self.key_heads, self.value_heads = (
            config.linear_num_key_heads,
            config.linear_num_value_heads,
        )
        self.key, self.value = config.linear_key_head_dim, config.linear_value_head_dim
        names = ("qkv", "z", "b", "a")
        self.projections = Linear(
            weights.stacked(*(f"linear_attn.in_proj_{name}.weight" for name in names)),
            weights.dtype,
        )
        self.sizes = [config.conv_dim, config.value_dim, 2 * self.value_heads]
        self.qkv_sizes = [2 * config.key_dim, config.value_dim]
        taps = weights["linear_attn.conv1d.weight"].float()[:, 0].t().contiguous()  # [W, C]
        self.taps, self.conv = taps, taps.unbind(0)
        self.rate = -weights["linear_attn.A_log"].float().exp()  # [Hv]
        self.dt_bias = weights["linear_attn.dt_bias"].float()
        norm = weights["linear_attn.norm.weight"].float()
        self.norm = RmsNorm(norm, config.rms_norm_eps)
        self.out = Linear(weights.matrix("linear_attn.out_proj.weight"), weights.dtype)
        self.qk_floor = torch.tensor(1e-6, device=self.rate.device)
        # what kernels/gated_delta/cpu.py reads beside the state's buffers
        self.constants: tuple[Any, ...] = ()
        if self.rate.device.type == "cpu":
            tensors = (taps, self.rate, self.dt_bias, norm)
            eps = np.float32(config.rms_norm_eps)
            self.constants = (*(tensor.numpy() for tensor in tensors), eps)
        # q is also scaled by Dk^-1/2: [q|k, 1, 1]
        self.qk_gain = torch.tensor([self.key**-0.5, 1.0], device=self.rate.device)[:, None, None]

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [T, D] -> conv input [T, C], output gate z [T, Hv * Dv], gate inputs [b | a]."""
        return tuple(torch.split(self.projections(x), self.sizes, -1))

    def _features(self, shifted: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Convolution inputs, W views [T, C] -> qk [T, 2, Hk, 1, Dk] and what normalises it
        [T, 2, Hk, 1, 1], v [T, Hv, 1, Dv]; f32."""
        qk, v = torch.split(causal_conv(shifted, self.conv, dtype).float(), self.qkv_sizes, -1)
        qk = qk.reshape(-1, 2, self.key_heads, self.key)
        r = (qk * qk).sum(-1, keepdim=True).add_(self.qk_floor).rsqrt_().mul_(self.qk_gain)
        return qk.unsqueeze(3), r.unsqueeze(3), v.reshape(-1, self.value_heads, 1, self.value)

    def _gates(self, ba: Tensor) -> tuple[Tensor, Tensor]:
        """[b | a] [T, 2 Hv] -> log decay g and strength beta [T, Hv] f32."""
        b, a = ba[:, : self.value_heads], ba[:, self.value_heads :]
        g = functional.softplus(a.float() + self.dt_bias).mul_(self.rate)
        return g, b.sigmoid().float()

    def _output(self, o: Tensor, z: Tensor) -> Tensor:
        """o [T, Hv, Dv] f32: norm per head, times silu(z), projected."""
        normed = self.norm(o.to(z.dtype)).reshape(z.shape)
        return self.out((normed.float() * functional.silu(z.float())).to(z.dtype))

    def absorb(self, x: Tensor, state: State, span: Span) -> Tensor:
        """Prefill: T tokens into the state for good."""
        mixed, z, ba = self._project(x)
        history = state.conv[self.slot, : state.taps]
        window = torch.cat([history, mixed])
        history.copy_(window[span.count :])
        qk, r, v = self._features(shifts(window, state.taps + 1), x.dtype)
        group = self.value_heads // self.key_heads
        qk = (qk * r).expand(-1, -1, -1, group, -1).reshape(-1, 2, self.value_heads, self.key)
        g, beta = self._gates(ba)
        q, k = qk.unbind(1)
        o = gated_delta.chunked(q, k, v.squeeze(2), g, beta, state.recurrent[self.slot], span.start)
        return self._output(o, z)

    def verify(self, x: Tensor, state: State, span: Span) -> Tensor:
        """R rows: the first lands in the state, the others run on a scratch copy of it, and
        `State.settle` folds the accepted ones in."""
        if state.compiled:
            y = np.empty((span.count, self.value_heads * self.value), np.float32)
            conv, *others = state.compiled[self.slot]
            delta_rows(self.projections(x).numpy(), conv, *self.constants, *others, y)
            return self.out(torch.from_numpy(y))
        mixed, z, ba = self._project(x)
        rows = state.rows(self.slot, span.count)
        rows.conv_new.copy_(mixed)
        qk, r, v = self._features(rows.conv_shifted, x.dtype)
        group = self.value_heads // self.key_heads
        torch.mul(
            qk.expand(-1, -1, -1, group, -1),
            r,
            out=rows.qk.view(-1, 2, self.key_heads, group, self.key),
        )
        rows.gates.copy_(ba)
        g, beta = self._gates(state.gates)  # the whole tile, see ROW_TILE
        rows.decay.copy_(g.exp_()[: span.count, :, None, None])
        beta = beta[:, :, None, None]
        live = rows.recurrent
        for i, (q, k, decay, d, o) in enumerate(rows.steps):
            if i == 1:
                live = state.scratch.copy_(live)
            gated_delta.row(q, k, v[i], decay, beta[i], live, d, o)
        return self._output(rows.o, z)


class Layer:
    """x += mixer(norm(x)); x += mlp(norm(x))."""

    def __init__(
        self, config: ModelConfig, weights: Named, mixer: DeltaNet | FullAttention
    ) -> None:
        self.mixer = mixer
        self.mlp = Mlp(weights)
        eps = config.rms_norm_eps
        self.before = RmsNorm(weights.scale("input_layernorm.weight"), eps)
        self.after = RmsNorm(weights.scale("post_attention_layernorm.weight"), eps)

    def __call__(
        self, x: Tensor, state: State, span: Span, rotary: Rotary, first: int = 0
    ) -> Tensor:
        y = self.before(x)
        if isinstance(self.mixer, FullAttention):
            x = x + self.mixer(y, state, span, rotary, first)
        elif span.rows:
            x = x + self.mixer.verify(y, state, span)
        else:
            x = x + self.mixer.absorb(y, state, span)
        return x + self.mlp(self.after(x))


class Mtp:
    """The draft head: x = fc [norm(E[t_p]) ; norm(h_{p-1})] through one full-attention layer.

    Slot p is built from token p and the hidden state of position p - 1 and predicts token p + 1.
    """

    FIRST_SLOT = 1

    def __init__(self, config: ModelConfig, weights: Named) -> None:
        eps = config.rms_norm_eps
        self.fc = Linear(weights.matrix("mtp.fc.weight"))
        self.embedding_norm = RmsNorm(weights.scale("mtp.pre_fc_norm_embedding.weight"), eps)
        self.hidden_norm = RmsNorm(weights.scale("mtp.pre_fc_norm_hidden.weight"), eps)
        self.norm = RmsNorm(weights.scale("mtp.norm.weight"), eps)
        inner = weights.under("mtp.layers.0.")
        self.layer = Layer(config, inner, FullAttention(config, inner, config.full_layers))

    def __call__(
        self, embedded: Tensor, hidden: Tensor, state: State, span: Span, rotary: Rotary
    ) -> Tensor:
        """embedded, hidden [T, D] -> y [T, D], which the head turns into draft logits."""
        x = self.fc(torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1))
        return self.norm(self.layer(x, state, span, rotary, self.FIRST_SLOT))


class Qwen35:
    """The whole text model. Holds weights only; every call takes the `State` that it changes."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        device: torch.device,
        *,
        vocab: int,
        positions: int,
    ) -> None:
        """weights: the tensors of `tensor_shapes`, plain ones in model dtype, which is that of the
        embedding. vocab: ids that exist; rows of the head beyond it are padding and are left out.
        positions: the longest context."""
        self.config = config
        self.device = device
        embedding = weights.pop("model.embed_tokens.weight")
        assert isinstance(embedding, Tensor)
        self.embedding = embedding
        self.dtype = self.embedding.dtype
        named = Named(weights, self.dtype)
        self.rotary = Rotary(config.rotary_dim, config.rope_theta, positions, self.dtype, device)
        tied = config.tie_word_embeddings
        head = (self.embedding if tied else named["lm_head.weight"])[:vocab].clone()
        self.head = Linear(PlainWeight(head))
        self.norm = RmsNorm(named.scale("model.norm.weight"), config.rms_norm_eps)
        self.layers: list[Layer] = []
        linear_slot = full_slot = 0
        for i, kind in enumerate(config.layer_types):
            inner = named.under(f"model.layers.{i}.")
            mixer: DeltaNet | FullAttention
            if kind == LINEAR:
                mixer = DeltaNet(config, inner, linear_slot)
                linear_slot += 1
            else:
                mixer = FullAttention(config, inner, full_slot)
                full_slot += 1
            self.layers.append(Layer(config, inner, mixer))
        self.mtp = Mtp(config, named) if config.mtp_layers else None

    @property
    def step_bytes(self) -> int:
        """Weight bytes that a decode step without drafts must read; the embedding's few rows and
        the MTP head are not among them."""
        matrices = [self.head]
        for layer in self.layers:
            mixer = layer.mixer
            entry = mixer.qkvg if isinstance(mixer, FullAttention) else mixer.projections
            matrices += [entry, mixer.out, layer.mlp.gate_up, layer.mlp.down]
        return sum(matrix.step_bytes for matrix in matrices)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [T] int64 -> [T, D]."""
        return functional.embedding(tokens, self.embedding)

    def rows_span(self, start: int, count: int) -> Span:
        """A span for decode rows."""
        return Span(start, count, self.rotary.angles(start, count), rows=True)

    def absorb(self, state: State, tokens: Tensor, start: int) -> Tensor:
        """Prefill tokens [T] at `start`, MTP slots too; final-normed hidden states [T, D].

        `state.hidden[0]` must be the hidden state of position start - 1 when start > 0.
        """
        count = len(tokens)
        span = Span(start, count, self.rotary.angles(start, count), rows=False)
        embedded = x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, state, span, self.rotary)
        hidden = self.norm(x)
        if self.mtp is not None:
            skip = 1 if start == 0 else 0
            if count > skip:
                before = torch.cat([state.hidden[:1], hidden[:-1]])[skip:]
                angles = (span.angles[0][skip:], span.angles[1][skip:])
                slots = Span(start + skip, count - skip, angles, rows=False)
                self.mtp(embedded[skip:], before, state, slots, self.rotary)
        return hidden

    def verify(self, tokens: Tensor, state: State, start: int) -> Tensor:
        """Decode rows [R] at `start` on top of a settled state; hidden states [R, D]."""
        span = self.rows_span(start, len(tokens))
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, state, span, self.rotary)
        return self.norm(x)

    def draft(self, tokens: Tensor, hidden: Tensor, state: State, start: int) -> Tensor:
        """MTP rows for slots [start, start + R): tokens [R] there and the hidden states [R, D] of
        the positions before; y [R, D]."""
        assert self.mtp is not None
        span = self.rows_span(start, len(tokens))
        return self.mtp(self.embed(tokens), hidden, state, span, self.rotary)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, D] -> [R, vocab] f32."""
        return self.head(hidden).float()
