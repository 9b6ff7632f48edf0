"""Products, convolutions, attention, reductions and norms with the layouts and sizes that models have (tools/cliff_cases.py): each
has the right result by the kernels of every class of devices, and none is left to the generic kernel but those that it suits. So
have the gradients of products and convolutions."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import as_gpu
import pytest
import torch
from agreement import Function
from cliff_cases import Case, cases, gradients
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

import lapilli
from lapilli.capture import capture
from lapilli.codegen.select import schedule_of
from lapilli.legalize.passes import prepare
from lapilli.lower import lower
from lapilli.target import CPU, GPU, GPU_MATRIX, TARGETS, Target

CASES = {f"{c.family}: {c.name}": c for c in cases(1)}
# Rounding errors of a sum of 1,000 products are 2^-24 * sqrt(1000) of its norm; results in half precision are rounded by 2^-11 at
# most, and so are the weights of attention.
BOUND = {torch.float32: 1e-5, torch.float16: 1e-3}


def check(case: Case, dtype: torch.dtype, target: str | None) -> None:
    arguments = case.arguments(dtype, zlib.crc32(case.name.encode()))
    inputs = arguments[: len(arguments) - case.weights]
    wanted = tree_leaves(case.f(*(t.double() for t in arguments)))
    shapes = case.dynamic_shapes()
    with lapilli.compile(case.model(arguments), tuple(inputs), target=target, dynamic_shapes=shapes) as program:
        got = tree_leaves(tree_map(torch.as_tensor, program(*inputs)))
    assert len(got) == len(wanted)
    for g, w in zip(got, wanted, strict=True):
        assert g.shape == w.shape
        if not g.is_floating_point():  # the place of an extremum
            assert torch.equal(g, w)
            continue
        error = (g.double() - w).norm() / w.norm().clamp_min(1e-30)
        assert error <= BOUND[dtype], f"the relative error is {error:.1e}"


@pytest.mark.part(6)
@pytest.mark.parametrize("name", CASES)
def test_on_this_device(name: str) -> None:
    check(CASES[name], torch.float32, None)


@pytest.mark.part(20)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["gpu-fp32", "gpu-fp16-matrix"])
def test_by_kernels_of_gpus(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path))
    as_gpu.on_any_device(monkeypatch.setattr)
    monkeypatch.setitem(TARGETS, GPU_MATRIX.name, replace(GPU_MATRIX, shared_memory=1 << 15))  # what every device has
    check(CASES[name], dtype, "gpu-fp16-matrix" if dtype is torch.float16 else "gpu-fp32")


def is_generic(case: Case, target: Target) -> bool:
    """Whether a contraction of a case has the generic kernel."""
    arguments = case.arguments(torch.float16 if target.half else torch.float32)
    inputs = tuple(arguments[: len(arguments) - case.weights])
    module = prepare(capture(case.model(arguments), inputs, case.dynamic_shapes()))
    schedule = schedule_of(lower(module, "fp16" if target.half else "fp32", target.half), target)
    reductions = [(t, t.reduction) for t in schedule.order.run if t.reduction is not None]
    return any(t.template is None and r.contraction is not None for t, r in reductions)


@pytest.mark.parametrize("target", [GPU_MATRIX, GPU, CPU], ids=lambda t: t.name)
def test_no_case_has_the_generic_kernel(target: Target) -> None:
    assert not [f"{c.family}: {c.name}" for c in cases(4) if is_generic(c, target)]


GRADIENTS = {f"{c.family}: {c.name}": c for c in gradients(1)}


@pytest.mark.part(20)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_on_this_device(name: str) -> None:
    check(GRADIENTS[name], torch.float32, None)


@pytest.mark.part(24)
@pytest.mark.parametrize("target", [GPU_MATRIX, GPU, CPU], ids=lambda t: t.name)
@pytest.mark.parametrize("name", [n for n in GRADIENTS if "results a channel" not in n])
def test_only_gradients_of_few_weights_have_the_generic_kernel(name: str, target: Target) -> None:
    assert not is_generic(GRADIENTS[name], target)


MANY = 65_537  # more than the work groups of a dimension
BATCHES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "products": (torch.bmm, ((MANY, 3, 8), (MANY, 8, 4))),
    "products of a row": (torch.bmm, ((MANY, 1, 8), (MANY, 8, 8))),
    "attention": (F.scaled_dot_product_attention, ((MANY, 1, 9, 4),) * 3),
    "attention of a query": (F.scaled_dot_product_attention, ((MANY, 1, 1, 4), (MANY, 1, 5, 4), (MANY, 1, 5, 4))),
    "small images": (lambda x, w: F.conv2d(x, w), ((MANY // 2, 4, 8, 8), (16, 4, 2, 2))),
    "convolutions": (lambda x, w: F.conv1d(x, w), ((MANY, 8, 6), (8, 8, 3))),
}


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("name", BATCHES)
def test_more_batches_than_work_groups(
    name: str, is_open: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path))
    as_gpu.on_any_device(monkeypatch.setattr)
    f, shapes = BATCHES[name]
    args = tuple(torch.randn(shape, generator=torch.Generator().manual_seed(k)) for k, shape in enumerate(shapes))
    batch = torch.export.Dim("batch", min=2, max=100_000)
    given = tuple({0: batch} if a.shape[0] > MANY // 4 else None for a in args)
    with lapilli.compile(Function(f), args, target="gpu-fp32", dynamic_shapes=(given,) if is_open else None) as program:
        torch.testing.assert_close(program(*args), f(*args), rtol=1e-4, atol=1e-5)
