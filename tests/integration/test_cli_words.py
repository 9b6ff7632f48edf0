"""--quiet and --verbose, of every command."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest
import tiny
from click.testing import CliRunner, Result

from lapilli.cli import COMMANDS, main
from lapilli.cli.common import Group, with_words
from lapilli.names import printable


def commands(group: click.Group, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*before, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*before, name))


ALL = list(commands(main))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "scaled.lap"
    path.write_bytes(tiny.scales(np.array([1, 2, 3], np.float32)))
    return path


def test_these_are_all_commands() -> None:
    assert len(ALL) > len(COMMANDS) > 15 and ("cache", "clear") in ALL


@pytest.mark.parametrize("command", ALL, ids=" ".join)
def test_every_command_has_both_and_takes_one(command: tuple[str, ...]) -> None:
    text = run(*command, "--help").stdout
    assert "--quiet" in text and "--verbose" in text
    both = run(*command, "--quiet", "--verbose")
    assert both.exit_code == 2 and "exclude each other" in both.stderr


@pytest.mark.parametrize(
    "command",
    ["run {} random", "bench {} --iter 2", "profile {} --no-limits --repeat 1", "inspect {}", "verify {}", "devices", "cache info",
     "report {}", "ops softmax", "strip {} --plans tiny -o {}.out"],
)  # fmt: skip
def test_quiet_says_results_alone(program: Path, command: str) -> None:
    arguments = command.format(program, program).split()
    usual, quiet = run(*arguments), run(*arguments, "--quiet")
    assert usual.exit_code == quiet.exit_code == 0, (usual.output, quiet.output)
    assert quiet.stderr == "" and bool(quiet.stdout) == bool(usual.stdout)


def test_verbose_says_what_is_done(program: Path) -> None:
    for command, said in (("bench", " s  "), ("profile", " s  profiling")):
        assert said in run(command, program, "--verbose").stderr
        assert said not in run(command, program).stderr


def test_errors_stay_and_have_their_place(tmp_path: Path) -> None:
    (tmp_path / "wrong.lap").write_bytes(b"no program" * 20)
    texts = {}
    for option in ("", "--quiet", "--verbose"):
        done = run("inspect", tmp_path / "wrong.lap", *filter(None, [option]))
        assert done.exit_code == 1 and "Error: " in done.stderr and "wrong.lap" in done.stderr
        texts[option] = done.stderr
    assert texts[""] == texts["--quiet"] and "Traceback" not in texts[""]
    assert "Traceback" in texts["--verbose"] and texts["--verbose"].endswith(texts[""])


def test_warnings_are_sentences() -> None:
    @click.group(cls=Group)
    def group() -> None:
        pass

    @click.command()
    def warn() -> None:
        said = UserWarning("It is left out.\x1b")
        click.echo(warnings.formatwarning(said, UserWarning, "insides.py", 3, "x"), nl=False)

    group.add_command(with_words(warn))
    before = warnings.formatwarning
    assert CliRunner().invoke(group, ["warn"]).stdout == "Warning: " + printable("It is left out.\x1b") + "\n"
    assert "insides.py:3: UserWarning: It is left out." in CliRunner().invoke(group, ["warn", "--verbose"]).stdout
    assert warnings.formatwarning is before
