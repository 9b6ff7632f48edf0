"""What .github says fits the repository: files parse, commands exist, actions have a version, forms ask for `lapilli report`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = [f for f in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) if f.stem != "config"]


def steps(file: Path) -> list[dict[str, Any]]:
    return [step for job in yaml.safe_load(file.read_text())["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows(file: Path) -> None:
    given = yaml.safe_load(file.read_text())
    assert given["name"] == file.stem and True in given  # YAML reads `on` as true
    assert given["permissions"] == {"contents": "read"}  # what else a job may do, it says itself
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for job in given["jobs"].values():
        assert set(job.get("needs", [])) <= set(given["jobs"])
    for step in steps(file):
        assert ("uses" in step) != ("run" in step)
        if "uses" in step:
            assert re.fullmatch(r"[\w./-]+@(v\d[\d.]*|release/v\d+)", step["uses"]), step
        for command in re.findall(r"\bmake ([\w -]+)", step.get("run", "")):
            assert command.startswith("python3") or set(command.split()) <= targets, command


def test_what_takes_long_runs_every_week() -> None:
    given = yaml.safe_load((ROOT / ".github" / "workflows" / "weekly.yml").read_text())
    assert {"schedule", "workflow_dispatch"} <= set(given[True])
    (job,) = given["jobs"].values()
    targets = set(job["strategy"]["matrix"]["target"])
    makefile = (ROOT / "Makefile").read_text()
    assert targets <= set(re.findall(r"^([a-z-]+):", makefile, re.M))
    assert {"fuzz", "failures"} <= targets  # fuzz runs fuzz-native, failures runs ThreadSanitizer
    assert any(step.get("run") == "make ${{ matrix.target }}" for step in job["steps"])


def test_a_new_seed_that_fails_fails_the_target() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\nrandom:")[2].partition("\n\n")[0]
    (new,) = [line for line in recipe.splitlines() if "--new" in line]
    assert "||" not in new or new.endswith("exit 1; }"), new


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.stem)
def test_issue_forms(file: Path) -> None:
    form = yaml.safe_load(file.read_text())
    assert form["name"] and form["description"] and form["labels"]
    fields = [entry for entry in form["body"] if entry["type"] != "markdown"]
    assert len({entry["id"] for entry in fields}) == len(fields)
    assert all(entry["attributes"]["label"] for entry in fields)
    if file.stem in ("wrong_result", "slow", "crash"):
        (report,) = [entry for entry in fields if entry["id"] == "report"]
        assert "lapilli report" in report["attributes"]["label"] and report["validations"]["required"]


def test_wheels_are_for_what_is_promised() -> None:
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    assert given["manylinux-x86_64-image"] == given["manylinux-aarch64-image"] == "manylinux_2_28"
    command = given["test-command"].split("{project}/")[1]
    assert (ROOT / command).exists()
