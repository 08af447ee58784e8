"""How does a whole chunk of the prefill grid attend through cuDNN, with few shapes of it?

    y = whole_chunk(q, k, v, qkvg, start)       T tokens at start = n T, gate included

On Hopper cuDNN's kernel does twice the work a second of torch's flash kernel. But it has one plan
for each shape, and making a plan takes tenths of a second, so it must not meet a length for the
first time in a live request. A chunk attends to its own triangle [T, T], and to the past unmasked
in pieces of T 2^i tokens, those of the binary digits of n: with room for P tokens that makes
1 + log2(P / T) shapes, all known in advance. The parts are joined by their log-sum-exps (Dao et
al.: Flash-Decoding, 2023), in one kernel that also multiplies by the sigmoid of the gate.

Chunks that do not fill the grid have any length and start: card.py. Which of the two a token goes
through follows from its place on the grid and from the chunk's end alone (E4).

torch keeps plans by thread: whoever warms them up must be the thread that serves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from capserve.engine.kernels.attention.plan import power_of_two

MIN_TOKENS = 1024
"""Shorter chunks give the kernel too few tiles: torch's flash kernel is as good."""

MAX_PARTS = 10
"""The own triangle and one piece for each binary digit of the chunk's number."""

_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention


def takes(tokens: int, heads: int, kv: Tensor) -> bool:
    """Whether chunks of `tokens` over kv [2, Hkv, P, D] can go through cuDNN here: tried out, as
    that depends on its version. Makes the plan of the own triangle."""
    _, _, positions, dim = kv.shape
    if not kv.is_cuda or kv.dtype == torch.float32 or not MIN_TOKENS <= tokens <= positions:
        return False
    if (positions // tokens).bit_length() >= MAX_PARTS:
        return False
    q = kv.new_zeros(tokens, heads, dim)
    try:
        _attend(q, kv[0, :, :tokens], kv[1, :, :tokens], causal=True)
        torch.cuda.synchronize(kv.device)
    except torch.OutOfMemoryError:
        raise  # that says nothing of cuDNN, and which form a chunk takes decides its bits
    except RuntimeError:
        return False
    return True


def whole_chunk(q: Tensor, k: Tensor, v: Tensor, qkvg: Tensor, start: int) -> Tensor:
    """q [T, Hq, D] at [start, start + T), start a multiple of T; k, v [Hkv, P, D]; qkvg [T, ...]
    with the gate in its last Hq D columns -> [T, Hq D]."""
    tokens, heads, dim = q.shape
    assert start % tokens == 0
    assert q.is_contiguous()
    assert qkvg.is_contiguous()
    end = start + tokens
    parts = [_attend(q, k[:, start:end], v[:, start:end], causal=True)]
    for first, until in pieces(start, tokens):
        parts.append(_attend(q, k[:, first:until], v[:, first:until], causal=False))
    assert len(parts) <= MAX_PARTS
    y = torch.empty(tokens, heads * dim, dtype=q.dtype, device=q.device)
    unused = [parts[0]] * (MAX_PARTS - len(parts))
    outputs, sums = zip(*parts, *unused, strict=True)
    block = min(4, power_of_two(heads))
    _join_gated[(tokens, triton.cdiv(heads, block))](
        *outputs, *sums, qkvg, y, tokens, len(parts),
        HQ=heads, D=dim, WIDTH=qkvg.shape[1], HB=block, num_warps=4,
    )  # fmt: skip
    return y


def pieces(start: int, tokens: int) -> list[tuple[int, int]]:
    """[0, start) cut by the binary digits of start / tokens, the largest piece first."""
    cut, at, count = [], 0, start // tokens
    for digit in range(count.bit_length() - 1, -1, -1):
        if count >> digit & 1:
            cut.append((at, at + (tokens << digit)))
            at = cut[-1][1]
    return cut


def _attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """-> o [T, Hq, D], contiguous, and the log-sum-exp of the scaled scores [Hq, T] f32."""
    queries = q.transpose(0, 1).unsqueeze(0)
    o, sums, *_ = _cudnn(queries, k.unsqueeze(0), v.unsqueeze(0), None, True, 0.0, causal)
    # the output has the order of q in memory, so nothing is copied
    return o[0].transpose(0, 1).contiguous(), sums.reshape(q.shape[1], len(q))


@triton.jit(do_not_specialize=["tokens", "parts"])
def _join_gated(
    o0, o1, o2, o3, o4, o5, o6, o7, o8, o9, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9,
    qkvg, y, tokens, parts,
    HQ: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, HB: tl.constexpr,
):  # fmt: skip
    """One program a token and HB heads."""
    outputs = (o0, o1, o2, o3, o4, o5, o6, o7, o8, o9)
    all_sums = (s0, s1, s2, s3, s4, s5, s6, s7, s8, s9)
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HB + tl.arange(0, HB)
    real = h < HQ
    at = (h * D)[:, None] + tl.arange(0, D)[None, :]
    inside = real[:, None]
    top = tl.full([HB], float("-inf"), tl.float32)
    for i in tl.static_range(10):
        s = tl.load(all_sums[i] + h * tokens + token, mask=real & (i < parts), other=float("-inf"))
        top = tl.maximum(top, s)
    top = tl.where(real, top, 0.0)
    total = tl.zeros([HB], tl.float32)
    o = tl.zeros([HB, D], tl.float32)
    for i in tl.static_range(10):
        s = tl.load(all_sums[i] + h * tokens + token, mask=real & (i < parts), other=float("-inf"))
        weight = tl.exp(s - top)
        x = tl.load(outputs[i] + token * (HQ * D) + at, mask=inside & (i < parts), other=0.0)
        o += weight[:, None] * x.to(tl.float32)
        total += weight
    gate = tl.load(qkvg + token * WIDTH + (WIDTH - HQ * D) + at, mask=inside, other=0.0)
    o = o / tl.where(real, total, 1.0)[:, None] / (1.0 + tl.exp(-gate.to(tl.float32)))
    tl.store(y + token * (HQ * D) + at, o.to(y.dtype.element_ty), mask=inside)
