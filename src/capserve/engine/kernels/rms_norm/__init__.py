"""Root mean square norm of rows: y = x * rsqrt(mean(x^2) + eps) * scale. See layers/norm.py, whose
torch form is the definition."""
