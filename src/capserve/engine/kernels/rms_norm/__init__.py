"""Root mean square norm of rows: y = x * rsqrt(mean(x^2) + eps) * scale (Zhang and Sennrich 2019).

    rows_norm       out[r] = N(x[r])
    norm_residual   x[r] += y[r], rounded to x's type; out[r] = N(x[r]) of the rounded sum

x, y, out [>= rows, D] bf16 or f32, contiguous; scale f32 [D], final (1 + w for most norms of the
family, see layers/norm.py). Any number of rows; a row's bits depend on nothing but the row. Rows
beyond `rows` are neither read nor written. Nothing is allocated.

Byte floor: x once and out once; for norm_residual x and y once, x and out written once.
"""
