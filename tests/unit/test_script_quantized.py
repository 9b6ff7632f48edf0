"""Operators on quantized tensors, interpreted: codes, scales and zero points are torch's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import lapilli
from lapilli.capture import script_quantized
from lapilli.capture.script_interpreter import Interpreter, inlined

quantized = torch.ops.quantized
GRIDS = ((torch.quint8, 0.03, 100), (torch.quint8, 0.011, 0), (torch.qint8, 0.025, 10), (torch.qint8, 0.02, -128))

# No average is of an even number of codes, and no new scale a multiple of the old one: so nothing lies at a tie.
ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "hardsigmoid": F.hardsigmoid, "gelu": F.gelu,
    "hardsigmoid_": lambda x: F.hardsigmoid(x, True), "relu": F.relu, "relu_": torch.relu_, "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -0.51, 0.47), "hardtanh_": lambda x: F.hardtanh(x, -0.51, 0.47, True),
    "clamp": lambda x: x.clamp(-0.2, 0.7), "threshold": lambda x: F.threshold(x, 0.113, 0.52),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.137), "leaky_relu_": lambda x: F.leaky_relu(x, 0.137, True),
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0), "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3), "adaptive": lambda x: F.adaptive_avg_pool2d(x, (2, 1)),
    "mean": lambda x: x.mean(3, keepdim=True), "max": lambda x: x.max(1)[0], "min": lambda x: x.min(),
    "sort": lambda x: x.sort(1)[0], "topk": lambda x: x.topk(2, 1)[0], "pad": lambda x: F.pad(x, (1, 1), value=0.71),
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), "cat": lambda x: torch.cat([x, torch.sigmoid(x)], 1),
    "cat of another grid": lambda x: torch.cat([torch.tanh(x), x], 1), "stack": lambda x: torch.stack([x, x], 1),
    "chunk": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1), "split": lambda x: x.split(3, 1)[1],
    "unbind": lambda x: x.unbind(1)[2], "tensor_split": lambda x: x.tensor_split(3, 1)[1],
    "index_select": lambda x: x.index_select(1, torch.tensor([2, 0])), "flip": lambda x: x.flip(1),
    "transpose": lambda x: x.transpose(1, 2), "repeat": lambda x: x.repeat(1, 2, 1, 1), "slice": lambda x: x[:, 1:3],
    "flatten": lambda x: x.flatten(1), "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "dropout": lambda x: F.dropout(x, 0.5, False),
    "quantized::add.Scalar": lambda x: quantized.add(x, 0.7), "quantized::add_relu.Scalar2": lambda x: quantized.add_relu(-0.2, x),
    "quantized::mul.Scalar2": lambda x: quantized.mul(-0.3, x), "quantized::mul_scalar.Tensor":
        lambda x: quantized.mul_scalar(x, torch.tensor(2.5)),
    "quantized::add": lambda x: quantized.add(x, torch.tanh(x), 0.0417, 3), "quantized::elu": lambda x: quantized.elu(x, 0.0417, 3),
    "quantized::cat": lambda x: quantized.cat([x, torch.tanh(x)], 1, 0.0417, 3),
    "a scale after gelu": lambda x: quantized.add_scalar(F.gelu(x), 0.33),
}  # fmt: skip


@pytest.fixture(autouse=True, params=("x86", "qnnpack"))
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.backends.quantized, "engine", request.param)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def agrees(function: Callable[[Tensor], Tensor], x: Tensor, scripted: bool = False) -> None:
    wanted = function(x)
    made: Any = torch.jit.script(function) if scripted else torch.jit.trace(function, x, check_trace=False)
    found = Interpreter(lambda *_: None).run(inlined(made.graph), [x])
    assert (found.scale, found.zero_point, found.dtype) == (wanted.q_scale(), wanted.q_zero_point(), wanted.dtype)
    steps = found.value / found.scale + found.zero_point
    assert torch.equal(steps.round(), wanted.int_repr().float())


def given(grid: int) -> Callable[[Tensor], Tensor]:
    dtype, scale, zero = GRIDS[grid]
    return lambda x: torch.quantize_per_tensor(x, scale, zero, dtype)


@pytest.mark.parametrize("grid", (0, 2))
@pytest.mark.parametrize("name", ONE)
def test_results_have_torchs_grid(name: str, grid: int) -> None:
    torch.manual_seed(0)
    rounded = given(grid)
    agrees(lambda x: ONE[name](rounded(x)), torch.randn(2, 4, 6, 7))


NUMBERS = (0.0, 0.7, -0.7, 3.0, -2.0, 1e-3, 7.65, -7.65, 40.0, -25.5, 2)


@pytest.mark.parametrize("grid", range(len(GRIDS)))
@pytest.mark.parametrize("name", ("add_scalar", "add_scalar_relu", "mul_scalar", "mul_scalar_relu"))
def test_numbers_move_the_grid(name: str, grid: int) -> None:
    """Of all codes, as many as there are; 7.65 is 255 steps of 0.03, whose scale doubles: every second sum is at a tie."""
    rounded, operator = given(grid), getattr(quantized, name)
    _, scale, zero = GRIDS[grid]
    x = (torch.arange(-256, 257) - zero) * scale
    for number in NUMBERS:
        agrees(lambda x, number=number: operator(rounded(x), number), x)


def lists(x: Tensor) -> Tensor:
    q = torch.quantize_per_tensor(x, 0.03, 100, torch.quint8)
    kept = [torch.tanh(q)]
    kept.append(q)
    kept += [torch.sigmoid(q)]
    named = {"a": kept[2]}
    named["b"] = kept[1]
    found = named["b"] if len(kept) == 3 else None
    assert found is not None
    return torch.cat(kept[1:] + [found, named["a"]], 1)  # noqa: RUF005 - TorchScript has no *


def in_place(x: Tensor) -> Tensor:
    q = torch.quantize_per_tensor(x, 0.03, 100, torch.quint8)
    F.hardtanh_(q, -0.51, 0.47)
    F.hardsigmoid(q, True)
    return q


def test_lists_keep_each_tensors_grid() -> None:
    agrees(lists, torch.randn(2, 3), scripted=True)
    agrees(in_place, torch.randn(2, 30), scripted=True)


def in_place_of_a_view(x: Tensor, other: bool) -> Tensor:
    q = torch.quantize_per_tensor(x, 0.03, 100, torch.quint8)
    a, b = q.view(-1).chunk(2, 0)
    torch.relu_(a)
    return q if other else torch.cat([a, b], 0)


def before_a_change(x: Tensor, other: bool) -> Tensor:
    q = torch.quantize_per_tensor(x, 0.03, 100, torch.quint8)
    a = q.transpose(0, 1)
    torch.relu_(q)
    return a if other else q


@pytest.mark.parametrize("function", (in_place_of_a_view, before_a_change))
def test_views_that_were_changed_are_not_read(function: Callable[[Tensor, bool], Tensor]) -> None:
    x = torch.randn(4, 6)
    made: Any = torch.jit.script(function)
    wanted = function(x, False)
    found = Interpreter(lambda *_: None).run(inlined(made.graph), [x, False])
    assert torch.equal((found.value / found.scale + found.zero_point).round(), wanted.int_repr().float())
    stale = Interpreter(lambda *_: None).run(inlined(made.graph), [x, True])
    with pytest.raises(lapilli.CompileError, match="changed in place before; use an operator that is not in place"):
        script_quantized.call("aten::dequantize", "", [stale], lambda values: values[0])


def test_codes_are_integers() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.quantize_per_tensor(x, 0.03, 10, torch.qint8).int_repr()

    x = torch.randn(20)
    made: Any = torch.jit.trace(function, x)
    found = Interpreter(lambda *_: None).run(made.graph, [x])
    assert found.dtype == torch.int8
    assert torch.equal(found, function(x))


def refused(x: Tensor) -> Tensor:
    q = torch.quantize_per_tensor(x, 0.03, 100, torch.quint8)
    return q * 3.0


def by_a_sum(x: Tensor) -> Tensor:
    q = torch.quantize_per_tensor(x, 0.03, 100, torch.quint8)
    return torch.ops.quantized.mul_scalar(q, x.sum().item()).dequantize()


def test_quantized_results_are_refused() -> None:
    with pytest.raises(
        lapilli.CompileError, match="a result of the model is a quantized tensor; .*end the model with a DeQuantStub"
    ):
        lapilli.compile(torch.jit.script(in_place), (torch.randn(3),), target="cpu-fp32")


def test_what_torch_does_not_compute_is_refused() -> None:
    with pytest.raises(RuntimeError):
        refused(torch.randn(3))
    with pytest.raises(
        lapilli.CompileError, match="aten::mul.*torch has no such operator on quantized tensors; use one of"
    ):
        lapilli.compile(torch.jit.script(refused), (torch.randn(3),), target="cpu-fp32")
    with pytest.raises(lapilli.CompileError, match="a factor is computed by the model; .*write it as a number"):
        lapilli.compile(torch.jit.script(by_a_sum), (torch.randn(3),), target="cpu-fp32")
