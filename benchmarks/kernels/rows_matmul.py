"""Every matrix that a decode step of the 27B and 9B shapes reads, for 1, 4 and 9 rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels import Case, Launch, sets_for
from capserve.engine.kernels.rows_matmul import triton as kernel
from capserve.engine.kernels.rows_matmul.reference import Norm
from capserve.engine.kernels.rows_matmul.tiles import Tile, form_of
from capserve.engine.weights import (
    BLOCK,
    BlockFp8Weight,
    PlainWeight,
    SplitWeight,
    Weight,
    bytes_of,
    shape_of,
)

ROWS = (1, 4, 9)
EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    name: str
    n: int
    k: int
    norm: bool = False
    residual: bool = False
    swiglu: bool = False
    fp8: bool = True
    """Whether FP8 checkpoints have this matrix in FP8."""
    out: torch.dtype = torch.bfloat16


SHAPES = [
    Shape("27B delta-in", 10240 + 6144 + 96, 5120, norm=True),
    Shape("27B attention-in", 14336, 5120, norm=True),
    Shape("27B mixer-out", 5120, 6144, residual=True),
    Shape("27B gate-up", 34816, 5120, norm=True, swiglu=True),
    Shape("27B down", 5120, 17408, residual=True),
    Shape("27B mtp-fc", 5120, 10240, fp8=False),
    Shape("27B head", 248320, 5120, fp8=False, out=torch.float32),
    Shape("9B delta-in", 8192 + 4096 + 64, 4096, norm=True),
    Shape("9B attention-in", 10240, 4096, norm=True),
    Shape("9B mixer-out", 4096, 4096, residual=True),
    Shape("9B gate-up", 24576, 4096, norm=True, swiglu=True),
    Shape("9B down", 4096, 12288, residual=True),
]


class Inputs:
    """The input sets of one shape and form, shared by its cases; only the last ones are kept."""

    _kept: dict[tuple[Shape, str], list[Weight]] = {}  # noqa: RUF012  one for all cases

    @classmethod
    def weights(cls, shape: Shape, form: str, device: torch.device) -> list[Weight]:
        key = (shape, form)
        if key not in cls._kept:
            cls._kept.clear()
            torch.cuda.empty_cache()
            one = _weight(shape, form, device)
            count = sets_for(bytes_of(one))
            cls._kept[key] = [one, *(_weight(shape, form, device) for _ in range(count - 1))]
        return cls._kept[key]


def _plain(n: int, k: int, device: torch.device) -> Tensor:
    return torch.empty(n, k, dtype=torch.bfloat16, device=device).normal_(std=k**-0.5)


def _weight(shape: Shape, form: str, device: torch.device) -> Weight:
    """Random bits suffice for FP8: any e4m3 pattern but the two NaNs takes the same time."""
    if form == "bf16":
        return PlainWeight(_plain(shape.n, shape.k, device))
    cut = shape.n // BLOCK * BLOCK
    bits = torch.randint(0, 0x7F, (cut, shape.k), dtype=torch.uint8, device=device)
    bits |= torch.randint(0, 2, bits.shape, dtype=torch.uint8, device=device) << 7
    scale = torch.rand(cut // BLOCK, -(-shape.k // BLOCK), device=device) * 1e-4
    head = BlockFp8Weight(bits.view(torch.float8_e4m3fn), scale)
    if cut == shape.n:
        return head
    return SplitWeight(head, PlainWeight(_plain(shape.n - cut, shape.k, device)))


def cases(device: torch.device) -> Iterable[Case]:
    for form, shape in product(("bf16", "fp8"), SHAPES):
        if form == "fp8" and not shape.fp8:
            continue
        for rows in ROWS:
            yield _case(shape, form, rows, device)


def _case(shape: Shape, form: str, rows: int, device: torch.device) -> Case:
    width = shape.n // 2 if shape.swiglu else shape.n
    norm: Norm | None = None
    if shape.norm:
        norm = torch.rand(shape.k, device=device) + 0.5, EPS

    def build(tile: Tile | None) -> Sequence[Launch]:
        x = torch.randn(rows, shape.k, device=device).bfloat16()
        out = torch.zeros(rows, width, dtype=shape.out, device=device)

        def launch(weight: Weight) -> Launch:
            if shape.swiglu:
                return lambda: kernel.rows_swiglu(x, weight, out, rows, norm=norm, tile=tile)
            return lambda: kernel.rows_matmul(
                x, weight, out, rows, norm=norm, residual=shape.residual, tile=tile
            )

        return [launch(weight) for weight in Inputs.weights(shape, form, device)]

    def peer() -> Sequence[Launch]:
        x = torch.randn(rows, shape.k, device=device).bfloat16()
        return [_library(x, weight, shape, norm) for weight in Inputs.weights(shape, form, device)]

    weight = _weight(shape, form, torch.device("meta"))
    floor = bytes_of(weight) + rows * (2 * shape.k + width * shape.out.itemsize)
    key = (form_of(weight, torch.bfloat16), *shape_of(weight), shape.swiglu)
    return Case(
        name=f"{shape.name} {form}",
        rows=rows,
        floor_bytes=floor,
        build=build,
        peer=peer if form == "bf16" else None,
        configs=_space(shape, form),
        near=_near,
        table_key=repr(key),
    )


def _library(x: Tensor, weight: Weight, shape: Shape, norm: Norm | None) -> Launch:
    """torch's norm, cuBLAS, torch's silu: what the kernel replaces."""
    assert isinstance(weight, PlainWeight)
    w = weight.weight
    out = torch.zeros(x.shape[0], shape.n, dtype=torch.bfloat16, device=x.device)

    def call() -> None:
        y = x if norm is None else functional.rms_norm(x, (shape.k,), norm[0].bfloat16(), norm[1])
        y = functional.linear(y, w)
        if shape.swiglu:
            gate, up = y.chunk(2, -1)
            functional.silu(gate).mul_(up)
        elif shape.residual:
            out.add_(y)

    return call


SHARED_BYTES = 227 << 10
"""Of one multiprocessor, less what the system takes of a block."""


def _tile(
    shape: Shape,
    form: str,
    columns: int,
    depth: int,
    resident: int,
    warps: int,
    *,
    swap: bool,
    tma: bool,
    split: int,
) -> Tile | None:
    """As many stages as let `resident` programs share a multiprocessor, and 16 KiB fetched ahead;
    None where fewer than 20 KiB of W would be on the way."""
    height = (
        columns * (2 if shape.swiglu else 1) * (2 if form == "bf16" else 1)
    )  # bytes of an input
    room = SHARED_BYTES // resident - (2 << 10)
    if split:
        room -= columns * 64  # sums on their way out, while loads go on
    stages = min(8, room // (depth * (32 + height)))
    if stages < 3 or (stages - 1) * depth * height < 20 << 10:
        return None
    ahead = _power_of_two((16 << 10) // height)
    return Tile(columns, depth, stages, warps, swap=swap, tma=tma, split=split, ahead=ahead)


def _space(shape: Shape, form: str) -> Sequence[Tile]:
    """Likely ones first: the sweep may run out of time. What the split form is for, it does by
    `resident` programs on each multiprocessor."""
    found = []
    for split, columns, depth, resident, swap, tma in product(
        (1, 2, 0),
        (64, 128, 32, 16),
        (128, 256, 64) if form == "bf16" else (BLOCK,),
        (1, 2, 3),
        (True, False),
        (True, False),
    ):
        if (swap and columns < 64) or (split and (resident != split or columns < 32)):
            continue
        warps = 4 if swap or columns == 128 else 2
        tile = _tile(shape, form, columns, depth, resident, warps, swap=swap, tma=tma, split=split)
        if tile is not None:
            found.append(tile)
    return sorted(dict.fromkeys(found), key=lambda tile: _guess(shape, form, tile))


def _near(tile: Tile) -> Sequence[Tile]:
    """One thing changed at a time."""
    aheads = [0, tile.ahead // 2, tile.ahead * 2, tile.ahead * 4] if tile.ahead else [128, 256]
    found = [replace(tile, ahead=ahead) for ahead in aheads]
    stages = (tile.stages - 1, tile.stages - 2, tile.stages + 1)
    found += [replace(tile, stages=count) for count in stages if count >= 2]
    if tile.swap:
        found += [replace(tile, warps=8)] if tile.columns == 128 else []
    else:
        found += [replace(tile, warps=warps) for warps in (1, 2, 4, 8) if warps != tile.warps]
    if tile.split == 1:
        found += [replace(tile, split=2)]  # half of them resident, or all, with few stages
    return found


def _power_of_two(at_most: int) -> int:
    return 1 << at_most.bit_length() - 1 if at_most > 0 else 0


MULTIPROCESSORS = 132


def _guess(shape: Shape, form: str, tile: Tile) -> float:
    """Smaller is likelier. The transposed product and the copy engine win nearly everywhere; the
    split form wins where a program a tile leaves multiprocessors idle."""
    programs = shape.n / (2 if shape.swiglu else 1) / tile.columns
    guess = 0.0 if tile.tma else 0.6
    guess += 0.0 if tile.swap else 0.6 if form == "bf16" else 0.3
    guess += 0.1 * abs(tile.stages - 4)
    if tile.split == 0:
        waves = programs / MULTIPROCESSORS
        guess += 0.8 * (1.0 - waves / -(-waves // 1)) + 0.2
    return guess
