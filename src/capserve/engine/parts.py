"""What are the pieces of a capsule, and how do they become bytes and come back?

A `Segment` is the KV of up to 512 positions, a `SmallState` everything of fixed size. Both are
immutable, have a name (history.py) and lie in one tier; `PartPool` sees to it that equal names in a
tier are one piece of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from capserve.engine.packing import Label, Layout, header
from capserve.engine.state import State
from capserve.engine.tiers import Tiers

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int32: "I32"}
DTYPES = {name: dtype for dtype, name in _DTYPES.items()}
"""By the file format's names."""


@dataclass(frozen=True, eq=False)
class Part:
    """A named piece of memory, never written after birth. Implements `seam.CapsulePart`."""

    label: Label
    tier: str

    @property
    def name(self) -> bytes:
        return self.label.name

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of its memory, in the order of the file."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def pack(self) -> list[memoryview]:
        """As `seam.CapsulePart.pack`. What lies on a card is copied to the host first."""
        tensors = {name: tensor.cpu() for name, tensor in self.tensors.items()}
        layouts = {name: _layout(tensor) for name, tensor in tensors.items()}
        return [memoryview(header(self.label, layouts)), *map(_bytes_of, tensors.values())]


@dataclass(frozen=True, eq=False)
class Segment(Part):
    """KV of the positions [i * 512, (i + 1) * 512), or of the tail."""

    kv: Tensor
    """[layers, k|v, Hkv, tokens, D]"""

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"kv": self.kv}


@dataclass(frozen=True, eq=False)
class SmallState(Part):
    """What a capsule holds beside KV; shapes as in `State`."""

    recurrent: Tensor
    conv: Tensor
    """Without the rows under verification."""
    hidden: Tensor
    """[hidden], of position - 1."""
    history: Tensor
    """`history.Tail`: with it names go on after a restore. In host memory in every tier: nobody
    else reads these 4 KiB."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {
            "recurrent": self.recurrent,
            "conv": self.conv,
            "hidden": self.hidden,
            "history": self.history,
        }


def segment_layout(state: State, tokens: int) -> dict[str, Layout]:
    """Of a segment's file with that many tokens."""
    return {"kv": _layout(state.kv[:, :, :, :tokens])}


def small_layout(state: State, history: Tensor) -> dict[str, Layout]:
    """Of a small state's file."""
    conv, hidden = state.conv[:, : state.taps], state.hidden[0]
    return {
        "recurrent": _layout(state.recurrent),
        "conv": _layout(conv),
        "hidden": _layout(hidden),
        "history": _layout(history),
    }


def _layout(tensor: Tensor) -> Layout:
    return Layout(_DTYPES[tensor.dtype], tuple(tensor.shape))


def _bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous host tensor's memory; NumPy has no bfloat16, hence bytes."""
    flat: npt.NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat.data.toreadonly()


P = TypeVar("P", bound=Part)


class PartPool:
    """Every living part of one engine, by name and tier; keeps none alive."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._living: WeakValueDictionary[tuple[bytes, str], Part] = WeakValueDictionary()

    def share(self, kind: type[P], name: bytes, tier: str, make: Callable[[], P]) -> P:
        """The living part of that name in that tier, else the one that `make` gives."""
        living = self._living.get((name, tier))
        if living is None:
            living = self._living[name, tier] = make()
        assert isinstance(living, kind), f"a name of two kinds: {name.hex()}"
        return living

    def segment_in(self, part: Segment, tier: str) -> Segment:
        """The same segment in that tier."""
        return self.share(
            Segment,
            part.name,
            tier,
            lambda: Segment(part.label, tier, self._tiers.copy(part.kv, tier)),
        )

    def small_in(self, part: SmallState, tier: str) -> SmallState:
        """The same small state in that tier."""

        def make() -> SmallState:
            r, c, h = (self._tiers.copy(t, tier) for t in (part.recurrent, part.conv, part.hidden))
            return SmallState(part.label, tier, r, c, h, part.history)

        return self.share(SmallState, part.name, tier, make)
