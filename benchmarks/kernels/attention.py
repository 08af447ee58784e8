"""How near to the card's bandwidth does attention read the KV, in a step and in a warm turn?

A step's cases are the fused operation, two launches; the peer is torch's flash kernel on queries
that are already prepared, so it does less. Chunks of many tokens are bound by arithmetic: their
names give the operations, and their share of the copy bandwidth means nothing. There the peer is
cuDNN's kernel, where it takes the shape; for few tokens it is torch's flash kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels import Case, Launch, sets_for
from capserve.engine.kernels.attention import card
from capserve.engine.kernels.attention import triton as decode
from capserve.engine.kernels.attention.plan import Plan, Scratch
from capserve.engine.layers.linear import MAX_ROWS

EPS = 1e-6
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    name: str
    heads: int
    kv_heads: int
    dim: int = 256
    half: int = 32

    @property
    def width(self) -> int:
        return 2 * (self.heads + self.kv_heads) * self.dim

    def kv_bytes(self, slots: int) -> int:
        return 2 * self.kv_heads * slots * self.dim * DTYPE.itemsize


SHAPES = (Shape("27B", 24, 4), Shape("9B", 16, 4))
CONTEXTS = (2048, 8192, 32768)


class Layer:
    """One layer's tensors, and as many KV buffers as make launches read from memory."""

    def __init__(self, shape: Shape, device: torch.device, end: int, tokens: int) -> None:
        both = shape.heads + shape.kv_heads
        self.shape, self.end = shape, end
        positions = end + 64
        self.qkvg = torch.randn(tokens, shape.width, device=device).to(DTYPE)
        self.scales = 1 + 0.1 * torch.randn(both, shape.dim, device=device)
        angle = torch.rand(positions, shape.half, device=device) * 6.28
        self.cos, self.sin = angle.cos().to(DTYPE), angle.sin().to(DTYPE)
        size = (2, shape.kv_heads, positions, shape.dim)
        self.kv = [
            torch.randn(size, device=device).to(DTYPE) for _ in range(sets_for(shape.kv_bytes(end)))
        ]


def step_launches(shape: Shape, device: torch.device, end: int, rows: int, plan: Any) -> list[Any]:
    layer = Layer(shape, device, end, MAX_ROWS)
    start = torch.tensor([end - rows], dtype=torch.int32, device=device)
    out = torch.empty(MAX_ROWS, shape.heads * shape.dim, dtype=DTYPE, device=device)
    scratch = Scratch.allocate(plan or _plan(shape, device), device)

    def on(kv: Tensor) -> Launch:
        return lambda: decode.rows_attention(
            layer.qkvg, layer.scales, EPS, layer.cos, layer.sin, kv, start, 0, 0, rows, out,
            scratch,
        )  # fmt: skip

    return [on(kv) for kv in layer.kv]


def chunk_launches(
    shape: Shape,
    device: torch.device,
    end: int,
    tokens: int,
    attend: Callable[[Tensor, Tensor, int], object],
) -> list[Launch]:
    """attend(q [T, Hq, D], kv, start) over all that lies before `end`."""
    layer = Layer(shape, device, end, 1)
    q = torch.randn(tokens, shape.heads, shape.dim, device=device).to(DTYPE)

    def on(kv: Tensor) -> Launch:
        return lambda: attend(q, kv, end - tokens)

    return [on(kv) for kv in layer.kv]


def _plan(shape: Shape, device: torch.device) -> Plan:
    return Plan.of(shape.heads, shape.kv_heads, shape.dim, DTYPE, device)


def _plans(shape: Shape, device: torch.device) -> list[Plan]:
    base = _plan(shape, device)
    plans = [base]
    forms = [(64, 4, 3), (64, 8, 3), (32, 4, 4), (32, 4, 2), (64, 8, 2), (64, 4, 2), (32, 8, 4)]
    for touched, (block, warps, stages) in itertools.product((1, 0, 2), forms):
        for splits in (base.splits, 2 * base.splits):
            plans.append(
                replace(
                    base, block=block, warps=warps, stages=stages, touched=touched, splits=splits
                )
            )
    return list(dict.fromkeys(plans))


def _forms() -> list[card.Form]:
    forms = [(128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 4)]
    return [card.Form(*form) for form in forms]


def _flash(q: Tensor, kv: Tensor, start: int) -> object:
    return card.flash_prefill(q, kv[0], kv[1], 0, start)


def _cudnn(q: Tensor, kv: Tensor, start: int) -> object:
    k, v = (side[None, :, : start + len(q)] for side in kv)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, is_causal=True, enable_gqa=True
        )


def _takes_shape(shape: Shape, device: torch.device) -> bool:
    """Whether cuDNN does: it depends on its version."""
    try:
        chunk_launches(shape, device, 256, 256, _cudnn)[0]()
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _steps(shape: Shape, device: torch.device) -> Iterable[Case]:
    plans = _plans(shape, device)
    for end, rows in itertools.product(CONTEXTS, (1, 4, 9)):
        queries = rows * (shape.width + shape.heads * shape.dim) * DTYPE.itemsize

        def build(plan: Any, end: int = end, rows: int = rows) -> Sequence[Launch]:
            return step_launches(shape, device, end, rows, plan)

        def peer(end: int = end, rows: int = rows) -> Sequence[Launch]:
            return chunk_launches(shape, device, end, rows, _flash)

        # one program shape serves every context: tuned at the two ends, with the usual rows
        tuned = plans if rows == 4 and end != 8192 else []
        yield Case(
            f"{shape.name} step at {end}",
            rows,
            shape.kv_bytes(end) + queries,
            build,
            peer,
            tuned,
            f"({shape.heads}, {shape.kv_heads}, {shape.dim})",
        )


def _chunks(shape: Shape, device: torch.device) -> Iterable[Case]:
    by_cudnn = _takes_shape(shape, device)
    for start, tokens in ((32704, 64), (32640, 128), (7680, 512), (0, 2048), (0, 8192)):
        end = start + tokens
        giga = 4 * tokens * (start + tokens / 2) * shape.heads * shape.dim / 1e9
        few = tokens <= card.SPLIT_TOKENS

        def build(form: Any, end: int = end, tokens: int = tokens) -> Sequence[Launch]:
            def ours(q: Tensor, kv: Tensor, begin: int) -> object:
                if form is not None:
                    return card.split_prefill(q, kv[0], kv[1], 0, begin, form)
                return card.prefill(q, kv[0], kv[1], 0, begin)

            return chunk_launches(shape, device, end, tokens, ours)

        def flash(end: int = end, tokens: int = tokens) -> Sequence[Launch]:
            return chunk_launches(shape, device, end, tokens, _flash)

        def cudnn(end: int = end, tokens: int = tokens) -> Sequence[Launch]:
            return chunk_launches(shape, device, end, tokens, _cudnn)

        yield Case(
            f"{shape.name} chunk at {start}, {giga:.0f} Gflop",
            tokens,
            shape.kv_bytes(end) + 2 * tokens * shape.heads * shape.dim * DTYPE.itemsize,
            build,
            flash if few else cudnn if by_cudnn and start == 0 else None,
            _forms() if few else [],
            "Form",
        )


def _around(shape: Shape, device: torch.device, tokens: int) -> Iterable[Case]:
    """What stands before and after the attention of a chunk."""
    query = tokens * shape.heads * shape.dim * DTYPE.itemsize

    def prepared(_: Any) -> Sequence[Launch]:
        layer = Layer(shape, device, tokens, tokens)
        arguments = (layer.scales, EPS, layer.cos, layer.sin)
        return [
            lambda kv=kv: card.prepare(layer.qkvg, *arguments, kv, 0, tokens)  # type: ignore[misc]
            for kv in layer.kv
        ]

    def gated(_: Any) -> Sequence[Launch]:
        layer = Layer(shape, device, 64, tokens)
        o = torch.randn(tokens, shape.heads, shape.dim, device=device).to(DTYPE)
        return [lambda: card.gate_mul(o, layer.qkvg)]

    moved = 2 * (query + shape.kv_bytes(tokens))
    yield Case(f"{shape.name} prepare", tokens, moved, prepared)
    yield Case(f"{shape.name} gate", tokens, 3 * query, gated)


def cases(device: torch.device) -> Iterable[Case]:
    for shape in SHAPES:
        yield from _steps(shape, device)
    yield from _chunks(SHAPES[0], device)
    for tokens in (64, 8192):
        yield from _around(SHAPES[0], device, tokens)
