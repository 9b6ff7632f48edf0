"""Sizes that no argument has as they are: they are computed from sums and products of several."""

from __future__ import annotations

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from lapilli.backend.size_sources import Sources
from lapilli.runtime.host_script import HostScript
from lapilli.runtime.interpreter import Environment
from lapilli.runtime.limits import Budget, Limits


def test_a_call_finds_a_size_in_a_product_with_one_that_it_knows() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.reshape(-1) * 2, torch.cat([y, y, y[:1]])

    graph = make_fx(f, tracing_mode="symbolic")(torch.rand(5, 3), torch.rand(3)).graph
    rows, columns = next(n.meta["val"] for n in graph.nodes if n.op == "placeholder").shape
    shown = [n for n in graph.nodes if n.op == "call_function" and n.meta["val"].dim() == 1]
    products = [n for n in shown if "*" in str(n.meta["val"].shape) and "+" not in str(n.meta["val"].shape)][:1]
    sums = [n for n in shown if "+" in str(n.meta["val"].shape)]
    given = Sources([*products, *sums])  # of n * m and of 2 * m + 1 elements
    assert given.has(rows)
    assert given.has(columns)
    assert given.function([rows, columns])([torch.empty(28), torch.empty(9)]) == (7, 4)
    assert not Sources(products).has(rows)


def test_a_script_finds_it_too() -> None:
    script = HostScript(
        [], [], symbols={"m": ["dim", "y", 0, 2, 1], "n": ["dim", "x", 0, "m", 0], "k": ["fixed", 3], "g": ["given"]}
    )
    values = {"x": np.zeros(28), "y": np.zeros(9)}
    env = Environment(script, values, lambda k: None, Budget(Limits()), {"g": 5})
    assert [env.size(s) for s in ("n", "m", "k", "g")] == [7, 4, 3, 5]
