"""Transposed convolutions with a stride: by phases of the output, so that no zeros between elements are multiplied."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapilli

LAYERS: tuple[type[nn.Module], ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CALLS: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


class Computed(nn.Module):
    """Its weight is an input, whose infinities are not known when it is compiled."""

    def __init__(self, rank: int, **given: Any) -> None:
        super().__init__()
        self.rank, self.given = rank, given

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        found: Tensor = CALLS[self.rank - 1](x, w, **self.given).relu()
        return found


def case(seed: int) -> tuple[nn.Module, tuple[Tensor, ...], Any]:
    r = random.Random(seed)
    torch.manual_seed(seed)
    rank = r.choice((1, 2, 2, 2, 3))
    kernel, stride = ([r.randint(1, most) for _ in range(rank)] for most in (5, 4))
    dilation = [r.choice((1, 2)) if seed % 6 == 0 else 1 for _ in range(rank)]
    padding = [r.randint(0, (k - 1) * d) for k, d in zip(kernel, dilation, strict=True)]
    more = [r.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)]
    groups, c, o = r.choice(((1, 3, 5), (1, 8, 4), (2, 4, 4), (3, 1, 2), (4, 1, 1)))
    sizes = [7, *(r.choice((4, 5, 7)) for _ in range(rank - 1))]
    x, w = torch.randn(r.choice((1, 2)), groups * c, *sizes), torch.randn(groups * c, o, *kernel)
    for value, often in ((x, 4), (w, 9)):
        if r.randrange(often) == 0:
            value.view(-1)[r.randrange(value.numel())] = math.inf
    given = {"stride": stride, "padding": padding, "output_padding": more, "groups": groups, "dilation": dilation}
    if seed % 3 == 0:
        return Computed(rank, **given), (x, w), None
    layer: Any = LAYERS[rank - 1](groups * c, groups * o, kernel, bias=r.random() < 0.5, **given)
    layer.weight.data = w
    return layer, (x,), ({2: torch.export.Dim("size", min=6, max=64)},) if seed % 3 == 1 else None


@pytest.mark.part(4)
@pytest.mark.parametrize("seed", range(32))
@pytest.mark.parametrize("plan", ["cpu-fp32", "gpu-fp32"])
def test_random_transposed_convolutions(seed: int, plan: Any, gpu_plans: None) -> None:
    model, args, sizes = case(seed)
    model.requires_grad_(False)
    with lapilli.compile(model, args, target=plan, dynamic_shapes=sizes, fallback="error") as program:
        found = program(*args)
    wanted = model.double()(*(a.double() for a in args))
    assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.isinf(), wanted.isinf())
    finite = wanted.isfinite()
    # A sum of a few hundred products of numbers around 1.
    assert torch.allclose(found[finite].double(), wanted[finite], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "layer, size", [
        (nn.ConvTranspose2d(32, 16, 4, 2, 1), (14, 14)), (nn.ConvTranspose2d(32, 16, 2, 2), (14, 14)),
        (nn.ConvTranspose2d(32, 16, 3, 2, 1, 1), (14, 14)), (nn.ConvTranspose2d(32, 16, 4, 4), (14, 14)),
        (nn.ConvTranspose1d(32, 16, 16, 8, 4), (100,)), (nn.ConvTranspose2d(8, 8, 16, 8, 4), (14, 14)),
        (nn.ConvTranspose3d(4, 4, 5, 3, 1, 1), (12, 12, 12)),
    ],
)  # fmt: skip
def test_zeros_are_not_multiplied(layer: Any, size: tuple[int, ...]) -> None:
    """Work is that of the input's elements and the kernel's, and of places at the edges."""
    x = torch.randn(1, layer.in_channels, *size)
    with lapilli.compile(layer.requires_grad_(False), (x,), target="cpu-fp32", fallback="error") as program:
        kernels = program.profile([x.numpy()], repeat=1).kernels
    needed = 2 * x.numel() * layer.weight[0].numel()
    edges = math.prod((n + 1) / n for n in size)
    assert needed <= sum(k.flops for k in kernels) <= 1.1 * edges * needed


def test_images_without_a_border_are_stored_by_the_product() -> None:
    """Where kernels do not overlap, a transposed convolution is one product, which stores its results where they belong."""
    layer, x = (
        nn.Sequential(nn.ConvTranspose2d(32, 16, 2, 2), nn.ReLU()).requires_grad_(False),
        torch.randn(1, 32, 9, 7),
    )
    with lapilli.compile(layer, (x,), target="cpu-fp32", fallback="error") as program:
        kernels = [k.kernel for k in program.profile([x.numpy()], repeat=1).kernels]
        assert torch.allclose(program(x), layer(x), rtol=1e-5, atol=1e-5)
    assert kernels == ["map", "matmul"]
