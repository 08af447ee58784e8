"""y = x W^T for the 1 to 9 rows of a decode step: x [R, K] f32, W [N, K], y [R, N] f32.

Row invariance is the point: every y[r, n] is one dot product, added up in one order, whatever R is
and wherever the row stands (I7). BLAS libraries choose kernels by row count and are not invariant.
Byte floor: W once. bfloat16 weights stay bfloat16 in memory, which halves it, and are widened
exactly; the products are float32.
"""
