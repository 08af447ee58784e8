"""Policy: who may run, what is reused, what is kept. Knows of the engine its seam alone."""
