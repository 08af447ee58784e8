"""Depthwise causal convolution over time, kernel W, no bias, then SiLU.

y_t[c] = silu(sum_{j < W} w[j, c] x_{t - (W-1) + j}[c]),  x = 0 before position 0
"""
