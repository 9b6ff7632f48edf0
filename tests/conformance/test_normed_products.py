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
    (32, 32, 128, 32, 32, 4, 2), (16, 64, 64, 16, 16, 1, 1), (16, 16, 256, 16, 16, 8, 1), (64, 96, 48, 32, 32, 1, 2),
    (32, 64, 64, 16, 32, 2, 1), (64, 64, 32, 32, 32, 1, 2),
]  # fmt: skip


@pytest.mark.parametrize("sizes", TILES, ids=str)
@pytest.mark.parametrize("width", [192, 200])  # with and without a chunk that is not full
def test_every_kind_of_tile(
    sizes: tuple[int, int, int, int, int, int, int], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a thread: one, two and more; of sixteen threads, four, six."""
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
