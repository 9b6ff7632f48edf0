"""The kernel IR: integer expressions, scalar expressions, tensor values, and their NumPy interpreter."""
