"""Sizes that grow beyond what a graph was compiled for: an algorithm that needs a bound for an open size gets a larger one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn import functional as F

from lapilli import autoload
from lapilli.backend.executable import Executable

autoload.register()

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(0)[0],
    "median": lambda x: x.median(),
    "topk": lambda x: x.topk(3)[0],
    "product": lambda x: x[None] @ x[:, None],
    "two": lambda x: (x.cumsum(0), x.cummax(0)[0]),
}


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that are compiled, by the bounds that they are compiled for."""
    found: list[Any] = []
    compile_ = Executable._compiled

    def noted(self: Executable, *args: Any) -> Any:
        found.append(dict(self._most))
        return compile_(self, *args)

    monkeypatch.setattr(Executable, "_compiled", noted)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_sizes_that_grow(name: str, made: list[Any]) -> None:
    """A size, an open one, beyond its bound, within the next, and small again."""
    compiled = torch.compile(CALLS[name], backend="vulkan")
    for n in (100, 200, 40_000, 65_538, 300):
        x = torch.randn(n)
        exact = CALLS[name](x.double())
        # sums of n terms, in any order: n units of what is added up, less by their signs
        near = {"rtol": 1e-5, "atol": 2.0**-24 * n**0.5 * 8 * (1 + x.abs().max().item())}
        torch.testing.assert_close(compiled(x), exact, check_dtype=False, **near)
    assert len(made) == 3 and made[:2] == [{}, {}] and made[2] and min(made[2].values()) >= 65_538


def test_a_first_call_beyond_the_bound(made: list[Any]) -> None:
    x = torch.randn(65_537)
    found = torch.compile(CALLS["sort"], backend="vulkan", dynamic=True)(x)
    assert torch.equal(found, x.sort(0)[0]) and len(made) == 2


@pytest.mark.parametrize("device", ["cpu", "vulkan"])
def test_training(device: str) -> None:
    """The gradient of a weight is a sum over all rows."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    exact = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    exact.load_state_dict(model.state_dict())
    compiled = torch.compile(model.to(device), backend="vulkan")
    for n in (100, 200, 40_000, 150):
        x, y = torch.randn(n, 8), torch.randint(0, 3, (n,))
        model.zero_grad()
        exact.zero_grad()
        F.cross_entropy(compiled(x.to(device)), y.to(device)).backward()
        F.cross_entropy(exact(x.double()), y).backward()
        for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad, check_dtype=False, rtol=1e-4, atol=1e-6)
