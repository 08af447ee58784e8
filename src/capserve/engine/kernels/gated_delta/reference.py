"""The gated delta rule in plain torch: a chunked form for prefill, rows for decode and verify."""

import torch
from torch import Tensor

SUB_CHUNK = 64
"""Tokens solved together in prefill, at absolute multiples. The published kernels use 64 as well;
splits at its multiples were the only ones that stayed bit-exact."""


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, start: int):
    """Absorb T tokens that begin at absolute position `start`.

    q, k [T, Hv, Dk], v [T, Hv, Dv], g, beta [T, Hv], all f32; state [Hv, Dk, Dv] f32, updated in
    place. Returns o [T, Hv, Dv] f32. Tokens are laid on absolute sub-chunks of 64: zero rows in
    front and behind (k = 0, beta = 0, g = 0) leave the state unchanged.

    Inside a sub-chunk, with G the inclusive cumsum of g and D_ij = exp(G_i - G_j) for j <= i:
    (I + strict_lower(beta k k^T * D)) [U, W] = [beta v, beta k exp(G)];  V' = U - W S;
    o = (q exp(G)) S + (q k^T * D) V';  S <- exp(G_L) S + (k exp(G_L - G))^T V'.
    """
    tokens, heads, key_dim = q.shape
    value_dim = v.shape[-1]
    front = start % SUB_CHUNK
    count = -(-(front + tokens) // SUB_CHUNK)
    length = count * SUB_CHUNK

    def lay(x: Tensor) -> Tensor:  # [T, H, *] -> [H, n, 64, *]
        out = x.new_zeros(length, *x.shape[1:])
        out[front : front + tokens] = x
        out = out.unflatten(0, (count, SUB_CHUNK))
        return out.permute(2, 0, 1, *range(3, out.dim())).contiguous()

    q, k, v, g, beta = lay(q), lay(k), lay(v), lay(g), lay(beta).unsqueeze(-1)
    cum = g.cumsum(-1)  # [H, n, 64]
    lower = torch.ones(SUB_CHUNK, SUB_CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (cum.unsqueeze(-1) - cum.unsqueeze(-2)).masked_fill_(~lower, -torch.inf).exp_()
    grown = cum.exp().unsqueeze(-1)  # exp(G) [H, n, 64, 1]
    scaled_k = k * beta
    system = (scaled_k @ k.transpose(-1, -2)).mul_(decay)  # unit diagonal is implied below
    rhs = torch.cat([v * beta, scaled_k * grown], -1)
    solved = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    u, w = solved.split([value_dim, key_dim], -1)
    inside = (q @ k.transpose(-1, -2)).mul_(decay)
    grown_q = q * grown
    last = cum[..., -1:]  # [H, n, 1]
    kept_k = (k * (last - cum).exp().unsqueeze(-1)).transpose(-1, -2)
    total = last.exp().unsqueeze(-1)  # [H, n, 1, 1]
    out = v.new_empty(heads, count, SUB_CHUNK, value_dim)
    for n in range(count):
        fresh = u[:, n] - w[:, n] @ state
        out[:, n] = torch.baddbmm(grown_q[:, n] @ state, inside[:, n], fresh)
        state.mul_(total[:, n]).baddbmm_(kept_k[:, n], fresh)
    return out.permute(1, 2, 0, 3).reshape(length, heads, value_dim)[front : front + tokens]


def row(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, d: Tensor,
        o: Tensor) -> None:  # fmt: skip
    """Absorb one token. q, k [Hv, 1, Dk], v [Hv, 1, Dv], decay = exp(g), beta [Hv, 1, 1], f32;
    state [Hv, Dk, Dv] f32, updated in place. Writes d and o [Hv, 1, Dv]."""
    state.mul_(decay)
    torch.sub(v, torch.bmm(k, state), out=d).mul_(beta)
    state.baddbmm_(k.transpose(1, 2), d)
    torch.bmm(q, state, out=o)


def fold(k: Tensor, d: Tensor, decay: Tensor, state: Tensor) -> None:
    """Repeat what `row` did to the state, bit for bit, from the d that it wrote."""
    state.mul_(decay).baddbmm_(k.transpose(1, 2), d)


def features(projected: Tensor, history: Tensor, conv_weight: Tensor, rate: Tensor,
             dt_bias: Tensor, heads: int, key: int, value: int, wide: torch.dtype):  # fmt: skip
    """projected [T, C + Hv Dv + 2 Hv], history [W-1, C] -> q, k [T, Hv, Dk], v [T, Hv, Dv],
    g, beta [T, Hv], z [T, Hv, Dv], in `wide`; shapes and constants as in the package."""
    taps, channels = conv_weight.shape
    mixed, z, b, a = projected.split([channels, heads * value, heads, heads], -1)
    window = torch.cat([history, mixed]).to(wide)
    x = sum(window[t : t + len(mixed)] * conv_weight[t].to(wide) for t in range(taps))
    x = torch.nn.functional.silu(x)
    qk, v = x.split([channels - heads * value, heads * value], -1)
    qk = qk.reshape(len(mixed), 2, -1, key)
    qk = qk * ((qk * qk).sum(-1, keepdim=True) + 1e-6).rsqrt()
    q, k = qk.repeat_interleave(heads // qk.shape[2], 2).unbind(1)
    g = torch.nn.functional.softplus(a.to(wide) + dt_bias.to(wide)) * rate.to(wide)
    shape = (len(mixed), heads, value)
    return q * key**-0.5, k, v.reshape(shape), g, b.to(wide).sigmoid(), z.to(wide).reshape(shape)


def gated_norm(o: Tensor, z: Tensor, norm: Tensor, eps: float) -> Tensor:
    """o, z [T, Hv, Dv] -> [T, Hv Dv]."""
    y = o * ((o * o).mean(-1, keepdim=True) + eps).rsqrt() * norm.to(o.dtype)
    return (y * torch.nn.functional.silu(z)).flatten(1)


def delta_rows(projected: Tensor, conv: Tensor, conv_weight: Tensor, rate: Tensor, dt_bias: Tensor,
               norm: Tensor, eps: float, recurrent: Tensor, row_k: Tensor, row_d: Tensor,
               row_decay: Tensor, out: Tensor, rows: int,
               wide: torch.dtype = torch.float32) -> None:  # fmt: skip
    """Rows of a decode step between a layer's projections; tensors as in the package's docstring.

    Writes `conv` from row W-1 on, row_k, row_d, row_decay and out, for `rows` rows. The state that
    the rows leave is dropped: `fold_rows` makes it again. Computes in `wide`.
    """
    taps, channels = conv_weight.shape
    heads, key, value = recurrent.shape
    used, history = projected[:rows], conv[: taps - 1].clone()
    conv[taps - 1 : taps - 1 + rows] = used[:, :channels]
    q, k, v, g, beta, z = features(
        used, history, conv_weight, rate, dt_bias, heads, key, value, wide
    )
    state, o = recurrent.to(wide, copy=True), torch.empty_like(v)
    for r in range(rows):
        d, decay = torch.empty_like(v[r, :, None]), g[r].exp()
        row(q[r, :, None], k[r, :, None], v[r, :, None], decay[:, None, None],
            beta[r, :, None, None], state, d, o[r, :, None])  # fmt: skip
        row_k[r], row_d[r], row_decay[r] = k[r], d[:, 0], decay
    out[:rows] = gated_norm(o, z, norm, eps)


def fold_rows(recurrent: Tensor, conv: Tensor, row_k: Tensor, row_d: Tensor, row_decay: Tensor,
              accepted: Tensor) -> None:  # fmt: skip
    """All layers, in place: rows [0, accepted) of the last verify into `recurrent` [L, Hv, Dk, Dv],
    and rows [accepted, accepted + W-1) of `conv` [L, W-1 + MAX_ROWS, C] to its front. accepted
    [1] int32; with 0 nothing changes."""
    count, taps = int(accepted), conv.shape[1] - row_k.shape[1]
    for r in range(count):
        recurrent.mul_(row_decay[:, r, :, None, None].to(recurrent.dtype))
        recurrent += row_k[:, r, :, :, None] * row_d[:, r, :, None, :]
    conv[:, :taps] = conv[:, count : count + taps].clone()


def delta_prefill(projected: Tensor, conv: Tensor, conv_weight: Tensor, rate: Tensor,
                  dt_bias: Tensor, norm: Tensor, eps: float, recurrent: Tensor, out: Tensor,
                  start: int, wide: torch.dtype = torch.float32) -> None:  # fmt: skip
    """T tokens from absolute position `start` on, for good: writes out [T, Hv Dv], and moves
    `recurrent` [Hv, Dk, Dv] and the first W-1 rows of `conv` [>= W-1, C] on. Computes in `wide`."""
    taps, channels = conv_weight.shape
    heads, key, value = recurrent.shape
    history = conv[: taps - 1].clone()
    conv[: taps - 1] = torch.cat([history, projected[:, :channels]])[len(projected) :]
    q, k, v, g, beta, z = features(
        projected, history, conv_weight, rate, dt_bias, heads, key, value, wide
    )
    state = recurrent.to(wide, copy=True)
    o = chunked(q, k, v, g, beta, state, start)
    recurrent.copy_(state)
    out.copy_(gated_norm(o, z, norm, eps))
