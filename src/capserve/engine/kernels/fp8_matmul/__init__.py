"""y = x W^T for a prefill's many rows and an FP8 W (engine/weights.py, BlockFp8Weight).

Where the card multiplies FP8 by blocks (compute capability 9.0), x is quantised on the way, as the
family's FP8 checkpoints mean it (`activation_scheme: dynamic`): every token's group of 128 inputs
gets the scale that maps its largest element to e4m3's largest, 448.

    s[t, j] = max(|x[t, 128 j : 128 j + 128]|, 1e-12) / 448
    q[t, k] = e4m3(x[t, k] / s[t, k / 128])
    y[t, n] = sum over k of q[t, k] s[t, k / 128] W[n, k]

Elsewhere, and for a float32 x, W is widened to the type of x a few thousand rows at a time and x
stays as it is.

x [T, K] bf16 or f32, contiguous, T from 0; W [N, K]; y [T, N] like x. Groups at the end of K may be
ragged; what lies behind the end is not read. Allocates y, and q and s or the widened rows.

Byte floor of the quantisation: x once, q and s once.
"""
