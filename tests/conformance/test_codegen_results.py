"""Compiled programs: kernels that are shared, memory that is shared, reductions that are right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from agreement import Function, relative_error
from torch import nn

import lapilli


def test_equal_layers_share_a_kernel() -> None:
    model = nn.Sequential(*[nn.Conv2d(16, 16, 1) for _ in range(5)])
    program = lapilli.compile(model, (torch.randn(1, 16, 5, 5),), target="any-fp32")
    assert len(program.description.kernels) < 2 + len(program.description.methods[0].plans[0].run)
    with torch.no_grad():
        x = torch.randn(1, 16, 5, 5)
        np.testing.assert_allclose(program(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n, k", [(300, 700), (5, 9000), (1, 257), (64, 256)])
def test_rows_are_folded_by_neighbours(n: int, k: int, gpu_plans: None) -> None:
    """Long rows of memory by invocations that read them together, other reductions as before."""
    a, v = torch.randn(n, k), torch.randn(k)

    def model(a: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        whole = (a * 3).int()
        return [a @ v, v.dot(v), a.sum(1), a.sum(0), a.amax(1), whole.sum(1), whole.amin(1), a.norm()]

    program = lapilli.compile(Function(model), (a, v), target="gpu-fp32")
    exact = [*model(a.double(), v.double())[:5], *model(a, v)[5:7], a.double().norm()]  # integers as float32 gives them
    for ours, theirs in zip(program(a, v), exact, strict=True):
        if theirs.is_floating_point():
            assert relative_error(ours, theirs) < 1e-5
        else:
            assert torch.equal(ours, theirs)


def test_arena_is_smaller_than_the_sum_of_its_tensors() -> None:
    x = torch.randn(1, 8, 6, 6)
    model = nn.Sequential(*[m for _ in range(6) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())])
    program = lapilli.compile(model, (x,), target="any-fp32")
    program(x)
    memory = program.memory()
    assert 0 < memory.arena < 0.6 * memory.arena_sum
