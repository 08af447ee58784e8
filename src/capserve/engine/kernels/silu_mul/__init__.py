"""The inner activation of a prefill's feed-forward: out = silu(g) * u, x = [g | u].

x [T, 2 I], out [T, I], bf16 or f32, contiguous; computed in float32, one rounding. A decode step
has it inside its matmul (`rows_swiglu`). Nothing is allocated. Byte floor: x once, out once.
"""
