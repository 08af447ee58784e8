"""The matmul of a step's rows: right, invariant, and blind to what it must not see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from capserve.engine.kernels import launch
from capserve.engine.kernels.rows_matmul import reference, split
from capserve.engine.kernels.rows_matmul import triton as kernel
from capserve.engine.kernels.rows_matmul.tiles import Tile
from capserve.engine.weights import (
    BlockFp8Weight,
    PlainWeight,
    SplitWeight,
    Weight,
    dense,
    quantised,
    shape_of,
)
from tests.kernels.conftest import ON_CARD
from tests.kernels.tolerance import assert_close, assert_same_bits, poisoned

MAX_ROWS = 9
EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16]

TILES = [
    Tile(16, 128, 3, 1),
    Tile(32, 128, 4, 2, ahead=256),
    Tile(64, 128, 3, 4, tma=True),
    Tile(64, 128, 3, 4, swap=True, ahead=1024),
    Tile(64, 128, 3, 4, swap=True, tma=True),
    Tile(128, 128, 3, 4, swap=True, tma=True, ahead=512),
    Tile(32, 128, 3, 4, split=1, ahead=256),
    Tile(128, 128, 3, 4, swap=True, tma=True, split=2, ahead=128),
]

CUT = Tile(64, 128, 4, 4, swap=True, tma=True, split=1, ahead=64) if ON_CARD else (
    Tile(32, 128, 3, 4, split=1)
)  # fmt: skip
"""A tile of the split form."""

REAL = [
    # what, N, K, swiglu
    ("27B delta in", 16480, 5120, False),
    ("27B attention in", 14336, 5120, False),
    ("27B out", 5120, 6144, False),
    ("27B gate up", 34816, 5120, True),
    ("27B down", 5120, 17408, False),
    ("27B fc", 5120, 10240, False),
    ("27B head", 248320, 5120, False),
    ("9B delta in", 12352, 4096, False),
    ("9B gate up", 24576, 4096, True),
    ("9B down", 4096, 12288, False),
]


def make(form: str, n: int, k: int, dtype: torch.dtype, device: torch.device) -> Weight:
    w = torch.randn(n, k, device=device) * k**-0.5
    if form == "plain":
        return PlainWeight(w.to(dtype))
    if form == "fp8":
        return quantised(w)
    cut = n // 128 * 128
    return SplitWeight(quantised(w[:cut]), PlainWeight(w[cut:].to(dtype)))


def with_programs(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The split form shares a matrix among so many."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: count)


def assert_counters_are_zero(device: torch.device) -> None:
    assert int(split.scratch(device).counters.count_nonzero()) == 0


def rows_of(count: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows of very different size, as residual streams are."""
    size = torch.logspace(-1, 1.5, count, device=device)[:, None]
    return (torch.randn(count, k, device=device) * size).to(dtype)


def norm_of(k: int, device: torch.device) -> reference.Norm:
    return 1.0 + 0.3 * torch.randn(k, device=device), EPS


def check(
    weight: Weight,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    *,
    norm: bool = False,
    residual: bool = False,
    swiglu: bool = False,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> None:
    """One call against the definition, every row on its own scale; NaN where nothing belongs."""
    n, k = shape_of(weight)
    n = n // 2 if swiglu else n
    out_dtype = out_dtype or dtype
    x = rows_of(MAX_ROWS, k, dtype, device)
    x[rows:] = float("nan")
    out = poisoned(MAX_ROWS, n, dtype=out_dtype, device=device)
    if residual:
        out[:rows] = torch.randn(rows, n, device=device).to(out_dtype)
    want = out.clone()
    given_norm = norm_of(k, device) if norm else None
    if swiglu:
        kernel.rows_swiglu(x, weight, out, rows, norm=given_norm, tile=tile)
        reference.rows_swiglu(x, weight, want, rows, norm=given_norm)
    else:
        kernel.rows_matmul(x, weight, out, rows, norm=given_norm, residual=residual, tile=tile)
        reference.rows_matmul_into(x, weight, want, rows, norm=given_norm, residual=residual)
    for r in range(rows):
        assert_close(out[r], want[r], dtype, f"row {r} of {rows}")
    assert bool(out[rows:].isnan().all()), "wrote beyond the rows"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["plain", "fp8", "split"])
@pytest.mark.parametrize("around", ["nothing", "norm", "residual", "norm and residual"])
def test_every_form_gives_the_definition(
    dtype: torch.dtype, form: str, around: str, device: torch.device
) -> None:
    weight = make(form, 176, 256, dtype, device)
    check(weight, dtype, device, 5, norm="norm" in around, residual="residual" in around)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["plain", "fp8"])
@pytest.mark.parametrize("norm", [False, True])
def test_swiglu_gives_the_definition(
    dtype: torch.dtype, form: str, norm: bool, device: torch.device
) -> None:
    check(make(form, 256, 256, dtype, device), dtype, device, 3, norm=norm, swiglu=True)


@settings(
    max_examples=24 if ON_CARD else 8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    n=st.integers(16, 150),  # of fewer columns all may be near 0, and the tolerance with them
    k=st.integers(16, 300),
    rows=st.integers(1, MAX_ROWS),
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(["plain", "fp8"]),
    norm=st.booleans(),
    residual=st.booleans(),
)
def test_ragged_ends_are_neither_read_nor_written(
    n: int,
    k: int,
    rows: int,
    dtype: torch.dtype,
    form: str,
    norm: bool,
    residual: bool,
    device: torch.device,
) -> None:
    """W and x lie in the middle of NaN."""
    weight = make(form, n, k, dtype, device)
    assert not isinstance(weight, SplitWeight)
    room = torch.full(((n + 256) * k,), float("nan"), device=device).to(weight.weight.dtype)
    inside = room[128 * k : (n + 128) * k].view(n, k)
    inside.copy_(weight.weight)
    if isinstance(weight, PlainWeight):
        check(PlainWeight(inside), dtype, device, rows, norm=norm, residual=residual)
    else:
        framed = BlockFp8Weight(inside, weight.scale)
        check(framed, dtype, device, rows, norm=norm, residual=residual)


@pytest.mark.parametrize("tile", TILES, ids=repr)
@pytest.mark.parametrize("form", ["plain", "fp8", "split", "swiglu", "fp8 swiglu"])
def test_every_tile_gives_the_definition(tile: Tile, form: str, device: torch.device) -> None:
    if not ON_CARD and (tile.tma or form != "plain"):
        pytest.skip("the interpreter has no copy engine, and time for one form only")
    swiglu = "swiglu" in form
    n = 2 * 384 if swiglu else 256 + 96 if ON_CARD else 96
    kind = {"swiglu": "plain", "fp8 swiglu": "fp8"}.get(form, form)
    weight = make(kind, n, 640 if ON_CARD else 256, torch.bfloat16, device)
    for norm in (False, True):
        check(weight, torch.bfloat16, device, 4, norm=norm, swiglu=swiglu, tile=tile)


@pytest.mark.parametrize("programs", [2, 5] if not ON_CARD else [2, 7, 96])
@pytest.mark.parametrize("form", ["plain", "fp8", "split", "swiglu", "fp8 swiglu"])
def test_a_matrix_shared_evenly_gives_the_definition(
    form: str, programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few programs with whole tiles in the middle of their runs, and many to a tile."""
    with_programs(monkeypatch, programs)
    swiglu = "swiglu" in form
    kind = {"swiglu": "plain", "fp8 swiglu": "fp8"}.get(form, form)
    n = 256 if swiglu else 160
    if ON_CARD:
        n = n * 8 if swiglu else n * 8 + 48
    weight = make(kind, n, 1152 if ON_CARD else 384, torch.bfloat16, device)
    for norm in (False, True):
        check(weight, torch.bfloat16, device, 4, norm=norm, residual=not swiglu, swiglu=swiglu,
              tile=CUT)  # fmt: skip
        assert_counters_are_zero(device)


@settings(
    max_examples=10 if ON_CARD else 6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    n=st.integers(1, 150),
    k=st.integers(1, 300),
    rows=st.integers(1, MAX_ROWS),
    programs=st.integers(1, 20),
    dtype=st.sampled_from(DTYPES),
    norm=st.booleans(),
    residual=st.booleans(),
)
def test_any_shape_may_be_shared_among_any_number_of_programs(
    n: int,
    k: int,
    rows: int,
    programs: int,
    dtype: torch.dtype,
    norm: bool,
    residual: bool,
    device: torch.device,
) -> None:
    tile = Tile(32, 32, 3, 4, split=1)
    weight = make("plain", n, k, dtype, device)
    with pytest.MonkeyPatch.context() as patch:
        with_programs(patch, programs)
        check(weight, dtype, device, rows, norm=norm, residual=residual, tile=tile)
    assert_counters_are_zero(device)


@pytest.mark.parametrize("form", ["plain", "fp8", "swiglu"])
def test_repeated_launches_of_a_shared_matrix_have_equal_bits(
    form: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is the last to arrive at a tile."""
    if not ON_CARD:
        with_programs(monkeypatch, 7)
    swiglu = form == "swiglu"
    n, k = (5120, 6144) if ON_CARD else (128, 256)
    weight = make("plain" if swiglu else form, n, k, torch.bfloat16, device)
    width = n // 2 if swiglu else n
    x, norm = rows_of(MAX_ROWS, k, torch.bfloat16, device), norm_of(k, device)
    want: Tensor | None = None
    for i in range(200 if ON_CARD else 2):
        out = poisoned(MAX_ROWS, width, dtype=torch.float32, device=device)
        if swiglu:
            kernel.rows_swiglu(x, weight, out, MAX_ROWS, norm=norm, tile=CUT)
        else:
            kernel.rows_matmul(x, weight, out, MAX_ROWS, norm=norm, tile=CUT)
        if want is None:
            want = out
        assert_same_bits(out, want, f"launch {i}")
    assert_counters_are_zero(device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_card_without_fp8_reads_the_bytes(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 254 numbers of e4m3, subnormals too."""
    monkeypatch.setattr(launch, "readable_fp8", lambda weight: weight.view(torch.uint8))
    bits = torch.arange(256, device=device).to(torch.uint8)
    bits = torch.where(bits & 0x7F == 0x7F, 0, bits).to(torch.uint8)
    n, k = torch.arange(256, device=device)[:, None], torch.arange(128, device=device)
    weight = bits[(n + k) % 256].view(torch.float8_e4m3fn)  # every row has large ones, no sum is 0
    scale = torch.tensor([[1.0], [2.0**-9]], device=device)
    check(BlockFp8Weight(weight, scale), dtype, device, 2)


def test_bf16_weights_may_give_float32_logits(device: torch.device) -> None:
    weight = make("plain", 96, 256, torch.bfloat16, device)
    x = rows_of(2, 256, torch.bfloat16, device)
    out = poisoned(2, 96, dtype=torch.float32, device=device)
    kernel.rows_matmul(x, weight, out, 2)
    assert_close(out, x.float() @ dense(weight).t(), torch.float32)


def alone(
    call: Callable[[Tensor, Tensor, int], None], x: Tensor, n: int, dtype: torch.dtype
) -> list[Tensor]:
    each = []
    for row in x:
        out = poisoned(1, n, dtype=dtype, device=x.device)
        call(row[None].contiguous(), out, 1)
        each.append(out[0])
    return each


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "form", ["plain", "fp8", "split", "swiglu", "plain shared", "fp8 shared", "swiglu shared"]
)
def test_a_row_has_the_same_bits_in_any_company_and_place(
    dtype: torch.dtype, form: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I7: alone, first, last, among 2 to 9, beside rows of infinite or undefined values."""
    tile = None
    if "shared" in form:
        if dtype is torch.float32:
            pytest.skip("float32 has no tile of the split form")
        form, tile = form.split()[0], CUT
        if not ON_CARD:
            with_programs(monkeypatch, 3)
    n, k = (4224, 5120) if ON_CARD else (48 + 128, 128) if tile is None else (128, 256)
    swiglu = form == "swiglu"
    weight = make("plain" if swiglu else form, n, k, dtype, device)
    norm = norm_of(k, device)
    width = n // 2 if swiglu else n

    def call(x: Tensor, out: Tensor, rows: int) -> None:
        if swiglu:
            kernel.rows_swiglu(x, weight, out, rows, norm=norm, tile=tile)
        else:
            kernel.rows_matmul(x, weight, out, rows, norm=norm, tile=tile)

    x = rows_of(MAX_ROWS, k, dtype, device)
    lone = alone(call, x if ON_CARD else x[:3], width, dtype)
    for rows in range(1, MAX_ROWS + 1) if ON_CARD else (2, 9):
        for shift in range(rows) if ON_CARD else (0, 1):
            order = [(r + shift) % rows for r in range(rows)]
            out = poisoned(MAX_ROWS, width, dtype=dtype, device=device)
            company = x[order].contiguous()
            call(company, out, rows)
            for place, r in enumerate(order):
                if r < len(lone):
                    assert_same_bits(out[place], lone[r], f"row {r} at {place} of {rows}")
    company = torch.full_like(x, float("inf"))
    company[2] = x[0]
    company[5] = float("nan")
    out = poisoned(MAX_ROWS, width, dtype=dtype, device=device)
    call(company, out, MAX_ROWS)
    assert_same_bits(out[2], lone[0], "beside infinities")


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True], ids=["table", "shared"])
@pytest.mark.parametrize(("what", "n", "k", "swiglu"), REAL, ids=[entry[0] for entry in REAL])
@pytest.mark.parametrize("form", ["plain", "fp8"])
def test_the_shapes_of_the_family_are_right(
    what: str, n: int, k: int, swiglu: bool, form: str, shared: bool, device: torch.device
) -> None:
    if shared and not ("27B" in what or "9B down" in what):
        pytest.skip("the 9B shapes show nothing that the 27B ones do not")
    tile = CUT if shared else None
    if form == "fp8":
        form = "split" if n % 128 else form
    weight = make(form, n, k, torch.bfloat16, device)
    normed = any(word in what for word in ("in", "up"))
    residual = "out" in what or "down" in what
    out_dtype = torch.float32 if "head" in what else torch.bfloat16
    for rows in (1, 4, 9):
        check(weight, torch.bfloat16, device, rows, norm=normed, residual=residual,
              swiglu=swiglu, out_dtype=out_dtype, tile=tile)  # fmt: skip
    assert_counters_are_zero(device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("form", "tile"),
    [("plain", None), ("fp8", None), ("plain", CUT), ("fp8", replace(CUT, split=2))],
    ids=repr,
)
def test_a_captured_chain_has_the_bits_of_single_calls(
    form: str, tile: Tile | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three matmuls that read each other's output, 64 layers deep, replayed 20 times with
    dependent launch, and once without."""
    d, inner, rows = 1024, 2048, 4
    norm = norm_of(d, device)
    layers = [
        (
            make(form, 2 * inner, d, torch.bfloat16, device),
            make(form, d, inner, torch.bfloat16, device),
        )
        for _ in range(64)
    ]
    start = rows_of(MAX_ROWS, d, torch.bfloat16, device)
    x = start.clone()
    h = poisoned(MAX_ROWS, inner, dtype=torch.bfloat16, device=device)

    def step() -> None:
        x.copy_(start)
        for up, down in layers:
            kernel.rows_swiglu(x, up, h, rows, norm=norm, tile=tile)
            kernel.rows_matmul(h, down, x, rows, residual=True, tile=tile)

    with monkeypatch.context() as patch:
        patch.setattr(launch, "PDL", False)
        step()
    want = x.clone()
    step()
    torch.cuda.synchronize()
    assert_same_bits(x, want, "with dependent launch")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for i in range(20):
        x.fill_(float("nan"))
        h.fill_(float("nan"))
        graph.replay()
        assert_same_bits(x[:rows], want[:rows], f"replay {i}")
    assert_counters_are_zero(device)
