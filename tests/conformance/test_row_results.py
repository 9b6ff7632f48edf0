"""Row fusion and attention on a device: the results are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from agreement import FLOAT_BOUND, Function, relative_error
from plans import labels, plan
from row_cases import ROWS, X, heads

import lapilli
from lapilli.target import ANY, GPU


def agrees(f: Callable[..., Any], target: str, *args: torch.Tensor) -> None:
    with torch.no_grad():
        want = f(*(a.double() if a.is_floating_point() else a for a in args))
    with lapilli.compile(Function(f), args, target=target) as program:
        assert relative_error(program(*args), want) <= FLOAT_BOUND


@pytest.mark.parametrize("target", [pytest.param("any-fp32", marks=pytest.mark.poor_device), "cpu-fp32", "gpu-fp32"])
def test_rows_agree(target: str, gpu_plans: None) -> None:
    agrees(lambda x: torch.cat([f(x).flatten() for f in ROWS.values()]), target, X)


@pytest.mark.parametrize("target", ["any-fp32", "gpu-fp32"])
def test_rows_of_all_lengths_agree(target: str, gpu_plans: None) -> None:
    def f(*rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.cat([x.softmax(-1), F.layer_norm(x, x.shape[1:])], 1).flatten() for x in rows])

    agrees(f, target, *(torch.randn(37, n) for n in (2, 3, 5, 64, 127, 1000)))


@pytest.mark.parametrize("target", ["any-fp32", "gpu-fp32"])
def test_rows_of_dynamic_length(target: str, gpu_plans: None) -> None:
    model, dim = Function(lambda x: F.layer_norm(x, x.shape[1:]).softmax(-1)), torch.export.Dim
    shapes = ({0: dim("rows", min=2, max=64), 1: dim("length", min=2, max=4000)},)
    with lapilli.compile(model, (torch.randn(3, 5),), target=target, dynamic_shapes=(shapes,)) as program:
        for rows, length in ((3, 5), (40, 33), (2, 4000)):
            x = torch.randn(rows, length)
            assert relative_error(program(x), model(x.double())) <= FLOAT_BOUND


def test_rows_with_nan_and_infinity(gpu_plans: None) -> None:
    x = torch.randn(6, 40)
    x[0], x[1, 3], x[2, 5], x[3, 0] = float("-inf"), float("nan"), float("inf"), float("-inf")
    agrees(lambda x: x.softmax(-1), "gpu-fp32", x)
    agrees(lambda x: F.layer_norm(x, (40,)), "gpu-fp32", x)


@pytest.mark.parametrize("target", ["any-fp32", "gpu-fp32"])
def test_attention_of_dynamic_length(target: str, gpu_plans: None) -> None:
    model = Function(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    shape = {2: torch.export.Dim("length", min=2, max=500)}
    with lapilli.compile(model, heads(1, 2, 7, 16), target=target, dynamic_shapes=((shape,) * 3,)) as program:
        for length in (2, 7, 33, 100):
            args = heads(1, 2, length, 16)
            assert relative_error(program(*args), model(*(a.double() for a in args))) <= FLOAT_BOUND


def test_a_reduction_is_stored_in_its_readers_shape(gpu_plans: None) -> None:
    """Flattening after a convolution costs no kernel."""

    def f(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weight).flatten(1).relu()

    args = torch.randn(2, 4, 7, 6), torch.randn(12, 4, 3, 3)
    for target in (ANY, GPU):
        assert labels(plan(f, *args, target=target))[-1] == "conv2d + relu"
        agrees(f, target.name, *args)


def test_verification_understands_rows_and_attention(gpu_plans: None) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(F.scaled_dot_product_attention(x, x, x), (24,))

    checks = lapilli.verify(Function(f), (X,), target="gpu-fp32")
    assert len(checks) == 2
    assert np.isfinite([c.error for c in checks]).all() and max(c.error for c in checks) < FLOAT_BOUND


def test_a_long_iteration_is_not_followed_into_a_row() -> None:
    """The 88 rounds that find eigenvalues read one another in several places."""

    def composed(x: torch.Tensor) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(x)
        return vectors @ torch.diag(values) @ vectors.mT

    x = X[0, 0, :12, None] * torch.eye(12) + X[1, :, :12].mT @ X[1, :, :12]
    assert relative_error(lapilli.compile(Function(composed), (x,))(x), composed(x)) < FLOAT_BOUND


READ_TWICE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "by row and by column": lambda x: (lambda m: (x * m[None, :]).sum(1) + m)(x.sum(1)),
    "by column and by row": lambda x: (lambda m: (x * m[None, :]).softmax(1) * m[:, None])(x.sum(1)),
    "by a product and its row": lambda x: (lambda m: x @ m + m)(x.sum(1)),
    "backwards": lambda x: (lambda m: (x * m.flip(0)[None, :]).sum(1) + m)(x.sum(1)),
}


@pytest.mark.poor_device
@pytest.mark.parametrize("n", [4, 60])
@pytest.mark.parametrize("name", READ_TWICE)
def test_a_reduction_that_is_read_in_two_places_is_no_step_of_a_row(name: str, n: int) -> None:
    """Of a square matrix rows and columns look alike."""
    x = torch.rand(n, n, generator=torch.Generator().manual_seed(n))
    want = READ_TWICE[name](x.double())
    assert relative_error(lapilli.compile(Function(READ_TWICE[name]), (x,))(x), want) < FLOAT_BOUND


@pytest.mark.parametrize("shape", [(65539, 65), (4096, 1024), (3, 16411, 96)])
def test_long_reductions_across_rows(shape: tuple[int, ...], gpu_plans: None) -> None:
    """In parts, of which the last may be shorter."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.sum(-2), x.amax(-2), x.amin(-2) * 2, (x * 0 + 1).prod(-2)], -1)

    agrees(f, "gpu-fp32", torch.randn(shape))


@pytest.mark.parametrize("target", ["any-fp32", "cpu-fp32", "gpu-fp32"])
def test_open_numbers_of_rows_and_columns(target: str, gpu_plans: None) -> None:
    model, dim = Function(lambda x: torch.cat([x.sum(0), x.mean(1), x.amax(0), x.sum()[None]])), torch.export.Dim
    shapes = ({0: dim("rows", min=1, max=20000), 1: dim("columns", min=1, max=20000)},)
    with lapilli.compile(model, (torch.randn(3, 5),), target=target, dynamic_shapes=(shapes,)) as program:
        for rows, columns in ((1, 1), (63, 3), (64, 65), (8193, 2), (2, 12000), (300, 301)):
            x = torch.randn(rows, columns)
            assert relative_error(program(x), model(x.double())) <= FLOAT_BOUND
