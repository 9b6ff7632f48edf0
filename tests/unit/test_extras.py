"""What the package asks for: the player NumPy and cffi alone, all else an extra, each named where it is missing."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lapilli.errors import LapilliError, MissingExtraError
from lapilli.runtime.extras import require

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "lapilli"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = {
    name: [re.split(r"[\[<>=!~ ]", text)[0] for text in wanted]
    for name, wanted in PROJECT["optional-dependencies"].items()
    if name not in ("test", "all")
}
PLACES = {  # packages of which another one is the reason, or whose import has another name
    "PIL": "pillow",
    "pyarrow": "ray",
    "starlette": "ray",
    "sympy": "torch",
    "networkx": "torch",
    "cryptography": "cryptography",
}
WITHOUT_EXTRA = {"torchao", "executorch", "torchvision", "transformers", "ml_dtypes", "pytest"}
"""Used where the user has them."""


def imports(file: Path) -> Iterator[tuple[str, bool]]:
    """Packages outside the standard library that a file imports, and whether importing the file is enough for that."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    at_once = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for name in names:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and top != "lapilli" and id(node) not in for_types:
                yield top, id(node) in at_once


def test_the_player_needs_two_packages() -> None:
    assert [re.split(r"[<>=]", text)[0] for text in PROJECT["dependencies"]] == ["numpy", "cffi"]
    files = [SOURCES / "player.py", SOURCES / "stream.py", SOURCES / "errors.py", *(SOURCES / "format").rglob("*.py")]
    # The rest of runtime/ but what torch itself asks for.
    files += [
        f
        for f in (SOURCES / "runtime").rglob("*.py")
        if f.stem not in ("operator", "registration", "seeding", "sequences")
    ]
    found = {(f.name, name) for f in files for name, at_once in imports(f) if at_once}
    assert {name for _, name in found} <= {"numpy", "cffi"}, found


def test_every_import_has_an_extra() -> None:
    known = {"numpy", "cffi"} | {name for wanted in EXTRAS.values() for name in wanted}
    missing = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in SOURCES.rglob("*.py")
        for name, _ in imports(file)
        if PLACES.get(name, name) not in known | WITHOUT_EXTRA
    }
    assert not missing


def test_all_is_all() -> None:
    (text,) = PROJECT["optional-dependencies"]["all"]
    assert set(re.findall(r"\w+", text)) - {"lapilli"} == set(EXTRAS)


def test_commands_that_messages_and_pages_name() -> None:
    """`pip install lapilli[x]` names extras that there are, and each is named by a message."""
    named = {}
    for file in [*SOURCES.rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for wanted in re.findall(r"(?:lapilli|'\.)\[([a-z,]+)\]", file.read_text(encoding="utf-8")):
            named.update({extra: file.suffix for extra in wanted.split(",")})
    asked = {match for f in SOURCES.rglob("*.py") for match in re.findall(r'require\("(\w+)"', f.read_text("utf-8"))}
    assert set(named) <= {*EXTRAS, "all", "test"}
    assert set(EXTRAS) <= set(named) | asked
    assert asked <= set(EXTRAS)


def test_a_missing_extra_names_the_command() -> None:
    require("cli", "The command line", "click")
    with pytest.raises(
        MissingExtraError, match=r"Photos needs no_such_package, not .* pip install 'lapilli\[image\]'"
    ) as error:
        require("image", "Photos", "os", "no_such_package")
    assert isinstance(error.value, ImportError) and isinstance(error.value, LapilliError)
