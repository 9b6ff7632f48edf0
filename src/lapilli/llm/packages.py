"""The packages of the extras `llm` and `serve`, which are imported when they are needed."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from lapilli.errors import LapilliError


def need(name: str, what: str, extra: str = "llm") -> Any:
    """A module.

    Raises:
        LapilliError: it is not installed; the message says what to do.
    """
    if find_spec(name) is None:
        raise LapilliError(f"{what} needs the package {name}, not installed here. Do: pip install 'lapilli[{extra}]'.")
    return import_module(name)
