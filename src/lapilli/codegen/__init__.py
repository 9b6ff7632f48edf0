"""Generates Slang from tasks, and SPIR-V from Slang."""
