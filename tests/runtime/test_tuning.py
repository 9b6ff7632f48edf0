"""Choice by measuring: what is measured is right, kept, gone on with, and used by everything that compiles for the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import as_gpu
import pytest
import torch
import torch.nn.functional as F
from agreement import Function
from torch import nn

import lapilli
from lapilli import tuning
from lapilli.backend.placement import targets
from lapilli.codegen import choices, cpu, families
from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.template import Context, KernelTemplate
from lapilli.compiler import compile_to_bytes
from lapilli.eager.programs import target_of
from lapilli.ir.integer import as_int
from lapilli.runtime.devices import device_named
from lapilli.schedule.task import Task
from lapilli.target import plans_here, tuned
from lapilli.target.records import Records


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A cache of this test's own, and nothing that ships."""
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path)
    monkeypatch.setattr(choices, "_MOST_VARIANTS", 3)  # of each family, to take less time
    for known in (tuned._known, tuned._of_driver, target_of):
        known.cache_clear()
    yield tmp_path / "cache" / "tuned"
    for known in (tuned._known, tuned._of_driver, target_of):
        known.cache_clear()


def small() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 1), nn.Conv2d(32, 32, 3, 1, 1, groups=32), nn.Flatten(),
        nn.Linear(32 * 8 * 8, 12),
    )  # fmt: skip
    return layers.eval(), torch.randn(1, 3, 16, 16)


class Layer(nn.Module):
    """Attention, a norm, products; weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def pretend(monkeypatch: pytest.MonkeyPatch, faster: str) -> list[dict[Any, str]]:
    """Times are no longer measured: candidates whose names contain `faster` take half of the time, all others as long as usual.
    Returns what is timed from now on."""
    timed: list[dict[Any, str]] = []

    def ratios(self: Any, made: Any, thorough: int) -> Any:
        timed.append(dict(now))
        found = {key: 0.5 if faster in name else 1.0 for key, name in now.items()}
        return found, 2.0, 1.0

    now: dict[Any, str] = {}
    plan = tuning._Session._planned

    def planned(self: Any, chosen: Any) -> Any:
        now.clear()
        now.update(chosen)
        return plan(self, chosen)

    monkeypatch.setattr(tuning, "_TOGETHER", 1)
    monkeypatch.setattr(tuning._Session, "_ratios", ratios)
    monkeypatch.setattr(tuning._Session, "_planned", planned)
    return timed


def test_tune_is_right_and_later_compiles_use_what_won() -> None:
    model, x = small()
    plain = compile_to_bytes(model, (x,))
    with lapilli.compile(model, (x,), tune=True) as program:
        torch.testing.assert_close(program(x), model(x))
    records = tuned.own(device_named())
    assert {r.op for r in records} >= {"convolution"} and all(r.times for r in records)
    again = compile_to_bytes(model, (x,))
    assert (again != plain) == any(r.best != r.default for r in records)
    with lapilli.compile(model, (x,)) as program:
        torch.testing.assert_close(program(x), model(x))


def test_what_won_is_used_wherever_a_device_is_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = small()
    before = compile_to_bytes(model, (x,))
    pretend(monkeypatch, "turned")
    data, found = tuning.tune(model, (x,))
    changed = [c for c in found.choices if c.best != c.default]
    assert changed and all("turned" in c.best and c.ratio == 0.5 for c in changed)
    assert data != before
    here = device_named()
    records = tuned.records_of(here)
    assert records and [t.records for t in targets(False, here.index)] == [records]
    assert target_of(here.index).records == records  # the eager device
    assert [t.records for t in plans_here(()) if t.name == found.plan] == [records]
    assert all(t.records == Records() for t in plans_here(()) if t.name != found.plan)
    compiled = torch.compile(model, backend="vulkan")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


def test_a_session_goes_on_where_another_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = small()
    timed = pretend(monkeypatch, "nothing")
    _, found = tuning.tune(model, (x,), seconds=0)
    assert not found.finished and not timed and found.after == found.before
    limit = iter([False] * 2 + [True] * 100)
    real = tuning._Session._try

    def some(self: Any, tried: Any, plans: Any = None) -> None:
        real(self, tried, plans)
        if next(limit):
            raise KeyboardInterrupt

    monkeypatch.setattr(tuning._Session, "_try", some)
    with pytest.raises(KeyboardInterrupt):
        tuning.tune(model, (x,))
    first = [(key, name) for each in timed for key, name in each.items()]
    monkeypatch.setattr(tuning._Session, "_try", real)
    _, found = tuning.tune(model, (x,))
    assert found.finished and all(c.tried == c.of for c in found.choices)
    every = [(key, name) for each in timed for key, name in each.items()]
    kept = len(timed[-1])  # the program that was interrupted is timed again: it was not stored
    assert len(every) <= len(set(every)) + kept + len(timed[2]) and set(first) < set(every)
    timed.clear()
    tuning.tune(model, (x,))
    assert not timed


def test_equal_times_decide_the_same(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    model, x = small()
    pretend(monkeypatch, "")  # all candidates are as fast
    texts = []
    for _ in range(2):
        tuning.tune(model, (x,))
        (file,) = cache.iterdir()
        records = tuned.read(file).records
        assert all(r.best == next(iter(r.times)) for r in records)
        texts.append([(r.key, r.best) for r in records])
        file.unlink()
    assert texts[0] == texts[1]


@dataclass(frozen=True)
class Wrong(cpu.CpuMatmul):
    """Leaves the last terms of sums out."""

    def write(self, task: Task, ctx: Context) -> KernelSource:
        return replace(cpu.CpuMatmul(**{**vars(self), "k": self.k - 4}).write(task, ctx), task=task)

    @property
    def variant(self) -> str:
        return "wrong"


@dataclass(frozen=True)
class Broken(cpu.CpuMatmul):
    """Is no Slang."""

    def write(self, task: Task, ctx: Context) -> KernelSource:
        made = super().write(task, ctx)
        return replace(made, source=made.source.replace("void main(", "void main( int", 1))

    @property
    def variant(self) -> str:
        return "broken"


@pytest.mark.parametrize("kind, why", [(Wrong, "differs from the reference by"), (Broken, "")])
def test_candidates_that_are_wrong_are_rejected(kind: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 36)).eval()
    x = torch.randn(40, 64)
    real = cpu.CpuMatmul.variants

    def variants(self: Any, task: Task, ctx: Context) -> Iterator[KernelTemplate]:
        found = real(self, task, ctx)
        yield next(found)
        if self.n == as_int(48):
            yield kind(**vars(self))
        yield from found

    monkeypatch.setattr(cpu.CpuMatmul, "variants", variants)
    pretend(monkeypatch, kind.__name__.lower())  # and it would be the fastest
    data, found = tuning.tune(model, (x,))
    (rejected,) = found.rejected
    assert (
        rejected.candidate == f"register tiles: {kind.__name__.lower()}"
        and why in rejected.why
        and "48" in rejected.title
    )
    assert all(c.tried == c.of for c in found.choices) and found.finished
    assert [r.wrong for r in tuned.own(device_named()) if r.wrong] == [(rejected.candidate,)]
    with lapilli.runtime.program.Program(data) as program:
        torch.testing.assert_close(program(x), model(x))
    _, again = tuning.tune(model, (x,))
    assert not again.rejected, "it is not tried again"


def test_open_sizes_are_measured_at_those_of_the_examples() -> None:
    rows = torch.export.Dim("rows", min=1, max=300)
    model = nn.Linear(32, 40).eval()
    x = torch.randn(50, 32)
    data, found = tuning.tune(model, (x,), dynamic_shapes=({0: rows},))
    assert [c.title for c in found.choices] == ["product 1..300x40x32"]
    with lapilli.runtime.program.Program(data) as program:
        for n in (1, 7, 300):
            given = torch.randn(n, 32)
            torch.testing.assert_close(program(given), model(given))


def test_methods_on_the_host_and_several_methods() -> None:
    """Segments beside operators on the CPU are measured with numbers of their own."""
    w = torch.randn(24, 32)
    parts = Function(lambda x: F.linear(torch.linalg.eigvals(x @ x.mT).real.expand(32, 32), w))
    x = torch.randn(32, 32)
    data, _ = tuning.tune(parts, (x,), seconds=5)
    with lapilli.runtime.program.Program(data) as program:
        assert program(x).shape == (32, 24)
    model = nn.Linear(32, 40).eval()
    methods = {"one": (model, (torch.randn(1, 32),)), "many": (model, (torch.randn(40, 32),))}
    data, found = tuning.tune(methods, seconds=20)
    with lapilli.runtime.program.Program(data) as program:
        for n, name in ((1, "one"), (40, "many")):
            given = torch.randn(n, 32)
            torch.testing.assert_close(program.methods[name](given), model(given))
    assert {c.title for c in found.choices} == {"product 40x32", "product 40x40x32"}


@pytest.mark.long
def test_halves() -> None:
    layer, x = Layer().half().eval(), torch.randn(1, 20, 32).half()
    data, found = tuning.tune(layer, (x,), seconds=10)
    assert found.plan == "cpu-fp16"
    with lapilli.runtime.program.Program(data) as program:
        torch.testing.assert_close(program(x), layer(x), rtol=2e-2, atol=2e-2)


@pytest.mark.part(2)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gpu_plans(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention, rows and products with the families that a GPU has."""
    as_gpu.on_any_device(monkeypatch.setattr)
    target_of.cache_clear()
    layer, x = Layer().eval(), torch.randn(1, 20, 32)
    pretend(monkeypatch, "4 queries")
    data, found = tuning.tune(layer, (x,), precision=precision, seconds=20)
    assert found.plan == f"gpu-{precision}" and not found.rejected
    assert {c.title.split()[0] for c in found.choices} == {"product", "attention", "rows"}
    with lapilli.runtime.program.Program(data) as program:
        bound = 2e-2 if precision == "fp16" else 1e-5
        torch.testing.assert_close(program(x), layer(x), rtol=bound, atol=bound)


def test_a_target_cannot_be_measured() -> None:
    with pytest.raises(lapilli.CompileError, match="leave target='h100' out"):
        lapilli.compile(nn.ReLU(), (torch.zeros(3),), target="h100", tune=True)
    wrong: Any
    for wrong in (2.5, 0, "yes", None):  # seconds are not given so, and nobody asked for minutes
        with pytest.raises(lapilli.CompileError, match="choose True or False"):
            lapilli.compile(nn.ReLU(), (torch.zeros(3),), tune=wrong)
    with pytest.raises(lapilli.NoDeviceError, match="There is no Vulkan device 'voodoo2'"):
        tuning.tune(nn.ReLU(), (torch.zeros(3),), device="voodoo2")


def test_nothing_to_choose() -> None:
    data, found = tuning.tune(nn.ReLU(), (torch.zeros(3),))
    assert found.choices == () and found.finished and found.rejected == ()
    assert isinstance(data, bytes)


def test_families_are_listed_by_name() -> None:
    """Records name families: two of the same name could not be told apart."""
    for kind in families.FAMILIES.values():
        names: Sequence[str] = [f.name for f in kind]
        assert len(set(names)) == len(names)
