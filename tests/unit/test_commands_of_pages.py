"""What pages tell people to type is there: commands and options, targets of make, extras of pip, names of the package."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import lapilli
from lapilli.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
]
SHELLS = ("", "sh", "console")
BLOCK = re.compile(r"^```([\w+-]*)[^\n]*\n(.*?)^```$", re.M | re.S)
INLINE = re.compile(r"(?<!`)`((?:lapilli|make|pip install) [^`\n\\]+)`")


def lines(page: Path) -> Iterator[str]:
    """Those for a shell, of blocks and between backquotes, without the remarks that follow some of them."""
    text = page.read_text(encoding="utf-8")
    for language, block in BLOCK.findall(text):
        if language in SHELLS:
            for line in block.splitlines():
                yield re.split(r"\s{2,}", line.strip())[0]
    yield from INLINE.findall(BLOCK.sub("", text))


def words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # an apostrophe: prose
        return []


def command_problem(arguments: list[str]) -> str:
    """Whether `lapilli ARGUMENTS` names a command and options that there are."""
    context = click.Context(main)
    found: click.Command = main
    while isinstance(found, click.Group):
        if not arguments or (arguments[0].isupper() or not arguments[0][0].isalpha()):
            return ""  # `lapilli --help`, `lapilli X`
        name, *arguments = arguments
        after = found.get_command(context, name)
        if after is None:
            return f"there is no command {name}"
        found = after
    known = {option for p in found.params for option in (*p.opts, *p.secondary_opts)} | {"--help", "-h"}
    given = {a.partition("=")[0].rstrip(",.") for a in arguments if re.match(r"--?[a-z]", a)}
    return "".join(f"{found.name} has no option {option}" for option in sorted(given - known))


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_there(page: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    problems = []
    for line in lines(page):
        found = words(line)
        if found[:1] == ["lapilli"] and (problem := command_problem(found[1:])):
            problems.append(f"{line}: {problem}")
        elif found[:1] == ["make"]:
            wanted = [w for w in found[1:] if re.fullmatch(r"[a-z][a-z-]+", w)][:1]
            problems += [f"{line}: make has no target {w}" for w in wanted if w not in targets()]
        elif found[:2] == ["pip", "install"]:
            named = re.findall(r"(?:lapilli|\.)\[([\w,]+)\]", line)
            problems += [f"{line}: no extra {e}" for name in named for e in name.split(",") if e not in extras]
    assert not problems


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_programs_name_what_there_is(page: Path) -> None:
    """Blocks of Python are Python, and what they take from `lapilli` is in it."""
    missing = []
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language != "python":
            continue
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "lapilli":
                known = hasattr(lapilli, node.attr) or (Path(lapilli.__file__).parent / node.attr).is_dir()
                missing += [] if known else [node.attr]
    assert not missing


def test_what_is_not_there_is_found() -> None:
    assert command_problem(["run", "model.lap", "--tops", "5"]) == "run has no option --tops"
    assert command_problem(["fly"]) == "there is no command fly"
    assert command_problem(["run", "model.lap", "--top", "5"]) == "" and command_problem(["cache", "info"]) == ""
