"""The engine computes what transformers computes, and drafts what MTP's formulas say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from capserve.engine.runtime import TorchEngine
from capserve.engine.seam import Sampling
from capserve.testing.tiny import SHAPES
from tests.engine.helpers import generate, tokens

transformers = pytest.importorskip("transformers")
TOLERANCE = 1e-4
"""Largest difference of a float32 logit, the same for every model."""


def reference(path: Path) -> torch.nn.Module:
    """transformers' own model; nested checkpoints are read through their text config."""
    config = transformers.AutoConfig.from_pretrained(path)
    config = getattr(config, "text_config", config)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        weights |= load_file(file)
    named = {k.replace("model.language_model.", "model."): v.float() for k, v in weights.items()}
    if config.tie_word_embeddings:
        named["lm_head.weight"] = named["model.embed_tokens.weight"]
    missing, unexpected = model.load_state_dict(named, strict=False)
    assert not missing
    assert all(name.startswith(("mtp.", "model.visual.")) for name in unexpected)
    return model.eval()


@pytest.fixture(params=["nano", *SHAPES])
def checkpoint(
    request: pytest.FixtureRequest, nano_dir: Path, tiny_dir: Callable[[str], Path]
) -> Path:
    return nano_dir if request.param == "nano" else tiny_dir(request.param)


@torch.inference_mode()
def test_logits_equal_transformers_over_prefill_and_decode(checkpoint: Path) -> None:
    engine = TorchEngine.load(checkpoint, max_model_len=1024, prefill_chunk=128)
    ids = tokens(400, engine.limits.vocab_size, seed=3)
    expected = reference(checkpoint)(torch.from_numpy(ids).long()[None]).logits[0]
    model, state = engine._model, engine._state
    got = []
    for start in range(0, 300, 128):  # prefill in chunks, then rows of changing counts
        hidden = model.absorb(
            state, torch.from_numpy(ids[start : min(start + 128, 300)]).long(), start
        )
        state.hidden[0] = hidden[-1]
        got.append(model.logits(hidden))
    start, count = 300, 1
    while start < 400:
        state.settle()
        rows = torch.from_numpy(ids[start : start + count]).long()
        got.append(model.logits(model.verify(rows, state, start)))
        state.accepted_rows = len(rows)
        start, count = start + len(rows), count % 9 + 1
    difference = (torch.cat(got) - expected).abs().max().item()
    print(f"{checkpoint.name}: max abs difference of logits {difference:.1e}")
    assert difference <= TOLERANCE


@torch.inference_mode()
def test_256_greedy_tokens_equal_transformers(checkpoint: Path) -> None:
    engine = TorchEngine.load(checkpoint, max_model_len=1024, prefill_chunk=128)
    ids = tokens(200, engine.limits.vocab_size, seed=5)
    drafts = min(3, engine.limits.max_drafts)
    engine.extend(ids)
    ours, _ = generate(engine, ids, 256, Sampling(drafts=drafts))
    model = reference(checkpoint)
    out = model.generate(
        torch.from_numpy(ids).long()[None],
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=256,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert ours == out[0, len(ids) :].tolist()


def plain_mtp(weights: dict[str, Tensor], ids: Tensor, hidden: Tensor, config: dict) -> Tensor:
    """MTP hidden states for slots 1.., written from the formulas alone: no buffers, no chunks.

    ids [T], hidden [T, D] (after the final norm). Row p - 1 is built from token p and hidden p - 1.
    """

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-6) * (1 + weights[name])

    heads, kv_heads, dim = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    )
    layer = "mtp.layers.0."
    embedded = weights["model.embed_tokens.weight"][ids[1:]]
    pair = [
        norm(embedded, "mtp.pre_fc_norm_embedding.weight"),
        norm(hidden[:-1], "mtp.pre_fc_norm_hidden.weight"),
    ]
    x = torch.cat(pair, -1) @ weights["mtp.fc.weight"].T
    y = norm(x, layer + "input_layernorm.weight")
    count = len(y)
    q_gate = (y @ weights[layer + "self_attn.q_proj.weight"].T).view(count, heads, 2 * dim)
    q, gate = q_gate[..., :dim], q_gate[..., dim:]
    k = (y @ weights[layer + "self_attn.k_proj.weight"].T).view(count, kv_heads, dim)
    v = (y @ weights[layer + "self_attn.v_proj.weight"].T).view(count, kv_heads, dim)
    q, k = norm(q, layer + "self_attn.q_norm.weight"), norm(k, layer + "self_attn.k_norm.weight")
    rotary = int(dim * config["rope_parameters"]["partial_rotary_factor"])
    inv = config["rope_parameters"]["rope_theta"] ** (-torch.arange(0, rotary, 2) / rotary)
    angle = torch.arange(1, count + 1)[:, None] * inv
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def rotate(t: Tensor) -> Tensor:
        a, b, rest = t[..., : rotary // 2], t[..., rotary // 2 : rotary], t[..., rotary:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)

    q, k = rotate(q), rotate(k)
    k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
    scores = scores.masked_fill(~torch.ones(count, count, dtype=torch.bool).tril(), -torch.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v) * torch.sigmoid(gate)
    x = x + mixed.reshape(count, -1) @ weights[layer + "self_attn.o_proj.weight"].T
    y = norm(x, layer + "post_attention_layernorm.weight")
    inner = functional.silu(y @ weights[layer + "mlp.gate_proj.weight"].T)
    inner = inner * (y @ weights[layer + "mlp.up_proj.weight"].T)
    return norm(x + inner @ weights[layer + "mlp.down_proj.weight"].T, "mtp.norm.weight")


@torch.inference_mode()
def test_mtp_logits_equal_a_plain_implementation(nano_dir: Path) -> None:
    transformers_config = transformers.AutoConfig.from_pretrained(nano_dir).to_dict()
    weights: dict[str, Tensor] = {}
    for file in nano_dir.glob("*.safetensors"):
        weights |= {name: tensor.float() for name, tensor in load_file(file).items()}
    engine = TorchEngine.load(nano_dir, max_model_len=1024, prefill_chunk=128)
    ids = tokens(301, engine.limits.vocab_size, seed=9)
    long = torch.from_numpy(ids).long()
    hidden = reference(nano_dir).model(long[None]).last_hidden_state[0]
    y = plain_mtp(weights, long, hidden, transformers_config)
    expected = y @ weights["model.embed_tokens.weight"].T
    model, state = engine._model, engine._state
    got = []
    for end in (200, 290, 300):  # MTP slots come from prefill, then from rows
        engine.reset()
        engine.extend(ids[:end])
        draft = model.draft(long[end : end + 1], state.hidden[:1], state, end)
        got.append((model.logits(draft)[0] - expected[end - 1]).abs().max().item())
    print(f"max abs difference of MTP logits {max(got):.1e}")
    assert max(got) <= TOLERANCE


def test_drafts_of_the_trained_head_are_mostly_accepted(nano: TorchEngine) -> None:
    nano.reset()
    rng = np.random.default_rng(0)
    ids = np.concatenate([rng.integers(0, 8000, 40, dtype=np.int32)])
    nano.extend(ids)
    _, chunks = generate(nano, ids, 200, Sampling(drafts=3))
    drafted = sum(chunk.drafted for chunk in chunks)
    accepted = sum(chunk.accepted for chunk in chunks)
    assert accepted / drafted > 0.5
