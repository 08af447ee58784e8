"""Norms, inputs and the inner activation: right, blind beyond their rows, invariant."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from capserve.engine.kernels.rms_norm import reference as norm_reference
from capserve.engine.kernels.rms_norm import triton as norm_kernel
from capserve.engine.kernels.rows_input import reference as input_reference
from capserve.engine.kernels.rows_input import triton as input_kernel
from capserve.engine.kernels.silu_mul import reference as silu_reference
from capserve.engine.kernels.silu_mul import triton as silu_kernel
from tests.kernels.conftest import ON_CARD
from tests.kernels.tolerance import assert_close, assert_same_bits, poisoned

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [96, 5120] if ON_CARD else [96, 200]
DRAWS = settings(
    max_examples=24 if ON_CARD else 12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def rows_of(count: int, d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    size = torch.logspace(-2, 2, count, device=device)[:, None]
    return (torch.randn(count, d, device=device) * size).to(dtype)


def scale_of(d: int, device: torch.device) -> Tensor:
    return 1.0 + 0.3 * torch.randn(d, device=device)


def assert_rows(got: Tensor, want: Tensor, rows: int, dtype: torch.dtype, what: str) -> None:
    for r in range(rows):
        assert_close(got[r], want[r], dtype, f"{what}, row {r}")
    assert bool(got[rows:].isnan().all()), f"{what}: wrote beyond the rows"


@DRAWS
@given(
    d=st.integers(1, 400),
    rows=st.integers(1, 12),
    dtype=st.sampled_from(DTYPES),
    added=st.booleans(),
)
def test_a_norm_gives_the_definition_and_the_sum_that_it_is_of(
    d: int, rows: int, dtype: torch.dtype, added: bool, device: torch.device
) -> None:
    x = rows_of(rows + 2, d, dtype, device)
    x[rows:] = float("nan")
    y = rows_of(rows + 2, d, dtype, device).flip(0) if added else None
    scale = scale_of(d, device)
    out = poisoned(rows + 2, d, dtype=dtype, device=device)
    want, want_x = out.clone(), x.clone()
    norm_kernel.norm_residual(x, y, scale, EPS, out, rows)
    norm_reference.norm_residual(want_x, y, scale, EPS, want, rows)
    assert_same_bits(x, want_x, "sum")
    assert_rows(out, want, rows, dtype, "norm")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", WIDTHS)
def test_a_row_is_normed_to_the_same_bits_wherever_it_stands(
    d: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = rows_of(9, d, dtype, device)
    scale = scale_of(d, device)
    whole = poisoned(9, d, dtype=dtype, device=device)
    norm_kernel.rows_norm(x, scale, EPS, whole, 9)
    want = whole.clone()
    norm_reference.rows_norm(x, scale, EPS, want, 9)
    assert_rows(whole, want, 9, dtype, "norm")
    for r in range(9):
        lone = poisoned(1, d, dtype=dtype, device=device)
        norm_kernel.rows_norm(x[r : r + 1].contiguous(), scale, EPS, lone, 1)
        assert_same_bits(lone[0], whole[r], f"row {r}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("rows", [1, 9])
def test_rows_begin_with_their_tokens_embeddings(
    d: int, rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    table = rows_of(50, d, dtype, device)
    tokens = torch.randint(0, 50, (12,), dtype=torch.int32, device=device)
    tokens[rows:] = 2**31 - 1
    out = poisoned(12, d, dtype=dtype, device=device)
    want = out.clone()
    input_kernel.embed_rows(tokens, table, out, rows)
    input_reference.embed_rows(tokens, table, want, rows)
    assert_same_bits(out[:rows], want[:rows])
    assert bool(out[rows:].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("rows", [1, 9])
def test_the_draft_heads_input_is_both_norms_side_by_side(
    d: int, rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    table = rows_of(50, d, dtype, device)
    hidden = rows_of(12, d, dtype, device)
    hidden[rows:] = float("nan")
    tokens = torch.randint(0, 50, (12,), dtype=torch.int32, device=device)
    scales = scale_of(d, device), scale_of(d, device)
    out = poisoned(12, 2 * d, dtype=dtype, device=device)
    want = out.clone()
    input_kernel.mtp_input(tokens, table, hidden, *scales, EPS, out, rows)
    input_reference.mtp_input(tokens, table, hidden, *scales, EPS, want, rows)
    assert_rows(out, want, rows, dtype, "input")


def test_a_token_that_does_not_exist_reads_nothing_but_the_table(device: torch.device) -> None:
    room = poisoned(54, 64, dtype=torch.float32, device=device)
    table = room[2:52]
    table.copy_(torch.randn(50, 64))
    tokens = torch.tensor([-1, 50, -(2**31), 2**31 - 1], dtype=torch.int32, device=device)
    out = poisoned(4, 64, dtype=torch.float32, device=device)
    input_kernel.embed_rows(tokens, table, out, 4)
    assert_same_bits(out, table[[0, 49, 0, 49]])


@DRAWS
@given(tokens=st.integers(0, 9), inner=st.integers(1, 400), dtype=st.sampled_from(DTYPES))
def test_silu_mul_gives_the_definition(
    tokens: int, inner: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = (torch.randn(tokens, 2 * inner, device=device) * 8).to(dtype)
    out = poisoned(tokens, inner, dtype=dtype, device=device)
    want = out.clone()
    silu_kernel.silu_mul(x, out)
    silu_reference.silu_mul(x, want)
    assert_close(out, want, dtype)
