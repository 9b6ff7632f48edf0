"""What people give as a model, and how they give examples."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import lapilli
from lapilli.capture.sources import capture


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


class InTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout, self.recurrent = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.GRU(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.scaled_dot_product_attention(x, x, x, dropout_p=0.1 if self.training else 0.0)
        result: torch.Tensor = self.recurrent(self.dropout(self.norm(y)))[0]
        return result


def test_an_exported_program_in_training_mode(tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    exported = torch.export.export(InTraining(), (x,))
    said = "exported in training mode.*aten.batch_norm, aten.dropout, aten.scaled_dot_product_attention\\). Call model.eval"
    torch.export.save(exported, tmp_path / "model.pt2")
    sources: tuple[Any, ...] = (exported, exported.module(), tmp_path / "model.pt2")
    for source in sources:
        with pytest.warns(UserWarning, match=said):
            capture(source, (x,))
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        capture(InTraining(), (x,))  # in eval mode, as documented
        capture(torch.export.export(InTraining().eval(), (x,)))
        chosen = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Dropout(0)).train()
        capture(torch.export.export(chosen, (x,)))
    assert not any("training mode" in str(w.message) for w in others)


def test_what_is_no_model() -> None:
    wrong: tuple[Any, ...] = (3, nn.Linear)
    for given in wrong:
        with pytest.raises(lapilli.CompileError, match="give an nn.Module, a function or a TorchScript module"):
            lapilli.compile(given, (torch.randn(2),))


def test_an_example_of_one_for_a_size_that_varies() -> None:
    with pytest.raises(lapilli.CompileError, match="give an example of 2, and the program still takes 1"):
        lapilli.compile(nn.Linear(4, 3), (torch.randn(1, 4),), dynamic_shapes=({0: Dim("batch", min=1, max=8)},))


class ChangedAfterDropout(nn.Module):
    """At inference the result of a dropout is its argument: what changes one changes both."""

    def __init__(self, dropout: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = x * 2
        y = self.dropout(z)
        y.mul_(3)
        return z + y


@pytest.mark.parametrize("way", ["compile", "trace"])
@pytest.mark.parametrize("name", ["module", "function", "channels", "alpha", "type"])
def test_what_changes_the_result_of_a_dropout_changes_its_argument(name: str, way: str) -> None:
    dropout: Any = {
        "module": nn.Dropout(0.3), "function": lambda x: F.dropout(x, 0.3, False), "alpha": lambda x: F.alpha_dropout(x, 0.3),
        "channels": lambda x: F.dropout2d(x, training=False), "type": lambda x: x.type_as(x),
    }[name]  # fmt: skip
    x = torch.randn(1, 3, 4, 5)
    model: nn.Module = ChangedAfterDropout(dropout).eval()
    expected = model(x)
    torch.testing.assert_close(expected, 12 * x)
    source = torch.jit.trace(model, (x,)) if way == "trace" else model
    got = lapilli.compile(source, (x,))(x)
    torch.testing.assert_close(got, expected)
