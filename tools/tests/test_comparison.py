"""benchmarks/comparison: its verdicts, its worker, and the page that it makes of them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import environments, machine, page, worker
from comparison.cases import Inputs
from comparison.environments import ENVIRONMENTS, Environment, install
from comparison.judging import judge
from comparison.systems import SYSTEMS, Run, System
from comparison.timing import follows
from torch import Tensor, nn
from workers import Died, Late

# -- verdicts

X = torch.linspace(1, 2, 100)
EXACT = X.double()


@pytest.mark.parametrize(
    ("got", "want", "reason"),
    [
        (X, X, None),
        (X * (1 + 5e-6), X, None),
        (X * (1 + 5e-5), X, "relative error 5e-05"),
        (X * (1 + 5e-5), X * (1 + 3e-5), None),  # torch's own error is eight times allowed
        (X * float("nan"), X, "relative error nan"),
        (X.double(), X, "torch.float64 [100], not torch.float32 [100]"),
        (X[:50], X, "torch.float32 [50], not torch.float32 [100]"),
        (torch.arange(100), torch.arange(100), None),
        (torch.arange(100) // 2, torch.arange(100), "99 of 100 differ"),
    ],
)
def test_judging(got: Tensor, want: Tensor, reason: str | None) -> None:
    found = judge([got, want], [want, want], [EXACT, EXACT])
    assert found["verdict"] == ("right" if reason is None else "wrong")
    assert reason is None or reason in found["reason"]


def test_as_many_results() -> None:
    assert judge([X], [X, X], [EXACT, EXACT])["reason"] == "1 results, not 2"


def test_losses() -> None:
    assert follows([(2.0, 2.0), (1.0, 1.0001)])["verdict"] == "right"
    assert "differ by 0.5" in follows([(2.0, 2.0), (1.5, 1.0)])["reason"]
    assert "nan" in follows([(2.0, 2.0), (float("nan"), 1.0)])["reason"]
    assert "do not fall" in follows([(1.0, 1.0), (2.0, 2.0)])["reason"]


# -- the worker


class Toy(System):
    """torch's CPU, its results times a factor; 0: an exception."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def prepare(self, model: nn.Module, inputs: Inputs) -> Run:
        if not self.factor:
            raise NotImplementedError("no such operator\nwith details")
        return lambda: [t * self.factor for t in torch.utils._pytree.tree_leaves(model(*inputs))]


@pytest.mark.parametrize(
    ("factor", "verdict", "reason"),
    [(1, "right", None), (1.001, "wrong", "0.001"), (0, "refused", "NotImplementedError: no such operator")],
)
def test_work(monkeypatch: pytest.MonkeyPatch, factor: float, verdict: str, reason: str | None) -> None:
    monkeypatch.setitem(SYSTEMS, "toy", lambda: Toy(factor))
    monkeypatch.setattr(worker, "_open", [])
    (found,) = worker.work("toy", "cases", "GELU, exact", 0)
    assert found["verdict"] == verdict
    assert reason in found["reason"] if reason else "reason" not in found


def test_times_are_medians_beside_torchs() -> None:
    (name, *_) = worker.tasks("pytorch", "models")
    assert name.startswith("MobileNetV2")
    found = worker.latency(Toy(1), nn.Linear(3, 3).eval().requires_grad_(False), (torch.ones(2, 3),))  # type: ignore[attr-defined]
    assert found["verdict"] == "right" and found["runs"] == 15
    assert 0 < found["seconds"] < 1 and 0 < found["torch_seconds"] < 1 and found["first"] > 0


def test_what_dies_and_what_is_late() -> None:
    assert worker.died(Died("SIGSEGV"))["verdict"] == "crash"
    assert worker.died(Late("no time"))["verdict"] == "not measured"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["other", "cases", "x.jsonl"], "invalid choice: 'other'"),
        (["torchvulkan", "speed", "x.jsonl"], "no such part: 'speed'; there are cases, dtypes"),
        (["torchvulkan", "cases"], "required: file"),
    ],
)
def test_bad_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.setattr("sys.argv", ["worker", *arguments])
    with pytest.raises(SystemExit) as stop:
        worker.main()
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_a_part_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "results.jsonl"
    monkeypatch.setattr("sys.argv", ["worker", "pytorch", "features", str(file)])
    worker.main()
    found = {line["task"]: line["steps"] for line in map(json.loads, file.read_text().splitlines())}
    assert found.keys() == worker.tasks("pytorch", "features").keys()
    for (step,) in found.values():
        assert step["verdict"] == "right" or (step["verdict"] == "refused" and step["reason"])
    assert json.loads(capsys.readouterr().out)["torch"] == torch.__version__


# -- environments and the machine


def test_an_environment_is_made_anew_when_the_source_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "src" / "lapilli" / "a.py"
    source.parent.mkdir(parents=True)
    source.write_text("1")
    (tmp_path / "pyproject.toml").touch()
    made: list[str] = []

    def make(name: str, folder: Path) -> dict[str, Any]:
        made.append(name)
        return {"wheel": 1}

    monkeypatch.setattr(environments, "REPOSITORY", tmp_path)
    monkeypatch.setattr(environments, "BUILD", tmp_path)
    monkeypatch.setattr(environments, "_made", make)
    assert [install("lapilli")["wheel"] for _ in range(2)] == [1, 1] and made == ["lapilli"]
    install("executorch")
    source.write_text("2")
    install("executorch")  # has none of our code
    install("lapilli")
    assert made == ["lapilli", "executorch", "lapilli"]
    monkeypatch.setitem(ENVIRONMENTS, "executorch", Environment("executorch==2.0"))
    install("executorch")
    assert made[-1] == "executorch"


def test_an_environment_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(name: str, folder: Path) -> dict[str, Any]:
        raise subprocess.CalledProcessError(1, ["python", "-m", "pip", "install", "torch"])

    monkeypatch.setattr(environments, "BUILD", tmp_path)
    monkeypatch.setattr(environments, "_made", fail)
    assert install("executorch") == {"failed": "install torch failed"}
    assert not (tmp_path / "executorch.json").exists()


def test_what_others_use_is_what_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, busy, own = iter([100.0, 110.0]), iter([50.0, 65.0]), iter([1.0, 8.0])
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))  # type: ignore[attr-defined]
    monkeypatch.setattr(machine, "_busy", lambda: next(busy))
    monkeypatch.setattr(machine, "_own", lambda: next(own))
    assert machine.watch()() == pytest.approx(0.8)


# -- the page

RIGHT = {"verdict": "right"}
REFUSED = {"verdict": "refused", "reason": "NotImplementedError: <no>"}
WRONG = {"verdict": "wrong", "reason": "3 of 4 differ"}
CRASH = {"verdict": "crash", "reason": "the process ended with SIGSEGV"}
LATE = {"verdict": "not measured", "reason": "not begun within 60 s"}
TIMED = {"verdict": "right", "seconds": 0.02, "torch_seconds": 0.01, "error": 3e-7, "torch_error": 2e-7}
INSTALLED = {
    "lapilli": {"wheel": 1_200_000, "installed": 81_000_000, "packages": 18},
    "torchvulkan": {"failed": "install torchvulkan failed"},
    "pytorch": {"wheel": 0, "installed": 0, "packages": 0},
}


def entry(*verdicts: str, backward: str = "right", reason: str = "why") -> list[dict[str, Any]]:
    samples = [{"sample": k, "verdict": v, "reason": reason * (v != "right")} for k, v in enumerate(verdicts)]
    return [*samples, {"sample": "backward", "verdict": backward, "reason": ""}]


RESULTS: dict[str, dict[str, Any]] = {
    "lapilli-compiled.cases": {"a|b": [RIGHT], "deep": [RIGHT]},
    "lapilli-eager.cases": {"a|b": [REFUSED], "deep": [CRASH]},
    "torchvulkan.cases": {"a|b": [WRONG], "deep": [LATE]},
    "executorch.cases": {"a|b": [{"verdict": "not run", "delegated": 3, "operators": 4}]},
    "lapilli-compiled.dtypes": {"float64": [RIGHT | {"cpu": ["add"]}], "int8": [RIGHT | {"cpu": []}]},
    "lapilli-eager.dtypes": {"float64": [RIGHT], "int8": [RIGHT]},
    "lapilli-eager.dtypes-strict": {"float64": [REFUSED], "int8": [RIGHT]},
    "torchvulkan.dtypes": {"float64": [WRONG], "int8": [RIGHT]},
    "torchvulkan.dtypes-strict": {"float64": [WRONG], "int8": [LATE]},
    "lapilli-compiled.models": {"net": [TIMED]},
    "lapilli-eager.models": {"net": [TIMED | WRONG | {"seconds": 2.0}]},
    "torchvulkan.models": {"net": [CRASH]},
    "lapilli-eager.training": {"CNN": [TIMED | {"apart": 2e-5}]},
    "lapilli-eager.features": {
        "sizes": [RIGHT | {"first": [0.2, 0.1], "again": [0.01, 0.002]}],
        "fallbacks named": [RIGHT | {"named": 2, "of": 3, "refused": 1}],
    },
    "lapilli-compiled.features": {"fallbacks named": [RIGHT | {"named": 3, "of": 3}]},
    "pytorch.features": {"torch.is_vulkan_available()": [RIGHT | {"value": "False"}]},
    "executorch.features": {"registry": [RIGHT | {"entries": 9, "aten": 5, "backends": ["X", "Y"]}]},
    "lapilli-eager.operators": {
        "abs": entry("right", "right"),
        "empty": entry("random", backward="random"),
        "bad": entry("right", "refused", "wrong", backward="wrong", reason="a < b. More"),
        "jiterator": entry("crash", reason="Jiterator is only supported on CUDA"),
    },
    "lapilli-eager.operators-strict": {"abs": entry("refused"), "late": [LATE | {"sample": 0}]},
    "torchvulkan.operators": {"igamma": [CRASH | {"sample": 0}]},
}


def made(others: float = 0.01) -> str:
    run: dict[str, Any] = {
        "started": "2026-01-02 03:04",
        "seconds": 60.0,
        "load": [0.1, 1.5],
        "others": others,
        "cores": 2,
    }
    run |= {"threads": 2, "every": 1, "samples": 3}
    runs = {key: run for key in RESULTS} | {"torchvulkan.training": run | {"failed": "exit code 1"}}
    return page.page(INSTALLED, runs, RESULTS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line",
    [
        "| a\\|b | right | not measured | refused | **wrong** | 3 of 4 operators delegated |",
        "| deep | right | not measured | **crash** | not measured | not measured |",
        "- a|b, Lapilli, device: refused: NotImplementedError: \\<no>",
        "- deep, Lapilli, device: crash: the process ended with SIGSEGV",
        "- deep, torchvulkan 0.2.1: not measured: not begun within 60 s",
        "| float64 | right, on the CPU | right, on the CPU | **wrong** |",
        "| int8 | right | right | right, strict: not measured |",
        "| net | 20 ms, 2× torch's 10 ms; error 3e-07 (torch 2e-07) | not measured "
        "| 2000 ms, 2e+02× torch's 10 ms; error 3e-07 (torch 2e-07), **wrong** | **crash** | not measured |",
        "| CNN | not measured | 20 ms, 2× torch's 10 ms; losses within 2e-05 | not measured |",
        "| sizes | — | not measured | right; ms: 200 100; again: 10 2 | not measured | — | — |",
        "| fallbacks named | 3 of 3 named in the report | not measured | 2 of 3 named by warnings; strict refuses 1 "
        "| not measured | — | — |",
        "| torch.is_vulkan_available() | — | not measured | — | not measured | False | — |",
        "| registry | — | not measured | — | not measured | — | 5 ATen operators of 9 entries; backends of the wheel: X, Y |",
        "| Lapilli, device | CPU allowed | 2 | 1 | 0 | 1 | 0 | 0 | 1 of 2 |",
        "| Lapilli, device | strict: the CPU forbidden | 2 | 0 | 1 | 0 | 0 | 1 | 1 of 1 |",
        "| torchvulkan 0.2.1 | CPU allowed | 1 | 0 | 0 | 0 | 1 | 0 | 0 of 0 |",
        "| torchvulkan 0.2.1 | strict: the CPU forbidden |  |  |  |  |  | not measured |  |",
        "- Lapilli, device, not right: `bad` (refused: a \\< b).",
        "| Lapilli | `pip install lapilli[compile]` | 1.2 | 18 | 81 |",
        "| torchvulkan 0.2.1 | `pip install torchvulkan` | not measured: install torchvulkan failed |  |  |",
        "Not measured, for the worker ended: torchvulkan.training (exit code 1).",
    ],
)
def test_the_page_says(line: str) -> None:
    assert line in made().splitlines()


def test_circumstances() -> None:
    text = made()
    assert "2026-01-02 03:04 to 2026-01-02 03:04 (UTC), 21 minutes, on 2 cores." in text
    assert "Load average at the start 0.1, at the end 1.5; other programs used 0.01 cores" in text
    assert "at most 3 of each one's samples" in text and "uses one thread or 2, whichever" in text
    assert "busy" not in text and "first version" not in text
    assert "**The machine was busy with other work**" in made(others=0.5)
    assert "Nothing has been measured yet." in page.page({}, {}, {})
