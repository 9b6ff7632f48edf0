"""lapilli.export.to_vulkan: which operators are lowered, what stays, and that the result is an exported program like others."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

import lapilli
from lapilli.export import LoweredProgram, VulkanPartitioner, to_vulkan
from lapilli.runtime.description import Description


class Network(nn.Module):
    """A Fourier transform between parts that can be lowered."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        y = nn.functional.hardswish(self.norm(self.conv(x)).relu()).mean((2, 3))
        return self.head(y), torch.fft.rfft(y).abs().sum()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Network().eval()


BATCH = {0: Dim("batch", min=2, max=64)}


def exported(model: nn.Module) -> ExportedProgram:
    return torch.export.export(model, (torch.rand(4, 3, 8, 8),), dynamic_shapes=(BATCH,))


def operators(lowered: LoweredProgram) -> list[str]:
    names = [str(n.target) for n in lowered.graph_module.graph.nodes if n.op == "call_function"]
    return [n for n in names if "getitem" not in n]


def programs(lowered: LoweredProgram) -> list[Description]:
    tensors = lowered.exported_program().constants
    return [Description.of(t.numpy().tobytes()) for name, t in tensors.items() if name.startswith("lapilli_program")]


def agree(lowered: LoweredProgram, model: nn.Module, bound: float = 1e-5) -> None:
    run = lowered.module()
    for n in (4, 7):
        x = torch.rand(n, 3, 8, 8)
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x), rtol=bound, atol=bound)


def test_lowering_says_nothing_of_torchs_insides(model: nn.Module) -> None:
    program = exported(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to_vulkan(program)


def test_all_that_can_be_is_lowered(model: nn.Module) -> None:
    lowered = to_vulkan(exported(model))
    assert operators(lowered) == [
        "lapilli.run.default",
        "aten.fft_rfft.default",
        "aten.abs.default",
        "lapilli.run.default",
    ]
    assert lowered.report().segments == ("gpu", "cpu", "gpu")
    reasons = {o.operator: o.reason for o in lowered.report().on_cpu}
    assert reasons["aten.fft_rfft.default"] == "no GPU lowering" and "complex64" in reasons["aten.abs.default"]
    assert not lowered.exported_program().state_dict  # all weights are in the program
    agree(lowered, model)


def test_an_input_called_as_something_of_python() -> None:
    """That of nn.Sequential is called input."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)).eval(), torch.rand(5, 4)
    run = to_vulkan(torch.export.export(model, (x,))).module()
    torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)


def test_lists_of_operators(model: nn.Module) -> None:
    blocked = to_vulkan(
        exported(model), VulkanPartitioner(operator_blocklist=["aten.relu", torch.ops.aten.linear.default])
    )
    assert "aten.relu.default" in operators(blocked) and "aten.linear.default" in operators(blocked)
    assert {o.reason for o in blocked.report().on_cpu if "relu" in o.operator} == {"in operator_blocklist"}
    assert set(blocked.exported_program().state_dict) == {"head.weight", "head.bias"}
    agree(blocked, model)
    allowed = to_vulkan(
        exported(model), VulkanPartitioner(operator_allowlist=["aten.conv2d.default", torch.ops.aten.relu])
    )
    assert {o.operator for o in allowed.report().operators if o.where == "gpu"} == {
        "aten.conv2d.default",
        "aten.relu.default",
    }
    agree(allowed, model)


def test_small_parts_stay(model: nn.Module) -> None:
    lowered = to_vulkan(exported(model), VulkanPartitioner(min_operators=3))
    assert operators(lowered)[-1] == "aten.sum.default" and operators(lowered).count("lapilli.run.default") == 1
    assert lowered.report().on_cpu[-1].reason == "fewer than 3 operators"
    agree(lowered, model)


def test_storage(model: nn.Module) -> None:
    """Half weights make the program smaller; half activations give it the plans of half precision."""
    full = to_vulkan(exported(model))
    weights = to_vulkan(exported(model), VulkanPartitioner(storage={"weights": "fp16"}))
    activations = to_vulkan(exported(model), VulkanPartitioner(storage={"activations": "fp16"}))
    half = to_vulkan(exported(model), VulkanPartitioner(precision="fp16"))

    def dtypes(lowered: LoweredProgram) -> set[str]:
        return {c.dtype for c in programs(lowered)[0].constants if len(c.shape) > 1}

    def plans(lowered: LoweredProgram) -> list[str]:
        return [p.name for p in programs(lowered)[0].methods[0].plans]

    assert [*map(dtypes, (full, weights, activations, half))] == [{"float32"}, {"float16"}, {"float32"}, {"float16"}]
    assert plans(full) == plans(weights) == ["gpu-fp32", "cpu-fp32", "any-fp32"]
    assert plans(half) == plans(activations) and "cpu-fp16" in plans(half)
    for lowered in (weights, activations, half):
        agree(lowered, model, 1e-2)
        with pytest.raises(AssertionError):  # it is not the same as full precision
            agree(lowered, model, 1e-7)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolutions(x).softmax(1)


@pytest.mark.parametrize("layout", ["auto", "contiguous", "channels-last"])
def test_layouts(layout: str) -> None:
    from lapilli.backend.aot_graph import prepare
    from lapilli.codegen.select import schedule_of
    from lapilli.ir.node import Convolution
    from lapilli.lower import lower
    from lapilli.target import ANY

    torch.manual_seed(0)
    model = Images().eval()
    agree(to_vulkan(exported(model), VulkanPartitioner(memory_layout=layout)), model)
    program = exported(model)
    states = [program.state_dict[s.target] for s in program.graph_signature.input_specs if s.target is not None]
    graph = lower(prepare(program.graph_module, dict(enumerate(states))).module)
    planned = schedule_of(graph, ANY, layout)
    convolutions = [
        t for t in planned.tasks if t.reduction is not None and isinstance(t.reduction.contraction, Convolution)
    ]
    orders = {planned.layouts[t.out.id].order for t in convolutions if t.out not in graph.results}
    wished = {"contiguous": {(0, 1, 2, 3)}, "channels-last": {(0, 2, 3, 1)}}
    assert orders and orders == wished.get(layout, orders)


def test_a_lowered_module_is_part_of_another(model: nn.Module, tmp_path: Path) -> None:
    """It is exported with it, saved, and run in a process that has only imported lapilli."""

    class Larger(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part, self.scale = part, nn.Parameter(torch.full((4,), 3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x * 2)[0] * self.scale

    lowered = to_vulkan(exported(model))
    larger, x = Larger(lowered.module()), torch.rand(5, 3, 8, 8)
    whole = torch.export.export(larger, (x[:4],), dynamic_shapes=(BATCH,))
    with torch.no_grad():
        want = model(x * 2)[0] * 3
        torch.testing.assert_close(whole.module()(x), want, rtol=1e-4, atol=1e-4)
    lowered.save(tmp_path / "part.pt2")
    torch.export.save(whole, tmp_path / "whole.pt2")
    torch.save((x, want, model(x)[0].detach()), tmp_path / "values.pt")
    code = (
        "import sys, torch, lapilli; x, whole, part = torch.load('values.pt')\n"
        "torch.testing.assert_close(torch.export.load('whole.pt2').module()(x), whole, rtol=1e-4, atol=1e-4)\n"
        "torch.testing.assert_close(torch.export.load('part.pt2').module()(x)[0], part, rtol=1e-4, atol=1e-4)\n"
        "assert 'lapilli.compiler' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_sizes_that_no_tensor_has() -> None:
    """A segment reads a size that its own inputs do not show."""

    class Repeat(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.fft.rfft(x).abs().sum() * torch.arange(y.shape[0]) + y.shape[0]

    args = (torch.rand(4), torch.rand(5, 0))
    program = torch.export.export(Repeat(), args, dynamic_shapes=(None, {0: Dim("n", min=2, max=50)}))
    lowered = to_vulkan(program)
    assert lowered.report().segments[-1] == "gpu"
    for n in (5, 9):
        args = (torch.rand(4), torch.rand(n, 0))
        torch.testing.assert_close(lowered.module()(*args), Repeat()(*args))


def test_a_number_is_read_between_segments() -> None:
    """`item()` waits for what it reads, and what needs the number waits for it: both are on the GPU, but not in one call."""

    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            count = y.sum().to(torch.int64).item()
            return (y * count).relu() + count

    lowered = to_vulkan(torch.export.export(Reads(), (torch.ones(2, 3),)))
    segments = [s for s in lowered.report().segments if s == "gpu"]
    assert len(segments) == 2
    for x in (torch.ones(2, 3), torch.arange(6.0).view(2, 3)):
        torch.testing.assert_close(lowered.module()(x), Reads()(x))


def test_buffers_that_change_and_strides() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(x.sum(0))
            return (x * self.count).t()

    x = torch.rand(4, 3)
    run, like = to_vulkan(torch.export.export(Counter(), (x,))).module(), Counter()
    for _ in range(3):
        torch.testing.assert_close(run(x), like(x), check_stride=True)


def test_gradients_are_refused(model: nn.Module) -> None:
    run = to_vulkan(exported(model)).module()
    with pytest.raises(lapilli.InvalidInputError, match="no gradients: train the module"):
        run(torch.rand(4, 3, 8, 8, requires_grad=True))[0].sum().backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"operator_blocklist": ["aten.lineer"]},
            "'aten.lineer', which is no operator of torch .did you mean 'aten.linear'",
        ),
        ({"operator_allowlist": ["aten.add.Tensr"]}, "did you mean 'aten.add.Tensor'"),
        ({"operator_blocklist": "aten.add"}, "is the text 'aten.add': give a list"),
        ({"operator_blocklist": [3]}, "has 3: an operator is a name such as 'aten.add.Tensor'"),
        ({"precision": "half"}, 'precision is \'half\': choose one of "fp32", "fp16"'),
        ({"memory_layout": "channels_last"}, "did you mean 'channels-last'"),
        ({"storage": {"weight": "fp16"}}, "storage is 'weight' .did you mean 'weights'"),
        ({"storage": {"weights": "int8"}}, "storage of weights is 'int8'"),
        ({"min_operators": 0}, "min_operators is 0: give a number from 1 on"),
    ],
)
def test_wrong_choices(options: dict[str, Any], message: str) -> None:
    with pytest.raises(lapilli.CompileError, match=message):
        VulkanPartitioner(**options)


def test_wrong_programs(model: nn.Module) -> None:
    with pytest.raises(lapilli.CompileError, match="takes an ExportedProgram .*, not a Network"):
        to_vulkan(model)  # type: ignore[arg-type]
