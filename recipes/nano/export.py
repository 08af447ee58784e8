"""How does a trained network become a directory that a server loads?

The family's own layout: bf16 safetensors in shards with an index, config, generation config,
tokenizer and template. Parameters already have their final names.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from recipes.nano.dialogs import NANO
from recipes.nano.model import Nano

SHARDS = 2
"""nano would fit one file; two make every test of loading see an index."""


def export(net: Nano, config: dict[str, Any], tokenizer: Path, out: Path) -> None:
    """Write the checkpoint of `net` to `out`; `tokenizer` is the directory of its tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous()
        for name, weight in net.state_dict().items()
    }
    files = {}
    for i, part in enumerate(_even_parts(tensors)):
        name = f"model-{i + 1:05}-of-{SHARDS:05}.safetensors"
        save_file(part, out / name, metadata={"format": "pt"})
        files |= dict.fromkeys(part, name)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copy(NANO / "generation_config.json", out)
    shutil.copy(NANO / "chat_template.jinja", out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, out)


def _even_parts(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The largest first, each into the part that is smallest so far."""
    parts: list[dict[str, Tensor]] = [{} for _ in range(SHARDS)]
    sizes = [0] * SHARDS
    for name in sorted(tensors, key=lambda name: -tensors[name].numel()):
        i = sizes.index(min(sizes))
        parts[i][name] = tensors[name]
        sizes[i] += tensors[name].numel()
    return parts
