"""Everything of a gated delta net between its two projections, for the rows of a decode step.

Convolution, SiLU, q/k norm, gates, delta rule and gated output norm in one call: some 45 torch
calls a layer otherwise, whose overhead was most of a step on CPU (docs/log.md, 2026-12-01). Float32
only. The definition is `reference.py`, as `DeltaNet.verify` strings it together. Nothing may be
reordered or fused here, so that `fold_rows` repeats the state update bit for bit, and that a row's
bits do not depend on its company.
"""

import math

import numpy as np

from capserve.engine.kernels.compiled import compiled


@compiled()
def _decay_and_read(state, decay, k, seen):
    """state [Dk, Dv] <- decay state; seen [Dv] <- state^T k."""
    for j in range(seen.shape[0]):
        seen[j] = np.float32(0.0)
    for i in range(state.shape[0]):
        for j in range(state.shape[1]):
            state[i, j] = state[i, j] * decay
            seen[j] = seen[j] + state[i, j] * k[i]


@compiled()
def _write(state, k, d):
    """state [Dk, Dv] <- state + k d^T."""
    for i in range(state.shape[0]):
        for j in range(state.shape[1]):
            state[i, j] = state[i, j] + k[i] * d[j]


@compiled()
def _silu(x):
    return x / (np.float32(1.0) + np.float32(math.exp(-x)))


@compiled()
def delta_rows(
    projected, conv, conv_weight, rate, dt_bias, norm, eps, live, scratch, qk, d, decay, y
):
    """projected [R, C + Hv Dv + 2 Hv] (conv input | z | b | a); conv [W-1 + rows, C], whose first
    W-1 rows are the inputs before; conv_weight [W, C]; rate, dt_bias [Hv]; norm [Dv]; live, scratch
    [Hv, Dk, Dv]; qk [rows, 2, Hv, 1, Dk], d [rows, Hv, 1, Dv], decay [rows, Hv, 1, 1]: what
    `fold_rows` needs. Row 0 lands in `live`, the others run on `scratch`. Writes y [R, Hv Dv]."""
    rows = projected.shape[0]
    taps, channels = conv_weight.shape
    heads, key, value = live.shape
    key_dim = (channels - heads * value) // 2
    group = heads // (key_dim // key)
    z_at, b_at = channels, channels + heads * value
    x = np.empty(channels, np.float32)
    seen = np.empty(value, np.float32)
    o = np.empty(value, np.float32)
    for r in range(rows):
        for c in range(channels):
            conv[taps - 1 + r, c] = projected[r, c]
    for r in range(rows):
        if r == 1:
            for h in range(heads):
                for i in range(key):
                    for j in range(value):
                        scratch[h, i, j] = live[h, i, j]
        states = live if r == 0 else scratch
        for c in range(channels):
            x[c] = np.float32(0.0)
        for t in range(taps):
            for c in range(channels):
                x[c] = x[c] + conv[r + t, c] * conv_weight[t, c]
        for c in range(channels):
            x[c] = _silu(x[c])
        for h in range(heads):
            for part in range(2):
                at = part * key_dim + (h // group) * key
                total = np.float32(1e-6)
                for i in range(key):
                    total += x[at + i] * x[at + i]
                scale = np.float32(1.0) / np.sqrt(total)
                if part == 0:
                    scale = scale / np.sqrt(np.float32(key))
                for i in range(key):
                    qk[r, part, h, 0, i] = x[at + i] * scale
            a = projected[r, b_at + heads + h] + dt_bias[h]
            softplus = a if a > np.float32(20.0) else np.float32(math.log1p(math.exp(a)))
            decay[r, h, 0, 0] = np.float32(math.exp(softplus * rate[h]))
            beta = np.float32(1.0) / (
                np.float32(1.0) + np.float32(math.exp(-projected[r, b_at + h]))
            )
            q, k = qk[r, 0, h, 0], qk[r, 1, h, 0]
            _decay_and_read(states[h], decay[r, h, 0, 0], k, seen)
            v_at = 2 * key_dim + h * value
            for j in range(value):
                d[r, h, 0, j] = (x[v_at + j] - seen[j]) * beta
                o[j] = np.float32(0.0)
            _write(states[h], k, d[r, h, 0])
            for i in range(key):
                for j in range(value):
                    o[j] = o[j] + states[h, i, j] * q[i]
            total = np.float32(0.0)
            for j in range(value):
                total += o[j] * o[j]
            scale = np.float32(1.0) / np.sqrt(total / np.float32(value) + eps)
            for j in range(value):
                z = projected[r, z_at + h * value + j]
                y[r, h * value + j] = o[j] * scale * norm[j] * _silu(z)


@compiled()
def fold_rows(recurrent, qk, d, decay, rows):
    """Repeat for all layers what rows [1, rows) did to their scratch: recurrent [L, Hv, Dk, Dv],
    the rest as in `delta_rows` with the layer in front."""
    for layer in range(recurrent.shape[0]):
        for h in range(recurrent.shape[1]):
            state = recurrent[layer, h]
            for r in range(1, rows):
                factor = decay[layer, r, h, 0, 0]
                for i in range(state.shape[0]):
                    for j in range(state.shape[1]):
                        state[i, j] = state[i, j] * factor
                _write(state, qk[layer, r, 1, h, 0], d[layer, r, h, 0])
