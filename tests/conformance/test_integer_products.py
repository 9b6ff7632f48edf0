"""Matrix products of integers, exact: the kernels of products, of floats and integers alike, and what they store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapilli

DTYPES = (torch.int32, torch.uint8, torch.int64, torch.int8, torch.int16)
TARGETS = ("cpu-fp32", "any-fp32", "gpu-fp32")
SHAPES = (
    (1, 1, 1),
    (1, 7, 5),
    (2, 3, 4),
    (5, 1, 9),
    (17, 13, 11),
    (33, 64, 12),
    (65, 37, 70),
    (4, 0, 3),
    (16, 260, 16),
)
"""Rows, inner dimension, columns."""


class Outputs(nn.Module):
    """Several results of the same arguments, in one program."""

    def __init__(self, results: Callable[..., Sequence[Tensor]]) -> None:
        super().__init__()
        self.results = results

    def forward(self, *args: Tensor) -> list[Tensor]:
        return list(self.results(*args))


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    """Of the whole type, so that products wrap; int64: such that they do not."""
    generator = torch.Generator().manual_seed(sum(shape) * 31 + dtype.itemsize)
    info = torch.iinfo(torch.int8 if dtype is torch.int64 else dtype)
    return torch.randint(info.min, info.max + 1, shape, generator=generator).to(dtype)


@pytest.fixture(autouse=True)
def every_plan(gpu_plans: None) -> None:
    """Plans for GPUs are run here too."""


@pytest.mark.parametrize(
    "dtype, target",
    [(dtype, TARGETS[0]) for dtype in DTYPES] + [(dtype, t) for dtype in DTYPES[:2] for t in TARGETS[1:]],
)
@pytest.mark.poor_device
def test_products(dtype: torch.dtype, target: str) -> None:
    """Of all shapes in one program, either side also transposed; sums wrap as torch's."""
    shapes = SHAPES if target == "cpu-fp32" else SHAPES[3:7]
    pairs = [(numbers(dtype, m, k), numbers(dtype, k, n)) for m, k, n in shapes]
    pairs += [(numbers(dtype, k, m).t(), numbers(dtype, n, k).t()) for m, k, n in shapes[-3:]]
    args = [x for pair in pairs for x in pair]
    f = Outputs(lambda *args: [a @ b for a, b in zip(args[::2], args[1::2], strict=True)])
    with lapilli.compile(f, tuple(args), target=target) as program:
        for got, expected in zip(program(*args), f(*args), strict=True):
            assert got.dtype is expected.dtype and torch.equal(got, expected), expected.shape


@pytest.mark.parametrize("target", TARGETS)
def test_what_follows(target: str) -> None:
    """Additions, comparisons and conversions are part of the product's kernel, or read what it stores."""
    a, b, bias = numbers(torch.int32, 9, 14) % 50, numbers(torch.int32, 14, 12) % 50, numbers(torch.int32, 12)
    x, w = torch.randn(9, 14), torch.randn(14, 12)

    def results(a: Tensor, b: Tensor, bias: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
        return [
            torch.addmm(bias, a, b, beta=2, alpha=-3), (a @ b > 0), (a @ b).to(torch.uint8), (a @ b).float() / 7,
            (a @ b).to(torch.int64) + 1, (a @ b).clamp(-5, 9), ((x @ w) * 8).round().to(torch.int32), (x @ w > 0) & (a @ b > 0),
            torch.bmm(a.view(3, 3, 14), b.expand(3, 14, 12)), a[0] @ b, a @ b[:, 0], a[0] @ b[:, 1], torch.matmul(a, b[None]),
        ]  # fmt: skip

    f = Outputs(results)
    args = (a, b, bias, x, w)
    with lapilli.compile(f, args, target=target) as program:
        for k, (got, expected) in enumerate(zip(program(*args), f(*args), strict=True)):
            assert got.dtype is expected.dtype
            if expected.is_floating_point():
                torch.testing.assert_close(got, expected, rtol=2**-22, atol=0)
            else:
                assert torch.equal(got, expected), k


def test_an_integer_product_takes_the_kernel_of_products() -> None:
    """So do products of floats whose comparison or conversion is stored."""
    a, x = numbers(torch.int32, 64, 64), torch.randn(64, 64)
    f = Outputs(lambda a, x: [a @ a, x @ x > 0, (x @ x).to(torch.uint8)])
    with lapilli.compile(f, (a, x), target="cpu-fp32") as program:
        kernels = [k.kernel for k in program.profile([a.numpy(), x.numpy()], 1).kernels]
    assert sum(name.startswith("matmul") for name in kernels) == 3, kernels


@pytest.mark.parametrize("size", [3, 40])
def test_an_int64_product_beyond_32_bits_is_refused(size: int) -> None:
    f = Outputs(lambda a, b: [a @ b])
    a = torch.full((size, size), 3)
    big = torch.full((size, size), 2**30)
    with lapilli.compile(f, (a, a)) as program:
        assert torch.equal(program(a, a)[0], a @ a)
        assert torch.equal(program(torch.eye(size, dtype=torch.int64), big)[0], big)
        with pytest.raises(lapilli.IntegerOverflowError):
            program(a, big)


def test_a_single_row_times_what_changes() -> None:
    """The right side is not copied first."""
    x, w = torch.randn(1, 52), torch.randn(52, 30)
    with lapilli.compile(Outputs(lambda x, w: [x @ w]), (x, w), target="cpu-fp32") as program:
        labels = [k.label for k in program.profile([x.numpy(), w.numpy()], 1).kernels]
        assert not any("pack" in label for label in labels), labels
        np.testing.assert_allclose(program(x, w)[0], (x.double() @ w.double()).float(), rtol=0, atol=52 * 2**-23 * 52)
