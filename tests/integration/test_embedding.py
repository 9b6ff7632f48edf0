"""The programs of docs/embedding.md, built and run as they stand there: one file, the same numbers from each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lapilli.player import _library_file

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where model.lap is."""
    made = tmp_path_factory.mktemp("embedding")
    subprocess.run([sys.executable, "-c", blocks("python")[0]], cwd=made, check=True, capture_output=True)
    return made


def printed(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def built(folder: Path, source: str, name: str, *command: str) -> list[str]:
    (folder / name).write_text(source)
    library = Path(os.fsdecode(_library_file()))
    where = [f"-I{ROOT / 'native' / 'include'}", f"-L{library.parent}", "-llapilli", f"-Wl,-rpath,{library.parent}"]
    result = folder / f"{name}.out"
    done = subprocess.run(
        [*command, *STRICT, name, "-o", str(result), *where], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [str(result)]


def test_one_file_gives_the_same_numbers(folder: Path) -> None:
    python = printed([sys.executable, "-c", blocks("python")[1]], folder)
    assert re.fullmatch(r"(\d\.\d{4} ){2}\d\.\d{4}\n", python)
    assert printed(built(folder, blocks("c")[0], "main.c", "gcc", "-std=c11"), folder) == python
    assert printed(built(folder, blocks("cpp")[0], "main.cpp", "g++", "-std=c++17"), folder) == python


def test_what_fails_is_said(folder: Path, tmp_path: Path) -> None:
    program = built(folder, blocks("c")[0], "main.c", "gcc", "-std=c11")
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "model.lap" in done.stderr


def test_an_engine_has_a_device_already(folder: Path) -> None:
    """It is compiled; native/tests/test_taken.cpp runs programs on a device of the application."""
    built(folder, blocks("cpp")[1] + "int main() {}\n", "engine.cpp", "g++", "-std=c++17")
