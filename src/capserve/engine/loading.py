"""How does a Hugging Face directory become the tensors that the model needs?

Names and shapes are checked against the model's own table before anything is read. Accepted: one or
more safetensors files, prefix `model.` or `model.language_model.`, tied or untied head, matrices in
float or in FP8 with a scale for each square of 128 (a tensor's own companions decide, not what the
config claims). Vision tensors are skipped. Anything missing, misshapen or unknown is refused by the
tensor's name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from capserve.engine.models.assembly import quantisable
from capserve.engine.models.config import ModelConfig
from capserve.engine.models.qwen3_5 import tensor_shapes
from capserve.engine.weights import BLOCK, BlockFp8Weight, Weight
from capserve.errors import CheckpointError

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

_CPU = torch.device("cpu")

_SKIPPED = ("model.visual.", "visual.", "vision_tower.", "model.vision_tower.")


def canonical_name(name: str) -> str | None:
    """The text model's own name of a tensor on disk; None for what is skipped."""
    if name.startswith(_SKIPPED) or name.endswith("rotary_emb.inv_freq"):
        return None
    return name.replace("model.language_model.", "model.", 1)


def index_tensors(path: Path) -> dict[str, Path]:
    """Every tensor name in the directory and the file that holds it.

    Raises CheckpointError when there is no safetensors file or the index names a missing one.
    """
    index = path / "model.safetensors.index.json"
    if index.exists():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{index}: not a safetensors index: {error}") from None
        files = {file: path / file for file in sorted(set(weight_map.values()))}
        for name, file in weight_map.items():
            if not files[file].exists():
                raise CheckpointError(f"{path}: shard {file} is missing (it holds {name})")
    else:
        files = {file.name: file for file in sorted(path.glob("*.safetensors"))}
        if not files:
            raise CheckpointError(f"{path}: no .safetensors file")
    found: dict[str, Path] = {}
    for file in files.values():
        with _open(file) as handle:
            found |= dict.fromkeys(handle.keys(), file)
    return found


def load_weights(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    progress: Progress | None = None,
    device: torch.device = _CPU,
) -> tuple[ModelConfig, dict[str, Tensor | Weight]]:
    """The tensors of `tensor_shapes(config)` on `device`: plain matrices in `dtype`, FP8 ones in
    their form, vectors as they are stored.

    An MTP head that the config promises but no tensor belongs to is left out (repacks often lose
    it): the config returned says so. Raises CheckpointError naming the tensor and both shapes.
    """
    on_disk: dict[str, tuple[str, Path]] = {}
    for raw, file in index_tensors(path).items():
        name = canonical_name(raw)
        if name is not None:
            on_disk[name] = (raw, file)
    if config.mtp_layers and not any(name.startswith("mtp.") for name in on_disk):
        config = config.without_mtp()
    expected = tensor_shapes(config)
    missing = sorted(expected.keys() - on_disk.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{path}: tensor {missing[0]} {expected[missing[0]]} is missing{more}"
        )
    scales = {n: _scale_of(n) for n in expected if quantisable(n) and _scale_of(n) in on_disk}
    unknown = sorted(on_disk.keys() - expected.keys() - set(scales.values()))
    if config.tie_word_embeddings and "lm_head.weight" in unknown:
        unknown.remove("lm_head.weight")  # some re-saves write the tied head out
    if not config.mtp_layers:
        unknown = [name for name in unknown if not name.startswith("mtp.")]
    if unknown:
        raise CheckpointError(
            f"{path}: tensor {unknown[0]} does not belong to this model "
            f"({len(unknown)} unknown in all): another form or architecture?"
        )
    return config, _read(expected, on_disk, scales, dtype, progress, device)


def _scale_of(name: str) -> str:
    """Where the scales of an FP8 matrix stand."""
    return f"{name}_scale_inv"


def _read(
    expected: dict[str, tuple[int, ...]],
    on_disk: dict[str, tuple[str, Path]],
    scales: dict[str, str],
    dtype: torch.dtype,
    progress: Progress | None,
    device: torch.device,
) -> dict[str, Tensor | Weight]:
    by_file: dict[Path, list[str]] = {}
    for name in expected:
        by_file.setdefault(on_disk[name][1], []).append(name)
    total = sum(file.stat().st_size for file in by_file)
    done = 0
    tensors: dict[str, Tensor | Weight] = {}
    found: dict[str, Tensor] = {}
    for name, companion in scales.items():
        rows, columns = expected[name]
        expected = expected | {companion: (-(-rows // BLOCK), -(-columns // BLOCK))}
        by_file.setdefault(on_disk[companion][1], []).append(companion)
    for file, names in by_file.items():
        with _open(file) as handle:
            for name in names:
                raw = on_disk[name][0]
                shape = tuple(handle.get_slice(raw).get_shape())
                if shape != expected[name]:
                    raise CheckpointError(
                        f"{file}: tensor {raw} has shape {shape}, expected {expected[name]}"
                    )
                tensor = handle.get_tensor(raw)
                narrow = tensor.dtype is torch.float8_e4m3fn
                if not tensor.is_floating_point() or narrow != (name in scales):
                    raise CheckpointError(f"{file}: tensor {raw} is {_described(tensor)}")
                as_stored = tensor.dim() == 1 or name in scales or name in scales.values()
                found[name] = tensor.to(device, None if as_stored else dtype)
                done += tensor.numel() * tensor.element_size()
                if progress is not None:
                    progress(min(done, total), total)
    if progress is not None:
        progress(total, total)
    for name in list(found):
        if name in scales:
            weight, scale = found[name], found[scales[name]]
            tensors[name] = BlockFp8Weight(weight.contiguous(), scale.float().contiguous())
        elif name not in scales.values():
            tensors[name] = found[name]
    return tensors


def _described(tensor: Tensor) -> str:
    if tensor.dtype is torch.float8_e4m3fn:
        return f"{tensor.dtype} without a weight_scale_inv beside it"
    if not tensor.is_floating_point():
        return f"{tensor.dtype}, not a float"
    return f"{tensor.dtype} with a weight_scale_inv beside it, expected float8_e4m3fn"


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a readable safetensors file: {error}") from None
