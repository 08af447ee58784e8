"""A card's prefill leaves the state that the definition leaves, whatever a chunk goes through."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from capserve.engine.kernels.attention import cudnn, reference
from capserve.engine.loading import load_weights
from capserve.engine.models.config import ModelConfig
from capserve.engine.models.qwen3_5 import Qwen35
from capserve.engine.models.qwen3_5_prefill import ChunkNetwork
from capserve.engine.state import State
from capserve.testing.tiny import SHAPES, write_checkpoint
from tests.kernels.conftest import ON_CARD
from tests.kernels.tolerance import assert_close, assert_same_bits

# on the card long enough for cuDNN: two whole chunks and a rest for flash
CHUNK, PROMPT, POSITIONS = (1024, 2600, 4096) if ON_CARD else (16, 35, 40)
LOOKED_AT = ("recurrent", "kv", "conv")


def by_definition(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """As `cudnn._attend`, in float32."""
    group = q.shape[1] // k.shape[0]
    keys, values = (x.float().repeat_interleave(group, 0) for x in (k, v))
    scores = q.float().transpose(0, 1) @ keys.transpose(1, 2) * q.shape[2] ** -0.5
    if causal:
        scores += torch.full_like(scores, float("-inf")).triu(1)
    o = torch.softmax(scores, -1) @ values
    return o.transpose(0, 1).to(q.dtype).contiguous(), scores.logsumexp(-1)


def chunk_is_the_definition(
    heads: int, kv_heads: int, dim: int, tokens: int, start: int, device: torch.device
) -> None:
    end = start + tokens
    q = torch.randn(tokens, heads, dim, device=device).bfloat16()
    qkvg = torch.randn(tokens, 2 * (heads + kv_heads) * dim, device=device).bfloat16()
    kv = torch.full((2, kv_heads, end + 64, dim), float("nan"), device=device).bfloat16()
    kv[:, :, :end] = torch.randn(2, kv_heads, end, dim, device=device)
    got = cudnn.whole_chunk(q, *kv, qkvg, start)
    o = torch.cat(  # a few rows at a time: the mask takes memory
        [
            reference.prefill(q[i : i + 512].float(), *kv[:, :, :end].float(), 0, start + i)
            for i in range(0, tokens, 512)
        ]
    )
    assert_close(got, reference.gate_mul(o, qkvg.float()), torch.bfloat16)
    assert_same_bits(cudnn.whole_chunk(q, *kv, qkvg, start), got)


@pytest.mark.skipif(ON_CARD, reason="the card has cuDNN itself")
@pytest.mark.parametrize("number", [0, 1, 5, 511])
def test_a_whole_chunk_is_joined_from_its_pieces_and_gated(
    number: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn, "_attend", by_definition)
    chunk_is_the_definition(6, 2, 16, 4, 4 * number, device)


def test_pieces_cover_the_past_and_come_in_powers_of_two() -> None:
    for number in range(300):
        cut = cudnn.pieces(number * 24, 24)
        assert [first for first, _ in cut] == [0, *(until for _, until in cut)][: len(cut)]
        assert (cut[-1][1] if cut else 0) == number * 24
        sizes = [(until - first) // 24 for first, until in cut]
        assert sizes == sorted({1 << i for i in range(9) if number >> i & 1}, reverse=True)


@pytest.mark.gpu
@pytest.mark.parametrize("number", [0, 1, 3, 6])
@pytest.mark.parametrize(("heads", "kv_heads"), [(24, 4), (16, 4), (16, 2)])
def test_cudnn_attends_as_the_definition(
    heads: int, kv_heads: int, number: int, device: torch.device
) -> None:
    kv = torch.empty(2, kv_heads, 8192, 256, dtype=torch.bfloat16, device=device)
    if not cudnn.takes(1024, heads, kv):
        pytest.skip("this cuDNN does not take the shape")
    chunk_is_the_definition(heads, kv_heads, 256, 1024, 1024 * number, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if ON_CARD else [torch.bfloat16])
def test_a_prompt_leaves_the_state_of_the_definition(
    dtype: torch.dtype, tmp_path: Path, device: torch.device
) -> None:
    path = write_checkpoint(tmp_path, SHAPES["two-layers"])
    limit = 1e-4 if dtype == torch.float32 else 3e-2
    prompt = torch.randint(0, 96, (PROMPT,), dtype=torch.int32)
    model, state = model_of(path, torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        model.absorb(state, prompt, 0)
        want = {name: seen(state, name) for name in LOOKED_AT}
        model, state = model_of(path, dtype, device)
        network = ChunkNetwork(model, state, CHUNK)
        for ends in ([CHUNK, 2 * CHUNK, PROMPT], [7, CHUNK, 2 * CHUNK, PROMPT]):
            state.reset()
            at = 0
            for end in ends:
                hidden = network.absorb(prompt[at:end].to(device), at)
                state.hidden[0] = hidden[-1]
                at = end
            for name, tensor in want.items():
                error = (seen(state, name) - tensor).norm() / tensor.norm()
                assert error <= limit, f"{name}: {error:.2e}"


def model_of(path: Path, dtype: torch.dtype, device: torch.device) -> tuple[Qwen35, State]:
    with torch.inference_mode():
        config, weights = load_weights(path, ModelConfig.from_dir(path), dtype, None, device)
        model = Qwen35(config, weights, device, vocab=96, positions=POSITIONS)
        return model, State(config, dtype, device, POSITIONS, for_card=device.type == "cuda")


def seen(state: State, name: str) -> Tensor:
    """What of a buffer later tokens read."""
    buffer = getattr(state, name).detach().double().cpu()
    if name == "conv":
        return buffer[:, : state.taps]
    if name == "kv":
        return buffer[..., 1:PROMPT, :]  # slot 0 of the MTP layer is never seen
    return buffer
