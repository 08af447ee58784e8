"""Tokens <-> words: no I/O on the wire, no torch, no engine."""
