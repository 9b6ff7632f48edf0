"""Products on matrix units that take in the layer norm of their rows (codegen/normed.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import random_blocks
import random_norms
import torch
from torch import Tensor, nn

import lapilli
from lapilli.codegen import normed
from lapilli.codegen.gpu_tiles import Tiles
from lapilli.codegen.tiles import MatrixTile
from lapilli.schedule.task import Task

pytestmark = pytest.mark.usefixtures("on_any_device", "small_tiles")


@pytest.mark.part(8)
@pytest.mark.parametrize("plan", ["gpu-fp16-matrix", "gpu-bf16-matrix"])
@pytest.mark.parametrize("seed", range(32))
def test_random_norms(seed: int, plan: str) -> None:
    random_norms.check(seed, plan)


class Block(nn.Module):
    """What a transformer does to each token."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)
        with torch.no_grad():
            for p in self.norm.parameters():
                p.normal_()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


TILES = [
    (48, 64, 64, 48, 16, 1, 1), (64, 64, 64, 32, 32, 1, 2, True), (32, 32, 128, 32, 32, 4, 2), (16, 64, 64, 16, 16, 1, 1),
    (16, 16, 256, 16, 16, 8, 1), (64, 96, 48, 32, 32, 1, 2), (32, 64, 64, 16, 32, 2, 1), (64, 64, 32, 32, 32, 1, 2),
]  # fmt: skip


@pytest.mark.parametrize("sizes", TILES, ids=str)
@pytest.mark.parametrize("width", [192, 200])  # with and without a chunk that is not full
def test_every_kind_of_tile(sizes: tuple[Any, ...], width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a thread: one, two, three and more; of sixteen threads, eight, six; tiles in bands, whose epilogue reads ahead."""
    tile = MatrixTile(*sizes)
    whole = normed._normed

    def with_tile(task: Task, *rest: Any) -> Task | None:
        assert isinstance(task.template, Tiles)
        return whole(replace(task, template=task.template.with_tile(tile)), *rest)

    monkeypatch.setattr(normed, "_normed", with_tile)
    torch.manual_seed(0)
    model, x = Block(width, 96).eval().half(), torch.randn(2, 37, width).half()
    x[0, 3] = 0
    x[1, 5] += 50
    with lapilli.compile(model, (x,), target="gpu-fp16-matrix", fallback="error") as program:
        found, names = program(x).double(), random_blocks.kernels(program)
    assert not any("row" in n for n in names), names
    with torch.no_grad():
        wanted = model.double()(x.double())
    assert float((found - wanted).norm() / wanted.norm()) < 2**-10


def test_a_residual_of_what_is_normed() -> None:
    """As transformers have it that norm after a residual, whose sum the next residual takes."""

    class After(Block):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                y = self.norm(x)
                x = y + self.down(nn.functional.gelu(self.up(y)))
            return x

    torch.manual_seed(0)
    model, x = After(128, 64).eval().half(), torch.randn(40, 128).half()
    x[3] = 0
    with lapilli.compile(model, (x,), target="gpu-fp16-matrix", fallback="error") as program:
        names = random_blocks.kernels(program)
        assert [sum(n in k for k in names) for n in ("row", "matmul")] == [4, 4], names
        with torch.no_grad():
            wanted = model.double()(x.double())
        assert float((program(x).double() - wanted).norm() / wanted.norm()) < 2**-10


@pytest.mark.parametrize("epsilon", [1e-12, 1e-5, 0.0])
def test_rows_of_equal_numbers(epsilon: float) -> None:
    """Their deviation is zero, and 1 / sqrt(epsilon) a million: they are beta all the same, and NaN without an epsilon."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(256, eps=epsilon), nn.Linear(256, 96)).eval().half()
    x = torch.tensor([0, 1, 5, 100, -3e4])[:, None].repeat(8, 256).half()
    with lapilli.compile(model, (x,), target="gpu-fp16-matrix", fallback="error") as program:
        assert random_blocks.kernels(program) == ["matmul_matrix"]
        found = program(x)
    if epsilon == 0:
        assert bool(found.isnan().all())
    else:
        torch.testing.assert_close(found, model[1].bias.expand_as(found), rtol=2**-11, atol=0)


@pytest.mark.parametrize("gamma", [1e-5, 1e-3, 0.01, 0.1, 1.0, 10.0, 200.0, 1000.0])
def test_gammas_of_any_size(gamma: float) -> None:
    """Weights times gamma are halves: where these would be denormal or infinite, the norm keeps its kernel."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 96, bias=False)).eval().half().requires_grad_(False)
    model[0].weight.mul_(gamma)
    model[1].weight.mul_(4)
    x = torch.randn(40, 256).half()
    with lapilli.compile(model, (x,), target="gpu-fp16-matrix", fallback="error") as program:
        taken = random_blocks.kernels(program) == ["matmul_matrix"]
        found = program(x).double()
    wanted = model.double()(x.double())
    finite = wanted.abs() < 65000
    assert taken == (0.1 <= gamma <= 200)
    # Without a kernel of its own, what is normed would be as precise only where gamma is not below 2^-14.
    assert float((found - wanted)[finite].norm() / wanted[finite].norm()) < (2**-10 if gamma >= 1e-3 else 2**-8)


class States(nn.Module):
    """A state that is normed, and changed after it was read. order: of what is done."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.norm, self.product, self.back, self.order = (
            nn.LayerNorm(128),
            nn.Linear(128, 128),
            nn.Linear(128, 128),
            order,
        )
        self.register_buffer("kept", torch.randn(40, 128))

    def forward(self, x: Tensor) -> Tensor:
        if self.order == "first":
            self.kept.copy_(x)
        y = self.norm(self.kept)
        if self.order == "between":
            self.kept.copy_(x)
        z = y + self.back(self.product(y).relu())
        if self.order == "last":
            self.kept.copy_(x)
        result: Tensor = z
        return result


@pytest.mark.parametrize("order", ["first", "between", "last"])
def test_states_that_are_normed(order: str) -> None:
    torch.manual_seed(0)
    model = States(order).eval().half().requires_grad_(False)
    given = [torch.randn(40, 128).half() for _ in range(3)]
    with lapilli.compile(model, (given[0],), target="gpu-fp16-matrix", fallback="error") as program:
        found = [program(x).double() for x in given]
    exact = model.double()
    for x, y in zip(given, found, strict=True):
        wanted = exact(x.double())
        assert float((y - wanted).norm() / wanted.norm()) < 2**-10
