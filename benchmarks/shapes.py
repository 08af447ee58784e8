"""Which public sizes of the family are benchmarks made in, without a download?

The values of their config.json; weights are drawn at random on the card, at a scale that keeps
activations finite. Random weights say nothing about acceptance or text, and everything about time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from capserve.engine.models.config import ModelConfig
from capserve.engine.models.qwen3_5 import tensor_shapes

_FAMILY: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 248_320,
    "head_dim": 256,
    "full_attention_interval": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attn_output_gate": True,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262_144,
    "mtp_num_hidden_layers": 1,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "dtype": "bfloat16",
}

_SIZES: dict[str, dict[str, Any]] = {
    "27B": {
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 48,
        "tie_word_embeddings": False,
    },
    "9B": {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
        "tie_word_embeddings": False,
    },
}

REAL_IDS = 248_077
"""Of the vocabulary's 248,320 rows; the others are padding."""


def names() -> list[str]:
    return list(_SIZES)


def config_json(size: str) -> dict[str, Any]:
    """The text part of that size's config.json."""
    return _FAMILY | _SIZES[size]


def config_of(size: str) -> ModelConfig:
    return ModelConfig.from_dict(config_json(size), name=f"{size} shape, random weights")


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Every tensor of the model: matrices ~ N(0, 1 / inputs), norms near their rest."""
    generator = torch.Generator(device).manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for name, shape in tensor_shapes(config).items():
        fresh = torch.empty(shape, dtype=dtype, device=device)
        if name.endswith("A_log"):
            fresh.uniform_(-2.0, 2.0, generator=generator)
        elif name.endswith("linear_attn.norm.weight"):
            fresh.normal_(1.0, 0.1, generator=generator)
        elif len(shape) == 1:
            fresh.normal_(0.0, 0.1, generator=generator)
        else:
            fresh.normal_(0.0, shape[-1] ** -0.5, generator=generator)
        tensors[name] = fresh
    return tensors
