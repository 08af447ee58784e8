"""Each byte of the plan is asked of the memory that it comes from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from capserve.cli.compose import plan_line
from capserve.engine import memory
from capserve.engine.memory import MemoryPlan
from capserve.engine.models.config import ModelConfig
from capserve.errors import MemoryBudgetError
from capserve.serving.disk.tier import pending_bound

MIB = 2**20


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Available bytes by device type."""
    found = {"cpu": 10_000 * MIB, "cuda": 10_000 * MIB}
    monkeypatch.setattr(memory, "available_bytes", lambda device: found[device.type])
    return found


def plan_on(device: str, nano_dir: Path) -> MemoryPlan:
    return memory.plan(
        ModelConfig.from_dir(nano_dir),
        torch.float32,
        torch.device(device),
        positions=1024,
        prefill_chunk=64,
        vocab=512,
        capsule_budget_bytes=3000 * MIB,
        gpu_budget_bytes=500 * MIB,
        pending_bytes=1000 * MIB,
    )


def test_without_a_card_all_comes_from_the_host(nano_dir: Path, sizes: dict[str, int]) -> None:
    plan = plan_on("cpu", nano_dir)
    model = plan.weights_bytes + plan.kv_bytes + plan.state_bytes + plan.workspace_bytes
    assert plan.total_bytes == model + 4000 * MIB
    assert "capsules 3,000, to disk 1,000)" in plan_line(plan)
    sizes["cpu"] = plan.total_bytes - 1
    with pytest.raises(MemoryBudgetError, match=r"are available$"):
        plan_on("cpu", nano_dir).check("nano")


def test_on_a_card_the_model_and_its_capsules_come_from_it_and_the_others_from_the_host(
    nano_dir: Path, sizes: dict[str, int]
) -> None:
    plan = plan_on("cuda", nano_dir)
    model = plan.weights_bytes + plan.kv_bytes + plan.state_bytes + plan.workspace_bytes
    assert plan.total_bytes == model + 1500 * MIB, "the host's budget is none of the card's"
    plan.check("nano")
    card, host = plan_line(plan).split(" and ")
    assert "10,000 MiB available on the card (" in card
    assert "capsules 500, to disk 1,000)" in card
    assert (
        host == "4,000 MiB of 10,000 MiB available in host memory (capsules 3,000, to disk 1,000)"
    )
    for short, bytes_needed in (("cuda", plan.total_bytes), ("cpu", 4000 * MIB)):
        before, sizes[short] = sizes[short], bytes_needed - 1
        where = {"cuda": "on the card", "cpu": "in host memory"}[short]
        with pytest.raises(MemoryBudgetError, match=f"are available {where}$"):
            plan_on("cuda", nano_dir).check("nano")
        sizes[short] = before


@pytest.mark.parametrize(
    ("budget", "bound"), [(0, 64), (100, 64), (200, 100), (2048, 1024), (100_000, 1024)]
)
def test_what_waits_for_the_disk_is_bounded_by_the_budget(budget: int, bound: int) -> None:
    assert pending_bound(budget * MIB) == bound * MIB
