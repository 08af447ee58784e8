"""Gated delta rule (Yang, Kautz, Hatamizadeh: Gated Delta Networks, 2024), as a layer has it.

Per value head, with state S [Dk, Dv] in float32 and, for each token, q, k [Dk], v [Dv], log decay
g <= 0 and strength beta in (0, 1):

    S <- exp(g) S
    d  = beta (v - S^T k)
    S <- S + k d^T
    o  = S^T q

q and k arrive normalised, q also scaled by Dk^-1/2. Value head j reads key head floor(j / (Hv/Hk)).

Around it, everything between a layer's two projections. With C = 2 Hk Dk + Hv Dv channels
[q | k | v], `projected` [T, C + Hv Dv + 2 Hv] = [convolution input | z | b | a], bf16 or f32:

    [q | k | v] = silu(causal convolution of W taps);  q, k <- x rsqrt(sum x^2 + 1e-6)
    g = rate softplus(a + dt_bias),  beta = sigmoid(b)
    y = o rsqrt(mean o^2 + eps) norm silu(z)                       [T, Hv Dv], per head over Dv

Constants in f32: conv_weight [W, C], rate (-exp(A_log)) and dt_bias [Hv], norm [Dv]. Dk and Dv are
powers of two from 16 on.

`delta_rows` (decode): R <= 9 rows from `recurrent` [Hv, Dk, Dv], which it only reads, and `conv`
[W-1 + MAX_ROWS, C], whose first W-1 rows are the inputs before. It writes the rows' inputs behind
them, `out` [R, Hv Dv], and for each row what `fold_rows` needs: row_k [MAX_ROWS, Hv, Dk], row_d
[MAX_ROWS, Hv, Dv], row_decay [MAX_ROWS, Hv] in f32. Floor: 4 Hv Dk Dv bytes (27B: 3.1 MB, 0.7 us).
`fold_rows` (once a step, all layers): the accepted rows into `recurrent` and `conv`, bit for bit.
Floor: 8 bytes an element of `recurrent` (27B: 302 MB, 71 us). `delta_prefill`: T tokens for good.
Floor: `projected` read and `out` written once (27B, 2048 tokens: 92 MB, 22 us). Its kernels are for
bfloat16; on the card a float32 model prefills by `reference.delta_prefill`.

None of the kernels allocates; the scratch that they are given is sized here.
"""


def rows_scratch_floats(max_rows: int, heads: int, key: int, value: int) -> int:
    """float32 elements that `delta_rows` passes between its own threads; one for all layers."""
    return max_rows * heads * (key + 2 * value + 2)


def prefill_scratch_elements(
    tokens: int, key_heads: int, heads: int, key: int, value: int
) -> tuple[int, int]:
    """Elements in the model's dtype, and in float32, for calls of up to `tokens` tokens.

    Positions are laid on absolute sub-chunks of 64, of which a call can touch one more than its
    length fills. In the model's dtype q|k, v (then U, then V'), W and the state at the start of
    each sub-chunk; in float32 the running log decay. 27B, 2048 tokens: 121 MB.
    """
    chunks = -(-tokens // 64) + 1
    per_position = 2 * key_heads * key + heads * (value + key)
    return chunks * (64 * per_position + heads * key * value), chunks * 64 * heads
