"""The version of the package: of what was made by it, its files and caches say so."""

__version__ = "0.1.0"
