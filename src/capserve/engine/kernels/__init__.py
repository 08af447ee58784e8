"""One folder an operation: `reference.py` is its definition and runs on CPU."""
