"""No kernel has what a driver may take for 0, 1 or true whatever the numbers are, as NVIDIA's does."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import folding
import pytest
import torch
from torch import Tensor

from lapilli.codegen import build, spirv
from lapilli.compiler import compile_to_bytes
from lapilli.ir import expr

SUM, PRODUCT, DECORATE, NO_CONTRACTION = 129, 133, 71, 42
FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "x + -x": lambda x, y: x + -x,
    "-x / x": lambda x, y: -x / x,
    "xy + -xy": lambda x, y: x * y + -x * y,
    "xy - yx": lambda x, y: x * y - y * x,
    "x/y + x/-y": lambda x, y: x / y + x / -y,
    "x - y + (y - x)": lambda x, y: x - y + (y - x),
    "of functions": lambda x, y: (x * y).exp() - (y * x).exp(),
    "of choices": lambda x, y: torch.where(x > 0, x, y) - torch.where(x > 0, x, y),
    "0x": lambda x, y: (x + y) * 0.0 + 0.0 / x,
    "x == x": lambda x, y: (x + y == y + x, x < x, x * y != y * x),
    "second derivative of a norm": lambda x, y: x / y.norm() + -(x / y.norm()),
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The SPIR-V of what is compiled."""
    found: list[bytes] = []
    finish = build.Builder.finish

    def kept(self: build.Builder, progress: Any = None) -> dict[str, bytes]:
        made = finish(self, progress)
        found.extend(made.values())
        return made

    monkeypatch.setattr(build.Builder, "finish", kept)
    return found


@pytest.mark.parametrize("target", ["cpu-fp32", "gpu-fp32"])
def test_kernels_have_nothing_to_fold(target: str, kernels: list[bytes]) -> None:
    for name, form in FORMS.items():
        kernels.clear()
        compile_to_bytes(form, (torch.rand(3, 5), torch.rand(3, 5)), target=target)
        assert kernels and not sum(folding.fold(code)[1] for code in kernels), name


def test_sums_that_are_no_multiply_add_are_exact(kernels: list[bytes]) -> None:
    """NVIDIA's compiler takes a sum over two columns plus that of the negatives for 0, whatever these are, but where the sum may
    not be contracted."""
    x = torch.rand(33, 2)
    for f in (lambda x: x.sum(1) + (-x).sum(1), lambda x: (x * x).sum(1) + (-x * x).sum(1), lambda x: x.sum(0) + x[0]):
        compile_to_bytes(f, (x,), target="gpu-fp32")
    found = 0
    for code in kernels:
        module = list(spirv.instructions(list(struct.unpack(f"<{len(code) // 4}I", code))))
        exact = {i[1] for i in module if i[0] & 0xFFFF == DECORATE and i[2] == NO_CONTRACTION}
        products = {i[2] for i in module if i[0] & 0xFFFF == PRODUCT}
        sums = [i for i in module if i[0] & 0xFFFF == SUM and products.isdisjoint(i[3:])]
        assert exact.issuperset(i[2] for i in sums)
        found += len(sums)
    assert found >= 6


def test_products_of_sums_are_not_multiplied_out(kernels: list[bytes]) -> None:
    """Where NVIDIA's compiler knows both constants it computes x * 0.0125 - 104857.6 instead, whose second number is rounded."""
    for f in (lambda x: (x - 8388608.0) * 0.0125, lambda x: (x + 8388608.0) * 0.0125 + 1.0):
        for x in (torch.rand(64), torch.rand(3, 5)):  # four elements an invocation, and one
            kernels.clear()
            compile_to_bytes(f, (x,), target="gpu-fp32")
            module = [list(spirv.instructions(list(struct.unpack(f"<{len(c) // 4}I", c)))) for c in kernels]
            found = [i for code in module for i in code if i[0] & 0xFFFF == PRODUCT]
            exact = [i[1] for code in module for i in code if i[0] & 0xFFFF == DECORATE and i[2] == NO_CONTRACTION]
            assert found and {i[2] for i in found} <= set(exact)


def test_quotients_of_constants_are_known() -> None:
    """As torch has them: those of GPUs may be some units off, and whether a tap of a window counts depends on it."""
    third = expr.const(5.0) / expr.const(3.0)
    assert isinstance(third, expr.Const) and third.value == float(torch.tensor(5.0) / 3.0)
    for x, y in ((1.0, 0.0), (1e-38, 1e10), (1e38, 1e-10)):
        assert not isinstance(expr.binary("div", expr.const(x), expr.const(y)), expr.Const) or y == 0


def test_such_a_driver_would_fold_them(kernels: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above has something to find."""
    monkeypatch.setattr(expr, "_of_one_value", lambda name, x, y: None)
    for name in ("x + -x", "xy + -xy", "xy - yx", "x - y + (y - x)"):
        kernels.clear()
        compile_to_bytes(FORMS[name], (torch.rand(3, 5), torch.rand(3, 5)), target="cpu-fp32")
        assert sum(folding.fold(code)[1] for code in kernels), name
