"""What is realised, fused, laid out and in which order: on small models, in the terms of tasks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from plans import labels, plan
from torch import nn

from lapilli.compiler import compile_to_bytes
from lapilli.errors import CompileError
from lapilli.ir.dtype import DType
from lapilli.ir.integer import as_int
from lapilli.schedule.layout import Layout, channels_last
from lapilli.schedule.realize import MOST_READS
from lapilli.target import ANY, CPU, FEW, GPU, STORAGE, TARGETS, Target, plans_for

X = torch.randn(1, 8, 6, 6)


# -- fusion


def test_a_pointwise_chain_is_one_kernel() -> None:
    assert labels(plan(lambda x: (x.relu() * 2 + 1).sigmoid().exp(), X)) == ["relu + mul + add + sigmoid + exp"]


def test_views_make_no_kernel() -> None:
    s = plan(lambda x: x.permute(0, 2, 3, 1).reshape(1, 36, 8)[:, 1:30].transpose(1, 2) + 1, X)
    assert len(s.order.run) == 1
    assert s.views


def test_several_readers_compute_what_is_quicker_computed_than_read() -> None:
    """As a mask that positions make, which each layer reads: few operations, and far fewer elements than it has."""
    rows, columns, x = torch.arange(16), torch.arange(64), torch.randn(16, 64)

    def two(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.where(mask, x, 0.0).cumsum(0), torch.where(mask, x * 2, 1.0).cumsum(1)

    def masked(r: torch.Tensor, c: torch.Tensor, x: torch.Tensor) -> Any:
        return two(c <= r[:, None])

    def costly(r: torch.Tensor, c: torch.Tensor, x: torch.Tensor) -> Any:
        return two((c.float().exp() + r[:, None].float().exp()).sin().exp() > 1)

    def large(r: torch.Tensor, c: torch.Tensor, x: torch.Tensor) -> Any:
        return two(c <= x)

    for f, once in ((masked, False), (costly, True), (large, True)):
        found = labels(plan(f, rows, columns, x))
        assert any(label.split(" + ")[-1] in ("le", "gt") for label in found) == once, (f.__name__, found)


@pytest.mark.parametrize("target", [ANY, CPU, GPU])
@pytest.mark.parametrize(
    "activation", [nn.ReLU(), nn.ReLU6(), nn.Hardswish(), nn.Hardsigmoid(), nn.SiLU(), nn.GELU(), nn.Sigmoid(), nn.Tanh()]
)  # fmt: skip
def test_activations_are_epilogues_of_convolutions(activation: nn.Module, target: Target) -> None:
    model = nn.Sequential(nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12), activation)
    runs = plan(model, X, target=target).order.run
    last = runs[-1]
    assert last.reduction is not None and last.template is not None
    assert len([t for t in runs if "winograd" not in t.label and not t.label.startswith("pack")]) == 1


@pytest.mark.parametrize("channels, side", [(1024, 8), (64, 600)])
def test_no_intermediate_is_larger_than_a_storage_buffer(channels: int, side: int) -> None:
    """Winograd's transform makes weights four times, and images 2.25 times as large."""
    s = plan(nn.Conv2d(channels, channels, 3, padding=1), torch.zeros(1, channels, side, side), target=CPU)
    sizes = [t.out.dtype.size * math.prod(size.value or 0 for size in t.out.shape) for t in s.tasks]
    assert max(sizes) <= STORAGE


def test_residual_is_an_epilogue() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x).relu()
            return (y + self.b(y)).relu()

    s = plan(Block(), X)
    reductions = [t for t in s.order.run if t.reduction is not None]
    assert len(reductions) == 2
    assert "add + relu" in reductions[1].label
    assert any(t.reads() for t in reductions[1:]) and reductions[0].out in reductions[1].reads()


def test_a_value_that_two_kernels_read_is_realised_once() -> None:
    def f(x: torch.Tensor) -> Any:
        y = x.exp()
        return y.sum(1), y.amax(2)

    assert sum("exp" in t.label for t in plan(f, X).order.run) == 1


def test_costly_work_is_not_repeated_by_a_broadcast() -> None:
    """tanh of 8 values, not of 8 x 36; a cheap multiplication is repeated."""
    s = plan(lambda x, b: x + b.tanh().exp().view(1, 8, 1, 1), X, torch.randn(8))
    assert len(s.order.run) == 2
    assert len(plan(lambda x, b: x + (b * 2).view(1, 8, 1, 1), X, torch.randn(8)).order.run) == 1


def test_every_task_says_why_it_is_realised() -> None:
    s = plan(nn.Sequential(nn.Conv2d(8, 12, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3)), X)
    assert all(t.reason for t in s.tasks)


# -- layout


def test_layouts() -> None:
    shape = (as_int(2), as_int(8), as_int(5), as_int(6))
    layout = Layout.of(shape, channels_last(4))
    assert [s.value for s in layout.strides] == [240, 1, 48, 8]
    assert layout.offset([as_int(v) for v in (1, 2, 3, 4)]) == 240 + 2 + 144 + 32
    assert channels_last(3) == (0, 2, 1) and channels_last(2) == (0, 1)


def test_what_convolutions_exchange_lies_channels_last() -> None:
    s = plan(nn.Sequential(nn.Conv2d(8, 12, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 4, 1)), X)
    inner = [t for t in s.order.run if t.out.rank == 4 and t.out not in s.graph.outputs and "conv" in t.label]
    assert inner
    assert all(s.layouts[t.out.id].order == (0, 2, 3, 1) for t in inner)


def test_inputs_and_outputs_are_row_major() -> None:
    s = plan(nn.Conv2d(8, 12, 3), X)
    for n in [*s.graph.inputs, *s.graph.outputs]:
        assert s.layouts[n.id].order == tuple(range(n.rank))


# -- order


def branches(x: torch.Tensor) -> torch.Tensor:
    """Three reductions side by side, over different rows, and one that reads them all."""
    a, b, c = x.sum(1), x.amax((1, 2)), x.amin((1, 3))
    return (a * b * c).softmax(-1)


def test_independent_kernels_run_side_by_side() -> None:
    order = plan(branches, X).order
    assert order.run_barriers[0] is False
    assert sum(order.run_barriers) < len(order.run) - 1


def test_a_barrier_stands_before_every_reader() -> None:
    order = plan(branches, X).order
    level = 0
    written: dict[int, int] = {}
    for task, barrier in zip(order.run, order.run_barriers, strict=True):
        level += barrier
        for read in task.reads():
            assert written.get(read.id, -1) < level
        written[task.out.id] = level


def test_values_live_from_their_kernel_to_their_last_reader() -> None:
    order = plan(nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 4, 1)), X).order
    for k, task in enumerate(order.run):
        first, last = order.lifetimes[task.out.id]
        assert first <= k <= last
        for read in task.reads():
            if read.id in order.lifetimes:
                assert order.lifetimes[read.id][1] >= k


def test_what_depends_on_weights_only_runs_at_load() -> None:
    order = plan(nn.Linear(8, 12), torch.randn(4, 8)).order
    assert order.load and len(order.run) == 1


# -- targets


def test_every_program_has_a_plan_for_every_device() -> None:
    stored: list[list[DType]] = [[], [DType.float16], [DType.bfloat16], [DType.float16, DType.bfloat16]]
    assert all(plans_for(s)[-2:] == [ANY, FEW] for s in stored)
    assert replace(FEW, name=ANY.name, bindings=ANY.bindings) == ANY
    assert not ANY.half and not ANY.texel and ANY.kind == "any"
    assert all(TARGETS[t.name] is t for s in stored for t in plans_for(s))


@pytest.mark.parametrize(
    ("precision", "dtype", "target"),
    [("fp16", torch.float32, "cpu-fp32"), ("fp16", torch.float16, "cpu-fp32"), ("fp32", torch.float32, "gpu-fp16")],
)
def test_plans_of_the_other_precision_are_refused(precision: str, dtype: torch.dtype, target: str) -> None:
    model, x = nn.Linear(4, 4).to(dtype), torch.randn(2, 4).to(dtype)
    with pytest.raises(CompileError, match=f"target is '{target}': with precision '{precision}' choose None"):
        compile_to_bytes(model, (x,), precision=precision, target=target)


def test_a_kernel_reads_few_buffers_whatever_vanishes_into_it() -> None:
    """Each of its operands alone would be few enough."""
    inputs = tuple(torch.randn(5) > 0 if k % 4 == 0 else torch.randn(5) for k in range(32))

    def model(*x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.where(x[k], x[k + 1], x[k + 2]) + x[k + 3] for k in range(0, 32, 4)])

    tasks = plan(model, *inputs).order.run
    assert 12 < max(len(t.reads()) for t in tasks) <= MOST_READS and len(tasks) < 8
