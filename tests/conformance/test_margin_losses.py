"""Losses whose decomposition in torch means something else where there is NaN."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from agreement import Function

import lapilli

NAN, INF = float("nan"), float("inf")


class Losses(torch.nn.Module):
    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor
    ) -> list[torch.Tensor]:
        return [
            F.multi_margin_loss(x, y, reduction=self.reduction),
            F.multi_margin_loss(x, y, p=2, margin=0.5, weight=weight, reduction=self.reduction),
            F.multilabel_margin_loss(x, labels, reduction=self.reduction),
        ]


# Not one row without a reduction: torch.export and torch's kernels give it different shapes.
@pytest.mark.parametrize(
    "reduction, rows", [("none", 5), ("mean", 5), ("sum", 5), ("none", 1), ("mean", None), ("sum", None)]
)
def test_losses_with_nan(reduction: str, rows: int | None) -> None:
    """In programs and eagerly: NaN counts as 0, as in torch's kernels on the CPU and on CUDA."""
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    x[0, 4], x[1, 2], x[3, 0], x[4, 1] = NAN, NAN, INF, -INF
    y = torch.tensor([1, 2, 0, 3, 6])
    labels = torch.tensor(
        [[1, 2, -1, 3, 0, 0, 0], [2, -1, 0, 0, 0, 0, 0], [-1] * 7, [0, 1, 2, 3, 4, 5, 6], [3, 3, 1, -1, -1, -1, -1]]
    )
    x, y, labels = (t[:rows] if rows else t[0] for t in (x, y, labels))
    weight = torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0, 1.5, 0.0])
    model = Losses(reduction)
    given = (x, y, labels, weight)
    wanted = model(*given)
    program = lapilli.compile(model, given, fallback="error")
    for results in (program(*given), model(*(t.to("vulkan") for t in given))):
        for got, want in zip(results, wanted, strict=True):
            # the sum of seven numbers: 8 roundings of 2^-24
            torch.testing.assert_close(got.cpu(), want, rtol=8 * 2.0**-24, atol=1e-6, equal_nan=True)


def test_one_number_is_a_row() -> None:
    x, labels = torch.tensor(0.5), torch.tensor(0)
    model = Function(F.multilabel_margin_loss)
    torch.testing.assert_close(lapilli.compile(model, (x, labels), fallback="error")(x, labels), model(x, labels))


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 7, 3), (2, 7, 3, 1)], ids=len)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_gradients_of_nll_loss_are_zero_but_at_the_target(shape: tuple[int, ...], reduction: str) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=random)
    x.view(-1)[::2] = INF
    size = (*shape[:1], *shape[2:]) if len(shape) > 1 else ()
    target = torch.randint(0, 7, size, generator=random)
    if size:
        target.view(-1)[0] = -100  # left out

    def gradients(device: str, weight: torch.Tensor | None) -> list[torch.Tensor]:
        given = x.to(device).requires_grad_()
        kept = None if weight is None else weight.to(device)
        loss = F.nll_loss(given, target.to(device), kept, reduction=reduction)
        return [loss.detach().cpu(), *(t.cpu() for t in torch.autograd.grad(loss.tanh().sum() * NAN, [given]))]

    for weight in (None, torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0, 1.5, 0.125])):
        for got, want in zip(gradients("vulkan", weight), gradients("cpu", weight), strict=True):
            torch.testing.assert_close(got, want, equal_nan=True)
