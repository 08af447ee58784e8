"""Choosing tokens inside a captured step, and accepting drafts.

For row r of up to 9, with the counts of a turn that include the drafts in front of the row:

    s  = logits, penalised (CTRL's repetition penalty; presence, frequency), biased, masked
    t  = s / temperature                                              float32, rounded to nearest
    K  = ids with fewer than top_k strictly larger t                  ties with the k-th are in
    P  = ids of K where the strictly larger ones of K hold less than top_p of K's softmax
    M  = ids of P with t >= max t + log(min_p)
    chosen = argmax over M of t + Gumbel(seed, position, id), lowest id on a tie

and argmax of s when the temperature is 0. Every set is {t >= a threshold}, so nothing depends on
the order of a sort or on where equal scores stand. Gumbel-max sampling: Gumbel 1954; Maddison et
al., A* Sampling, NeurIPS 2014. Noise by counter: Philox 4x32-10 (`kernels/philox`).

    choose(logits f32 [>= rows, >= V], settings, drafts i32 [8], start i32 [1], offset, rows,
           chosen i32 [>= rows] out, scores f32 [>= rows, V] out, scratch, place=0)
    accept(chosen i32 [9], drafts i32 [8], settings, cursor, decided i32 [9], result i32 [16],
           rows, mode)

All settings are read from device memory (`buffers.SamplingBuffers`): one graph serves every turn.
Nothing is allocated; `scratch` is given. A row is computed by programs of its own and no sum is
formed by floating-point atomics, so its bits depend on nothing but its inputs.

Floor: the logits once, 4 V bytes a row, which a head of the same step has just written: they come
out of the L2 cache. Penalties read 5 V bytes more, a bias 4 V, a mask V / 8; `scores` are another
4 V, written only when log probabilities are asked for.
"""
