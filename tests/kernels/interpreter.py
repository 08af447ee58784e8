"""Three repairs of Triton 3.6's interpreter, in force once this module is imported.

Under numpy 2.4 an array of one element is no longer an int, so a loop to a bound that was loaded
fails; a dot of bfloat16 multiplies the bits as if they were integers; and a row of a dot has other
bits in another place of the tile, by the processor's matmul, which no tensor core does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_dot = interpreter.InterpreterBuilder.create_dot


def _with_index(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _wide(handle: Any) -> Any:
    data = handle.data
    if handle.dtype.scalar == tl.bfloat16:
        data = (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float64)


def _dot_of_floats(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
    if not (a.dtype.scalar.is_floating() and d.dtype.scalar == tl.float32):
        return _dot(self, a, b, d, *rest)
    if min(a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth) < 16:
        return _dot(self, a, b, d, *rest)
    product = np.matmul(_wide(a), _wide(b)).astype(np.float32)
    return interpreter.TensorHandle(product + d.data, tl.float32)


interpreter._patch_lang_tensor = _with_index
interpreter.InterpreterBuilder.create_dot = _dot_of_floats
