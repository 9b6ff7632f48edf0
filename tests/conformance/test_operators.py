"""Operators on the device, against torch: the same samples as in compiler/test_lowering, up to three of every operator.

Kernels without 16-bit types are tested on every operator; those for lavapipe (texel buffers) and for GPUs (shared memory,
subgroups) where they differ: contractions and reductions."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from agreement import (
    COMPARABLE,
    NOT_HALF,
    ONLY_FLOAT,
    SPECIAL,
    Case,
    assert_agree,
    check_half,
    expected,
    on_device,
    samples,
)
from operator_cases import CASES, convolutions, f, ints

aten = torch.ops.aten


def _some(overload: Any, dtype: torch.dtype) -> list[Case]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = CASES.get(overload, []) if dtype is torch.float32 else []
        return [*own, *samples(overload, dtype, 3)]


def _name(overload: Any) -> str:
    return str(overload)


@pytest.mark.parametrize("overload", COMPARABLE, ids=_name)
def test_floats(overload: Any) -> None:
    cases = _some(overload, torch.float32) or _some(overload, torch.int64)
    for start in range(0, len(cases), 16):  # a program for every 16 calls
        part = cases[start : start + 16]
        assert_agree(on_device(part, "any-fp32"), expected(part))


_INTEGERS = [o for o in COMPARABLE if o not in ONLY_FLOAT]


@pytest.mark.parametrize("start", range(0, len(_INTEGERS), 12))
@pytest.mark.part(12)
def test_integers_and_bools(start: int) -> None:
    """Twelve operators a program, with a sample of every type."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in (torch.int64, torch.uint8, torch.bool):
            cases = [c for o in _INTEGERS[start : start + 12] for c in samples(o, dtype, 1)]
            if cases:
                assert_agree(on_device(cases, "any-fp32"), expected(cases))


@pytest.mark.parametrize("target", ["any-fp32", "cpu-fp16"])
@pytest.mark.parametrize("start", range(0, len(COMPARABLE), 8))
@pytest.mark.part(12)
def test_half_precision(start: int, target: str) -> None:
    """Half-precision tensors, on kernels with 16-bit types and on kernels that find two of them in a word."""
    part = [o for o in COMPARABLE[start : start + 8] if o not in NOT_HALF]
    cases = [c for o in part for c in _some(o, torch.float16)[:1]]
    if cases:
        check_half(on_device(cases, target), cases)


_DIFFERENT = [
    o for o in COMPARABLE
    if any(w in str(o) for w in ("conv", "mm", "matmul", "linear", "bmm", "softmax", "norm", "pool", "sum", "mean", "var", "arg",
                                 "any", "all", "prod", "cat", "upsample", "attention"))
]  # fmt: skip


@pytest.mark.parametrize("target", ["cpu-fp32", "gpu-fp32"])
@pytest.mark.parametrize("start", range(0, len(_DIFFERENT), 4))
@pytest.mark.part(12)
def test_kernels_of_other_plans(start: int, target: str, gpu_plans: None) -> None:
    cases = [c for o in _DIFFERENT[start : start + 4] for c in _some(o, torch.float32)[:4]]
    if cases:
        assert_agree(on_device(cases, target), expected(cases))


@pytest.mark.parametrize("target", [pytest.param("any-fp32", marks=pytest.mark.poor_device), "cpu-fp32", "gpu-fp32"])
@pytest.mark.part(3)
def test_convolutions(target: str, gpu_plans: None) -> None:
    """Any dimension, stride, padding, dilation, groups, batch; transposed too."""
    cases = convolutions()
    assert_agree(on_device(cases, target), expected(cases))


@pytest.mark.poor_device
def test_nan_and_infinity_in_functions() -> None:
    """SwiftShader's own exp and log make numbers of NaN, which Vulkan leaves to the driver; ours must not."""
    overloads = [aten.sigmoid, aten.tanh, aten.exp, aten.atan, aten.asinh, aten.log1p, aten.expm1]
    cases = [Case(o.default, (SPECIAL,)) for o in overloads]
    assert_agree(on_device(cases, "any-fp32"), expected(cases))


@pytest.mark.poor_device
def test_largest_float_is_no_infinity() -> None:
    """What models write over masked scores: a softmax of nothing else must not be NaN."""
    yes, least = torch.tensor([[True, True], [True, False]]), torch.finfo(torch.float32).min
    cases = [Case(aten.masked_fill.Scalar, (f(2, 2), yes, value)) for value in (least, -least, float("inf"))]
    assert_agree(on_device(cases, "any-fp32"), expected(cases))


@pytest.mark.poor_device
def test_nan_and_infinity_in_arithmetic() -> None:
    overloads = [aten.relu, aten.relu6, aten.abs, aten.isnan, aten.isinf, aten.floor, aten.hardswish]
    cases = [Case(o.default, (SPECIAL,)) for o in overloads]
    pairs = torch.cartesian_prod(SPECIAL, SPECIAL)
    cases += [Case(o.default, (pairs[:, 0], pairs[:, 1])) for o in (aten.maximum, aten.minimum)]
    cases += [Case(o.Tensor, (pairs[:, 0], pairs[:, 1])) for o in (aten.add, aten.mul, aten.eq, aten.lt)]
    cases.append(Case(aten.amax.default, (SPECIAL.reshape(2, 5), [1])))
    cases.append(Case(aten.argmax.default, (SPECIAL.reshape(2, 5), 1)))
    assert_agree(on_device(cases, "any-fp32"), expected(cases))


@pytest.mark.poor_device
def test_every_element_type_goes_in_and_out() -> None:
    kinds = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32)
    cases = [Case(aten.clone.default, (ints(n, low=0, high=100).to(k),)) for k in kinds for n in (1, 5, 8)]
    assert_agree(on_device(cases, "any-fp32"), expected(cases))


def test_type_promotion() -> None:
    """Operands of different types meet in torch's common type."""
    values = [f(6), ints(6), ints(6, dtype=torch.int32), ints(6, low=0, dtype=torch.uint8), f(6) > 0]
    cases = [Case(aten.add.Tensor, (a, b)) for a in values for b in values]
    cases += [Case(aten.mul.Tensor, (a, b)) for a in values for b in values]
    assert_agree(on_device(cases, "any-fp32"), expected(cases))


def test_integers_wrap_as_in_torch() -> None:
    small = torch.tensor([100, -100, 127, -128], dtype=torch.int8)
    cases = [Case(aten.add.Tensor, (small, small)), Case(aten.mul.Tensor, (small, small))]
    cases.append(
        Case(aten.sub.Tensor, (ints(5, low=0, dtype=torch.uint8), ints(5, low=0, high=200, dtype=torch.uint8)))
    )
    assert_agree(on_device(cases, "any-fp32"), expected(cases))


def test_long_sums_are_exact_enough() -> None:
    """A million terms: partial sums keep the error below the bound that short sums have."""
    x = torch.rand(1 << 20, generator=torch.Generator().manual_seed(3)) + 1
    cases = [Case(aten.sum.default, (x,)), Case(aten.mean.dim, (x.reshape(4, -1), [1]))]
    assert_agree(on_device(cases, "any-fp32"), [t.float() for t in expected(cases, lambda t: t.double())])


def test_more_elements_than_groups_of_one_dimension() -> None:
    """17 million elements take more than 65,535 work groups."""
    x = torch.arange(17_000_001, dtype=torch.int32)
    cases = [Case(aten.add.Tensor, (x, 1))]
    assert_agree(on_device(cases, "any-fp32"), expected(cases))
