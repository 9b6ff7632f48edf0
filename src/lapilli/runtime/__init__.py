"""The program as people use it: load, run, ask for devices. Needs NumPy and cffi, and torch only for its tensors."""
