"""What the rows of a step begin with: a token's embedding, and for the draft head its two norms.

    embed_rows   out[r] = E[tokens[r]]
    mtp_input    out[r] = [N_e(E[tokens[r]]) | N_h(hidden[r])]

tokens int32 [>= rows] on the device; table E [V, D] bf16 or f32; hidden [>= rows, D]; out
[>= rows, D] or [>= rows, 2 D]; e_scale, h_scale f32 [D], final; N(x) = x * rsqrt(mean x^2 + eps) *
scale (Zhang and Sennrich 2019). A token outside [0, V) would be a bug of the sampler: it is
clamped, so that it can read nothing that is not the table's. Any number of rows. Nothing is
allocated.

Byte floor: the rows read and written; a launch's own cost is what these kernels are about.
"""
