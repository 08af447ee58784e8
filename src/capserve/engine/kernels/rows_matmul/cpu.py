"""On CPU, one thread, compiled when first used: a weight row is widened once and met by all rows.

One thread on purpose. For matrices of a few megabytes a parallel region costs as much as it saves,
and on a machine that is also busy with the agent's own work it costs far more: each region waits
until the scheduler has given every thread its turn (measured: 7 ms a region; docs/log.md,
2026-12-01).
"""

import numpy as np

from capserve.engine.kernels.compiled import compiled

_ORDER_FREE = {"reassoc", "contract", "nsz"}
"""Let the compiler add in vector lanes. The order is fixed when the loop is compiled, not by R."""


@compiled(fastmath=_ORDER_FREE)
def rows_matmul_f32(x, weight, y):
    """x [R, K] f32, weight [N, K] f32; writes y [R, N] f32."""
    rows, inner = x.shape
    for n in range(weight.shape[0]):
        for r in range(rows):
            total = np.float32(0.0)
            for k in range(inner):
                total += x[r, k] * weight[n, k]
            y[r, n] = total


@compiled(fastmath=_ORDER_FREE)
def rows_matmul_bf16(x, weight, y):
    """The same with weight [N, K] as the bits of bfloat16, uint16."""
    rows, inner = x.shape
    bits = np.empty(inner, np.uint32)
    wide = bits.view(np.float32)
    for n in range(weight.shape[0]):
        for k in range(inner):
            bits[k] = np.uint32(weight[n, k]) << np.uint32(16)
        for r in range(rows):
            total = np.float32(0.0)
            for k in range(inner):
                total += x[r, k] * wide[k]
            y[r, n] = total
