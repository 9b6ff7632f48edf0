"""Passes over the exported FX graph of ATen operators."""
