"""Tiny random checkpoints of the family, written in the published layouts.

Each shape exercises what nano does not: other head ratios, an untied head, the nested config with
the multimodal prefix and vision tensors beside the text, shards, no MTP head.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from capserve.engine.models.assembly import quantisable
from capserve.engine.models.config import ModelConfig
from capserve.engine.models.qwen3_5 import tensor_shapes
from capserve.engine.weights import quantised


@dataclass(frozen=True)
class TinyShape:
    """One way to be a member of the family. `config` are the text fields of config.json."""

    name: str
    config: dict[str, Any]
    nested: bool = False
    """Official layout: `text_config`, prefix `model.language_model.`, vision tensors."""
    shards: int = 1
    drop_mtp: bool = False
    gates_in_float32: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


def _config(**changes: Any) -> dict[str, Any]:
    base = {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "full_attention_interval": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "max_position_embeddings": 4096,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "mtp_num_hidden_layers": 1,
        "dtype": "float32",
    }
    return base | changes


SHAPES = {
    shape.name: shape
    for shape in (
        TinyShape("flat-tied", _config()),
        TinyShape(
            "nested-untied-sharded",
            _config(tie_word_embeddings=False, linear_num_value_heads=6, hidden_size=80),
            nested=True,
            shards=3,
            gates_in_float32=True,
        ),
        TinyShape(
            "gqa6-equal-heads",
            _config(
                num_attention_heads=6,
                num_key_value_heads=1,
                linear_num_value_heads=2,
                linear_key_head_dim=32,
                num_hidden_layers=8,
            ),
        ),
        TinyShape(
            "two-layers",
            _config(
                vocab_size=96,
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=2,
                full_attention_interval=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=16,
                linear_num_key_heads=1,
                linear_num_value_heads=2,
            ),
        ),
        TinyShape("no-mtp", _config(linear_value_head_dim=24), drop_mtp=True),
    )
}


def write_checkpoint(
    path: Path, shape: TinyShape, seed: int = 0, form: Literal["plain", "fp8"] = "plain"
) -> Path:
    """Write a random checkpoint of `shape` into `path` (made if absent); returns `path`.

    form: `fp8` as the official FP8 folders are, with bfloat16 scales for squares of 128.

    Weights are scaled so that logits have a spread of about 1 and that the network is well
    conditioned: with residual branches four times as strong, transformers' own float32 logits are
    1.5e-4 away from its float64 ones; so they are 3e-5.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = ModelConfig.from_dict(shape.config, shape.name)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, size in tensor_shapes(config).items():
        if shape.drop_mtp and name.startswith("mtp."):
            continue
        noise = torch.randn(size, generator=generator)
        if name.endswith("A_log"):
            tensor = torch.rand(size, generator=generator) * 2 - 1
        elif name.endswith("dt_bias"):
            tensor = noise - 2
        elif name.endswith("linear_attn.norm.weight"):
            tensor = 1 + 0.1 * noise
        elif len(size) == 1:
            tensor = 0.1 * noise
        elif name.endswith("embed_tokens.weight"):
            tensor = noise / config.hidden_size**0.5
        elif name.endswith("conv1d.weight"):
            tensor = noise * 0.5
        elif name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            tensor = noise / size[-1] ** 0.5 / 4
        else:
            tensor = noise / size[-1] ** 0.5
        keep = shape.gates_in_float32 and name.endswith(("A_log", "linear_attn.norm.weight"))
        stored = tensor if keep or not shape.gates_in_float32 else tensor.bfloat16()
        on_disk = _on_disk(name, nested=shape.nested)
        if form == "fp8" and quantisable(name):
            narrow = quantised(stored.float())
            tensors[on_disk] = narrow.weight
            tensors[f"{on_disk}_scale_inv"] = narrow.scale.bfloat16()
        else:
            tensors[on_disk] = stored.contiguous()
    if shape.nested:
        tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(4, 4)
        top = {
            "model_type": "qwen3_5",
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "text_config": {k: v for k, v in shape.config.items() if k != "architectures"},
            "tie_word_embeddings": shape.config["tie_word_embeddings"],
        }
    else:
        top = dict(shape.config)
    if form == "fp8":
        top["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    (path / "config.json").write_text(json.dumps(top | shape.extra, indent=1), encoding="utf-8")
    _save(path, tensors, shape.shards)
    return path


def _on_disk(name: str, *, nested: bool) -> str:
    return (
        name.replace("model.", "model.language_model.", 1)
        if nested and name.startswith("model.")
        else name
    )


def _save(path: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return
    names = sorted(tensors)
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(names)}
    for file in files:
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, path / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
