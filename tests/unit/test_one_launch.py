"""The player is called from two modules, and work is queued from one: everybody else goes through these."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import lapilli

PACKAGE = Path(lapilli.compile.__code__.co_filename).parent
HEADER = (PACKAGE.parents[1] / "native" / "include" / "lapilli.h").read_text(encoding="utf-8")
FUNCTIONS = set(re.findall(r"\b(lapilli_\w+)\(", HEADER))
SOURCES = {path.name: path for path in PACKAGE.rglob("*.py")}


def _native_calls(path: Path) -> set[str]:
    """Names of the player's functions that a module reads from its library."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in FUNCTIONS}


def test_who_calls_the_player() -> None:
    calls = {name: found for name, path in SOURCES.items() if (found := _native_calls(path))}
    assert set(calls) == {"player.py", "stream.py"}
    queueing = {
        name for name, found in calls.items() if any(f.startswith(("lapilli_enqueue", "lapilli_launch")) for f in found)
    }
    assert queueing == {"stream.py"}
