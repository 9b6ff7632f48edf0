"""The cache of kernels, for processes that have a cache of their own for everything else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def keep_kernels(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Kernels stay in the user's cache, wherever LAPILLI_CACHE_DIR points. put: what sets an attribute."""
    from lapilli.codegen import build
    from lapilli.runtime.cache import Cache

    class Kernels(Cache):
        @property
        def folder(self) -> Path:
            return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lapilli" / self.name

    put(build, "CACHE", Kernels(build.CACHE.name, build.CACHE.most))
