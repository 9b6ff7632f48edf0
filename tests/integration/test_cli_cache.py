"""`lapilli cache warm`: what it makes is there for the next process; what it says, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lapilli.cli import main
from lapilli.runtime.cache import base

TRAINS = """
import torch
from lapilli.eager.programs import programs_of, target_of
from lapilli.eager.usual import train_usual_models
print(train_usual_models() > 400, programs_of(target_of(0)).compiled)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the test's own."""
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path / "cache"))


def kept() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in base().rglob("*") if path.is_file()}


def python(*arguments: object) -> str:
    """What a new process prints."""
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def warm(*arguments: object, code: int = 0) -> Result:
    done = CliRunner().invoke(main, ["cache", "warm", *map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def test_programs_are_compiled_for_the_next_process(scaled: Path) -> None:
    """By the driver, whose pipelines are in the cache: it has nothing to add when they run."""
    python("-m", "lapilli.cli", "cache", "warm", scaled)
    made = kept()
    assert any(path.name.startswith("pipelines-") for path in made)
    python("-m", "lapilli.cli", "run", scaled, "random")
    assert kept() == made


@pytest.mark.long
def test_usual_operators_are_compiled_for_the_next_process() -> None:
    assert "operators were run on vulkan:0" in python("-m", "lapilli.cli", "cache", "warm")
    made = kept()
    assert len([path for path in made if path.parent.name == "eager"]) > 100
    assert python("-c", TRAINS).split() == ["True", "0"]
    assert kept() == made


@pytest.mark.parametrize("columns", ["40", "200"])
def test_what_is_said(columns: str, scaled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each program, whose path is not broken, however narrow the terminal is."""
    monkeypatch.setenv("COLUMNS", columns)
    second = tmp_path / "a_program_whose_name_is_longer_than_forty_columns_are.lap"
    second.write_bytes(scaled.read_bytes())
    done = warm(scaled, second)
    assert done.stdout.splitlines() == [f"{scaled}: ready", f"{second}: ready"] and done.stderr == ""
    monkeypatch.setattr("lapilli.eager.usual.train_usual_models", lambda: 1234)
    said = "1,234 operators were run on vulkan:0, forward and backward; their programs are in the cache"
    assert warm("--device", "0").stdout.splitlines() == [said]


def test_what_is_refused(scaled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.lap"
    broken.write_bytes(scaled.read_bytes()[:-1])
    done = warm(scaled, broken, code=1)
    assert done.stdout.splitlines() == [f"{scaled}: ready"] and f"Error: {broken}: " in done.stderr
    assert "'missing.lap' does not exist" in warm("missing.lap", code=2).stderr
    assert "--all" in warm("--all", code=2).stderr
    for programs in ((), (scaled,)):
        done = warm("--device", "Nonesuch", *programs, code=1)
        assert (
            done.stderr.replace('"', "'").startswith("Error: There is no Vulkan device 'Nonesuch'; ")
            and done.stdout == ""
        )
    monkeypatch.setattr("lapilli.runtime.compiler_packages.missing_packages", lambda: ["torch"])
    assert "Compiling needs torch, not installed here. Do: pip install 'lapilli[compile]'" in warm(code=1).stderr
    assert warm(scaled).stdout.splitlines() == [f"{scaled}: ready"]
