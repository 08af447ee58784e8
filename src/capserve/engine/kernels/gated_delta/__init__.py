"""Gated delta rule (Yang, Kautz, Hatamizadeh: Gated Delta Networks, 2024).

Per value head, with state S [Dk, Dv] in float32 and, for each token, q, k [Dk], v [Dv], log decay
g <= 0 and strength beta in (0, 1):

    S <- exp(g) S
    d  = beta (v - S^T k)
    S <- S + k d^T
    o  = S^T q

q and k arrive normalised, q also scaled by Dk^-1/2. Value head j reads key head floor(j / (Hv/Hk)).
"""
