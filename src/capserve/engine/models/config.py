"""Which network does a checkpoint's config.json describe?

Accepts the text fields nested under `text_config` (all official folders) or flat at the top level
(text-only re-saves). Whatever this engine can't run is refused here, by the field's name, before a
byte of weights is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from capserve.errors import CheckpointError

LINEAR = "linear_attention"
FULL = "full_attention"


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the Qwen3.5 family's text model. Names follow the checkpoint's own fields."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    """Leading dims of each head that rotate: partial_rotary_factor * head_dim, even."""
    rope_theta: float
    rms_norm_eps: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    tie_word_embeddings: bool
    max_position_embeddings: int
    mtp_layers: int
    fp8: bool = False
    """Matrices are FP8 with a scale for each square of 128, as the config claims."""

    @property
    def linear_layers(self) -> int:
        return sum(kind == LINEAR for kind in self.layer_types)

    @property
    def full_layers(self) -> int:
        return sum(kind == FULL for kind in self.layer_types)

    @property
    def key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: q, k and v of the gated delta net."""
        return 2 * self.key_dim + self.value_dim

    def without_mtp(self) -> ModelConfig:
        return replace(self, mtp_layers=0)

    @classmethod
    def from_dir(cls, path: Path) -> ModelConfig:
        """Reads `path`/config.json. Raises CheckpointError naming the file or the field."""
        file = path / "config.json"
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no config.json") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: not readable as JSON: {error}") from None
        if not isinstance(raw, dict):
            raise CheckpointError(f"{file}: holds a {type(raw).__name__}, not an object")
        return cls.from_dict(raw, name=path.name)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], name: str) -> ModelConfig:
        """From a parsed config.json. Raises CheckpointError naming the field and its value."""
        text = raw.get("text_config") or raw
        read = _Fields(text)
        kind = str(text.get("model_type", ""))
        if kind not in ("qwen3_5_text", "qwen3_5"):
            raise CheckpointError(
                f"config.json: model_type {kind!r}; this engine runs qwen3_5_text"
            )
        fp8 = _is_block_fp8(raw.get("quantization_config") or text.get("quantization_config"))
        if text.get("hidden_act", "silu") != "silu":
            raise CheckpointError(
                f"config.json: hidden_act {text['hidden_act']!r}, expected 'silu'"
            )
        if text.get("attention_bias", False):
            raise CheckpointError("config.json: attention_bias true; the family has none")
        if not text.get("attn_output_gate", True):
            raise CheckpointError("config.json: attn_output_gate false; the family has the gate")
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in ("default", "mrope"):
            raise CheckpointError(f"config.json: rope_type {rope_type!r}, expected 'default'")
        layers = read.integer("num_hidden_layers")
        types = text.get("layer_types")
        if types is None:
            interval = int(text.get("full_attention_interval", 4))
            types = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers)]
        if len(types) != layers or not set(types) <= {LINEAR, FULL}:
            raise CheckpointError(
                f"config.json: layer_types has {len(types)} entries of {sorted(set(types))} "
                f"for num_hidden_layers {layers}"
            )
        head_dim = read.integer("head_dim")
        factor = float(rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25)))
        rotary_dim = int(head_dim * factor)
        tied = raw.get("tie_word_embeddings")
        config = cls(
            name=name,
            vocab_size=read.integer("vocab_size"),
            hidden_size=read.integer("hidden_size"),
            intermediate_size=read.integer("intermediate_size"),
            layer_types=tuple(types),
            num_attention_heads=read.integer("num_attention_heads"),
            num_key_value_heads=read.integer("num_key_value_heads"),
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            rope_theta=float(rope.get("rope_theta", text.get("rope_theta", 1e7))),
            rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            linear_num_key_heads=read.integer("linear_num_key_heads"),
            linear_num_value_heads=read.integer("linear_num_value_heads"),
            linear_key_head_dim=read.integer("linear_key_head_dim"),
            linear_value_head_dim=read.integer("linear_value_head_dim"),
            linear_conv_kernel_dim=read.integer("linear_conv_kernel_dim"),
            tie_word_embeddings=bool(
                tied if tied is not None else text.get("tie_word_embeddings", False)
            ),
            max_position_embeddings=read.integer("max_position_embeddings"),
            mtp_layers=int(text.get("mtp_num_hidden_layers", 0) or 0),
            fp8=fp8,
        )
        _divides("num_key_value_heads", config.num_key_value_heads, "num_attention_heads",
                 config.num_attention_heads)  # fmt: skip
        _divides("linear_num_key_heads", config.linear_num_key_heads, "linear_num_value_heads",
                 config.linear_num_value_heads)  # fmt: skip
        if rotary_dim % 2 or rotary_dim < 2:
            raise CheckpointError(
                f"config.json: head_dim {head_dim} x partial_rotary_factor {factor} gives "
                f"{rotary_dim} rotary dims; an even number of at least 2 is needed"
            )
        if config.mtp_layers > 1:
            raise CheckpointError(
                f"config.json: mtp_num_hidden_layers {config.mtp_layers}, expected 0 or 1"
            )
        return config


def _is_block_fp8(quantization: Mapping[str, Any] | None) -> bool:
    """Raises CheckpointError for a quantization that does not load, by its method."""
    if not quantization:
        return False
    method = quantization.get("quant_method")
    if method != "fp8":
        raise CheckpointError(
            f"config.json: quantization_config.quant_method {method!r}, expected 'fp8'"
        )
    block = quantization.get("weight_block_size")
    if block != [128, 128]:
        raise CheckpointError(
            f"config.json: quantization_config.weight_block_size {block!r}, expected [128, 128]"
        )
    return True


class _Fields:
    def __init__(self, text: Mapping[str, Any]) -> None:
        self._text = text

    def integer(self, field: str) -> int:
        value = self._text.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            extra = ""
            if field == "intermediate_size" and "num_experts" in self._text:
                extra = f" (num_experts {self._text['num_experts']}: experts do not load yet)"
            raise CheckpointError(
                f"config.json: {field} is {value!r}, expected an integer >= 1{extra}"
            )
        return value


def _divides(small_name: str, small: int, big_name: str, big: int) -> None:
    if big % small:
        raise CheckpointError(
            f"config.json: {big_name} {big} is no multiple of {small_name} {small}"
        )
