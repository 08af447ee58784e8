"""Does a model fit, and where do its bytes go?

Formulas only: the plan is made from config.json, before a weight is read, and the engine allocates
what the plan says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from capserve.engine import card_bytes
from capserve.engine.layers.linear import Linear
from capserve.engine.layers.rotary import Rotary
from capserve.engine.models.config import ModelConfig
from capserve.engine.models.qwen3_5 import weight_bytes
from capserve.engine.state import StateBytes
from capserve.errors import MemoryBudgetError


@dataclass(frozen=True)
class Side:
    """What is taken from one memory, the card's or the host's."""

    where: str
    """In words after "available"; "" when there is but one memory."""
    uses: Mapping[str, int]
    """Bytes by use."""
    available_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.uses.values())

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.available_bytes

    def parts(self) -> str:
        return ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in self.uses.items())


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by use, for one model in one dtype at one context length.

    Model and live state lie on the device. Capsules lie in host memory, and on a card there too, up
    to a budget of its own. Those on their way to disk may outlive their place in either.
    """

    weights_bytes: int
    kv_bytes: int
    state_bytes: int
    """Small state, row buffers, scratch and the table of rotary angles."""
    workspace_bytes: int
    """Activations of one prefill chunk: an estimate. On a card, buffers of a decode step too."""
    capsule_bytes: int
    """The host tier's budget."""
    gpu_capsule_bytes: int
    """The card tier's budget; 0 without a card."""
    pending_bytes: int
    """Most that waits to be written to disk."""
    on_card: bool
    available_bytes: int
    """On the device."""
    host_available_bytes: int

    @property
    def sides(self) -> tuple[Side, ...]:
        """The device first; on a card, then the host."""
        model = {
            "weights": self.weights_bytes,
            "kv": self.kv_bytes,
            "state": self.state_bytes,
            "workspace": self.workspace_bytes,
        }
        host = {"capsules": self.capsule_bytes, "to disk": self.pending_bytes}
        if not self.on_card:
            return (Side("", model | host, self.available_bytes),)
        card = model | host | {"capsules": self.gpu_capsule_bytes}
        return (
            Side(" on the card", card, self.available_bytes),
            Side(" in host memory", host, self.host_available_bytes),
        )

    @property
    def total_bytes(self) -> int:
        """Of the device."""
        return self.sides[0].total_bytes

    @property
    def fits(self) -> bool:
        return all(side.fits for side in self.sides)

    def check(self, name: str) -> None:
        """Raises MemoryBudgetError with both numbers and where the bytes go."""
        for side in self.sides:
            if not side.fits:
                raise MemoryBudgetError(
                    f"{name} needs {side.total_bytes / 2**20:,.0f} MiB ({side.parts()}) "
                    f"and {side.available_bytes / 2**20:,.0f} MiB are available{side.where}"
                )


def plan(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    positions: int,
    prefill_chunk: int,
    vocab: int,
    capsule_budget_bytes: int = 0,
    gpu_budget_bytes: int = 0,
    pending_bytes: int = 0,
) -> MemoryPlan:
    """The plan for a context of `positions` tokens. Budgets: of capsules in host memory and on a
    card, and of those on their way to disk."""
    state = StateBytes.of(config, dtype)
    kv = state.kv_per_token * positions
    matrix = Linear.element_bytes(device, dtype)
    return MemoryPlan(
        weights_bytes=weight_bytes(
            config,
            dtype,
            vocab,
            matrix_bytes=matrix,
            quantised_bytes=1 if device.type == "cuda" else 4,
        ),
        kv_bytes=kv,
        state_bytes=state.buffers(config, dtype, positions, on_card=device.type == "cuda")
        - kv
        + Rotary.table_bytes(config.rotary_dim, positions, dtype),
        workspace_bytes=(
            card_bytes.step_bytes(config, dtype, device, vocab)
            + card_bytes.chunk_bytes(config, dtype, prefill_chunk)
            if device.type == "cuda"
            else _workspace_bytes(config, prefill_chunk, vocab)
        ),
        capsule_bytes=capsule_budget_bytes,
        gpu_capsule_bytes=gpu_budget_bytes if device.type == "cuda" else 0,
        pending_bytes=pending_bytes,
        on_card=device.type == "cuda",
        available_bytes=available_bytes(device),
        host_available_bytes=available_bytes(torch.device("cpu")),
    )


def _workspace_bytes(config: ModelConfig, chunk: int, vocab: int) -> int:
    mlp = 4 * chunk * config.intermediate_size * 4
    heads = config.linear_num_value_heads
    dims = config.linear_key_head_dim + config.linear_value_head_dim
    delta = chunk * heads * (6 * dims + 4 * 64) * 4
    qkv = 4 * chunk * config.num_attention_heads * config.head_dim * 4
    return max(mlp, delta, qkv) + 16 * vocab * 4


def available_bytes(device: torch.device) -> int:
    """Bytes that this process could still take on the device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    found = [2**63 - 1]
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except OSError:
        pass
    try:
        cgroup = Path("/sys/fs/cgroup")
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            used = int((cgroup / "memory.current").read_text(encoding="ascii"))
            stat = dict(
                line.split() for line in (cgroup / "memory.stat").read_text("ascii").splitlines()
            )
            # the page cache of a checkpoint just downloaded counts as used, and is given up first
            found.append(int(limit) - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        pass
    return max(0, min(found))
