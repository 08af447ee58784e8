"""A fingerprint changes with everything that changes a bit, and with nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numba
import pytest
import torch

from capserve.engine import fingerprint, packing
from capserve.engine.fingerprint import content_digest, fingerprint_of, sample_digest
from capserve.engine.runtime import TorchEngine
from capserve.testing.tiny import SHAPES, write_checkpoint

CPU = torch.device("cpu")


def of(path: Path, dtype: torch.dtype = torch.float32, chunk: int = 64) -> str:
    return fingerprint_of(path, dtype, CPU, chunk)


@pytest.fixture
def checkpoint(tiny_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    """One of its own, in three shards."""
    return shutil.copytree(tiny_dir("nested-untied-sharded"), tmp_path / "own")


def test_the_same_checkpoint_has_one_fingerprint_wherever_it_lies(
    tiny_dir: Callable[[str], Path], checkpoint: Path
) -> None:
    assert of(checkpoint) == of(checkpoint) == of(tiny_dir("nested-untied-sharded"))
    assert len(of(checkpoint)) == 32


def test_dtype_grid_config_format_and_machine_count(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [of(checkpoint), of(checkpoint, torch.bfloat16), of(checkpoint, chunk=128)]
    with monkeypatch.context() as patch:
        patch.setattr(packing, "FORMAT", "0")
        found.append(of(checkpoint))
    with monkeypatch.context() as patch:
        patch.setattr(numba, "__version__", "0.0")
        found.append(of(checkpoint))
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NONE")
        found.append(of(checkpoint))
    config = checkpoint / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"more": 1}))
    found.append(of(checkpoint))
    assert len(set(found)) == len(found)


def test_a_bit_of_any_weight_counts_in_a_small_checkpoint(checkpoint: Path) -> None:
    found = {of(checkpoint)}
    for file in sorted(checkpoint.glob("*.safetensors")):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        found.add(of(checkpoint))
    assert len(found) == 4


def test_a_large_checkpoint_counts_by_headers_and_the_start_of_each_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_checkpoint(tmp_path, SHAPES["flat-tied"]) / "model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + size])
    entries.pop("__metadata__", None)
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", len(content))  # not below it: large
    before = of(tmp_path)
    for name, entry in entries.items():
        changed = bytearray(content)
        changed[8 + size + entry["data_offsets"][0]] ^= 1
        file.write_bytes(changed)
        assert of(tmp_path) != before, name
    file.write_bytes(content.replace(b"model.norm", b"model.morn"))
    assert sample_digest(file) != content_digest(file)
    assert of(tmp_path) != before
    file.write_bytes(content)
    assert of(tmp_path) == before


def test_what_changes_no_bit_is_not_in_it(tiny_dir: Callable[[str], Path]) -> None:
    """Threads, context and drafts: the state's bytes are the same, so the names may be, too."""
    made = []
    for threads, positions, drafts in ((1, 700, 0), (2, 1024, 8)):
        engine = TorchEngine.load(
            tiny_dir("gqa6-equal-heads"),
            max_model_len=positions,
            prefill_chunk=192,
            threads=threads,
            max_drafts=drafts,
        )
        engine.extend((torch.arange(650) % 320).int().numpy())
        parts = [b"".join(part.pack()) for part in engine.snapshot().parts]
        made.append((engine.limits.fingerprint, parts))
    assert made[0] == made[1]
