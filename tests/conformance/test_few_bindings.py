"""The plan for devices that bind four buffers gives what torch gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import FLOAT_BOUND, Function, relative_error
from torch import nn
from torch.export import Dim

import lapilli
from lapilli.target import FEW

pytestmark = pytest.mark.poor_device

N, K = 6, 8


def integers_and_bools(*v: torch.Tensor) -> torch.Tensor:
    a, b, c, d, e, f = v
    chosen = torch.where(a.int() > b.int(), c.int(), d.to(torch.int8).int()) + (e > 0)
    return chosen * f + (a * b - c).long() % 5


def views_and_windows(*v: torch.Tensor) -> torch.Tensor:
    parts = torch.cat([v[0][:, 1:], v[1].T[:6, :3], v[2].flip(1), v[3][:, ::2]], 1)
    return parts[:, :8] * v[4] + v[5].roll(1, 0) - parts[:, 7:15]


def product_with_much_after(*v: torch.Tensor) -> torch.Tensor:
    a, b, c, d, e, f = v
    return torch.sigmoid(a @ b.T @ c * d + e) * f + torch.where(b > 0, c, d)


def product_with_both_types_after(*v: torch.Tensor) -> torch.Tensor:
    """Its own kernel reads two operands, and would bind floats and integers besides."""
    a, b, c, d, e, f = v
    chosen = (e * 9).int()
    return torch.stack([(a @ b.T) * c[:, :6] + chosen[:, :6] * d[:, :6], chosen[:, :6] - f[:, :6]])


def rows_of_many(*v: torch.Tensor) -> torch.Tensor:
    a, b, c, d, e, f = v
    return F.layer_norm(a + b * c, (K,), d[0], e[0]) + (a * f).softmax(-1)


def indices(*v: torch.Tensor) -> torch.Tensor:
    a, b, c, d, e, f = v
    at = (a[:, 0].abs() * 10).long() % N
    return a[at] + b[at.flip(0)] * c.index_add(0, at, d) - e.scatter(1, (f.abs() * 9).long() % K, f)


CASES: list[Callable[..., torch.Tensor]] = [
    integers_and_bools, views_and_windows, product_with_much_after, product_with_both_types_after,
    rows_of_many, indices,
]  # fmt: skip


def compiled(model: nn.Module, inputs: tuple[torch.Tensor, ...], **more: Any) -> lapilli.Program:
    program = lapilli.compile(model, inputs, target=FEW.name, **more)
    (plan,) = program.description.methods[0].plans
    assert plan.requirements["max_bindings"] <= 4
    return program


@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_functions(case: Callable[..., torch.Tensor]) -> None:
    values = [torch.randn(N, K) for _ in range(6)]
    with compiled(Function(case), tuple(values)) as program:
        assert relative_error(program(*values), case(*values)) <= FLOAT_BOUND


class Followed(nn.Module):
    """A layer, and what reads floats and integers after it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.table = layer, nn.Embedding(50, 24)

    def forward(self, x: torch.Tensor, at: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        found = self.table(at).reshape(y.shape)
        return torch.where(at.reshape(-1)[: y.shape[-1]] > 9, y * found, found - y) + other.reshape(y.shape)


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...], str]] = {
    "one row": (nn.Linear(64, 24, bias=False), (1, 64), "matvec"),
    "rows": (nn.Linear(64, 24, bias=False), (30, 64), "matmul"),
    "a convolution": (nn.Conv2d(8, 24, 3, padding=1, bias=False), (2, 8, 6, 4), "convolution"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_what_follows_a_product_is_a_kernel_of_its_own(name: str) -> None:
    """Where the product's would bind too many buffers with it: loops over all terms for each result would be far slower."""
    torch.manual_seed(0)
    layer, shape, kernel = LAYERS[name]
    count = layer(torch.randn(shape)).numel()
    model = Followed(layer).eval()
    given = torch.randn(shape), torch.randint(50, (count // 24,)), torch.randn(count)
    wanted = model(*given).detach()
    with compiled(model, given) as program:
        (plan,) = program.description.methods[0].plans
        assert relative_error(program(*given), wanted) <= FLOAT_BOUND
        names = [d.kernel for d in plan.run]
    assert any(n.startswith(kernel) for n in names), names


def test_open_sizes() -> None:
    def f(*v: torch.Tensor) -> torch.Tensor:
        return torch.cat([v[0] * v[1] + v[2], v[3].flip(0), v[4] - v[5]], 1)

    values = [torch.randn(N, K) for _ in range(6)]
    rows = Dim("rows", min=2, max=64)
    shapes = tuple({0: rows} for _ in values)
    with compiled(Function(f), tuple(values), dynamic_shapes=(shapes,)) as program:
        for given in (values, [torch.randn(11, K) for _ in range(6)]):
            assert relative_error(program(*given), f(*given)) <= FLOAT_BOUND


class Block(nn.Module):
    """A convolution with a residual and scales, and a recurrent layer over its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.lstm = nn.LSTM(8, 5, batch_first=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
        z = self.norm(F.silu(self.conv(x) * y + x)) * y.sigmoid()
        return self.lstm(z.mean(1), (h, c))


def test_a_model() -> None:
    model = Block().eval()
    inputs = (torch.randn(2, 4, 8, 8), torch.randn(2, 4, 1, 1), torch.randn(1, 2, 5), torch.randn(1, 2, 5))
    with torch.no_grad(), compiled(model, inputs) as program:
        out, (h, c) = program(*inputs)
        wanted, (wanted_h, wanted_c) = model(*inputs)
        for got, want in ((out, wanted), (h, wanted_h), (c, wanted_c)):
            assert relative_error(got, want) <= FLOAT_BOUND


class Adder(nn.Module):
    """Its state is read where it is not written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.arange(8.0))

    def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        self.state.copy_(self.state.flip(0) * a + b * c)
        return self.state + a


def test_a_state_that_shares_a_buffer() -> None:
    model, values = Adder(), [torch.randn(8) for _ in range(3)]
    with torch.no_grad(), compiled(Adder(), tuple(values)) as program:
        for _ in range(3):
            assert relative_error(program(*values), model(*values)) <= FLOAT_BOUND


def test_every_kernel_is_verified() -> None:
    values = tuple(torch.randn(N, K) for _ in range(6))
    checks = lapilli.verify(Function(product_with_both_types_after), values, target=FEW.name)
    assert len(checks) == 3 and all(c.error < 1e-6 for c in checks)
