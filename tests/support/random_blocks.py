"""Random blocks of mobile networks on matrix units: a 1x1 convolution and the depthwise one that reads it, which are one kernel
(codegen/expanded.py). Sizes, strides, paddings, what follows either, infinities, values that are read elsewhere.

    python tests/support/random_blocks.py [--seconds 60] [--seed 0] [--plan gpu-fp16-matrix] [--gpu-plans]
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import random_cases
import torch
from taken_plan import taken_plan
from torch import Tensor, nn

import lapilli
from lapilli.codegen import expanded

_ENDS = (nn.ReLU6, nn.SiLU, nn.Hardswish, nn.Identity, nn.LeakyReLU, nn.GELU)


@dataclass(frozen=True)
class Case:
    """read: channels of the image; kernel, stride, padding: of the depthwise convolution; ends: what follows the convolutions.
    residual: whether something as large as the result is added to it. elsewhere: whether something else reads what is between the
    convolutions. strange: infinities and NaN in the image, in the weights of either convolution.
    """

    images: int
    read: int
    channels: int
    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    ends: tuple[int, int]
    biases: tuple[bool, bool]
    residual: bool
    elsewhere: bool
    channels_last: bool
    strange: tuple[int, int, int]


def case(seed: int) -> Case:
    r = random.Random(seed)
    kernel = r.choice(((3, 3), (3, 3), (5, 5), (1, 3), (3, 1), (2, 2), (5, 3)))
    size = r.choice((1, 2, 5, 7, 8, 13, 14, 20)), r.choice((1, 3, 7, 11, 14, 16, 28))
    padding = tuple(r.choice((0, k // 2, k - 1)) for k in kernel)
    padding = tuple(max(p, (k - s + 1) // 2) for p, k, s in zip(padding, kernel, size, strict=True))
    strange = r.random() < 0.25
    return Case(
        r.choice((1, 1, 2, 3)), r.choice((8, 16, 24, 40, 64, 96, 3, 20)), 16 * r.randint(1, 6), size, kernel,
        (r.choice((1, 1, 2)), r.choice((1, 1, 2, 3))), (padding[0], padding[1]),
        (r.randrange(len(_ENDS)), r.randrange(len(_ENDS))), (r.random() < 0.8, r.random() < 0.8), r.random() < 0.2,
        r.random() < 0.15, r.random() < 0.3, (r.randrange(3), r.randrange(3), r.randrange(3)) if strange else (0, 0, 0),
    )  # fmt: skip


class Block(nn.Module):
    def __init__(self, given: Case) -> None:
        super().__init__()
        self.given = given
        c = given.channels
        self.first = nn.Conv2d(given.read, c, 1, bias=given.biases[0])
        self.second = nn.Conv2d(c, c, given.kernel, given.stride, given.padding, groups=c, bias=given.biases[1])
        self.ends = nn.ModuleList(_ENDS[i]() for i in given.ends)
        with torch.no_grad():
            for convolution, count in zip((self.first, self.second), given.strange[1:], strict=True):
                _spoil(convolution.weight, count)
            for p in self.parameters():
                p.copy_(p.half())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        between = self.ends[0](self.first(x))
        y = self.ends[1](self.second(between))
        if self.given.residual:
            y = y + x.mean((1, 2, 3), keepdim=True) * torch.ones_like(y)
        return (y, between.amax((2, 3))) if self.given.elsewhere else (y,)


def _spoil(x: Tensor, count: int) -> None:
    values = float("inf"), float("-inf"), float("nan")
    for k in range(count):
        x.view(-1)[int(torch.randint(x.numel(), ()))] = values[k % 3]


def check(seed: int, plan: str) -> list[str]:
    """Compares a case with torch in float64, and with two kernels; the names of its kernels. Raises AssertionError."""
    given = case(seed)
    torch.manual_seed(seed)
    model = Block(given).eval()
    x = torch.randn(given.images, given.read, *given.size)
    _spoil(x, given.strange[0])
    x = x.half().float()
    if given.channels_last:
        x = x.to(memory_format=torch.channels_last)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expanded, "_WORTH", 100.0)  # whether it pays or not
        with lapilli.compile(model, (x,), target=plan, precision="fp16", fallback="error") as program:
            found, again, names = program(x), program(x), kernels(program)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expanded, "bands", lambda *_: [])
        with lapilli.compile(model, (x,), target=plan, precision="fp16", fallback="error") as program:
            apart = program(x)
            assert "expanded_depthwise" not in kernels(program)
    with torch.no_grad():
        wanted = model.double()(x.double())
    for y, same, two, exact in zip(found, again, apart, wanted, strict=True):
        assert torch.equal(y.nan_to_num(), same.nan_to_num()), f"{given}: runs differ"
        assert torch.equal(y.isnan(), two.isnan()) and torch.equal(y.isinf(), two.isinf()), f"{given}: other numbers"
        real = y.isfinite() & two.isfinite()
        if not any(given.strange):
            assert bool(real.all()), f"{given}: not finite"
            # What is between is rounded to halves, as a result is, and weights are summed up: two roundings of 2^-11.
            error = float((y.double() - exact).norm() / exact.norm().clamp(min=1e-3))
            assert error < 2**-10, f"{given}: {error}"
        scale = float(two[real].abs().max()) if bool(real.any()) else 1.0
        torch.testing.assert_close(
            y[real].double(), two[real].double(), rtol=2**-8, atol=2**-8 * scale, msg=lambda text: f"{given}: {text}"
        )
    copied = given.size[1] == 1 or given.read % 8 != 0
    assert given.elsewhere or copied or "expanded_depthwise" in names, f"{given}: {names}"
    assert not given.elsewhere or "expanded_depthwise" not in names, f"{given}: what another kernel reads is not stored"
    return [n for n in names if "depthwise" in n]


def kernels(program: lapilli.Program) -> list[str]:
    plan = taken_plan(program)
    return [d.kernel for d in plan.run]


if __name__ == "__main__":
    random_cases.main(__doc__, "blocks", ("gpu-fp16-matrix",), check)
