"""Honest fakes, generated replies and tiny random checkpoints, for tests of any layer."""
