"""How do a checkpoint's matrices become the ones that a layer multiplies by?

What reads the same input is stacked into one matrix, so that a step launches one matmul. Rows are
only moved, never changed: an FP8 matrix moves in whole squares of 128, with their scales. Where a
square would be cut (models smaller than any published one), the form is given up for plain rows.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import torch
from torch import Tensor

from capserve.engine.weights import BLOCK, BlockFp8Weight, PlainWeight, SplitWeight, Weight, dense

Weights = MutableMapping[str, Tensor | Weight]
"""The tensors of `tensor_shapes` by name: vectors and plain matrices as they are, others in their
form. A model takes them out as it is made, so that what is stacked does not lie in memory twice."""

_PLAIN_ENDS = (
    "embed_tokens.weight",
    "lm_head.weight",
    "in_proj_a.weight",
    "in_proj_b.weight",
    "conv1d.weight",
    "mtp.fc.weight",
)


def quantisable(name: str) -> bool:
    """Whether the family's quantised checkpoints hold that tensor in a form other than plain."""
    vector = "norm" in name or name.endswith(("A_log", "dt_bias"))
    return name.endswith(".weight") and not vector and not name.endswith(_PLAIN_ENDS)


def stack(parts: Sequence[Weight], dtype: torch.dtype) -> Weight:
    """One matrix of all the rows of `parts`, in their order; plain rows in `dtype`."""
    if len(parts) == 1:
        return parts[0]
    heads: list[BlockFp8Weight] = []
    tails: list[Tensor] = []
    for part in parts:
        if isinstance(part, BlockFp8Weight) and not tails and part.weight.shape[0] % BLOCK == 0:
            heads.append(part)
        else:
            tails.append(dense(part, dtype))
    if not heads:
        return PlainWeight(torch.cat(tails))
    head = BlockFp8Weight(
        torch.cat([part.weight.view(torch.uint8) for part in heads]).view(torch.float8_e4m3fn),
        torch.cat([part.scale for part in heads]),
    )
    return SplitWeight(head, PlainWeight(torch.cat(tails))) if tails else head


def query_and_gate(
    q_proj: Weight, heads: int, dim: int, dtype: torch.dtype
) -> tuple[Weight, Weight]:
    """q_proj [Hq 2 D, K] holds query and gate in turn, head by head -> both [Hq D, K]."""
    if isinstance(q_proj, BlockFp8Weight) and dim % BLOCK == 0:
        bits = _in_turn(q_proj.weight.view(torch.uint8), heads, dim)
        scales = _in_turn(q_proj.scale, heads, dim // BLOCK)
        query, gate = (
            BlockFp8Weight(rows.view(torch.float8_e4m3fn), scale)
            for rows, scale in zip(bits, scales, strict=True)
        )
        return query, gate
    plain = _in_turn(dense(q_proj, dtype), heads, dim)
    return PlainWeight(plain[0]), PlainWeight(plain[1])


def _in_turn(rows: Tensor, heads: int, each: int) -> tuple[Tensor, Tensor]:
    query, gate = rows.reshape(heads, 2, each, rows.shape[1]).unbind(1)
    return query.flatten(0, 1).contiguous(), gate.flatten(0, 1).contiguous()


class Named:
    """A checkpoint's tensors under a prefix, each taken once; a name that is missing is a bug of
    the loader."""

    def __init__(self, tensors: Weights, dtype: torch.dtype, prefix: str = "") -> None:
        self._tensors, self.dtype, self._prefix = tensors, dtype, prefix

    def under(self, prefix: str) -> Named:
        return Named(self._tensors, self.dtype, self._prefix + prefix)

    def __getitem__(self, name: str) -> Tensor:
        """A vector, or a matrix that is always plain."""
        tensor = self._tensors.pop(self._prefix + name)
        assert isinstance(tensor, Tensor), f"{self._prefix}{name} is not plain"
        return tensor

    def matrix(self, name: str) -> Weight:
        tensor = self._tensors.pop(self._prefix + name)
        return PlainWeight(tensor.contiguous()) if isinstance(tensor, Tensor) else tensor

    def stacked(self, *names: str) -> Weight:
        return stack([self.matrix(name) for name in names], self.dtype)

    def query_and_gate(self, name: str, heads: int, dim: int) -> tuple[Weight, Weight]:
        return query_and_gate(self.matrix(name), heads, dim, self.dtype)

    def scale(self, name: str) -> Tensor:
        """The float32 scale 1 + w of a norm stored around 0."""
        return 1.0 + self[name].float()
