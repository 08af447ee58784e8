"""Mechanism: one hot state, and what can be done to it. The only package that imports torch."""
