"""The embedded checkpoint is complete, is packaged, and is what its card says."""

from __future__ import annotations

import fnmatch
import json
import struct
import tomllib
from pathlib import Path

from capserve.nano import checkpoint_dir

ROOT = Path(__file__).parents[3]


def test_every_file_of_the_checkpoint_goes_into_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    globs = project["tool"]["setuptools"]["package-data"]["capserve.nano"]
    files = [path.name for path in checkpoint_dir().iterdir() if path.is_file()]
    data = [name for name in files if not name.endswith(".py")]
    assert {"README.md", "config.json", "tokenizer.json", "chat_template.jinja"} <= set(data)
    assert all(any(fnmatch.fnmatch(name, glob) for glob in globs) for name in data)


def test_the_shards_hold_what_the_index_promises() -> None:
    index = json.loads((checkpoint_dir() / "model.safetensors.index.json").read_text())
    found: dict[str, str] = {}
    size = 0
    for file in sorted(set(index["weight_map"].values())):
        for name, entry in _header(checkpoint_dir() / file).items():
            found[name] = file
            size += entry["data_offsets"][1] - entry["data_offsets"][0]
    assert found == index["weight_map"]
    assert size == index["metadata"]["total_size"]


def test_the_card_states_the_numbers_of_the_files() -> None:
    card = (checkpoint_dir() / "README.md").read_text()
    index = json.loads((checkpoint_dir() / "model.safetensors.index.json").read_text())
    config = json.loads((checkpoint_dir() / "config.json").read_text())
    total = index["metadata"]["total_size"]
    assert f"{len(index['weight_map'])} tensors, bf16, {total / 1e6:.2f} MB" in card
    assert f"{total / 2 / 1e6:.1f} million parameters" in card
    assert f"{config['vocab_size']} byte-level BPE entries" in card
    assert f"{config['max_position_embeddings']:,} positions" in card


def _header(file: Path) -> dict[str, dict[str, list[int]]]:
    """The tensor table of a safetensors file: 8 bytes of length, then JSON."""
    with file.open("rb") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        table: dict[str, dict[str, list[int]]] = json.loads(handle.read(length))
    table.pop("__metadata__", None)
    return table
