"""The user's side of a program: loads it, runs it, lists devices. Needs NumPy and cffi, and torch only for its tensors."""
