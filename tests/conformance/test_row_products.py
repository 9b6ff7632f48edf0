"""Products of a few rows with what comes before and after them: norms, rotations, gates, and updates of caches (codegen/absorb.py,
codegen/scaled_rows.py). Each is right, and is one kernel where the steps before it are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from taken_plan import taken_plan
from torch import Tensor, nn
from torch.nn import functional as F

import lapilli
import lapilli.sampling
from lapilli.codegen import packing

pytestmark = pytest.mark.usefixtures("on_any_device")

PLANS = ["gpu-fp32", "gpu-fp16", "gpu-fp16-matrix"]


def kernels(program: lapilli.Program) -> list[str]:
    plan = taken_plan(program)
    return [d.kernel for d in plan.run if not d.rounds_input]


def linear(rows: int, columns: int, bias: bool = False) -> nn.Linear:
    made = nn.Linear(columns, rows, bias=bias)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(rows + columns)) / columns**0.5)
    return made


def rotate_halves(x: Tensor, angles: Tensor) -> Tensor:
    """As in Llama."""
    (a, b), cos, sin = x.chunk(2, -1), angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rotate_as_transformers(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def rotate_neighbours(x: Tensor, angles: Tensor) -> Tensor:
    """As in GPT-J."""
    a, b, cos, sin = x[..., 0::2], x[..., 1::2], angles.cos(), angles.sin()
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def rotate_some(x: Tensor, angles: Tensor) -> Tensor:
    """A part of each head, as in Phi."""
    return torch.cat([rotate_halves(x[..., : 2 * angles.shape[-1]], angles), x[..., 2 * angles.shape[-1] :]], -1)


class Layer(nn.Module):
    """A norm, and a product of its rows in heads, turned."""

    def __init__(self, turn: Callable[[Tensor, Tensor], Tensor], heads: int, size: int, width: int, bias: bool) -> None:
        super().__init__()
        self.turn, self.heads, self.size = turn, heads, size
        self.norm, self.product = nn.RMSNorm(width, eps=1e-5), linear(heads * size, width, bias)
        self.norm.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        return self.turn(self.product(self.norm(x)).unflatten(-1, (self.heads, self.size)).transpose(1, 2), angles)


TURNS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "halves": (rotate_halves, 2),
    "transformers": (rotate_as_transformers, 2),
    "neighbours": (rotate_neighbours, 2),
    "some": (rotate_some, 4),
}


def compiled(model: nn.Module, args: tuple[Any, ...], plan: str) -> lapilli.Program:
    precision: Any = "fp16" if "fp16" in plan else "fp32"
    return lapilli.compile(model.eval(), args, target=plan, precision=precision, fallback="error")


def agrees(program: lapilli.Program, model: nn.Module, args: tuple[Tensor, ...], plan: str) -> None:
    exact = model.double()(*(a.double() if a.is_floating_point() else a for a in args))
    bound = 4e-3 if "fp16" in plan else 2e-5  # weights and results in half precision; sums of some hundred terms
    for _ in range(2):
        torch.testing.assert_close(program(*args).double(), exact, rtol=bound, atol=bound)
    model.float()


@pytest.mark.part(5)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize(
    ("rows", "heads", "size", "width", "bias"), [(1, 3, 16, 64, False), (1, 1, 8, 40, True), (3, 2, 12, 52, True)]
)
def test_rotations(name: str, rows: int, heads: int, size: int, width: int, bias: bool, plan: str) -> None:
    turn, part = TURNS[name]
    model, random = Layer(turn, heads, size, width, bias), torch.Generator().manual_seed(rows)
    args = torch.randn(1, rows, width, generator=random), torch.randn(rows, size // part, generator=random)
    with compiled(model, args, plan) as program:
        agrees(program, model, args, plan)
        if name == "halves" and (rows == 1 or "matrix" not in plan):
            assert len(kernels(program)) == 3, kernels(program)  # and cosines and sines


class Gate(nn.Module):
    def __init__(self, inner: int, width: int, bias: bool) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.RMSNorm(width), linear(inner, width, bias), linear(inner, width, bias)
        self.down = linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


@pytest.mark.part(5)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("rows", "inner", "width", "bias"), [(1, 48, 64, False), (1, 8, 24, True), (5, 20, 36, True), (8, 68, 300, False)]
)
def test_gates(rows: int, inner: int, width: int, bias: bool, plan: str) -> None:
    model = Gate(inner, width, bias)
    args = (torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)),)
    with compiled(model, args, plan) as program:
        agrees(program, model, args, plan)
        if rows == 1:
            assert len(kernels(program)) == 2, kernels(program)


def test_a_gate_that_is_read_elsewhere() -> None:
    class Read(Gate):
        def forward(self, x: Tensor) -> Any:
            y = self.norm(x)
            gate = self.gate(y)
            return F.silu(gate) * self.up(y) + gate.sum()

    model, args = Read(20, 32, False), (torch.randn(1, 32),)
    with compiled(model, args, "gpu-fp32") as program:
        agrees(program, model, args, "gpu-fp32")


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms": lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6),
    "divided": lambda x: x / x.pow(2).mean(-1, keepdim=True).sqrt(),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "sum": lambda x: x / x.sum(-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),  # two sums: not such rows
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "added": lambda x: x + x.mean(-1, keepdim=True),
    "twice": lambda x: x * x.mean(-1, keepdim=True) * x.abs().mean(-1, keepdim=True),
    "columns": lambda x: x / (1 + x * x).sum(0, keepdim=True),
    "other rows": lambda x: x.flip(0) / (1 + x * x).sum(-1, keepdim=True),
}


class Normed(nn.Module):
    def __init__(self, norm: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.norm, self.product = norm, linear(12, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.norm(x))


@pytest.mark.part(5)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str, rows: int, plan: str) -> None:
    model = Normed(NORMS[name], 32)
    args = (torch.rand(rows, 32, generator=torch.Generator().manual_seed(1)) + 0.5,)
    with compiled(model, args, plan) as program:
        agrees(program, model, args, plan)
        if name in ("rms", "divided") and (rows == 1 or "matrix" not in plan):
            assert len(kernels(program)) == 1, kernels(program)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), 0.0])
def test_norms_of_special_values(special: float) -> None:
    model, x = Normed(NORMS["divided"], 16), torch.randn(1, 16)
    x[0, 5] = special
    if special == 0:
        x.zero_()
    with compiled(model, (x,), "gpu-fp32") as program:
        torch.testing.assert_close(program(x), model(x), equal_nan=True)


class Cached(nn.Module):
    """Writes a token's keys, turned or not, into a cache at a place, and returns all of it."""

    def __init__(self, turned: bool, heads: int, size: int, width: int, length: int) -> None:
        super().__init__()
        self.heads, self.size, self.turned = heads, size, turned
        self.product = linear(heads * size, width)
        self.cache = nn.Buffer(torch.zeros(1, heads, length, size))

    def forward(self, x: Tensor, angles: Tensor, places: Tensor) -> Tensor:
        k = self.product(x).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k = rotate_halves(k, angles) if self.turned else k
        return self.cache.index_copy_(2, places, k) * 2


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_caches(turned: bool, rows: int, plan: str) -> None:
    model, random = Cached(turned, 2, 8, 24, 7), torch.Generator().manual_seed(3)
    steps = [
        (torch.randn(1, rows, 24, generator=random), torch.randn(rows, 4, generator=random), torch.arange(rows) + start)
        for start in (0, 2, 4)
    ]
    with compiled(model, steps[0], plan) as program:
        names = kernels(program)
        model.double()
        model.cache.zero_()
        for x, angles, places in steps:
            exact = model(x.double(), angles.double(), places)
            bound = 4e-3 if "fp16" in plan else 1e-5
            torch.testing.assert_close(program(x, angles, places).double(), exact, rtol=bound, atol=bound)
    if rows == 1 or "matrix" not in plan:
        assert len(names) == (4 if turned else 2), names  # with cosines and sines


@pytest.mark.parametrize("place", [-9, 5, 1 << 30])
def test_places_out_of_range_change_nothing(place: int) -> None:
    """torch on the CPU refuses them; memory beside the cache must stay as it is."""
    model, x, angles = Cached(True, 1, 8, 24, 5), torch.randn(1, 1, 24), torch.randn(1, 4)
    with compiled(model, (x, angles, torch.tensor([0])), "gpu-fp32") as program:
        before = program(x, angles, torch.tensor([1]))
        torch.testing.assert_close(before, program(x, angles, torch.tensor([place])), rtol=0, atol=0)


class ReadsItsCache(nn.Module):
    """What is stored depends on all of the cache's first entry."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.product = linear(width, width)
        self.cache = nn.Buffer(torch.linspace(-1, 1, 3 * width).reshape(3, width))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return self.cache.index_copy_(0, places, self.product(self.cache[:1]) + x) * 1


@pytest.mark.parametrize("plan", PLANS)
def test_products_of_a_cache_end_before_it_changes(plan: str) -> None:
    args, bound = (torch.ones(1, 512), torch.tensor([0])), 5e-3 if "fp16" in plan else 1e-5
    with compiled(ReadsItsCache(512), args, plan) as program:
        exact = ReadsItsCache(512).double()
        for place in (0, 2, 0):
            given = args[0], torch.tensor([place])
            torch.testing.assert_close(
                program(*given).double(), exact(given[0].double(), given[1]), rtol=bound, atol=bound
            )
        assert len(kernels(program)) == 3, kernels(program)


class Mixed(nn.Module):
    """What a layer may be made of, by chance: a norm, products of its rows that are turned, gated, cached, or read twice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)

        def one(of: list[Any]) -> Any:
            return of[int(torch.randint(len(of), (1,), generator=random))]

        self.rows, self.heads, self.size, self.width = (
            one([1, 1, 2, 7]),
            one([1, 2, 5]),
            one([4, 8, 20]),
            one([8, 24, 100]),
        )
        self.norm, self.turn, self.steps = one(list(NORMS.values())), one(list(TURNS.values())), one([1, 3])
        self.q, self.k, self.v, self.g = (
            linear(self.heads * self.size, self.width, one([False, True])) for _ in range(4)
        )
        self.keys, self.values = (nn.Buffer(torch.zeros(1, self.heads, 9, self.size)) for _ in range(2))
        self.reads_twice, self.gated = one([False, True]), one([False, True])

    def forward(self, x: Tensor, angles: Tensor, places: Tensor) -> Any:
        y, (turn, _) = self.norm(x), self.turn
        q, k, v, g = (
            f(y).unflatten(-1, (self.heads, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v, self.g)
        )
        v = torch.sigmoid(g) * v if self.gated else v
        keys, values = self.keys.index_copy_(2, places, turn(k, angles)), self.values.index_copy_(2, places, v)
        return turn(q, angles), keys * 1, values + 1, (y.sum() + g.sum() if self.reads_twice else g)


@pytest.mark.part(5)
@pytest.mark.parametrize("seed", range(16))
def test_layers_by_chance(seed: int) -> None:
    """Whatever is one kernel, results are those of the steps apart."""
    model, plan = Mixed(seed), PLANS[seed % 3]
    random, part = torch.Generator().manual_seed(seed), model.turn[1]
    calls = [
        (
            torch.rand(1, model.rows, model.width, generator=random) + 0.5,
            torch.randn(model.rows, model.size // part, generator=random), torch.arange(model.rows) + start,
        )
        for start in (0, 2)
    ]  # fmt: skip
    bound = (
        2e-2 if "fp16" in plan else 1e-4
    )  # norms that are none of rows' lengths make large values; these are rounded
    with compiled(model, calls[0], plan) as program:
        exact = Mixed(seed).double()
        for args in calls:
            expected = exact(args[0].double(), args[1].double(), args[2])
            for ours, theirs in zip(program(*args), expected, strict=True):
                torch.testing.assert_close(ours.double(), theirs, rtol=bound, atol=bound)


class ReadByACopy(nn.Module):
    """A product that a rotation reads, and so does a copy that another product needs."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.other = linear(32, 16), linear(5, 8)

    def forward(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        y = self.product(x).unflatten(1, (4, 8))
        return rotate_halves(y, angles), self.other(y.transpose(0, 1)[:, 1:])


class ReadByADraw(nn.Module):
    """A product that a rotation reads, and so does a step of a draw."""

    def __init__(self) -> None:
        super().__init__()
        self.product = linear(32, 16)

    def forward(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        y = self.product(x)
        return rotate_halves(y.unflatten(1, (4, 8)), angles), lapilli.sampling.next_token(y, 0.0)


@pytest.mark.parametrize("model", [ReadByACopy, ReadByADraw])
def test_a_product_stays_that_copies_and_steps_read(model: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "WORTH_COPYING", 0)
    torch.manual_seed(0)
    module, given = model().eval(), (torch.randn(4, 16), torch.rand(4, 4, 4))
    with lapilli.compile(module, given, target="gpu-fp32") as program:
        for got, wanted in zip(program(*given), module(*given), strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
