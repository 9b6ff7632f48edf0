"""Runs a page of docs/tutorials as a reader does, from top to bottom in one folder.

- ```python: in one namespace for the page.
- ```sh: commands of `lapilli` are run; `pip install` has to name extras that there are, and packages
  that the tests' environment has.
- ```text: what the block before it prints, where … stands for anything.
- ```java: compiled, with the sources of android/lapilli.
- ```console: what needs other machines; tests/unit/test_commands_of_pages.py reads the options.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from lapilli.cli import main

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "tutorials"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def installed(arguments: list[str]) -> None:
    """Raises where `pip install` would bring what the tests do not have."""
    for name in (a for a in arguments if not a.startswith("-")):
        package, _, extras = name.rstrip("]").partition("[")
        importlib.metadata.version(package)
        if extras:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            assert package == "lapilli" and set(extras.split(",")) <= project["optional-dependencies"].keys(), name


def command(line: str) -> str:
    """What a line of a shell prints to stdout."""
    words = shlex.split(line, comments=True)
    if words[:2] == ["pip", "install"]:
        installed(words[2:])
        return ""
    assert words[0] == "lapilli", f"{line}: only lapilli and pip are run"
    done = CliRunner().invoke(main, words[1:])
    assert done.exit_code == 0, (line, done.output, done.exception)
    return done.stdout


def java(text: str) -> None:
    """In a file of the class's name in the current folder."""
    Path("Classifier.java").write_text(text, encoding="utf-8")
    Path("classes").mkdir()
    sources = ROOT / "android" / "lapilli" / "src" / "main" / "java"
    stubs = ROOT / "android" / "stubs"
    subprocess.run(
        ["javac", "-d", "classes", "-sourcepath", os.pathsep.join(str(folder) for folder in (sources, stubs)), "Classifier.java"],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip


def run(page: Path) -> None:
    """In the current folder, which files are written to. Raises where something fails, or prints something else."""
    text = page.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "tutorial"}
    printed, count = "", 0
    for language, block in BLOCK.findall(text):
        count += 1
        if language == "text":
            pattern = ".*".join(re.escape(part) for part in block.strip().split("…"))
            assert re.fullmatch(rf"\s*{pattern}\s*", printed, re.S), (page.name, block, printed)
        elif language == "python":
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(block, f"{page.name}, block {count}", "exec"), names)
            printed = output.getvalue()
        elif language == "sh":
            printed = "".join(command(line) for line in block.splitlines())
        elif language == "java":
            java(block)
        else:
            assert language == "console", language
    assert count == text.count("\n```") // 2, "a block that is not read"
