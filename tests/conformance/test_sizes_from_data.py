"""Sizes that depend on data: made on the CPU between parts on the GPU, which read them. Compiled to files, and by torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapilli

SIZE = 40

Made = tuple[Tensor, Tensor, int]
"""Two results of one size that depends on data (places among SIZE * SIZE, and numbers), and that size."""


def _of_nonzero(y: Tensor) -> Made:
    found = torch.nonzero(y > 0)
    places = found.transpose(0, 1)
    return places[0] * SIZE + places[1], y[places[0], places[1]], found.shape[0]


def _of_argwhere(y: Tensor) -> Made:
    places = torch.argwhere(y > 0)
    return places @ torch.tensor([SIZE, 1]), y[places[:, 0], places[:, 1]], places.shape[0]


def _of_mask(y: Tensor) -> Made:
    found = torch.masked_select(y, y > 0)
    return torch.arange(SIZE * SIZE).reshape(SIZE, SIZE)[y > 0], found, found.shape[0]


def _of_unique(y: Tensor) -> Made:
    found = torch.unique((y > 0).int() * torch.arange(SIZE)).long()
    return found, y.reshape(-1)[found], found.shape[0]


def _of_item(y: Tensor) -> Made:
    n: Any = (y > 0).sum().item()
    torch._check(n <= SIZE * SIZE)
    return torch.arange(n), y.reshape(-1)[:n], n


def _of_repeats(y: Tensor) -> Made:
    places = torch.repeat_interleave((y[0] > 0).long() + (y[1] > 0).long())
    return places, y[2][places], places.shape[0]


def _put(y: Tensor, made: Made) -> Tensor:
    return y.reshape(-1).index_put((made[0],), made[1] * 2).reshape(SIZE, SIZE)


def _count(y: Tensor, made: Made) -> Tensor:
    return y + made[2] * 0.5


def _other_part(y: Tensor, made: Made) -> Tensor:
    """The size is that of a slice of something else, which goes where the views of the first are read."""
    return y.reshape(-1).index_put((made[0],), y.T.reshape(-1)[: made[2]]).reshape(SIZE, SIZE)


def _sum(y: Tensor, made: Made) -> Tensor:
    return y + made[1].exp().sum() + made[1].flip(0).cumsum(0).sum() * 1e-3


def _joined(y: Tensor, made: Made) -> Tensor:
    both = torch.cat([made[1], y[0], made[1] + 1])
    return y * both.sum() + nn.functional.pad(made[1], (1, 2)).square().sum()


def _outer(y: Tensor, made: Made) -> Tensor:
    return y + (made[1][:, None] * y[:1]).sum(0)


MAKERS = (_of_nonzero, _of_argwhere, _of_mask, _of_unique, _of_item, _of_repeats)
READERS = (_put, _count, _other_part, _sum, _joined, _outer)


class Between(nn.Module):
    """Products before and after, so that these parts are worth a transfer to the GPU."""

    def __init__(self, make: Callable[[Tensor], Made], read: Callable[[Tensor, Made], Tensor]) -> None:
        super().__init__()
        self.make, self.read = make, read

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ x.mT / SIZE + x
        made = self.make(y[0] if y.dim() == 3 else y)
        return self.read(y, made) @ x, made[1]


def inputs() -> list[Tensor]:
    """Of which some, all, none, and few numbers are taken."""
    x = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    few = torch.full((SIZE, SIZE), -0.1)
    few[0, 5] = 30.0
    return [x, x.abs(), torch.zeros(SIZE, SIZE), few]


@pytest.mark.parametrize("read", READERS, ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize("make", MAKERS, ids=lambda f: f.__name__[1:])
def test_of_files(make: Callable[[Tensor], Made], read: Callable[[Tensor, Made], Tensor]) -> None:
    model = Between(make, read)
    with lapilli.compile(model, (inputs()[0],)) as program:
        for x in inputs():
            torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-3)


@pytest.mark.part(6)
@pytest.mark.parametrize("read", READERS, ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize("make", MAKERS, ids=lambda f: f.__name__[1:])
def test_of_graphs(make: Callable[[Tensor], Made], read: Callable[[Tensor, Made], Tensor]) -> None:
    """Dynamo with sizes from data in its graphs."""
    model = Between(make, read)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        run = torch.compile(model, backend="vulkan")
        for x in inputs():
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-3)
