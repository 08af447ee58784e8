"""y = N(x) W^T for the 1 to 9 rows of a decode step, with what stands around it.

    rows_matmul   out[r] = N(x[r]) W^T,  or  out[r] += N(x[r]) W^T  (`residual`)
    rows_swiglu   out[r] = silu(N(x[r]) G^T) * (N(x[r]) U^T),  W = [G; U]
    N(x) = x * rsqrt(mean x^2 + eps) * scale  (Zhang and Sennrich 2019), or x where no norm is given

x    [>= rows, K] bf16 or f32, contiguous; rows beyond `rows` are never read
W    [N, K] in one of the forms of engine/weights.py
out  [>= rows, N] ([>= rows, N/2] for swiglu) bf16 or f32; rows beyond `rows` are never written
norm (scale f32 [K], eps): scale is final, 1 + w for the family's norms

Row invariance is the point: every y[r, n] is one dot product, added up in one order, whatever
`rows` is and wherever the row stands (I7). BLAS libraries choose kernels by row count and are not
invariant. A call allocates nothing, so the card's form may be captured in a graph; 9 MB of scratch
a device (`split.scratch`) are made when a matrix is first shared among programs, which must not be
under capture, and launches of one device must follow one another.

Byte floor: W once, the rows of x and out once. On the card every program owns some columns and
reads all of x, so the norm costs no launch: x is multiplied by `scale` as it comes, its squares are
added up beside it, and the accumulator is multiplied by rsqrt at the end. FP8 weights are widened
in registers and the accumulator is scaled once for each 128 of K. On the CPU bfloat16 weights stay
bfloat16 in memory, which halves the bytes, and are widened exactly; the products are float32.
"""
