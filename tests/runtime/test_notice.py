"""No silence longer than two seconds; the cache that makes first uses second ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import lapilli
from lapilli.cli import main

WORK = """
import sys, time
from lapilli.runtime import notice
for k in range({times}):
    with notice.working():
        notice.count_kernels(2)
        time.sleep({work})
    time.sleep({pause})
time.sleep(0.8)
"""


LOADS = """
import sys, time
from lapilli.player import NativeProgram
from lapilli.runtime.loaded import Loaded
from lapilli.runtime.host import Permission
from pathlib import Path

def load(*args, **kwargs):  # as slow as a disk is
    time.sleep(2.8)
    raise KeyboardInterrupt

NativeProgram.load = load
try:
    Loaded(Path(sys.argv[1]), None, Permission.of(True), None, False)
except KeyboardInterrupt:
    time.sleep(0.8)
"""

COMMAND = """
import sys, time
import click
from lapilli.cli.common import with_words
from lapilli.runtime import notice

@click.command()
def slow():
    with notice.working():
        time.sleep(2.5)

with_words(slow)(sys.argv[1:])
"""


def written(code: str, *arguments: object, **environment: str) -> str:
    """What a process writes on stderr."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    env = {**os.environ, **environment}
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stderr


def said(times: int, work: float, pause: float, **environment: str) -> str:
    """What work of some length, with pauses, writes on stderr."""
    return written(WORK.format(times=times, work=work, pause=pause), **environment)


def test_long_work_is_named() -> None:
    line = said(1, 2.8, 0)
    assert line.startswith("lapilli: compiling for the GPU (2 s, 2 kernels); the result is kept in ")
    assert line.count("\n") == 1


def test_many_short_pieces_count_as_one() -> None:
    assert "lapilli: compiling for the GPU (2 s" in said(14, 0.2, 0.02)


def test_short_work_and_quiet_processes_say_nothing() -> None:
    assert said(3, 0.1, 0.7) == ""
    assert said(1, 2.5, 0, LAPILLI_QUIET="1") == ""


@pytest.mark.parametrize("size, begins", [(250_000_000, "loading 0.2 GB (2 s)"), (1000, "compiling for the GPU (2 s)")])
def test_a_large_file_that_loads_is_named(size: int, begins: str, tmp_path: Path) -> None:
    path = tmp_path / "large.lap"
    with path.open("wb") as file:
        file.truncate(size)
    line = written(LOADS, path)
    assert line.startswith(f"lapilli: {begins}") and line.count("\n") == 1
    assert ("kept in" in line) == begins.startswith("compiling")


def test_quiet_commands_say_nothing_of_it() -> None:
    assert "compiling for the GPU" in written(COMMAND)
    assert written(COMMAND, "--quiet") == ""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def command(*args: str) -> str:
    result = CliRunner().invoke(main, ["cache", *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_cache_is_shown_and_cleared(cache: Path, tmp_path: Path) -> None:
    assert all(not part["files"] for part in json.loads(command("info", "--json"))["parts"])
    program = lapilli.compile(nn.Linear(3, 5), (torch.rand(2, 3),))
    program.save(tmp_path / "linear.lap")
    program.close()
    assert "ready" in command("warm", str(tmp_path / "linear.lap"))
    parts = {part["name"]: part for part in json.loads(command("info", "--json"))["parts"]}
    assert parts["kernels"]["files"] and parts["kernels"]["bytes"] and parts["pipelines"]["files"]
    assert str(cache) in command("info").replace("\n", "")
    assert json.loads(command("clear", "pipelines", "--json"))["files"] == parts["pipelines"]["files"]
    stranger = cache / "notes.txt"
    stranger.write_text("not ours")
    (cache / "kernels" / "link").symlink_to(stranger)
    assert json.loads(command("clear", "--json"))["files"] == parts["kernels"]["files"]
    assert stranger.read_text() == "not ours"
    unknown = CliRunner().invoke(main, ["cache", "clear", "cookies"])
    assert unknown.exit_code == 1 and "There is no part 'cookies' of the cache; there are kernels" in unknown.output


def test_files_that_another_process_removes_meanwhile_are_no_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "kernels").mkdir(parents=True)
    (cache / "kernels" / "kept").write_bytes(b"abc")
    (cache / "kernels" / ".gone").write_bytes(b"being written")

    scan = os.scandir

    def scan_and_remove(path: Path) -> AbstractContextManager[list[os.DirEntry[str]]]:
        with scan(path) as entries:
            found = list(entries)
        (cache / "kernels" / ".gone").unlink(missing_ok=True)
        return nullcontext(found)

    monkeypatch.setattr(os, "scandir", scan_and_remove)
    kernels = json.loads(command("info", "--json"))["parts"][0]
    assert (kernels["name"], kernels["files"], kernels["bytes"]) == ("kernels", 1, 3)
    assert json.loads(command("clear", "--json")) == {"files": 1, "bytes": 3}


@pytest.mark.long
def test_usual_operators_are_made_once() -> None:
    from lapilli.eager.programs import programs_of, target_of
    from lapilli.eager.usual import train_usual_models

    assert train_usual_models() > 400
    known = programs_of(target_of(0))
    compiled = known.compiled
    train_usual_models()
    assert known.compiled == compiled
