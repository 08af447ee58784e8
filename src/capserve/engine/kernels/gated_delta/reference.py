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
