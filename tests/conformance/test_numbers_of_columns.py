"""Programs with an open number of columns of products are right for any number: there may be fewer of them than a tile has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapilli

pytestmark = pytest.mark.usefixtures("on_any_device")

COUNTS = (1, 2, 3, 4, 5, 16, 40)


class Product(nn.Module):
    """Columns: as many of the second input as it has groups, times `each`. Rows lie one behind the other, so that what is written
    behind a row falls into the next one."""

    def __init__(self, each: int) -> None:
        super().__init__()
        self.each = each

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.relu(x @ y.reshape(-1, x.shape[1]).T)

    def inputs(self, rows: int, count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, 8), torch.randn(count, self.each, 8)


class Convolution(Product):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.relu(F.conv2d(x, y.reshape(-1, x.shape[1], 3, 3)))

    def inputs(self, rows: int, count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(1, 8, 6, rows + 2), torch.randn(count, self.each, 72)


@pytest.mark.part(4)
@pytest.mark.parametrize("plan", ["cpu-fp32", "any-fp32", "gpu-fp32"])
@pytest.mark.parametrize("rows", [1, 3, 8, 200])
@pytest.mark.parametrize("each", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", [Product, Convolution])
def test_any_number_of_columns(kind: Callable[[int], Product], each: int, rows: int, plan: str) -> None:
    torch.manual_seed(each * rows)
    model = kind(each).eval()
    shapes = (None, {0: torch.export.Dim("columns", min=1, max=4096)})
    with lapilli.compile(
        model, model.inputs(rows, 40), dynamic_shapes=shapes, target=plan, fallback="error"
    ) as program:
        for count in COUNTS:
            given = model.inputs(rows, count)
            wanted = model(*(x.double() for x in given))
            error = (program(*given).double() - wanted).norm() / wanted.norm().clamp(min=1)
            assert error < 2e-6, count  # sums of 8 or 72 products in float32
