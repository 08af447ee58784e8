"""A checkpoint that is not right is refused by the name of what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from capserve.engine.memory import available_bytes
from capserve.engine.runtime import TorchEngine, plan_memory
from capserve.engine.seam import Sampling
from capserve.engine.weights import BlockFp8Weight, dense
from capserve.errors import CheckpointError, MemoryBudgetError, StartupError
from capserve.testing.tiny import SHAPES, write_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", SHAPES["flat-tied"])


def load(path: Path) -> TorchEngine:
    return TorchEngine.load(path, max_model_len=256, prefill_chunk=64)


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def edit_config(path: Path, **fields: object) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_a_missing_tensor_is_named_with_its_shape(checkpoint: Path) -> None:
    edit_tensors(checkpoint, lambda t: t.pop("model.layers.2.linear_attn.A_log"))  # type: ignore[arg-type]
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.2\.linear_attn\.A_log \(4,\) is missing"
    ):
        load(checkpoint)


def test_a_misshapen_tensor_is_named_with_both_shapes(checkpoint: Path) -> None:
    name = "model.layers.3.self_attn.k_proj.weight"
    edit_tensors(checkpoint, lambda t: t.update({name: torch.zeros(64, 63)}))
    with pytest.raises(
        CheckpointError, match=r"k_proj.weight has shape \(64, 63\), expected \(64, 64\)"
    ):
        load(checkpoint)


def test_a_tensor_of_another_form_is_named(checkpoint: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    edit_tensors(checkpoint, lambda t: t.update({name: torch.zeros(1, 1)}))
    with pytest.raises(
        CheckpointError, match=r"down_proj.weight is torch.float32 with a weight_sc"
    ):
        load(checkpoint)


def test_an_fp8_checkpoint_is_the_matrices_that_its_scales_stand_for(tmp_path: Path) -> None:
    fp8 = write_checkpoint(tmp_path / "fp8", SHAPES["flat-tied"], form="fp8")
    plain = write_checkpoint(tmp_path / "plain", SHAPES["flat-tied"])
    edit_tensors(plain, lambda t: t.update(widened(fp8)))
    engines = [TorchEngine.load(path, max_model_len=256) for path in (fp8, plain)]
    ids = np.random.default_rng(0).integers(0, 320, 40, dtype=np.int32)
    said = []
    for engine in engines:
        engine.extend(ids)
        engine.begin(Sampling(drafts=3), ids)
        said.append([engine.step().tokens for _ in range(6)])
    assert said[0] == said[1]
    assert engines[0].limits.fingerprint != engines[1].limits.fingerprint


def widened(fp8: Path) -> dict[str, torch.Tensor]:
    """What the FP8 folder has quantised, as float32."""
    stored = load_file(fp8 / "model.safetensors")
    return {
        name: dense(BlockFp8Weight(tensor, stored[f"{name}_scale_inv"].float()))
        for name, tensor in stored.items()
        if tensor.dtype is torch.float8_e4m3fn
    }


def test_scales_of_another_shape_are_named(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, SHAPES["flat-tied"], form="fp8")
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    edit_tensors(path, lambda t: t.update({name: torch.zeros(2, 1)}))
    with pytest.raises(CheckpointError, match=r"scale_inv has shape \(2, 1\), expected \(1, 1\)"):
        load(path)


def test_fp8_without_its_scales_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, SHAPES["flat-tied"], form="fp8")
    edit_tensors(path, lambda t: t.pop("model.layers.0.mlp.up_proj.weight_scale_inv"))
    with pytest.raises(CheckpointError, match=r"up_proj.weight is torch.float8_e4m3fn without"):
        load(path)


def test_integer_weights_are_refused(checkpoint: Path) -> None:
    edit_tensors(
        checkpoint, lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)})
    )
    with pytest.raises(CheckpointError, match=r"model.norm.weight is torch.int8"):
        load(checkpoint)


def test_a_truncated_file_is_named(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(
        CheckpointError, match=r"model.safetensors: not a readable safetensors file"
    ):
        load(checkpoint)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, SHAPES["nested-untied-sharded"])
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shard model-00002-of-00003.safetensors is missing"):
        load(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"intermediate_size": None, "num_experts": 8}, "experts do not load yet"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"weight_block_size None"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quant_method 'awq'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads 4 is no multiple of num_key_value_heads 3",
        ),
        ({"layer_types": ["full_attention"]}, "1 entries"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers 2"),
    ],
)
def test_a_config_of_another_model_is_refused_by_field(
    checkpoint: Path, fields: dict[str, object], message: str
) -> None:
    edit_config(checkpoint, **fields)
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint)


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_config_that_is_no_object_is_refused(checkpoint: Path, text: str) -> None:
    (checkpoint / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config.json"):
        load(checkpoint)


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config.json"):
        load(tmp_path)


def test_a_tied_head_that_is_also_stored_loads(checkpoint: Path) -> None:
    edit_tensors(checkpoint, lambda t: t.update({"lm_head.weight": torch.zeros(320, 64)}))
    assert load(checkpoint).limits.max_drafts == 8


def test_a_repack_that_lost_its_mtp_head_loads_without_drafts(tmp_path: Path) -> None:
    engine = load(write_checkpoint(tmp_path, SHAPES["no-mtp"]))
    assert engine.limits.max_drafts == 0


def test_an_mtp_head_with_a_lost_tensor_is_refused(checkpoint: Path) -> None:
    edit_tensors(checkpoint, lambda t: t.pop("mtp.fc.weight"))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"mtp.fc.weight \(64, 128\) is missing"):
        load(checkpoint)


def test_a_model_that_does_not_fit_is_refused_before_a_weight_is_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_memory(checkpoint, max_model_len=256, prefill_chunk=64)
    (checkpoint / "model.safetensors").unlink()  # reading it would be another error
    monkeypatch.setattr("capserve.engine.memory.available_bytes", lambda _: plan.total_bytes - 1)
    with pytest.raises(MemoryBudgetError, match=r"needs .* MiB .* and .* MiB are available"):
        load(checkpoint)


def held_bytes(model: object) -> int:
    """Bytes of every tensor and array that is reachable from `model`, each storage once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    todo: list[object] = [model]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, np.ndarray):
            storages.setdefault(value.ctypes.data, value.nbytes)
        elif isinstance(value, list | tuple):
            todo += value
        elif hasattr(value, "__dict__"):
            todo += vars(value).values()
    return sum(storages.values())


@pytest.mark.parametrize("name", ["nano", "nested-untied-sharded"])
def test_the_planned_weight_bytes_are_those_that_the_model_holds(
    name: str, nano_dir: Path, tmp_path: Path
) -> None:
    path = nano_dir if name == "nano" else write_checkpoint(tmp_path, SHAPES[name])
    plan = plan_memory(path, max_model_len=256)
    engine = TorchEngine.load(path, max_model_len=256)
    rotary = engine._model.rotary
    angles = rotary.table_bytes(rotary.rotary_dim, 256, torch.float32)
    measured = held_bytes(engine._model) - angles
    # float32 norms that are kept once a head, and constants of a few bytes, are not in the formula
    assert plan.weights_bytes <= measured <= plan.weights_bytes * 1.002
    assert 0 < plan.total_bytes < available_bytes(torch.device("cpu"))


def test_more_context_than_the_checkpoint_has_is_refused(checkpoint: Path) -> None:
    with pytest.raises(StartupError, match=r"5000 .* 4096"):
        TorchEngine.load(checkpoint, max_model_len=5000)


def test_progress_reaches_its_total_and_never_falls(nano_dir: Path) -> None:
    seen: list[tuple[int, int]] = []
    TorchEngine.load(
        nano_dir, max_model_len=256, progress=lambda done, total: seen.append((done, total))
    )
    done = [d for d, _ in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1][1] > 0
