"""Causal grouped-query attention over a contiguous KV buffer; softmax in float32.

Query head h reads kv head floor(h / (Hq / Hkv)); scores are scaled by head_dim^-1/2.
"""
