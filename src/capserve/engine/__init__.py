"""Mechanism: one hot state, and what can be done to it. The only package that imports torch."""

import os

# Before torch loads OpenMP. Its threads spin while they wait, which on a machine that also runs the
# agent's own work makes them wait for each other's turn: an 8k prefill took 52 s beside two busy
# processes, and 7 to 12 s when the threads sleep instead (docs/log.md, 2026-12-01).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
