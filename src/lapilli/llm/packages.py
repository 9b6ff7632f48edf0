"""Packages that only sources and chats need, imported where they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lapilli.runtime.extras import require


def need(name: str, what: str, extra: str = "llm") -> Any:
    """A module; raises MissingExtraError, which says what to install."""
    require(extra, what, name)
    return import_module(name)
