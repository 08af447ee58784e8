"""Counter-based random numbers: Philox 4x32-10 (Salmon et al., Parallel Random Numbers, SC 2011).

A pure function of (key, counter), the same on every device, so that noise can be keyed by (seed,
position, token) and asked for only where it is needed. Triton has the same function built in.
"""
