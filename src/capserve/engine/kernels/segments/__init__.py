"""Many KV segments into the live buffer in one launch.

    kv        [layers, 2, Hkv, P, D]       the live buffer
    segment i [layers, 2, Hkv, n_i, D]     contiguous, its slots are [s_i, s_i + n_i) of kv

A capsule of 32k tokens has 64 segments; a copy of each costs more in launches than in bytes. Floor:
every byte is read once and written once.
"""
