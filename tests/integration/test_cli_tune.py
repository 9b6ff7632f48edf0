"""`lapilli tune`: what it prints, the files that it reads and writes, and its exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import lapilli
from lapilli import tuning
from lapilli.cli import main
from lapilli.runtime.devices import device_named
from lapilli.target import tuned
from lapilli.tuning import Choice, Rejected, Tuned

pytestmark = pytest.mark.all_plans


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path)
    tuned._of_driver.cache_clear()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    layer = torch.nn.Linear(16, 20).eval()
    torch.export.save(torch.export.export(layer, (torch.randn(24, 16),)), tmp_path / "model.pt2")
    return tmp_path / "model.pt2"


def cli(*args: object, code: int = 0) -> Result:
    done = CliRunner().invoke(main, list(map(str, args)))
    assert done.exit_code == code, done.output
    return done


def test_tune_exports_and_imports(model: Path, tmp_path: Path) -> None:
    text = cli("tune", model, "-o", tmp_path / "tuned.lap").stdout
    assert "Different tasks: 1;" in text and "written" in text and "again to go on" not in text
    with lapilli.load(tmp_path / "tuned.lap") as program:
        assert program(torch.randn(24, 16)).shape == (24, 20)
    said = json.loads(
        cli("tune", model, "-o", tmp_path / "tuned.lap", "--export", tmp_path / "r.jsonl", "--json").stdout
    )
    assert said["finished"] and said["records"] == 1 and said["choices"][0]["tried"] == said["choices"][0]["of"]
    found = tuned.read(tmp_path / "r.jsonl")
    assert (found.device, found.driver) == (device_named().name, device_named().driver)
    cli("cache", "clear")
    assert tuned.own(device_named()), "what was measured stays"
    cli("cache", "clear", "tuned")
    assert not tuned.own(device_named())
    assert "(records: 1)" in cli("tune", "--import", tmp_path / "r.jsonl").stdout
    assert tuple(tuned.own(device_named())) == found.records


def test_a_session_without_time(model: Path, tmp_path: Path) -> None:
    text = cli("tune", model, "-o", tmp_path / "tuned.lap", "--seconds", "0").stdout
    assert "without tuning: 0;" in text and "run the same command again to go on" in text
    assert (tmp_path / "tuned.lap").exists()


def test_a_session_that_is_stopped_says_that_it_can_go_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lapilli.tuning.tune", stopped)
        said = cli("tune", model, "-o", tmp_path / "tuned.lap", code=1)
    assert "tuned.lap is not written. What was measured is kept: the same command goes on" in said.stderr
    assert not said.stdout and not (tmp_path / "tuned.lap").exists()


def test_wrong_use(model: Path, tmp_path: Path) -> None:
    assert "Name a model to tune, or --export or --import a file" in cli("tune", code=2).output
    assert "-o names the program of a MODEL" in cli("tune", "-o", "x.lap", "--export", "y", code=2).output
    assert "tune a model first" in cli("tune", "--export", tmp_path / "r.jsonl", code=1).output
    assert "There is no Vulkan device 'voodoo2'" in cli("tune", model, "--device", "voodoo2", code=1).output
    assert "would replace the model" in cli("tune", model, "-o", model, code=1).output
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"lapilli records": 1, "device": "d", "driver": "v"}\n{"plan": "cpu-fp32", "run": "rm -rf"}\n')
    assert 'line 2: "op" must be a text' in cli("tune", "--import", broken, code=1).output
    assert not list((tmp_path / "cache").glob("tuned/*"))


@pytest.mark.parametrize("columns", [40, 80, 160])
def test_nothing_is_cut(columns: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    title, long = "convolution 64x56x56x64x56x56", "tiles on matrix units, weights as they lie: 32x32x128 of 32x32 by 4"
    choices = (
        Choice(title, 3, "Winograd: 4x4", 1234.5, long, 0.8125, 20, 21),
        Choice("rows 64x384", 1, "usual team", 9.5, "usual team", 1, 5, 5),
    )
    device = replace(device_named(), name="A device of a maker with a long name")
    wrong = (Rejected(title, "depthwise: groups of 64", "differs from the reference by 0.3 of its norm"),)
    found = Tuned(device, "gpu-fp16-matrix", 0.25, 0.2, choices, wrong, False)

    def instead(*args: Any, **named: Any) -> tuple[bytes, Tuned]:
        return b"program", found

    monkeypatch.setattr(tuning, "tune", instead)
    monkeypatch.setenv("COLUMNS", str(columns))
    text = cli("tune", model, "-o", "t.lap").stdout
    assert "…" not in text and all(len(line) <= columns for line in text.splitlines()), text
    letters = "".join(text.replace("│", " ").split())
    for part in (
        "81%",
        "1.23ms",
        "250.00msw",
        "200.00msnow",
        "0.3ofitsnorm",
        "3times",
        "withouttuning:23;",
        "againtogoon",
    ):
        assert part in letters, (part, text)
    assert ("━" in text) == (columns >= 72)
