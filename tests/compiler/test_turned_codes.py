"""Constant matrices of codes: turned once, and packed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from agreement import relative_error
from torch import Tensor, nn

from lapilli.capture import capture
from lapilli.code_operators import DEQUANTIZE, UNPACK
from lapilli.graph.module import Module
from lapilli.ir import interpret
from lapilli.legalize.passes import prepare
from lapilli.lower import lower

aten = torch.ops.aten


class Weight(nn.Module):
    """A matrix of codes [k, n] with a scale and a zero point of each column, or of each block of a column."""

    codes: Tensor
    scale: Tensor
    zero: Tensor

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor], codes: Tensor, block: int) -> None:
        super().__init__()
        k, n = codes.shape
        size = (n,) if block == -1 else (-(-k // block), n)
        self.use, self.block = use, [block, 1]
        self.register_buffer("codes", codes)
        self.register_buffer("scale", torch.rand(size) + 0.5)
        self.register_buffer("zero", torch.randint(-3, 4, size, dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, DEQUANTIZE(self.codes, self.scale, self.zero, self.block, torch.float32))


def check(module: Module, model: nn.Module, x: Tensor) -> None:
    (got,) = interpret.run(lower(module), [x.numpy()])
    assert relative_error(got, model(x)) <= 1e-6


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": torch.matmul,
    "transposed": lambda x, w: torch.nn.functional.linear(x, w.transpose(-2, -1)),
    "permuted": lambda x, w: torch.nn.functional.linear(x, w.permute(1, 0)),
    "twice": lambda x, w: x @ w + torch.nn.functional.linear(x, w.t()),
}


@pytest.mark.parametrize("block", [-1, 4])
@pytest.mark.parametrize("use", USES)
def test_matrices_are_turned_as_codes(use: str, block: int) -> None:
    model, x = Weight(USES[use], torch.randint(-100, 100, (10, 6), dtype=torch.int8), block), torch.randn(3, 10)
    module = prepare(capture(model, (x,)))
    check(module, model, x)
    targets = [n.target for n in module.graph.nodes]
    assert targets.count(DEQUANTIZE) == 1 and aten.linear.default in targets
    assert not {aten.matmul.default, aten.mm.default, aten.t.default, aten.permute.default} & set(targets)
    assert not any(v.shape == (10, 6) for v in module.constants.values())


def test_a_permutation_that_keeps_its_axes_turns_nothing() -> None:
    model = Weight(lambda x, w: x + w.permute(0, 1), torch.randint(-100, 100, (10, 6), dtype=torch.int8), -1)
    x = torch.randn(10, 6)
    check(prepare(capture(model, (x,))), model, x)


@pytest.mark.parametrize("low", [-128, -8, 0, 3, 112, 120, 240])
def test_sixteen_neighbouring_codes_are_packed(low: int) -> None:
    """Also those beyond 127, which are unpacked to uint8."""
    kind = torch.int8 if low < 112 else torch.uint8
    codes = (torch.arange(96) % 16 + low).to(kind).reshape(12, 8)
    model, x = Weight(torch.matmul, codes, -1), torch.randn(3, 12)
    module = prepare(capture(model, (x,)))
    check(module, model, x)
    assert any(n.target is UNPACK for n in module.graph.nodes)
