"""Do the GPU's delta rows, fold and prefill compute what `reference.py` says, with steady bits?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import tests.kernels.conversions
import tests.kernels.interpreter  # noqa: F401
from capserve.engine.kernels.gated_delta import chunked_triton, cpu, reference, triton
from tests.kernels.conftest import ON_CARD
from tests.kernels.delta_layers import EPS, MAX_ROWS, TAPS, Layer, random_layer
from tests.kernels.tolerance import assert_close, assert_same_bits, poisoned

F32, BF16 = torch.float32, torch.bfloat16
TINY, UNEVEN = (1, 2, 16, 16), (1, 3, 32, 16)
NANO, DENSE_9B, DENSE_27B = (4, 8, 64, 64), (16, 32, 128, 128), (16, 48, 128, 128)
NARROW = (1, 2, 64, 64)
"""For bfloat16 prefill off the card. In 16 dims an output is now and then a difference of nearly
equal sums, and the norm behind it makes its rounding as large as an output."""
# what is served: small models in float32, large ones in bfloat16
SMALL = [(TINY, F32), (UNEVEN, F32)]
SERVED = [(NANO, F32), (DENSE_9B, BF16), (DENSE_27B, BF16)] if ON_CARD else []
CASES = [*SMALL, (TINY, BF16), (UNEVEN, BF16), *SERVED]
PREFILL = [*SMALL, *(SERVED or [(NARROW, BF16)])]
LARGE = {F32: NANO, BF16: DENSE_27B} if ON_CARD else {F32: TINY, BF16: TINY}
few = settings(
    max_examples=40 if ON_CARD else 3,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def run_rows(layer: Layer, projected: Tensor, rows: int, module: Any = triton) -> dict[str, Tensor]:
    """What `rows` rows write, poison where they don't; moves `layer.conv` on."""
    extra = {"scratch": layer.rows_scratch()} if module is triton else {"wide": torch.float64}
    written = layer.row_buffers() | {"out": layer.out(MAX_ROWS)}
    module.delta_rows(
        projected=projected, conv=layer.conv, recurrent=layer.recurrent, rows=rows,
        **layer.constants(), **written, **extra,
    )  # fmt: skip
    return written


def run_fold(layer: Layer, written: dict[str, Tensor], accepted: int, module: Any = triton) -> None:
    """One layer, as a stack of one."""
    rows = {name: written[name][None] for name in ("row_k", "row_d", "row_decay")}
    count = torch.tensor([accepted], dtype=torch.int32, device=layer.device)
    module.fold_rows(layer.recurrent[None], layer.conv[None], **rows, accepted=count)


def run_prefill(
    layer: Layer, projected: Tensor, start: int, module: Any = chunked_triton
) -> Tensor:
    """As served; but off the card float32 goes through the kernels too: an exact look at them."""
    count = len(projected)
    out = layer.out(count)
    inputs = {"projected": projected, "conv": layer.conv, "recurrent": layer.recurrent, "out": out}
    if module is reference:
        reference.delta_prefill(**inputs, **layer.constants(), start=start, wide=torch.float64)
        return out
    make = chunked_triton.delta_prefill if ON_CARD else chunked_triton.Prefill
    chunk = make(layer.shape, TAPS, count, start, **layer.prefill_scratch(count))
    chunk(chunked_triton.Layer(**inputs, **layer.constants()))
    return out


@pytest.mark.parametrize(("shape", "dtype"), CASES)
@pytest.mark.parametrize("rows", [1, 4, 9] if ON_CARD else [4])
def test_rows_are_the_definition_and_touch_nothing_else(shape, dtype, rows, device) -> None:
    layer = random_layer(shape, dtype, device)
    projected = layer.tokens(MAX_ROWS)
    projected[rows:] = float("nan")
    before, wanted = layer.clone(), layer.clone()
    got = run_rows(layer, projected, rows)
    want = run_rows(wanted, projected, rows, reference)
    for name, tensor in got.items():
        # inside the kernel nothing is rounded below float32
        assert_close(tensor[:rows], want[name][:rows], dtype if name == "out" else F32, name)
        assert tensor[rows:].isnan().all(), name
    assert_same_bits(layer.conv, wanted.conv, "conv")
    assert_same_bits(layer.recurrent, before.recurrent, "recurrent")


def test_the_definition_is_what_the_cpu_computes(device) -> None:
    layer = random_layer((2, 4, 32, 16), F32, torch.device("cpu"))
    rows, projected = 5, layer.tokens(5)
    wanted = layer.clone()
    want = run_rows(wanted, projected, rows, reference)
    run_fold(wanted, want, rows, reference)
    state, scratch = layer.recurrent.numpy(), layer.clone().recurrent.numpy()
    heads, key, value = layer.recurrent.shape
    qk = torch.zeros(1, MAX_ROWS, 2, heads, 1, key).numpy()
    d, decay = torch.zeros(1, MAX_ROWS, heads, 1, value), torch.zeros(1, MAX_ROWS, heads, 1, 1)
    constants = [layer.constants()[n].numpy() for n in ("conv_weight", "rate", "dt_bias", "norm")]
    y = torch.zeros(rows, heads * value)
    cpu.delta_rows(
        projected.numpy(), layer.conv.numpy(), *constants, torch.tensor(EPS).numpy()[()],
        state, scratch, qk[0], d[0].numpy(), decay[0].numpy(), y.numpy(),
    )  # fmt: skip
    cpu.fold_rows(state[None], qk, d.numpy(), decay.numpy(), rows)
    assert_close(y, want["out"][:rows], F32)
    assert_close(torch.from_numpy(state), wanted.recurrent, F32)


@pytest.mark.parametrize(("shape", "dtype"), CASES if ON_CARD else [(TINY, BF16)])
def test_a_row_and_the_state_have_the_same_bits_however_rows_are_grouped(
    shape, dtype, device
) -> None:
    layer = random_layer(shape, dtype, device)
    projected = layer.tokens(MAX_ROWS)
    together = layer.clone()
    want = run_rows(together, projected, MAX_ROWS)
    run_fold(together, want, MAX_ROWS)
    for group in ([1] * 9, [2, 5, 2], [4, 4, 1], [8, 1]) if ON_CARD else ([1, 1, 2], [3, 1]):
        apart, at = layer.clone(), 0
        for rows in group:
            mine = projected.roll(-at, 0).contiguous()  # whoever follows, a row is the same
            got = run_rows(apart, mine, rows)
            for name, tensor in got.items():
                assert_same_bits(tensor[:rows], want[name][at : at + rows], f"{name} of {group}")
            run_fold(apart, got, rows)
            at += rows
        if at == MAX_ROWS:
            assert_same_bits(apart.recurrent, together.recurrent, "recurrent")
            assert_same_bits(apart.conv[: TAPS - 1], together.conv[: TAPS - 1], "conv")


@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 1) if ON_CARD else [2])
def test_every_number_of_rows_leaves_the_state_of_single_steps(rows, device) -> None:
    """Fold == rows bit for bit: the state folded by one call is the one that each row saw."""
    layer = random_layer(LARGE[BF16], BF16, device)
    projected = layer.tokens(MAX_ROWS)
    together, apart = layer.clone(), layer.clone()
    run_fold(together, run_rows(together, projected, MAX_ROWS), rows)
    for r in range(rows):
        run_fold(apart, run_rows(apart, projected[r:].contiguous(), 1), 1)
    assert_same_bits(together.recurrent, apart.recurrent, "recurrent")
    assert_same_bits(together.conv[: TAPS - 1], apart.conv[: TAPS - 1], "conv")


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_fold_of_all_layers_reads_the_accepted_rows_alone(dtype, device) -> None:
    heads, key, value, channels = (48, 128, 128, 10240) if ON_CARD else (2, 16, 16, 1100)
    layers = 5 if ON_CARD else 2
    recurrent = torch.randn(layers, heads, key, value, device=device)
    conv = torch.randn(layers, TAPS - 1 + MAX_ROWS, channels, device=device).to(dtype)
    k, d = (torch.randn(layers, MAX_ROWS, heads, n, device=device) for n in (key, value))
    decay = torch.rand(layers, MAX_ROWS, heads, device=device)
    for accepted in range(MAX_ROWS + 1) if ON_CARD else (0, 1, 4, 9):
        count = torch.tensor([accepted], dtype=torch.int32, device=device)
        rows = [x.clone() for x in (k, d, decay)]
        window = conv.clone()
        window[:, accepted + TAPS - 1 :] = float("nan")
        for x in rows:
            x[:, accepted:] = float("nan")
        got, want = recurrent.clone(), recurrent.double()
        got_conv, want_conv = window.clone(), window.clone()
        triton.fold_rows(got, got_conv, *rows, count)
        reference.fold_rows(want, want_conv, *rows, count)
        assert_close(got, want, F32, f"recurrent after {accepted}")
        assert_same_bits(got_conv, want_conv, f"conv after {accepted}")
        if accepted == 0:
            assert_same_bits(got, recurrent, "recurrent")


@pytest.mark.parametrize("dtype", [F32, BF16] if ON_CARD else [F32])
def test_many_steps_stay_as_near_as_one(dtype, device) -> None:
    """Random numbers of rows, random numbers of them accepted, against float64."""
    layer = random_layer(LARGE[dtype], dtype, device, decay=0.02)
    wanted = layer.clone()
    wanted.recurrent = wanted.recurrent.double()
    generator = torch.Generator().manual_seed(1)
    for _ in range(512 if ON_CARD else 6):
        rows = int(torch.randint(1, MAX_ROWS + 1, (), generator=generator))
        accepted = int(torch.randint(1, rows + 1, (), generator=generator))
        projected = layer.tokens(rows)
        got, want = run_rows(layer, projected, rows), run_rows(wanted, projected, rows, reference)
        assert_close(got["out"][:rows], want["out"][:rows], dtype)
        run_fold(layer, got, accepted)
        run_fold(wanted, want, accepted, reference)
        assert_close(layer.recurrent, wanted.recurrent, F32, "recurrent")


@pytest.mark.parametrize(("shape", "dtype"), PREFILL)
@pytest.mark.parametrize(("start", "count"), [(0, 200), (75, 130)] if ON_CARD else [(75, 60)])
def test_prefill_is_the_definition(shape, dtype, start, count, device) -> None:
    layer = random_layer(shape, dtype, device)
    projected, wanted = layer.tokens(count), layer.clone()
    got, want = (
        run_prefill(layer, projected, start),
        run_prefill(wanted, projected, start, reference),
    )
    assert_close(got, want, dtype)
    assert_close(layer.recurrent, wanted.recurrent, dtype, "recurrent")
    assert_same_bits(layer.conv, wanted.conv, "conv")


@few
@given(data=st.data())
def test_prefill_of_any_length_from_anywhere(data, device) -> None:
    shape, dtype = data.draw(st.sampled_from([(TINY, F32), (UNEVEN, F32), (NARROW, BF16)]))
    start = data.draw(st.integers(0, 200))
    count = data.draw(st.integers(1, 400 if ON_CARD else 70))
    decay = data.draw(st.sampled_from([0.01, 1.0, 16.0]))
    layer = random_layer(shape, dtype, device, decay)
    projected, wanted = layer.tokens(count), layer.clone()
    got, want = (
        run_prefill(layer, projected, start),
        run_prefill(wanted, projected, start, reference),
    )
    assert_close(got, want, dtype)
    assert_close(layer.recurrent, wanted.recurrent, dtype, "recurrent")
    assert_same_bits(layer.conv, wanted.conv, "conv")


@pytest.mark.parametrize("start", [0, 75] if ON_CARD else [75])
def test_a_prefill_cut_on_the_grid_has_the_bits_of_one_call(start, device) -> None:
    layer = random_layer(LARGE[BF16], BF16, device)
    whole, cut = layer.clone(), layer.clone()
    end = 1111 if ON_CARD else 200
    projected = layer.tokens(end - start)
    want = run_prefill(whole, projected, start)
    at, got = start, []
    for until in (128, 192, 512, 1088, end) if ON_CARD else (128, end):
        got.append(run_prefill(cut, projected[at - start : until - start], at))
        at = until
    assert_same_bits(torch.cat(got), want)
    assert_same_bits(cut.recurrent, whole.recurrent, "recurrent")
    assert_same_bits(cut.conv, whole.conv, "conv")


@pytest.mark.parametrize("dtype", [F32, BF16] if ON_CARD else [F32])
def test_equal_keys_written_at_full_strength_do_not_blow_up(dtype, device) -> None:
    """The worst case of the inverse: I + A is then nearly all ones below its diagonal, and a series
    in powers of A has terms of 10^18."""
    layer = random_layer(LARGE[dtype], dtype, device, decay=1e-3)
    projected = layer.tokens(128 if ON_CARD else 64)
    keys = layer.key_heads * layer.key
    projected[:, keys : 2 * keys] = projected[:1, keys : 2 * keys] + 1.0
    layer.conv[: TAPS - 1, keys : 2 * keys] = projected[0, keys : 2 * keys]
    at = layer.channels + layer.heads * layer.value
    projected[:, at : at + layer.heads] = 12.0
    wanted = layer.clone()
    got, want = run_prefill(layer, projected, 0), run_prefill(wanted, projected, 0, reference)
    assert layer.recurrent.isfinite().all()
    # by the norm alone: single outputs are differences of nearly equal sums
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error <= (1e-5 if dtype == F32 else 1e-2)


def test_rows_go_on_where_a_prefill_ended(device) -> None:
    layer = random_layer(LARGE[F32], F32, device)
    projected, wanted = layer.tokens(70), layer.clone()
    want = run_prefill(wanted, projected, 0, reference)
    run_prefill(layer, projected[:66], 0)
    written = run_rows(layer, projected[66:].contiguous(), 4)
    run_fold(layer, written, 4)
    assert_close(written["out"][:4], want[66:], F32)
    assert_close(layer.recurrent, wanted.recurrent, F32, "recurrent")
    assert_same_bits(layer.conv[: TAPS - 1], wanted.conv[: TAPS - 1], "conv")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_captured_step_replays_the_bits_of_an_eager_one(dtype, device) -> None:
    layers = [random_layer(LARGE[dtype], dtype, device) for _ in range(3)]
    recurrent = torch.stack([layer.recurrent for layer in layers])
    conv = torch.stack([layer.conv for layer in layers])
    for layer, state, window in zip(layers, recurrent, conv, strict=True):
        layer.recurrent, layer.conv = state, window
    many = [layer.row_buffers() for layer in layers]
    names = ("row_k", "row_d", "row_decay")
    rows = {name: torch.stack([buffers[name] for buffers in many]) for name in names}
    projected = [layer.tokens(MAX_ROWS) for layer in layers]
    out = [layer.out(MAX_ROWS) for layer in layers]
    accepted = torch.zeros(1, dtype=torch.int32, device=device)
    scratch = layers[0].rows_scratch()

    def step() -> None:
        triton.fold_rows(recurrent, conv, **rows, accepted=accepted)
        for i, layer in enumerate(layers):
            mine = {name: rows[name][i] for name in names}
            triton.delta_rows(
                projected=projected[i], conv=conv[i], recurrent=recurrent[i], rows=4,
                scratch=scratch, out=out[i], **mine, **layer.constants(),
            )  # fmt: skip

    def three_steps(one: Any) -> list[Tensor]:
        recurrent.copy_(begun[0])
        conv.copy_(begun[1])
        seen = []
        for count in (0, 3, 1):
            accepted.fill_(count)
            one()
            seen += [tensor.clone() for tensor in (recurrent, conv, *out, *rows.values())]
        return seen

    begun = recurrent.clone(), conv.clone()
    eager = three_steps(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for tensor in out:
        tensor.copy_(poisoned(*tensor.shape, dtype=dtype, device=device))
    for got, want in zip(three_steps(graph.replay), eager, strict=True):
        assert_same_bits(got, want)


@pytest.mark.gpu
def test_a_long_prefill_of_the_real_shape_is_the_definition(device) -> None:
    layer = random_layer(DENSE_27B, BF16, device, decay=0.05)
    projected, wanted = layer.tokens(2048), layer.clone()
    got, want = run_prefill(layer, projected, 64), run_prefill(wanted, projected, 64, reference)
    assert_close(got, want, BF16)
    assert_close(layer.recurrent, wanted.recurrent, BF16, "recurrent")
