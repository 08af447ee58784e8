"""Every fast form of an operation computes what its plain reference defines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capserve.engine.kernels.attention import cpu as attention_cpu
from capserve.engine.kernels.attention import reference as attention
from capserve.engine.kernels.gated_delta import reference as gated_delta
from capserve.engine.kernels.rows_matmul.cpu import rows_matmul_bf16, rows_matmul_f32
from capserve.engine.kernels.rows_matmul.reference import rows_matmul
from capserve.engine.layers.norm import RmsNorm
from capserve.engine.runtime import TorchEngine

TOLERANCE = 2e-5
"""Of float32 results of size about 1, the same for every kernel."""


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    inner=st.integers(1, 300),
    outer=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_rows_matmul_equals_its_reference(rows: int, inner: int, outer: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inner, generator=generator)
    weight = (torch.randn(outer, inner, generator=generator) / inner**0.5).bfloat16()
    expected = rows_matmul(x, weight)
    for kernel, given_weight in (
        (rows_matmul_bf16, weight.view(torch.uint16)),
        (rows_matmul_f32, weight.float()),
    ):
        y = np.full((rows, outer), np.nan, np.float32)
        kernel(x.numpy(), given_weight.numpy(), y)
        assert (torch.from_numpy(y) - expected).abs().max() < TOLERANCE


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 90),
    start=st.integers(0, 150),
    first=st.integers(0, 1),
    heads=st.sampled_from([(4, 2), (6, 1), (2, 2)]),
    seed=st.integers(0, 99),
)
def test_prefill_attention_equals_its_reference_and_ignores_what_it_must_not_see(
    tokens: int, start: int, first: int, heads: tuple[int, int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    start = max(start, first)
    q = torch.randn(tokens, heads[0], 32, generator=generator)
    k, v = torch.randn(2, heads[1], 256, 32, generator=generator).unbind(0)
    expected = attention.prefill(q, k, v, first, start)
    unseen = torch.ones(256, dtype=torch.bool)
    unseen[first : start + tokens] = False
    k[:, unseen], v[:, unseen] = torch.nan, torch.nan
    got = attention_cpu.prefill(q, k, v, first, start)
    assert (got - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["flat-tied", "gqa6-equal-heads", "no-mtp"])
@torch.inference_mode()
def test_the_compiled_delta_net_equals_its_torch_form(
    name: str, tiny_dir: Callable[[str], Path]
) -> None:
    """Outputs and, after the accepted rows are folded in, every part of the state."""
    engine = TorchEngine.load(tiny_dir(name), max_model_len=256, prefill_chunk=64, threads=1)
    model, state = engine._model, engine._state
    engine.extend(np.arange(50, dtype=np.int32))
    start = engine.snapshot()
    compiled = state.compiled
    assert compiled is not None
    results = []
    for form in (compiled, None):
        state.compiled = form
        engine.restore(start)
        hidden = model.verify(torch.arange(60, 67), state, 50)
        state.accepted_rows = 4
        state.settle()
        results.append((hidden, state.recurrent.clone(), state.conv[:, : state.taps].clone()))
    state.compiled = compiled
    for got, expected in zip(*results, strict=True):
        assert (got - expected).abs().max() < TOLERANCE


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 9), heads=st.integers(1, 4), dim=st.integers(1, 80), seed=st.integers(0, 9)
)
def test_the_compiled_norm_equals_its_torch_form(
    rows: int, heads: int, dim: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    norm = RmsNorm(torch.randn(heads, dim, generator=generator), 1e-6)
    x = torch.randn(rows, heads, dim, generator=generator)
    few = norm(x)
    many = norm(x.repeat(10, 1, 1))[:rows]  # too many rows for the compiled form
    assert (few - many).abs().max() < TOLERANCE


@pytest.mark.parametrize("start", [0, 1, 40, 63, 64, 100])
@pytest.mark.parametrize("tokens", [1, 23, 64, 65, 200])
def test_the_chunked_delta_rule_equals_the_rows(start: int, tokens: int) -> None:
    """Output and state, whatever part of a sub-chunk the call begins and ends in."""
    generator = torch.Generator().manual_seed(tokens + start)
    heads, key, value = 3, 16, 24

    def unit(*shape: int) -> torch.Tensor:
        return torch.nn.functional.normalize(torch.randn(*shape, generator=generator), dim=-1)

    q, k = unit(tokens, heads, key), unit(tokens, heads, key)
    v = torch.randn(tokens, heads, value, generator=generator)
    g = -torch.rand(tokens, heads, generator=generator)
    beta = torch.rand(tokens, heads, generator=generator)
    before = torch.randn(heads, key, value, generator=generator)
    state = before.clone()
    out = gated_delta.chunked(q, k, v, g, beta, state, start)
    by_rows = before.clone()
    o = torch.full((tokens, heads, 1, value), torch.nan)
    d = torch.full((heads, 1, value), torch.nan)
    for t in range(tokens):
        gated_delta.row(
            q[t, :, None], k[t, :, None], v[t, :, None], g[t].exp()[:, None, None],
            beta[t][:, None, None], by_rows, d, o[t],
        )  # fmt: skip
    assert (out - o.squeeze(2)).abs().max() < TOLERANCE
    assert (state - by_rows).abs().max() < TOLERANCE


def test_512_rows_drift_no_further_from_float64_than_rounding_allows() -> None:
    generator = torch.Generator().manual_seed(0)
    heads, dim = 2, 32
    state = torch.zeros(heads, dim, dim)
    exact = state.double()
    d, o = torch.empty(heads, 1, dim), torch.empty(heads, 1, dim)
    exact_d, exact_o = d.double(), o.double()
    for _ in range(512):
        q, k = (
            torch.nn.functional.normalize(torch.randn(heads, 1, dim, generator=generator), dim=-1)
            for _ in range(2)
        )
        v = torch.randn(heads, 1, dim, generator=generator)
        decay = torch.rand(heads, 1, 1, generator=generator) * 0.1 + 0.9
        beta = torch.rand(heads, 1, 1, generator=generator)
        gated_delta.row(q, k, v, decay, beta, state, d, o)
        gated_delta.row(
            q.double(),
            k.double(),
            v.double(),
            decay.double(),
            beta.double(),
            exact,
            exact_d,
            exact_o,
        )
    assert (o - exact_o).abs().max() < TOLERANCE
    assert (state - exact).abs().max() < TOLERANCE
