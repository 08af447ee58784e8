"""Makes Triton 3.6's interpreter round to nearest, as the card does: left alone it truncates, and
loses a carry where it is asked to round. Import it before a kernel runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_convert = interpreter._convert_float

_FLOATS = {
    tl.float32: (torch.float32, np.uint32),
    tl.float16: (torch.float16, np.uint16),
    tl.bfloat16: (torch.bfloat16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
}
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def _nearest_even(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """data: numpy array with the bits of `source` -> unsigned integers with those of `target`."""
    if source not in _FLOATS or target not in _FLOATS:
        return _convert(data, source, target, rounding)
    kind, bits = _FLOATS[source]
    value = torch.from_numpy(np.array(data).reshape(-1).view(bits)).view(kind)
    narrow = value.to(_FLOATS[target][0])
    return narrow.view(_BITS[narrow.element_size()]).numpy().reshape(data.shape)


interpreter._convert_float = _nearest_even
