"""What people give as a model, and how they give examples."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

import lapilli


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * scale

    def half_of(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) / 2


def test_functions() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ y).relu()

    x, y = torch.randn(3, 4), torch.randn(4, 5)
    program = lapilli.compile(f, (x, y), dynamic_shapes={"x": {0: Dim("n", min=2, max=9)}, "y": None})
    for n in (3, 7):
        x = torch.randn(n, 4)
        torch.testing.assert_close(program(x, y), f(x, y))


def test_bound_methods_bring_their_parameters() -> None:
    model, x = Scaled(), torch.randn(2, 4)
    program = lapilli.compile(model.half_of, (x,))
    torch.testing.assert_close(program(x), model.half_of(x))


def test_arguments_by_keyword() -> None:
    model, x, scale = Scaled(), torch.randn(2, 4), torch.tensor(3.0)
    shapes = {"x": {0: Dim("n", min=2, max=9)}, "scale": None}
    program = lapilli.compile(model, (x,), example_kwargs={"scale": scale}, dynamic_shapes=shapes)
    for n in (2, 5):
        x = torch.randn(n, 4)
        torch.testing.assert_close(program(x, scale=scale), model(x, scale=scale))


def test_the_module_of_an_exported_program() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Dropout()).eval(), torch.randn(2, 4)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(lapilli.compile(exported, (x,))(x), model(x))


def test_what_is_no_model() -> None:
    for given in (3, nn.Linear):
        with pytest.raises(lapilli.CompileError, match="give an nn.Module, a function or a TorchScript module"):
            lapilli.compile(given, (torch.randn(2),))


def test_an_example_of_one_for_a_size_that_varies() -> None:
    with pytest.raises(lapilli.CompileError, match="give an example of 2, and the program still takes 1"):
        lapilli.compile(nn.Linear(4, 3), (torch.randn(1, 4),), dynamic_shapes=({0: Dim("batch", min=1, max=8)},))
