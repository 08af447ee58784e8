"""Causal grouped-query attention over a contiguous KV buffer; softmax in float32.

Query head h reads kv head floor(h / G), G = Hq / Hkv; scores are scaled by head_dim^-1/2.

**A decode step** (`reference.rows_attention`, on the card `triton.rows_attention`) is one operation
from the projection's output to the input of the output projection. For the row r at position
p = start + offset + r, and each head:

    q, k  <- rotary(norm(q), p), rotary(norm(k), p)    norm(x) = x rsqrt(mean x^2 + eps) scale
    kv[:, p] <- k, v
    o     = sum_j w_j v_j,  w = softmax over j in [first, p] of q k_j / sqrt(D)
    out   = o sigmoid(gate)

    qkvg    [>= R, (2 Hq + 2 Hkv) D]  q | k | v | gate, bf16 or f32: the model's dtype
    scales  [Hq + Hkv, D] f32         final scales (1 + w) of the norms of q and k
    cos sin [P, rot / 2]              model's dtype; pairs (i, i + rot / 2)
    kv      [2, Hkv, P, D]            model's dtype; k after norm and rotary
    start   [1] int32                 on the device
    out     [>= R, Hq D]              model's dtype
    scratch `plan.Scratch`            what the splits leave for the kernel that joins them

Two launches, nothing is allocated: safe to capture. The keys are read in splits that are joined by
their log-sum-exps (Dao et al.: Flash-Decoding, 2023; online softmax of Milakov and Gimelshein,
2018). Byte floor: 2 Hkv (p + R) D elements of KV, read once for all rows and heads; at 32,768 slots
of the 27B shape 134 MB a layer.

**A prefill chunk** (`reference.prefill`, `cpu.prefill`, on the card `card.py`) has its norms,
rotary and KV writes in `prepare`, then attention, then `gate_mul`. Floor: 4 T (start + T / 2) Hq D
operations.
"""
