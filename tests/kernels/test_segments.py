"""Segments reach the live buffer bit for bit, and nothing beside them changes."""

from __future__ import annotations

import pytest
import torch

from capserve.engine.kernels.segments import reference, triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_of_any_length_lie_where_they_belong(
    dtype: torch.dtype, device: torch.device
) -> None:
    kv = torch.full((2, 2, 3, 80, 16), torch.nan, dtype=dtype, device=device)
    expected = kv.clone()
    segments = [torch.randn(2, 2, 3, n, 16, device=device).to(dtype) for n in (32, 32, 5)]
    starts = [0, 40, 72]
    triton.place(kv, segments, starts)
    reference.place(expected, segments, starts)
    assert torch.equal(kv.view(torch.uint8), expected.view(torch.uint8))


def test_no_segment_is_no_launch(device: torch.device) -> None:
    kv = torch.zeros(1, 2, 1, 8, 16, device=device)
    triton.place(kv, [], [])
    assert not kv.any()
