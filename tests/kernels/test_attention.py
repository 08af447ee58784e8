"""Attention on the card: a decode step's fused operation, and a prefill chunk's three.

Everything that must not be read is NaN here: slots before `first` and from the step's end on, rows
beyond those in use, the scratch, the outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")
from capserve.engine.kernels.attention import reference
from capserve.engine.kernels.attention.plan import Plan, Scratch
from capserve.engine.layers.linear import MAX_ROWS
from tests.kernels.conftest import ON_CARD
from tests.kernels.tolerance import assert_close, assert_same_bits, poisoned

card = pytest.importorskip("capserve.engine.kernels.attention.card")
decode = pytest.importorskip("capserve.engine.kernels.attention.triton")

EPS = 1e-6
DTYPES = (torch.float32, torch.bfloat16)
many = settings(
    max_examples=60 if ON_CARD else 6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    half: int


SMALL = [Shape(4, 2, 32, 4), Shape(6, 1, 16, 2), Shape(2, 2, 64, 8)]
REAL = {
    "27B": Shape(24, 4, 256, 32),
    "9B": Shape(16, 4, 256, 32),
    "35B-A3B": Shape(16, 2, 256, 32),
    "nano": Shape(4, 2, 64, 8),
}


@dataclass
class Layer:
    """The tensors of one attention layer with room for `positions` slots."""

    shape: Shape
    qkvg: Tensor
    """[tokens, ...]: what a projection would give for the tokens of a test."""
    scales: Tensor
    cos: Tensor
    sin: Tensor
    kv: Tensor

    @classmethod
    def make(
        cls, shape: Shape, dtype: torch.dtype, device: torch.device, positions: int, tokens: int
    ) -> Layer:
        both = shape.heads + shape.kv_heads

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, device=device)

        rate = 1e4 ** (-torch.arange(shape.half, device=device) / shape.half)
        angle = torch.arange(positions, device=device)[:, None] * rate
        return cls(
            shape,
            (1.5 * draw(tokens, 2 * both * shape.dim)).to(dtype),
            1.0 + 0.2 * draw(both, shape.dim),
            angle.cos().to(dtype),
            angle.sin().to(dtype),
            draw(2, shape.kv_heads, positions, shape.dim).to(dtype),
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.kv.dtype

    def known(self, first: int, start: int) -> Layer:
        """The same with nothing but NaN outside the slots [first, start)."""
        kv = torch.full_like(self.kv, float("nan"))
        kv[:, :, first:start] = self.kv[:, :, first:start]
        return replace(self, kv=kv)

    def exact(self) -> Layer:
        """Copies for the reference: float32 inputs, KV and softmax in float64."""
        return replace(
            self,
            qkvg=self.qkvg.float(),
            cos=self.cos.float(),
            sin=self.sin.float(),
            kv=self.kv.double(),
        )

    def plan(self, splits: int | None = None) -> Plan:
        s = self.shape
        plan = Plan.of(s.heads, s.kv_heads, s.dim, self.dtype, self.kv.device)
        if splits is not None:
            plan = replace(plan, splits=splits)
        return plan if ON_CARD else replace(plan, block=16, splits=splits or 2)

    def scratch(self, splits: int | None = None) -> Scratch:
        scratch = Scratch.allocate(self.plan(splits), self.kv.device)
        scratch.o.fill_(float("nan"))
        scratch.ml.fill_(float("nan"))
        return scratch

    def rows(
        self, rows: Tensor, start: int, first: int = 0, offset: int = 0, splits: int | None = None
    ) -> Tensor:
        """A step of the rows `rows` of qkvg at `start + offset`. Writes `self.kv`."""
        count = len(rows)
        qkvg = poisoned(MAX_ROWS, rows.shape[1], dtype=self.dtype, device=rows.device)
        qkvg[:count] = rows
        width = self.shape.heads * self.shape.dim
        out = poisoned(MAX_ROWS, width, dtype=self.dtype, device=rows.device)
        at = torch.tensor([start], dtype=torch.int32, device=rows.device)
        scratch = self.scratch(splits)
        decode.rows_attention(
            qkvg, self.scales, EPS, self.cos, self.sin, self.kv, at, offset, first, count, out,
            scratch,
        )  # fmt: skip
        assert out[count:].isnan().all(), "rows beyond the step were written"
        return out[:count]

    def rows_reference(self, rows: Tensor, start: int, first: int = 0) -> Tensor:
        out = torch.empty(len(rows), self.shape.heads * self.shape.dim, device=rows.device)
        at = torch.tensor([start], dtype=torch.int32)
        reference.rows_attention(
            rows, self.scales, EPS, self.cos, self.sin, self.kv, at, 0, first, len(rows), out
        )
        return out


def check_step(layer: Layer, start: int, rows: int, first: int, splits: int | None = None) -> None:
    layer = layer.known(first, start)
    exact = layer.exact()
    offset = min(start, 3)
    got = layer.rows(layer.qkvg[:rows], start - offset, first, offset, splits)
    want = exact.rows_reference(exact.qkvg[:rows], start, first)
    assert_close(got, want, layer.dtype)
    assert_close(layer.kv, exact.kv, layer.dtype, "kv")  # NaN where it was NaN


@pytest.mark.parametrize("dtype", DTYPES)
@many
@given(
    shape=st.sampled_from(SMALL),
    start=st.integers(0, 55),
    rows=st.integers(1, MAX_ROWS),
    late=st.booleans(),
    splits=st.integers(1, 3),
)
def test_a_step_of_any_rows_anywhere_equals_the_definition(
    device: torch.device,
    dtype: torch.dtype,
    shape: Shape,
    start: int,
    rows: int,
    late: bool,
    splits: int,
) -> None:
    first = 1 if late and start >= 1 else 0
    layer = Layer.make(shape, dtype, device, 64, rows)
    check_step(layer, start, rows, first, splits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_at_its_position_in_any_company_and_place(
    device: torch.device, dtype: torch.dtype
) -> None:
    start, first = 27, 1  # rows stand on both sides of the block boundary at 32
    layer = Layer.make(SMALL[0], dtype, device, 40, MAX_ROWS).known(first, start)
    before = layer.kv.clone()
    whole = layer.rows(layer.qkvg, start, first)
    cuts = [[1] * MAX_ROWS, [5, 4], [2, 7]] if ON_CARD else [[1, 1, 3, 4]]
    for cut in cuts:
        pieces, kv, at = [], replace(layer, kv=before.clone()), 0
        for count in cut:
            pieces.append(kv.rows(layer.qkvg[at : at + count], start + at, first))
            at += count
        assert_same_bits(torch.cat(pieces), whole)
        assert_same_bits(kv.kv, layer.kv, "kv")


def test_how_many_splits_there_are_changes_rounding_only(device: torch.device) -> None:
    layer = Layer.make(SMALL[1], torch.float32, device, 64, 4).known(0, 50)
    one = replace(layer, kv=layer.kv.clone()).rows(layer.qkvg, 50, splits=1)
    assert_close(layer.rows(layer.qkvg, 50, splits=7), one, torch.float32)


def test_rows_that_have_no_slot_write_nothing_and_change_nothing(device: torch.device) -> None:
    layer = Layer.make(SMALL[1], torch.float32, device, 33, MAX_ROWS).known(0, 31)
    guarded = torch.full((layer.kv.numel() + 4096,), 7.0, device=device)
    kv = guarded[: layer.kv.numel()].view_as(layer.kv)
    kv.copy_(layer.kv)
    fits = layer.rows(layer.qkvg[:2], 31)
    beyond = replace(layer, kv=kv).rows(layer.qkvg, 31)
    assert_same_bits(beyond[:2], fits)
    assert_same_bits(kv, layer.kv, "kv")
    assert (guarded[layer.kv.numel() :] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@many
@given(
    shape=st.sampled_from(SMALL[:2]),
    tokens=st.integers(1, 40 if ON_CARD else 9),
    start=st.integers(0, 40),
    late=st.booleans(),
    splits=st.integers(1, 3),
)
def test_a_prefill_chunk_equals_the_definition(
    device: torch.device,
    dtype: torch.dtype,
    shape: Shape,
    tokens: int,
    start: int,
    late: bool,
    splits: int,
) -> None:
    first = 1 if late and start >= 1 else 0
    layer = Layer.make(shape, dtype, device, 64, tokens)
    check_chunk(layer, start, tokens, first, splits)


def split(q: Tensor, kv: Tensor, first: int, start: int, splits: int) -> Tensor:
    form = replace(card.form_for(q.dtype, q.shape[2], q.device), splits=splits)
    return card.split_prefill(q, *kv, first, start, form if ON_CARD else replace(form, tile=16))


def check_chunk(
    layer: Layer, start: int, tokens: int, first: int, splits: int | None = None
) -> None:
    layer = layer.known(first, start)
    exact = layer.exact()
    arguments = (layer.scales, EPS)
    q = card.prepare(layer.qkvg, *arguments, layer.cos, layer.sin, layer.kv, start, tokens)
    if splits is None:
        o = card.prefill(q, *layer.kv, first, start)
    else:
        o = split(q, layer.kv, first, start, splits)
    y = card.gate_mul(o, layer.qkvg)
    want = reference.prepare(exact.qkvg, *arguments, exact.cos, exact.sin, exact.kv, start, tokens)
    assert_close(q, want, layer.dtype, "q")
    assert_close(layer.kv, exact.kv, layer.dtype, "kv")
    want = reference.prefill(want, *exact.kv, first, start)
    assert_close(o, want, layer.dtype, "o")
    assert_close(y, reference.gate_mul(want, exact.qkvg), layer.dtype, "y")


def test_a_chunk_in_two_pieces_equals_the_whole(device: torch.device) -> None:
    layer = Layer.make(SMALL[0], torch.float32, device, 40, 14).known(0, 13)
    q = reference.prepare(
        layer.qkvg, layer.scales, EPS, layer.cos, layer.sin, layer.kv, 13, 14
    ).contiguous()
    whole = split(q, layer.kv, 0, 13, 2)
    pieces = [
        split(q[:5], layer.kv, 0, 13, 2),
        split(q[5:], layer.kv, 0, 18, 2),
    ]
    assert_close(torch.cat(pieces), whole, torch.float32)


# -- what needs the card ---------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("start", [0, 1, 63, 2043, 32760])
def test_real_shapes_equal_the_definition(device: torch.device, name: str, start: int) -> None:
    for dtype in DTYPES if name == "nano" else (torch.bfloat16,):
        layer = Layer.make(REAL[name], dtype, device, 32768 + 64, MAX_ROWS)
        for rows in (1, 4, 9):
            check_step(layer, start, rows, min(start, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
def test_real_shapes_are_row_invariant(device: torch.device, name: str) -> None:
    for dtype in DTYPES if name == "nano" else (torch.bfloat16,):
        for start in (0, 59, 2100, 8187):
            layer = Layer.make(REAL[name], dtype, device, 8200, MAX_ROWS).known(0, start)
            before = layer.kv.clone()
            whole = layer.rows(layer.qkvg, start)
            for cut in ([1] * 9, [5, 4], [1, 8], [3, 3, 3]):
                kv, at = replace(layer, kv=before.clone()), 0
                for count in cut:
                    piece = kv.rows(layer.qkvg[at : at + count], start + at)
                    assert_same_bits(piece, whole[at : at + count])
                    at += count
                assert_same_bits(kv.kv, layer.kv, "kv")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["27B", "nano"])
def test_512_steps_equal_one_prefill_and_a_graph_gives_the_bits_of_eager_calls(
    device: torch.device, name: str
) -> None:
    dtype = torch.bfloat16 if name == "27B" else torch.float32
    begin, steps = 1000, 512
    layer = Layer.make(REAL[name], dtype, device, 2048, steps).known(0, begin)
    exact = layer.exact()
    scratch = layer.scratch()
    start = torch.tensor([begin], dtype=torch.int32, device=device)
    qkvg = layer.qkvg[:MAX_ROWS].clone()
    width = layer.shape.heads * layer.shape.dim
    out = poisoned(MAX_ROWS, width, dtype=dtype, device=device)

    def step(kv: Tensor) -> None:
        decode.rows_attention(
            qkvg, layer.scales, EPS, layer.cos, layer.sin, kv, start, 0, 0, 1, out, scratch
        )

    replayed = layer.kv.clone()
    step(replayed.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(replayed)
    each = []
    for i in range(steps):
        start.fill_(begin + i)
        qkvg[0] = layer.qkvg[i]
        step(layer.kv)
        each.append(out[0].clone())
        out.fill_(float("nan"))
        graph.replay()
        assert_same_bits(out[0], each[-1])
    assert_same_bits(replayed, layer.kv, "kv")
    q = reference.prepare(
        exact.qkvg, exact.scales, EPS, exact.cos, exact.sin, exact.kv, begin, steps
    )
    want = reference.gate_mul(reference.prefill(q, *exact.kv, 0, begin), exact.qkvg)
    assert_close(torch.stack(each), want, dtype)
    assert_close(layer.kv, exact.kv, dtype, "kv")


@pytest.mark.gpu
@pytest.mark.parametrize("begin", [0, 2000])
def test_steps_that_follow_each_other_in_a_graph_wait_for_each_other(
    device: torch.device, begin: int
) -> None:
    """With dependent launch a step's programs start early, and no other kernel stands between."""
    steps = 64
    layer = Layer.make(REAL["27B"], torch.bfloat16, device, begin + steps, MAX_ROWS)
    layer = layer.known(0, begin)
    start = torch.tensor([begin], dtype=torch.int32, device=device)
    scratch = layer.scratch()
    out = poisoned(steps, MAX_ROWS, 24 * 256, dtype=layer.dtype, device=device)

    def chain(kv: Tensor, out: Tensor, pause: bool) -> None:
        for i in range(steps):
            decode.rows_attention(
                layer.qkvg, layer.scales, EPS, layer.cos, layer.sin, kv, start, i, 0, 1, out[i],
                scratch,
            )  # fmt: skip
            if pause:
                torch.cuda.synchronize()

    apart, kv = out.clone(), layer.kv.clone()
    chain(kv, apart, pause=True)
    together = layer.kv.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(together, out, pause=False)
    for _ in range(10):
        together.copy_(layer.kv)
        out.fill_(float("nan"))
        graph.replay()
        assert_same_bits(out[:, 0], apart[:, 0])
        assert_same_bits(together, kv, "kv")


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize(
    ("start", "tokens"), [(0, 512), (0, 1), (1, 64), (4096, 1000), (8192, 64), (16384, 128)]
)
def test_real_chunks_equal_the_definition(
    device: torch.device, name: str, start: int, tokens: int
) -> None:
    for dtype in DTYPES if name == "nano" else (torch.bfloat16,):
        layer = Layer.make(REAL[name], dtype, device, start + tokens + 64, tokens)
        check_chunk(layer, start, tokens, min(start, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 300])
def test_a_chunk_gives_the_same_bits_again(device: torch.device, tokens: int) -> None:
    layer = Layer.make(REAL["27B"], torch.bfloat16, device, 5000, tokens)
    q = torch.randn(tokens, 24, 256, device=device).bfloat16()
    once = card.prefill(q, *layer.kv, 0, 4000)
    for _ in range(5):
        assert_same_bits(card.prefill(q, *layer.kv, 0, 4000), once)
