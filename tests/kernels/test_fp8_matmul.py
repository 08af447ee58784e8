"""The FP8 matmul of a prefill: the groups' scales, the product, the fallback, ragged ends."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from capserve.engine.kernels.fp8_matmul import reference
from capserve.engine.kernels.fp8_matmul import triton as kernel
from capserve.engine.weights import BlockFp8Weight, dense, quantised
from tests.kernels.conftest import ON_CARD
from tests.kernels.tolerance import assert_close

DRAWS = settings(
    max_examples=24 if ON_CARD else 10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def activations(tokens: int, k: int, device: torch.device) -> Tensor:
    """Groups of very different size, one of zeros."""
    x = torch.randn(tokens, k, device=device) * torch.logspace(-3, 3, k, device=device)
    x[:, : min(128, k)] *= torch.arange(tokens, device=device)[:, None] % 3
    return x.bfloat16()


def weight_of(n: int, k: int, device: torch.device) -> BlockFp8Weight:
    return quantised(torch.randn(n, k, device=device) * k**-0.5)


@DRAWS
@given(tokens=st.integers(0, 70), k=st.integers(1, 500))
def test_every_group_of_a_token_gets_its_own_scale(
    tokens: int, k: int, device: torch.device
) -> None:
    x = activations(tokens, k, device)
    q, scale = kernel.quantise_groups(x)
    want_q, want_scale = reference.quantise_groups(x)
    assert_close(scale[:tokens], want_scale, torch.float32, "scale")
    got, want = (reference.widened(*each) for each in ((q[:tokens], scale[:tokens]),
                                                       (want_q, want_scale)))  # fmt: skip
    # a quotient beside a boundary of e4m3 may fall on its other side: one step of 1/8 at most
    assert bool(((got - want).abs() <= want.abs() / 7 + 1e-30).all())
    assert int((got != want).sum()) <= 1e-3 * got.numel() + 1
    assert scale.stride(0) == 1
    assert scale.shape[0] % 4 == 0
    assert bool((scale > 0).all())


@DRAWS
@given(tokens=st.integers(0, 20), n=st.integers(1, 300), k=st.integers(1, 300))
def test_a_card_without_fp8_widens_the_weight(
    tokens: int, n: int, k: int, device: torch.device
) -> None:
    x, weight = activations(tokens, k, device), weight_of(n, k, device)
    room = torch.full(((n + 64) * k,), float("nan"), device=device).to(torch.float8_e4m3fn)
    framed = room[32 * k : (n + 32) * k].view(n, k)
    framed.copy_(weight.weight)
    y = kernel.widened_matmul(x, BlockFp8Weight(framed, weight.scale))
    assert_close(y, x.float() @ dense(weight).t(), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "k"), [(5120, 6144), (16384, 5120), (5120, 17408), (1040, 5120 + 16), (256, 128)]
)
@pytest.mark.parametrize("tokens", [1, 7, 64, 2048])
def test_the_cards_matmul_takes_both_scales_by_blocks(
    n: int, k: int, tokens: int, device: torch.device
) -> None:
    x, weight = activations(tokens, k, device), weight_of(n, k, device)
    want = reference.fp8_matmul(x, weight)
    y = kernel.fp8_matmul(x, weight)
    assert y.shape == want.shape
    if kernel.multiplies_blocks(weight):
        assert_close(y, want, torch.bfloat16)
    else:
        assert_close(y, x.float() @ dense(weight).t(), torch.bfloat16)
