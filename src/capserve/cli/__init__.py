"""Composition root: turns settings into a running server, and drives one from a terminal."""
