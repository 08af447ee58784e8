"""The definition: one copy a segment."""

from collections.abc import Sequence

from torch import Tensor


def place(kv: Tensor, segments: Sequence[Tensor], starts: Sequence[int]) -> None:
    """segments[i] to the slots of `kv` from starts[i] on."""
    for segment, start in zip(segments, starts, strict=True):
        kv[:, :, :, start : start + segment.shape[3]].copy_(segment, non_blocking=True)
