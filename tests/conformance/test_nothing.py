"""Reductions of no elements: an error where torch has no result, its own result elsewhere, whenever a size turns out to be 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import Function
from torch import Tensor
from torch.utils._pytree import tree_leaves

import lapilli
from lapilli import autoload

autoload.register()
pytestmark = pytest.mark.filterwarnings("ignore:.*runs on the CPU:UserWarning")

WITHOUT_RESULT: dict[str, Callable[[Tensor], Any]] = {
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max of a dimension": lambda x: x.max(1),
    "min of a dimension": lambda x: x.min(-1),
    "amax": lambda x: x.amax(1),
    "argmax": lambda x: x.argmax(),
    "argmin of a dimension": lambda x: x.argmin(1),
    "aminmax": lambda x: torch.aminmax(x, dim=1),
    "median of a dimension": lambda x: x.median(1),
    "nanmedian of a dimension": lambda x: x.nanmedian(1),
    "mode": lambda x: x.mode(1),
    "kthvalue": lambda x: x.kthvalue(1, 1),
    "adaptive pooling": lambda x: torch.nn.functional.adaptive_avg_pool1d(x[None], 2),
}

WITH_RESULT: dict[str, Callable[[Tensor], Any]] = {
    "median": lambda x: x.median(),
    "nanmedian": lambda x: x.nanmedian(),
    "sum": lambda x: x.sum(1),
    "prod": lambda x: x.prod(),
    "mean": lambda x: x.mean(1),
    "any": lambda x: (x.any(1), x.all()),
    "logsumexp": lambda x: x.logsumexp(1),
    "sort": lambda x: (x.sort(1), x.cumsum(1), x.cummax(1), x.softmax(1)),
    "other dimension": lambda x: (x.amax(0), x.max(0), x.argmax(0), x.median(0)),
}


def class_of(call: Callable[[], Any]) -> type[Exception] | None:
    try:
        call()
    except Exception as error:
        assert len(str(error)) > 10
        return type(error)
    return None


@pytest.mark.parametrize("name", WITHOUT_RESULT)
def test_programs_refuse_a_size_of_nothing(name: str) -> None:
    f = WITHOUT_RESULT[name]
    x = torch.randn(3, 4)
    open_size = {1: torch.export.Dim("n", min=0, max=64)}
    program = lapilli.compile(Function(f), (x,), dynamic_shapes={"args": (open_size,)}, fallback="error")
    for ours, theirs in zip(tree_leaves(program(x)), tree_leaves(f(x)), strict=True):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(lapilli.InvalidInputError, match=r"n|size"):
        program(torch.zeros(3, 0))


def test_programs_give_what_torch_gives_of_nothing() -> None:
    open_size = {1: torch.export.Dim("n", min=0, max=64)}
    model = Function(lambda x: [f(x) for f in WITH_RESULT.values()])
    program = lapilli.compile(model, (torch.randn(3, 4),), dynamic_shapes={"args": (open_size,)}, fallback="error")
    for x in (torch.zeros(3, 0), torch.randn(3, 5), torch.zeros(3, 1)):
        for ours, theirs in zip(tree_leaves(program(x)), tree_leaves(model(x)), strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
def test_eager_raises_as_torch(dtype: torch.dtype) -> None:
    x = torch.zeros(3, 0, dtype=dtype)
    y = x.to("vulkan")
    for name, f in WITHOUT_RESULT.items():
        expected = class_of(lambda f=f: f(x))
        assert expected is not None and class_of(lambda f=f: f(y)) is expected, name
    for name, f in WITH_RESULT.items():
        if class_of(lambda f=f: f(x)) is None:
            for ours, theirs in zip(tree_leaves(f(y)), tree_leaves(f(x)), strict=True):
                torch.testing.assert_close(ours.cpu(), theirs, equal_nan=True, msg=name)


@pytest.mark.parametrize("shape", [(2, 6, 0), (0, 6, 4)])
def test_gradients_of_group_norm(shape: tuple[int, ...]) -> None:
    """torch's decomposition divides by the number of elements of a group."""
    found = []
    for f in (torch.nn.functional.group_norm, torch.compile(torch.nn.functional.group_norm, backend="vulkan")):
        x, weight = torch.zeros(shape, requires_grad=True), torch.ones(6, requires_grad=True)
        found.append(torch.autograd.grad(f(x, 3, weight).sum(), (x, weight)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 3)], ids=str)
def test_nothing_has_torchs_strides(shape: tuple[int, ...]) -> None:
    """NumPy's are zeros, which operators that look at strides refuse, in programs and on their results."""
    x = torch.randn(*shape, 2)
    model = Function(lambda x: (x + 1, torch.complex(x[..., 0] + 1, x[..., 1])))
    found, pairs = lapilli.compile(model, (x,))(x)
    assert found.stride() == x.stride() and pairs.shape == shape
    assert torch.view_as_complex(found).shape == shape
