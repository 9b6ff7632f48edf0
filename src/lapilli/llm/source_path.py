"""What is a language model by its path."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeGuard


def is_source(model: Any) -> TypeGuard[str | os.PathLike[str]]:
    """Whether this is the path of a GGUF file or of a Hugging Face folder."""
    if not isinstance(model, str | os.PathLike):
        return False
    path = Path(os.fspath(model))
    return path.suffix.lower() == ".gguf" or (path / "config.json").is_file()
