"""Programs whose outputs, inputs and states are special: a constant, an input, a list."""

from __future__ import annotations

from typing import Any

import torch
from agreement import Function, relative_error
from torch import nn

import lapilli


def test_keyword_inputs() -> None:
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    program = lapilli.compile(model, {"input": x}, target="any-fp32")
    assert relative_error(program(input=x), model(x).detach()) <= 1e-6


def test_an_output_that_is_an_input() -> None:
    program = lapilli.compile(Function(lambda x: (x, x + 1, x)), (torch.ones(3),), target="any-fp32")
    a, b, c = program(torch.arange(3.0))
    assert a.tolist() == c.tolist() == [0, 1, 2] and b.tolist() == [1, 2, 3]


def test_an_output_that_is_a_constant() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.arange(4.0))

        def forward(self, x: torch.Tensor) -> Any:
            return x + self.w, self.w, self.w * 2

    program = lapilli.compile(Constant(), (torch.ones(4),), target="any-fp32")
    _, w, double = program(torch.ones(4))
    assert w.tolist() == [0, 1, 2, 3] and double.tolist() == [0, 2, 4, 6]


def test_a_norm_that_updates_its_statistics_changes_them() -> None:
    """Its schema does not say so."""

    class Norm(nn.Module):
        def forward(self, x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.instance_norm(x, mean, variance, use_input_stats=True)

    x = torch.rand(2, 3, 5)
    ours, theirs = [torch.zeros(3), torch.ones(3)], [torch.zeros(3), torch.ones(3)]
    program = lapilli.compile(Norm(), (x, *ours), target="any-fp32")
    torch.testing.assert_close(program(x, *ours), Norm()(x, *theirs), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours, theirs)


def test_lists_of_operators_are_taken_apart() -> None:
    x = torch.rand(7, 2)
    program = lapilli.compile(Function(lambda x: torch.histogramdd(x, [3, 4])[0]), (x,), target="any-fp32")
    torch.testing.assert_close(program(x), torch.histogramdd(x, [3, 4])[0])
