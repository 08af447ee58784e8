"""What does a card hold beside weights, state and KV?

Formulas only, and no Triton: the plan is made before anything is. The large buffers are counted;
graphs, the libraries' workspaces and scratch of a few megabytes are not.
"""

from __future__ import annotations

import torch

from capserve.engine.kernels.attention.plan import Plan
from capserve.engine.kernels.gated_delta import prefill_scratch_elements, rows_scratch_floats
from capserve.engine.layers.linear import MAX_ROWS
from capserve.engine.models.config import ModelConfig

_CPU = torch.device("cpu")
_PROCESSORS = 132
"""Of a card that is planned for and not there: a large one's."""


def step_bytes(config: ModelConfig, dtype: torch.dtype, device: torch.device, vocab: int) -> int:
    """Buffers of a decode step: activations of its rows, logits, how a turn samples."""
    heads, value_heads = config.num_attention_heads, config.linear_num_value_heads
    both = heads + config.num_key_value_heads
    width = (
        5 * config.hidden_size
        + config.conv_dim
        + 2 * config.value_dim
        + 2 * value_heads
        + (2 * both + heads) * config.head_dim
        + config.intermediate_size
    )
    floats = rows_scratch_floats(
        MAX_ROWS, value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    )
    here = device if torch.cuda.is_available() else _CPU
    attention = Plan.of(heads, config.num_key_value_heads, config.head_dim, dtype, here)
    splits = 1 if here == device else _PROCESSORS // config.num_key_value_heads
    logits_and_scores = 2 * MAX_ROWS * vocab * 4
    settings = vocab * (4 + 1 + 4) + MAX_ROWS * (vocab + 31) // 32 * 4
    return (
        MAX_ROWS * width * dtype.itemsize
        + 4 * floats
        + attention.scratch_bytes * splits
        + logits_and_scores
        + settings
    )


def chunk_bytes(config: ModelConfig, dtype: torch.dtype, chunk: int) -> int:
    """Of a prefill chunk: the delta rule's scratch, and the activations that are alive at once in
    the MLP, which is the widest place."""
    elements, floats = prefill_scratch_elements(
        chunk,
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )
    alive = 4 * config.hidden_size + 3 * config.intermediate_size
    if config.fp8:
        alive += config.intermediate_size  # the quantised input of a matmul, and its scales
    return elements * dtype.itemsize + 4 * floats + chunk * alive * dtype.itemsize
