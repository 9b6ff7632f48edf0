"""Every lowering, run by the NumPy interpreter, against torch."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from agreement import (
    COMPARABLE,
    NOT_HALF,
    ONLY_FLOAT,
    SPECIAL,
    Case,
    Function,
    assert_agree,
    check_half,
    expected,
    inputs_of,
    module_of,
    samples,
    through_interpreter,
)
from operator_cases import CASES

from lapilli.capture import capture
from lapilli.ir import interpret
from lapilli.ir.node import Constant, Matmul, Reduce
from lapilli.legalize.passes import prepare
from lapilli.lower import lower

DTYPES = (torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool)


@pytest.mark.parametrize("overload", COMPARABLE, ids=str)
def test_agrees_with_torch(overload: Any) -> None:
    """On torch's own samples in all element types, and on ours."""
    cases = list(CASES.get(overload, []))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in DTYPES:
            if dtype.is_floating_point or overload not in ONLY_FLOAT:
                cases += samples(overload, dtype, 6)
        assert cases, "there is no sample of this operator: add one to operator_cases.py"
        for case in cases:
            try:
                assert_agree(through_interpreter([case]), expected([case]))
            except Exception as error:
                error.add_note(repr(case))
                raise


@pytest.mark.part(2)
@pytest.mark.parametrize("overload", COMPARABLE, ids=str)
def test_half_precision(overload: Any) -> None:
    cases = [] if overload in NOT_HALF else samples(overload, torch.float16, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases:
            try:
                check_half(through_interpreter([case]), [case])
            except Exception as error:
                error.add_note(repr(case))
                raise


_POINTWISE = [
    o for o in COMPARABLE
    if o in (torch.ops.aten.relu.default, torch.ops.aten.hardtanh.default, torch.ops.aten.abs.default,
             torch.ops.aten.exp.default, torch.ops.aten.sqrt.default, torch.ops.aten.sigmoid.default,
             torch.ops.aten.tanh.default, torch.ops.aten.isnan.default, torch.ops.aten.isinf.default,
             torch.ops.aten.floor.default, torch.ops.aten.relu6.default, torch.ops.aten.log.default,
             torch.ops.aten.hardswish.default, torch.ops.aten.neg.default, torch.ops.aten.reciprocal.default,
             torch.ops.aten.rsqrt.default)
]  # fmt: skip


@pytest.mark.parametrize("overload", _POINTWISE, ids=str)
def test_nan_and_infinity_of_one_value(overload: Any) -> None:
    case = Case(overload, (SPECIAL,))
    np.testing.assert_allclose(through_interpreter([case])[0], expected([case])[0].numpy(), rtol=1e-6)


@pytest.mark.parametrize("name", ["add", "mul", "div", "maximum", "minimum", "eq", "lt", "ge"])
def test_nan_and_infinity_of_two_values(name: str) -> None:
    pairs = torch.tensor(list(itertools.product(SPECIAL.tolist(), repeat=2)))
    packet = getattr(torch.ops.aten, name)
    case = Case(packet.default if name in ("maximum", "minimum") else packet.Tensor, (pairs[:, 0], pairs[:, 1]))
    np.testing.assert_allclose(through_interpreter([case])[0], expected([case])[0].numpy(), rtol=1e-6)


def test_inputs_that_are_not_contiguous() -> None:
    x = torch.randn(6, 8).t()[::2]
    case = Case(torch.ops.aten.add.Tensor, (x, x.flip(0)))
    assert_agree(interpret.run(lower(module_of([case])), inputs_of([case])), expected([case]))


def test_float64_is_refused_with_advice() -> None:
    case = Case(torch.ops.aten.add.Tensor, (torch.ones(2, dtype=torch.float64), 1))
    with pytest.raises(TypeError, match=r"float64 is not supported on the GPU; convert the model with \.float\(\)"):
        lower(module_of([case]))


def test_complex_numbers_are_refused() -> None:
    case = Case(torch.ops.aten.add.Tensor, (torch.ones(2, dtype=torch.complex64), 1))
    with pytest.raises(TypeError, match="complex64 tensors are not supported"):
        lower(module_of([case]))


def test_interpolation_of_integers_is_refused() -> None:
    case = Case(torch.ops.aten.upsample_bilinear2d.default, (torch.ones(1, 1, 2, 2, dtype=torch.uint8), [4, 4], False))
    with pytest.raises(TypeError, match="convert the tensor to float first"):
        lower(module_of([case]))


@pytest.mark.parametrize(
    "numbers",
    [
        torch.arange(7), torch.arange(3, 40, 5), torch.arange(9).flip(0), torch.arange(6).reshape(2, 3), torch.tensor([[4], [1]]),
        torch.arange(4)[:, None] * 3 - 2 * torch.arange(5), torch.zeros(3, 2, dtype=torch.int64), torch.tensor(5),
        torch.tensor([2**31 - 1, 0, -(2**31) + 1]), torch.tensor([-(2**31), -1]), torch.arange(3, dtype=torch.int32),
    ],
    ids=str,
)  # fmt: skip
def test_regular_integers_are_computed(numbers: torch.Tensor) -> None:
    assert not reads_constants(numbers)


@pytest.mark.parametrize(
    "numbers",
    [torch.tensor([0, 1, 2, 4]), torch.tensor([-(2**31), 2**31 - 1]), torch.tensor([[0, 1], [1, 3]]),
     torch.zeros(0, dtype=torch.int64), torch.arange(3).float(), torch.arange(3, dtype=torch.uint8), torch.tensor([True, True])],
    ids=str,
)  # fmt: skip
def test_other_constants_are_read(numbers: torch.Tensor) -> None:
    assert reads_constants(numbers)


def reads_constants(numbers: torch.Tensor) -> bool:
    """Whether a graph that adds these numbers to others has them as data. What it computes must be right."""
    module = prepare(capture(Function(torch.add, numbers).eval(), (torch.zeros_like(numbers),)))
    graph = lower(module)
    (found,) = interpret.run(graph, [np.zeros(numbers.shape, np.asarray(numbers).dtype)])
    np.testing.assert_array_equal(found, numbers.numpy())
    return any(isinstance(n, Constant) for n in graph.nodes())


def test_products_of_three_are_matrix_products() -> None:
    """nn.Bilinear and its gradients: one for each, with at most a sum of few terms beside it."""

    class Bilinear(torch.nn.Module):
        def forward(self, g: torch.Tensor, a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
            three = torch.ops.aten._trilinear.default
            of_a = three(g, w, b, [2, 3], [0], [1, 2], [1, 3])
            of_b = three(a, w, g, [1, 3], [0], [2, 3], [1, 2])
            of_w = three(a, g, b, [1, 3], [2, 3], [1, 2], [0])
            return [torch.nn.functional.bilinear(a, b, w), of_a, of_b, of_w]

    given = (torch.randn(7, 3), torch.randn(7, 4), torch.randn(7, 5), torch.randn(3, 4, 5))
    graph = lower(prepare(capture(Bilinear(), given)))
    sums = [n for n in graph.nodes() if isinstance(n, Reduce)]
    assert sum(isinstance(n.contraction, Matmul) for n in sums) == 4
    assert all(isinstance(n.contraction, Matmul) or len(n.raxes) == 1 for n in sums)
    leaves = [x.double().requires_grad_() for x in given[1:]]
    made = torch.nn.functional.bilinear(*leaves)
    wanted = [made.detach(), *torch.autograd.grad(made, leaves, given[0].double())]
    for got, want in zip(interpret.run(graph, [x.numpy() for x in given]), wanted, strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-5)
