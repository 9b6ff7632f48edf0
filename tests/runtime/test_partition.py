"""Programs of more than one segment: operators on the CPU, control flow, numbers, several methods."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.scan import scan
from torch.export import Dim

import lapilli
from lapilli import Program

TARGET = "any-fp32"


def compiled(model: torch.nn.Module, args: tuple[Any, ...], dynamic: Any = None, **options: Any) -> Program:
    return lapilli.compile(model.eval(), args, dynamic_shapes=dynamic, target=TARGET, **options)


def agree(program: Program, model: torch.nn.Module, calls: Sequence[tuple[Any, ...]]) -> None:
    for args in calls:
        with torch.no_grad():
            torch.testing.assert_close(program(*args), model(*args), rtol=1e-4, atol=1e-5)


class Spectrum(torch.nn.Module):
    """A Fourier transform in double precision between two large layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(256, 1024), torch.nn.Linear(513, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.fft.rfft(self.first(x).double()).abs().float()).relu()


def test_an_operator_between_segments_runs_on_the_cpu(tmp_path: Path) -> None:
    model, x = Spectrum(), torch.rand(32, 256)
    program = compiled(model, (x,))
    report = program.report()
    assert report.segments == ("gpu", "cpu", "gpu")
    reasons = {o.operator: o.reason for o in report.on_cpu}
    assert reasons["aten._fft_r2c.default"] == "no GPU lowering" and "float64" in reasons["aten.abs.default"]
    assert {o.operator for o in report.operators if o.where == "gpu"} == {"aten.linear.default", "aten.relu.default"}
    agree(program, model, [(x,), (torch.rand(32, 256),)])
    program.save(tmp_path / "spectrum.lap")
    agree(lapilli.load(tmp_path / "spectrum.lap"), model, [(x,)])
    torch.testing.assert_close(program.submit(x).result(), program(x))
    assert "4 on the CPU" in str(report) and "gpu → cpu → gpu" in str(report)


def test_cpu_operators_can_be_refused() -> None:
    with pytest.raises(lapilli.UnsupportedOperatorError, match=r"aten\._fft_r2c\.default: no GPU lowering.*fallback"):
        compiled(Spectrum(), (torch.rand(2, 256),), fallback="error")
    with pytest.raises(lapilli.CompileError, match='choose "cpu" or "error"'):
        compiled(Spectrum(), (torch.rand(2, 256),), fallback="gpu")


class Cheap(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x.double()).abs().float()
        return torch.fft.rfft((spectrum + 1)[..., :4].double()).abs().float()


def test_a_cheap_operator_is_not_sent_to_the_gpu_and_back() -> None:
    model, x = Cheap(), torch.rand(3, 16)
    program = compiled(model, (x,))
    assert program.report().segments == ("cpu",)
    assert any("too little" in o.reason for o in program.report().on_cpu)
    agree(program, model, [(x,)])


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.a(x).relu(), lambda x: self.b(x) - 1, (x,)) * 2


def test_cond_chooses_between_two_segments_of_the_gpu() -> None:
    model, x = Branches(), torch.rand(2, 4)
    program = compiled(model, (x,))
    assert program.report().segments == ("gpu", "cond(gpu | gpu)", "gpu") and not program.report().on_cpu
    agree(program, model, [(x,), (-x,), (x,)])


class Loop(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return while_loop(lambda i, x: x.sum() < 100, lambda i, x: (i + 1, x * 1.5), (torch.tensor(0), x))


def test_while_loop() -> None:
    model, x = Loop(), torch.rand(2, 4) + 0.1
    program = compiled(model, (x,))
    assert program.report().segments == ("while(gpu | gpu)",)
    agree(program, model, [(x,), (x * 50,), (x * 200,)])


class Running(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return scan(lambda carry, y: (carry * 0.5 + y, carry - y), torch.zeros(4), x)


def test_scan() -> None:
    model, x = Running(), torch.rand(5, 4)
    agree(compiled(model, (x,)), model, [(x,)])


class DataDependent(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        places = x.nonzero()
        count = x.sum().to(torch.int64).item()
        torch._check(count >= 0)
        torch._check(count < 100)
        return x[places[:, 0]].sum(), torch.zeros(count) + 1, x.shape[0] * 2  # type: ignore[arg-type]


def test_sizes_that_depend_on_data_and_a_size_as_an_output() -> None:
    model = DataDependent()
    program = compiled(model, (torch.ones(5),), {"x": {0: Dim("n", max=50)}})
    agree(program, model, [(torch.ones(5),), (torch.tensor([0.0, 1, 0, 3, 0, 0, 1]),)])
    with pytest.raises(lapilli.InvalidInputError, match="out of bounds"):
        program(torch.ones(51))
    with pytest.raises(lapilli.InvalidInputError, match="was given as float64"):
        program(torch.ones(5).double())


class Numbers(torch.nn.Module):
    def forward(self, x: torch.Tensor, k: int) -> torch.Tensor:
        return torch.arange(k) * x / (k / 2)


def test_a_number_as_an_input() -> None:
    model = Numbers()
    program = compiled(model, (torch.tensor(3.0), 5), {"x": {}, "k": Dim.DYNAMIC})
    assert not program.report().on_cpu
    agree(program, model, [(torch.tensor(3.0), 5), (torch.tensor(2.0), 9)])
    with pytest.raises(lapilli.InvalidInputError, match="give an int"):
        program(torch.tensor(2.0), 2.5)


class Pairs(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, 2).sum(1) * x.shape[0]


def test_a_size_that_is_a_multiple_of_a_symbol() -> None:
    model = Pairs()
    program = compiled(model, (torch.rand(12),), {"x": {0: 2 * Dim("n", max=100)}})
    agree(program, model, [(torch.rand(12),), (torch.rand(30),), (torch.rand(200),)])
    with pytest.raises(lapilli.InvalidInputError, match="no whole n gives 13"):
        program(torch.rand(13))


def test_methods_share_their_weights(tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 64).eval()
    many, one = torch.rand(7, 64), torch.rand(1, 64)
    lapilli.compile({"prefill": (model, (many,)), "decode": (model, (one,))}, target=TARGET).save(tmp_path / "m.lap")
    program = lapilli.load(tmp_path / "m.lap")
    assert list(program.methods) == ["prefill", "decode"] and len(program.description.constants) == 2
    with torch.no_grad():
        torch.testing.assert_close(program(many), model(many))
        torch.testing.assert_close(program.methods["decode"](one), model(one))
        torch.testing.assert_close(program.methods["decode"].submit(one).result(), model(one))
    with pytest.raises(lapilli.CompileError, match="gives every method its own inputs"):
        lapilli.compile({"a": (model, (one,))}, (one,))


def test_branches_after_the_device_has_been_used() -> None:
    """From its first use on, Dynamo leaves Lapilli's code alone; it traces branches under a mode of ours."""
    torch.compile(lambda x: x + 1, backend="vulkan")(torch.ones(2).to("vulkan"))
    test_cond_chooses_between_two_segments_of_the_gpu()
