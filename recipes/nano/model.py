"""The network for training: what the engine runs, written for gradients.

Same parameters under the same names as a Qwen3.5 text checkpoint, MTP head included, so an export
is a plain dump. Plain torch in float32 or autocast; documents share a row and don't see each other.

Gated delta rule (Yang et al., 2024, "Gated Delta Networks"), state S [K, V], decay a = exp(g):
    S <- a S;  d = beta (v - S' k);  S <- S + k d';  o = S' q
Here in chunks of 64: inside a chunk the d of all rows solve one triangular system.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64
FORGET = -30.0
"""Log decay at a document's first token: exp(-30) is zero beside anything float32 can hold here,
and unlike -inf it keeps differences of cumulative sums finite."""


@dataclass(frozen=True)
class Batch:
    """Where each token stands. `start` [B, T] as in pack.Rows."""

    ids: Tensor  # [B, T] int64
    start: Tensor  # [B, T] int64

    @property
    def positions(self) -> Tensor:  # [B, T], from 0 in each document
        return torch.arange(self.ids.shape[1], device=self.ids.device) - self.start

    @property
    def mask(self) -> Tensor:  # [B, 1, T, T], True where a query may look
        rows = torch.arange(self.ids.shape[1], device=self.ids.device)
        causal = rows[:, None] >= rows[None, :]
        return (causal & (self.start[:, :, None] == self.start[:, None, :]))[:, None]


class Norm(nn.Module):
    """RMS norm with the weight stored as an offset from one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return _rms(x.float()).mul(1 + self.weight).to(x.dtype)


class GatedNorm(nn.Module):
    """RMS norm with a plain weight, times silu of a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return _rms(x.float()) * self.weight * F.silu(gate.float())


def _rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """o [B, T, H, V] of q, k [B, T, H, K], v [B, T, H, V] and log decay g, beta [B, T, H].

    float32 throughout, under autocast too: the state sums thousands of rounded writes.
    """
    with torch.autocast(q.device.type, enabled=False):
        return _delta_rule(q, k, v, g, beta)


def _delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    batch, length, heads, width = v.shape
    pad = -length % CHUNK

    def chunks(x: Tensor) -> Tensor:  # [B, T, H, *] -> [n, B, H, 64, *]
        x = F.pad(x.float(), (0, 0, 0, 0, 0, pad)).transpose(1, 2)
        return x.unflatten(2, (-1, CHUNK)).movedim(2, 0)

    q = F.normalize(q.float(), dim=-1, eps=1e-6) * q.shape[-1] ** -0.5
    k = F.normalize(k.float(), dim=-1, eps=1e-6)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    eye = torch.eye(CHUNK, device=q.device)
    state = q.new_zeros(batch, heads, k.shape[-1], width)
    outputs = []
    parts = (chunks(x) for x in (q, k, v, g[..., None], beta[..., None]))
    for qc, kc, vc, gc, bc in zip(*parts, strict=True):
        total = gc.cumsum(-2)  # [B, H, 64, 1], log decay since the chunk began
        between = (total - total.mT).masked_fill(~lower, -math.inf).exp()
        known = vc - total.exp() * (kc @ state)
        system = eye + (bc * (kc @ kc.mT) * between).tril(-1)
        d = torch.linalg.solve_triangular(system, bc * known, upper=False, unitriangular=True)
        outputs.append(total.exp() * (qc @ state) + ((qc @ kc.mT) * between) @ d)
        left = total[:, :, -1:]  # what of each row's write is left at the chunk's end
        state = left.exp() * state + (kc * (left - total).exp()).mT @ d
    return torch.cat(outputs, 2)[:, :, :length].transpose(1, 2)


class DeltaNet(nn.Module):
    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, self.taps = c["hidden_size"], c["linear_conv_kernel_dim"]
        self.key_heads, self.value_heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        self.key_dim = self.key_heads * c["linear_key_head_dim"]
        self.value_dim = self.value_heads * c["linear_value_head_dim"]
        channels = 2 * self.key_dim + self.value_dim
        self.conv1d = nn.Conv1d(channels, channels, self.taps, groups=channels, bias=False)
        self.in_proj_qkv = nn.Linear(hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, self.value_dim, bias=False)
        self.in_proj_b = nn.Linear(hidden, self.value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.value_heads, bias=False)
        # Time constants from one to a thousand tokens, as in Mamba 2.
        step = torch.exp(torch.empty(self.value_heads).uniform_(math.log(1e-3), math.log(0.1)))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.A_log = nn.Parameter(torch.empty(self.value_heads).uniform_(1, 16).log())
        self.norm = GatedNorm(c["linear_value_head_dim"])
        self.out_proj = nn.Linear(self.value_dim, hidden, bias=False)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        positions = batch.positions
        mixed = F.silu(self._convolve(self.in_proj_qkv(x), positions))
        q, k, v = mixed.split([self.key_dim, self.key_dim, self.value_dim], -1)
        q, k = (part.unflatten(-1, (self.key_heads, -1)) for part in (q, k))
        repeat = self.value_heads // self.key_heads
        q, k = (part.repeat_interleave(repeat, 2) for part in (q, k))
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        g = torch.where((positions == 0)[..., None], FORGET, g)
        beta = self.in_proj_b(x).float().sigmoid()
        o = delta_rule(q, k, v.unflatten(-1, (self.value_heads, -1)), g, beta)
        gate = self.in_proj_z(x).unflatten(-1, (self.value_heads, -1))
        return self.out_proj(self.norm(o, gate).flatten(2).to(x.dtype))

    def _convolve(self, x: Tensor, positions: Tensor) -> Tensor:
        """Causal taps that do not reach across a document's start."""
        weight = self.conv1d.weight[:, 0].to(x.dtype)  # [C, taps], the last one is the token's own
        out = x * weight[:, -1]
        for back in range(1, self.taps):
            tap = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
            out = out + tap * (positions >= back)[..., None] * weight[:, -1 - back]
        return out


class Attention(nn.Module):
    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, self.dim = c["hidden_size"], c["head_dim"]
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.q_proj = nn.Linear(hidden, 2 * self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)
        self.q_norm, self.k_norm = Norm(self.dim), Norm(self.dim)
        rotary = int(self.dim * c["partial_rotary_factor"])
        theta = c["rope_parameters"]["rope_theta"]
        self.register_buffer(
            "frequency", theta ** (-torch.arange(0, rotary, 2) / rotary), persistent=False
        )

    def forward(self, x: Tensor, batch: Batch, chain: MtpChain | None = None) -> Tensor:
        """`chain` replaces the keys: see MtpChain."""
        depth = 0 if chain is None else chain.depth
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, -1)).chunk(2, -1)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, -1)))
        angle = (batch.positions + depth)[..., None, None] * self.frequency
        q, k = _rotate(self.q_norm(q), angle), _rotate(k, angle)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, -1))
        repeat = self.heads // self.kv_heads
        q, k, v = (
            y.transpose(1, 2) for y in (q, *(y.repeat_interleave(repeat, 2) for y in (k, v)))
        )
        if chain is None:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=batch.mask)
        else:
            o = chain.attend(q, k, v, batch.mask)
        return self.o_proj(o.transpose(1, 2).flatten(2) * gate.flatten(2).sigmoid())


def _rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate the leading dims of x [B, T, H, D]: halves, not neighbours, form the pairs."""
    half = angle.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)


class MtpChain:
    """Keys for drafting deeper than one token.

    The server drafts token after token: at depth k a slot sees the depth-1 slots up to its own,
    which came from true tokens, and its own chain of drafts. So the first pass's keys are kept, and
    each later pass adds one key per query.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._slots: tuple[Tensor, Tensor] | None = None
        self._drafts: list[tuple[Tensor, Tensor]] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """q, k, v [B, H, T, D] of this pass."""
        if self._slots is None:
            self._slots = (k, v)
        else:
            self._drafts.append((k, v))
        self.depth += 1
        keys, values = self._slots
        scale = q.shape[-1] ** -0.5
        scores = (q @ keys.mT).float() * scale
        scores = scores.masked_fill(~mask, -math.inf)
        own = [(q * key).sum(-1, keepdim=True).float() * scale for key, _ in self._drafts]
        weights = torch.cat([scores, *own], -1).softmax(-1).to(v.dtype)
        out = weights[..., : keys.shape[2]] @ values
        for i, (_, value) in enumerate(self._drafts):
            at = keys.shape[2] + i
            out = out + weights[..., at : at + 1] * value
        return out


class Mlp(nn.Module):
    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, inner = c["hidden_size"], c["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: Mapping[str, Any], kind: str) -> None:
        super().__init__()
        if kind == "linear_attention":
            self.linear_attn = DeltaNet(c)
        else:
            self.self_attn = Attention(c)
        self.mlp = Mlp(c)
        self.input_layernorm = Norm(c["hidden_size"])
        self.post_attention_layernorm = Norm(c["hidden_size"])
        self.kind = kind

    def forward(self, x: Tensor, batch: Batch, chain: MtpChain | None = None) -> Tensor:
        y = self.input_layernorm(x)
        if self.kind == "linear_attention":
            x = x + self.linear_attn(y, batch)
        else:
            x = x + self.self_attn(y, batch, chain)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, kind) for kind in c["layer_types"])
        self.norm = Norm(c["hidden_size"])

    def forward(self, batch: Batch) -> Tensor:
        x = self.embed_tokens(batch.ids)
        for layer in self.layers:
            x = layer(x, batch)
        return self.norm(x)


class MtpHead(nn.Module):
    """Slot t reads the hidden state at t and the embedding of token t + 1, and predicts t + 2."""

    def __init__(self, c: Mapping[str, Any]) -> None:
        super().__init__()
        hidden = c["hidden_size"]
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = Norm(hidden)
        self.pre_fc_norm_hidden = Norm(hidden)
        self.layers = nn.ModuleList([Layer(c, "full_attention")])
        self.norm = Norm(hidden)

    def forward(self, hidden: Tensor, embedded: Tensor, batch: Batch, chain: MtpChain) -> Tensor:
        pair = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        return self.norm(self.layers[0](self.fc(torch.cat(pair, -1)), batch, chain))


class Nano(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, self.mtp = Trunk(config), MtpHead(config)
        depth = len(config["layer_types"])
        for name, weight in self.named_parameters():
            if name.endswith("conv1d.weight"):
                nn.init.uniform_(weight, -0.5, 0.5)
            elif weight.dim() == 2:
                nn.init.normal_(
                    weight, std=0.02 if "embed" in name else 0.5 * weight.shape[1] ** -0.5
                )
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                    weight.data /= math.sqrt(2 * depth)  # residual branches start small

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.model.embed_tokens.weight.to(hidden.dtype).T

    def forward(self, batch: Batch, mtp_depth: int) -> tuple[Tensor, list[Tensor]]:
        """Hidden states [B, T, D] of the trunk, and of the MTP head at depth 1 to `mtp_depth`.

        The trunk's at t predicts token t + 1, the head's at depth k token t + 1 + k.
        """
        trunk = hidden = self.model(batch)
        chain, deeper = MtpChain(), []
        for depth in range(1, mtp_depth + 1):
            embedded = self.model.embed_tokens(batch.ids.roll(-depth, 1))
            hidden = self.mtp(hidden, embedded, batch, chain)
            deeper.append(hidden)
        return trunk, deeper
