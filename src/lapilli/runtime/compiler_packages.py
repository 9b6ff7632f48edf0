"""Checks whether the compiler's packages are installed."""

from __future__ import annotations

from importlib.util import find_spec

from lapilli.errors import CompileError


def missing_packages() -> list[str]:
    """The packages that the compiler needs and that are not installed."""
    return [name for name in ("torch", "slangtorch", "flatbuffers") if find_spec(name) is None]


def require_compiler() -> None:
    """Raises CompileError, which says what to install, if a package that the compiler needs is missing."""
    missing = missing_packages()
    if missing:
        raise CompileError(
            f"Compiling needs {' and '.join(missing)}, not installed here. Do: pip install 'lapilli[compile]'. "
            "(Loading and running programs does not need them.)"
        )
