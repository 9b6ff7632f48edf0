"""Graphs whose sizes torch.compile has made dynamic: calls that repeat their sizes get kernels for these."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lapilli import autoload, backend
from lapilli.backend import graph_program, repeated_sizes

autoload.register()


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The dynamic sizes of the programs that run, one list a run."""
    found: list[list[str]] = []
    call = graph_program.GraphProgram.__call__

    def noted(self: graph_program.GraphProgram, *args: Any) -> list[Any]:
        found.append(self.symbols)
        return call(self, *args)

    monkeypatch.setattr(graph_program.GraphProgram, "__call__", noted)
    return found


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)
    )


def gradients(model: Any, parameters: list[nn.Parameter], x: torch.Tensor) -> list[torch.Tensor]:
    result = model(x)
    return [g.cpu() for g in torch.autograd.grad(F.mse_loss(result, torch.ones_like(result)), parameters)]


def test_an_odd_batch_slows_no_later_one(sizes: list[list[str]]) -> None:
    model = network()
    like = copy.deepcopy(model)
    run = torch.compile(model, backend=backend.vulkan, options={"fallback": "error"})
    dynamic = []
    for batch in (4, 3, 4, 4, 4, 4, 3, 4):
        sizes.clear()
        x = torch.rand(batch, 3, 6, 6)
        found = gradients(run, list(model.parameters()), x)
        for got, want in zip(found, gradients(like, list(like.parameters()), x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        dynamic.append([bool(names) for names in sizes])
    open_sizes, fixed = [True, True], [False, False]  # forward and backward
    # The first four are compiled for four; then the size is dynamic, until four came three times in a row.
    assert dynamic == [fixed, open_sizes, open_sizes, open_sizes, fixed, fixed, open_sizes, fixed]
    torch.testing.assert_close(model[1].running_var, like[1].running_var, rtol=1e-4, atol=1e-5)
    assert int(model[1].num_batches_tracked) == int(like[1].num_batches_tracked) == 8


def test_sizes_that_vary_are_not_compiled_for(sizes: list[list[str]]) -> None:
    layer = nn.Linear(4, 4)
    run = torch.compile(layer, backend=backend.vulkan, dynamic=True)
    for rows in (2, 3, 4) * 4:
        run(torch.rand(rows, 4)).sum().backward()
    assert len(sizes) == 24 and all(sizes)


def test_so_many_programs_and_no_more(sizes: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_sizes, "MOST", 2)
    layer = nn.Linear(4, 4)
    run = torch.compile(layer, backend=backend.vulkan, dynamic=True)
    for rows in (2, 3, 5):
        for _ in range(3):
            sizes.clear()
            run(torch.rand(rows, 4)).sum().backward()
        assert all(map(bool, sizes)) == (rows == 5)


def test_inference_and_graphs_without_products_stay_open(sizes: list[list[str]]) -> None:
    """A program of inference holds its weights; other kernels are as fast for any sizes."""
    layer = nn.Linear(4, 4)
    run = torch.compile(layer, backend=backend.vulkan, dynamic=True)
    plain = torch.compile(lambda x: x.sin().cumsum(0), backend=backend.vulkan, dynamic=True)
    for _ in range(4):
        with torch.no_grad():
            run(torch.rand(5, 4))
        plain(torch.rand(6, 4, requires_grad=True)).sum().backward()
    assert len(sizes) == 12 and all(sizes)


def test_numbers_may_change_with_every_call(sizes: list[list[str]]) -> None:
    """A counter among the arguments is no size: it does not keep the rows from being fixed, and stays dynamic itself."""
    layer = nn.Linear(4, 4)
    run = torch.compile(lambda x, k: (layer(x) + torch.arange(k)[0]) * k, backend=backend.vulkan, dynamic=True)
    numbers = []
    for k in range(2, 7):
        sizes.clear()
        x = torch.rand(5, 4)
        torch.testing.assert_close(run(x, k), layer(x) * k)
        numbers.append(len(sizes[0]))
    assert numbers == [2, 2, 1, 1, 1]


def test_results_keep_their_strides() -> None:
    """What is saved for the gradients goes from the fixed forward graph to the fixed backward graph, in any order of axes."""
    weight = torch.rand(4, 4, requires_grad=True)
    run = torch.compile(
        lambda x: (x.transpose(0, 1) @ weight).sin().permute(2, 0, 1), backend=backend.vulkan, dynamic=True
    )
    for _ in range(4):
        x = torch.rand(3, 5, 4, requires_grad=True)
        result = run(x)
        like = (x.transpose(0, 1) @ weight).sin().permute(2, 0, 1)
        assert result.shape == like.shape and result.stride() == like.stride()
        got, want = (torch.autograd.grad(y.square().sum(), [x, weight]) for y in (result, like))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_sizes_that_no_shape_of_an_argument_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward graph is given some as numbers: these stay dynamic, within their bounds."""
    monkeypatch.setattr(repeated_sizes, "need_fixed_sizes", lambda graph: True)
    run = torch.compile(
        lambda x, y: torch.cdist(x.reshape(1, -1, 1), y[:, None])[0], backend=backend.vulkan, dynamic=True
    )
    for _ in range(4):
        x, y = torch.rand(2, 1, 2, 1, requires_grad=True), torch.rand(1)
        got, want = (torch.autograd.grad(f(x, y).sum(), x) for f in (run, lambda x, y: (x.reshape(-1, 1) - y).abs()))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
