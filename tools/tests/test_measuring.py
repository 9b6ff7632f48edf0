"""The instruments behind docs/operators.md and docs/models.md: their comparisons, their workers, their tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import blockers
import measure
import opdb
import pytest
import torch
import workers
import zoo
from measure import Measurement, Stop, compare, compare_distributions
from toy_work import toy
from workers import Died, Late, Limits, Log, Result

from lapilli.errors import CompileError, InvalidFileError, UnsupportedOperatorError

# -- workers


def test_workers_survive_crashes_and_hangs() -> None:
    found: dict[str, list[Any]] = {}
    for task, step, result in workers.run(toy, ["fine", "killed", "hangs", "exits", "last"], 2, Limits(2)):
        assert step == len(found.setdefault(task, []))
        found[task].append(result)
    whole = [{"step": k} for k in range(3)]
    assert found["fine"] == found["last"] == [*whole, None]
    for task, reason in (("killed", "SIGSEGV"), ("hangs", "no result within 2 s"), ("exits", "exit code 3")):
        first, dead, *rest = found[task]
        assert first == whole[0] and rest == [whole[2], None]
        assert isinstance(dead, Died) and reason in dead.reason


def test_limits_of_a_task_and_of_all() -> None:
    found = [result for _, _, result in workers.run(toy, ["killed", "fine"], 1, Limits(2, deaths=1))]
    first, dead, *rest = found
    assert first == {"step": 0} and isinstance(dead, Died) and rest == [None, *({"step": k} for k in range(3)), None]
    late = list(workers.run(toy, ["fine"], 1, Limits(2, total=-1)))
    assert late == [("fine", 0, Late("not begun within -1 s")), ("fine", 1, None)]


def test_log_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path, shown = tmp_path / "results" / "log.jsonl", []

    def fill(tasks: Sequence[str]) -> Log:
        log = Log(path)
        log.fill(
            toy,
            tasks,
            1,
            Limits(2),
            lambda d: {"died": d.reason},
            lambda task, steps, _: shown.append((task, len(steps))),
        )
        return log

    fill(["a", "killed"])
    again = fill(["a", "killed", "b"])
    assert shown == [("a", 3), ("killed", 3), ("b", 3)]
    assert again.tasks["killed"]["steps"][1] == {"died": "the process ended with SIGSEGV"}
    assert [json.loads(line)["task"] for line in path.read_text().splitlines()] == ["a", "killed", "b"]


# -- comparing

X = torch.linspace(1, 2, 100)
NAN = torch.tensor([1.0, float("nan"), float("inf")])


@pytest.mark.parametrize(
    ("got", "want", "message"),
    [
        ([X], [X, X], "1 outputs instead of 2"),
        ([X.double()], [X], "dtype"),
        ([X[:50]], [X], "shape"),
        ([X], [X.to_sparse()], "strided instead of torch.sparse_coo"),
        ([(2 * X).to_sparse()], [X.to_sparse()], "relative error"),
        ([X * (1 + 2e-5)], [X], "relative error 2e-05"),
        ([torch.tensor([1, 2])], [torch.tensor([1, 3])], "1 of 2 elements differ"),
        ([NAN.flip(0)], [NAN], "NaN or infinity"),
        ([-NAN], [NAN], "NaN or infinity"),
        ([3], [4], "3 instead of 4"),
        ([X], [1.0], "instead of 1.0"),
        ([1.0], [X], "a float instead of a tensor"),
        ([torch.complex(X, X)], [torch.complex(X, -X)], "relative error"),
    ],
)
def test_what_is_wrong(got: list[Any], want: list[Any], message: str) -> None:
    with pytest.raises(Stop, match=message) as stop:
        compare(got, want, None, Measurement())
    assert stop.value.verdict == "wrong"


def test_what_is_right() -> None:
    found = Measurement()
    compare([X * (1 + 5e-6), NAN, 3, float("nan")], [X, NAN, 3, float("nan")], None, found)
    assert found.error == pytest.approx(5e-6, rel=0.1)


def test_torchs_own_error_is_allowed_eight_times() -> None:
    exact = X.double()
    theirs = (exact * (1 + 3e-5)).float()
    compare([(exact * (1 - 2e-4)).float()], [theirs], [exact], Measurement())
    with pytest.raises(Stop):
        compare([(exact * (1 - 4e-4)).float()], [theirs], [exact], Measurement())
    with pytest.raises(Stop):  # torch in float64 says something else: no reference
        compare([(exact * (1 - 4e-4)).float()], [theirs], [exact * 2], Measurement())


def draws(make: Callable[[], torch.Tensor]) -> list[list[torch.Tensor]]:
    torch.manual_seed(5)
    return [[make()] for _ in range(measure.DRAWS)]


def test_distributions() -> None:
    normal = draws(lambda: torch.randn(20, 30))
    compare_distributions([[torch.randn(20, 30)] for _ in range(measure.DRAWS)], normal)
    for other, what in (
        (lambda: torch.randn(20, 30) + 0.2, "mean"),
        (lambda: torch.randn(20, 30) * 1.3, "spread"),
        (lambda: torch.randn(20, 30) * (torch.rand(20, 30) > 0.1), "zeros"),
        (lambda: torch.randn(20, 31), "shape"),
        (lambda: torch.randn(20, 30, generator=torch.Generator().manual_seed(1)), "the same random numbers"),
    ):
        with pytest.raises(Stop, match=what):
            compare_distributions(draws(other), normal)
    compare_distributions(draws(lambda: torch.randn(9).cauchy_()), draws(lambda: torch.randn(9).cauchy_()))


# -- op_db


def broken(exported: Any, found: Measurement) -> measure.Run:
    """A compiler whose programs give ones."""
    return lambda inputs: [torch.ones_like(inputs[0])]


def test_an_entry_is_measured_with_its_samples() -> None:
    steps = list(opdb.work(2, True, "add", 0))
    assert [(s["sample"], s["verdict"]) for s in steps] == [(opdb.DYNAMIC, "right"), (0, "right"), (1, "right")]
    assert opdb.row("add", steps)[:3] == ["`add`", "2/2", "right"]
    assert [s["sample"] for s in opdb.work(2, True, "add", 2)] == [1]
    sample = opdb.calls("exp", 1)[0]
    assert opdb.static("exp", sample, broken).verdict == "wrong"
    assert opdb.static("empty_like", opdb.calls("empty_like", 1)[0], broken).verdict == "right"
    assert opdb.static("bernoulli", opdb.calls("bernoulli", 1)[0], broken).verdict == "wrong"
    assert opdb.static("allclose", opdb.calls("allclose", 1)[0], broken).verdict == "unexportable"


def test_other_sizes() -> None:
    module = opdb.OperatorCall(torch.add, *torch.utils._pytree.tree_flatten(((torch.ones(3, 4), torch.ones(4)), {})))
    auto = torch.export.Dim.AUTO
    exported = measure.export(module, module.inputs, (({0: auto, 1: auto}, {0: auto}),))
    grown = opdb.other_sizes(exported, module.inputs)
    assert grown is not None and [tuple(t.shape) for t in grown] == [(4, 5), (5,)]
    assert opdb.other_sizes(measure.export(module, module.inputs), module.inputs) is None


def step(verdict: str, reason: str = "", **others: Any) -> Result:
    return {**Measurement(verdict, reason).as_dict(), "sample": 0, "inputs": "", **others}


def test_operator_page() -> None:
    cpu = [("aten.svd.default", "no GPU lowering")]
    tasks = {
        "abs": {"steps": [step("right", segments=["gpu"]), step("right", sample=opdb.DYNAMIC)]},
        "svd": {"steps": [step("right", segments=["cpu"], cpu=cpu), step("unexportable")]},
        "bad": {"steps": [step("right"), step("wrong", "a|b"), step("refused"), step("crash", "SIGSEGV")]},
        "off": {"steps": [step("unexportable", "data")]},
    }
    text = opdb.page(tasks)
    assert "Entries, sizes fixed: 2 right, 1 crash, 1 unexportable." in text
    assert "1 run on the GPU alone, 1 with a part on the CPU" in text
    assert "| `svd` | 1/1 |  | CPU: aten.svd.default | no GPU lowering |" in text
    assert "| `bad` | 1/4 |" in text and "crash: SIGSEGV" in text
    assert opdb.verdict(tasks["bad"]["steps"][:3]) == "wrong"


# -- the zoo


def test_model_page() -> None:
    right = step("right", segments=["gpu", "cpu", "gpu"], cpu=[("aten.sort.default", "why")], kernels=3, operators=9)
    text = zoo.page({"timm/a": {"steps": [right]}, "timm/b": {"steps": [step("refused", "too | large")]}})
    assert "| timm | 2 | 1 | 0 | 1 | 0 | 0 | 0 |" in text
    assert "2 gpu, 1 cpu (aten.sort.default)" in text and "too \\| large" in text


def test_a_model_is_measured() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    found = measure.measure(model, [torch.randn(2, 4)], measure.interpreted)
    assert found.verdict == "right" and found.operators == 2
    assert measure.measure(model, [torch.randn(2, 4)], broken).verdict == "wrong"


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (UnsupportedOperatorError("no lowering"), "refused"),
        (TypeError("float64 is not supported"), "refused"),
        (CompileError("a generated kernel does not compile (please report this): E30019"), "crash"),
        (InvalidFileError("the program is damaged"), "crash"),
        (KeyError("u3"), "crash"),
    ],
)
def test_own_failures_are_no_refusals(error: Exception, verdict: str) -> None:
    def compile(exported: Any, found: Measurement) -> measure.Run:
        raise measure._stop(error)

    assert measure.measure(torch.nn.ReLU(), [X], compile).verdict == verdict


def test_blockers() -> None:
    tasks = {
        "a": {"steps": [step("refused", "1 operator(s) have no GPU lowering yet: aten.sort.default."), step("right")]},
        "b": {"steps": [step("crash", "KeyError: 'u3'"), step("right", cpu=[("aten.sort.default", "axis 7")])]},
        "c": {"steps": [step("crash", "KeyError: 'u3'"), step("unexportable", "data")]},
    }
    counted = blockers.count(tasks, {"timm/x": tasks["b"]})
    assert counted[0] == ("crash: KeyError: 'u3'", ["timm/x"], ["b", "c"])
    assert ("no lowering: aten.sort.default", [], ["a"]) in counted
    assert ("on the CPU: aten.sort.default (axis N)", ["timm/x"], ["b"]) in counted
