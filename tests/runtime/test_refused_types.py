"""Calls that torch refuses for their operands' types: refused by the device, too, in torch's words."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


def first_of(x: Tensor) -> Tensor:
    """The index of the first element."""
    return torch.tensor([0], device=x.device)


MATRIX, IMAGE = torch.ones(2, 2), torch.ones(1, 2, 2)
MIXED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "integers times floats": (torch.matmul, (MATRIX.int(), MATRIX * 1.5)),
    "floats times halves": (torch.matmul, (MATRIX, MATRIX.half())),
    "integers times bools": (torch.matmul, (MATRIX.long(), MATRIX.bool())),
    "a vector": (torch.mv, (MATRIX, MATRIX[0].half())),
    "batches": (torch.bmm, (IMAGE, IMAGE.half())),
    "an offset": (torch.addmm, (MATRIX[0], MATRIX.half(), MATRIX.half())),
    "a layer of integers": (F.linear, (MATRIX.long(), MATRIX, MATRIX[0])),
    "a convolution": (F.conv1d, (IMAGE, IMAGE.half())),
    "a bias": (F.conv1d, (IMAGE, IMAGE, MATRIX[0].half())),
    "an addition at places": (lambda x, y: x.index_add(0, first_of(x), y), (MATRIX[0], MATRIX[0, :1].half())),
    "a write at places": (lambda x, y: x.index_put((first_of(x),), y), (MATRIX[0], MATRIX[0, :1].half())),
}  # fmt: skip
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda x: x.softmax(-1), "log_softmax": lambda x: F.log_softmax(x, 0), "var": torch.var, "std": torch.std,
    "var_mean": torch.var_mean, "std_mean": torch.std_mean, "gelu": F.gelu, "silu": F.silu, "softplus": F.softplus,
    "hardsigmoid": F.hardsigmoid, "hardswish": F.hardswish, "mish": F.mish, "logcumsumexp": lambda x: x.logcumsumexp(0),
    "lerp": lambda x: x.lerp(x, 0.5),
}  # fmt: skip
CASES = {
    **MIXED,
    **{f"{name} of {kind}": (f, (torch.ones(3).to(kind),)) for name, f in FUNCTIONS.items() for kind in (torch.int64, torch.uint8)},
}  # fmt: skip


def error_of(f: Callable[..., Any], given: tuple[Tensor, ...]) -> str:
    with pytest.raises((RuntimeError, NotImplementedError, IndexError)) as error, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the call ran on the CPU
        f(*given)
    return str(error.value)


@pytest.mark.parametrize("name", CASES)
def test_on_the_device(name: str) -> None:
    f, given = CASES[name]
    assert error_of(f, tuple(x.to("vulkan") for x in given)) == error_of(f, given)


def test_types_that_are_asked_for() -> None:
    x = torch.tensor([1, 2, 3])
    torch.testing.assert_close(x.to("vulkan").softmax(0, dtype=torch.float32).cpu(), x.softmax(0, dtype=torch.float32))
    torch.testing.assert_close(x.to("vulkan").bool().float().var().cpu(), x.bool().float().var())
