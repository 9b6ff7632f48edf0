"""Gradients of the weights of depthwise convolutions, and of convolutions in small groups, which are sums over images
(codegen/depthwise_gradient.py): for every class of devices, and that what lies outside of an image is no term of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from agreement import FLOAT_BOUND, Function, relative_error
from plans import plan
from taken_plan import taken_plan
from torch import Tensor

import lapilli
from lapilli.target import KNOWN, TARGETS, of_device

BACKWARD = torch.ops.aten.convolution_backward
PLANS = ["cpu-fp32", "any-fp32", "any-fp32-few", "gpu-fp32", "gpu-fp16", "gpu-fp16-matrix"]


@dataclass(frozen=True)
class Case:
    """A convolution; outs: results of a group. places: as arguments of torch's convolutions, for each dimension."""

    batch: int
    groups: int
    image: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    channels: int = 1
    outs: int = 1
    transposed: bool = False

    @property
    def how(self) -> tuple[list[int], list[int], list[int], bool, list[int], int]:
        n = len(self.image)
        stride, padding, dilation = self.stride or (1,) * n, self.padding or (0,) * n, self.dilation or (1,) * n
        return list(stride), list(padding), list(dilation), self.transposed, [0] * n, self.groups

    def arguments(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
        """The result's gradient, the image and the weight."""
        r = torch.Generator().manual_seed(sum(self.image) + self.groups)
        x = torch.randn(self.batch, self.groups * self.channels, *self.image, generator=r)
        shape = (self.groups * self.outs, self.channels)
        if self.transposed:
            shape = (self.groups * self.channels, self.outs)
        w = torch.randn(*shape, *self.kernel, generator=r)
        g = torch.randn(torch.ops.aten.convolution(x, w, None, *self.how).shape, generator=r)
        return g.to(dtype), x.to(dtype), w.to(dtype)

    def gradient(self, g: Tensor, x: Tensor, w: Tensor) -> Tensor:
        found: Tensor = BACKWARD(g, x, w, None, *self.how, [False, True, False])[1]
        return found


CASES = {
    "3x3": Case(3, 8, (7, 9), (3, 3), padding=(1, 1)),
    "one image": Case(1, 12, (14, 14), (3, 3), padding=(1, 1)),
    "channels in no fours": Case(2, 13, (6, 7), (3, 3), padding=(1, 1)),
    "stride": Case(2, 8, (9, 12), (3, 3), (2, 2), (1, 1)),
    "strides and dilations": Case(3, 5, (15, 17), (3, 2), (2, 3), (2, 1), (3, 2)),
    "5x5": Case(1, 16, (11, 6), (5, 5), padding=(2, 2)),
    "7x7": Case(2, 8, (13, 10), (7, 7), padding=(3, 3)),
    "wider than a line of taps": Case(1, 8, (5, 30), (2, 19), padding=(1, 9)),
    "larger than the image": Case(2, 4, (3, 3), (5, 5), padding=(3, 3)),
    "1x1": Case(2, 8, (5, 5), (1, 1)),
    "no padding": Case(1, 8, (9, 9), (3, 3)),
    "more padding than taps": Case(1, 4, (4, 3), (2, 2), padding=(3, 3)),
    "one place": Case(3, 8, (3, 3), (3, 3)),
    "a line": Case(2, 6, (50,), (9,), padding=(4,)),
    "a line with gaps": Case(2, 6, (50,), (4,), (2,), (3,), (5,)),
    "a volume": Case(2, 6, (4, 5, 7), (3, 3, 3), padding=(1, 1, 1)),
    "a volume with strides": Case(1, 8, (7, 6, 9), (3, 2, 3), (2, 1, 2), (1, 0, 2), (1, 2, 1)),
    "several results a channel": Case(2, 5, (6, 7), (3, 3), padding=(1, 1), outs=3),
    "groups of 3": Case(3, 4, (6, 7), (3, 3), padding=(1, 1), channels=3, outs=3),
    "more channels than results": Case(2, 3, (8, 7), (3, 3), (2, 2), (1, 1), channels=16, outs=2),
    "odd groups that are large": Case(2, 2, (8, 7), (3, 3), padding=(1, 1), channels=9, outs=11),
    "transposed": Case(2, 6, (5, 6), (3, 3), (2, 2), (1, 1), transposed=True),
    "transposed, two results a channel": Case(2, 6, (5, 6), (4, 4), (2, 2), (1, 1), outs=2, transposed=True),
    "sums of many parts": Case(2, 4, (96, 120), (3, 3), padding=(1, 1)),
}  # fmt: skip


@pytest.mark.part(6)
@pytest.mark.usefixtures("on_any_device", "small_tiles")
@pytest.mark.parametrize("target", PLANS)
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, target: str) -> None:
    case, half = CASES[name], "fp16" in target
    given = case.arguments(torch.float16 if half else torch.float32)
    if len(case.image) == 2 and case.batch > 1:
        given = tuple(t.to(memory_format=torch.channels_last) for t in given)  # type: ignore[assignment]
    with lapilli.compile(
        Function(case.gradient), given, target=target, precision="fp16" if half else "fp32", fallback="error"
    ) as program:
        found = program(*given)
        names = [d.kernel for d in taken_plan(program).run]
    wanted = case.gradient(*(t.double() for t in given))
    assert relative_error(found, wanted) < (2**-11 if half else FLOAT_BOUND)
    assert not any(name.startswith("generic") for name in names), names
    if name != "odd groups that are large":
        assert "depthwise_gradient" in names


def exact(g: Tensor, x: Tensor, kernel: Sequence[int], stride: int, padding: int) -> Tensor:
    """By the terms whose element of the image exists. (torch may multiply zeros around an image, as it has several ways.)"""
    found = torch.zeros(x.shape[1], 1, *kernel, dtype=torch.float64)
    for tap in itertools.product(*map(range, kernel)):
        a, b = x.double(), g.double()
        for d, k in enumerate(tap, 2):
            at = torch.arange(g.shape[d]) * stride - padding + k
            inside = (at >= 0) & (at < x.shape[d])
            a, b = a.index_select(d, at[inside]), b.index_select(d, inside.nonzero()[:, 0])
        found[(..., *tap)] = (a * b).sum([0, *range(2, x.dim())])[:, None]
    return found


@pytest.mark.usefixtures("on_any_device", "small_tiles")
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("target", ["cpu-fp32", "any-fp32", "gpu-fp32"])
@pytest.mark.parametrize("stride", [1, 2])
def test_what_is_outside_is_no_term(stride: int, target: str, is_open: bool) -> None:
    case = Case(2, 8, (9, 14), (3, 3), (stride,) * 2, (1, 1))
    g, x, w = case.arguments()
    g[0, 1, 0, 0], g[1, 2, -1, 3], g[0, 3, 2, -1], x[1, 4, 0, 5], x[0, 5, 3, 3] = (
        torch.inf, -torch.inf, torch.nan, torch.inf, torch.nan,
    )  # fmt: skip
    batch: Any = ({0: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO}, None) if is_open else None
    with lapilli.compile(
        Function(case.gradient), (g, x, w), target=target, dynamic_shapes=(batch,) if is_open else None
    ) as program:
        found = program(g, x, w).double()
    wanted = exact(g, x, case.kernel, stride, 1)
    assert torch.equal(found.isnan(), wanted.isnan()) and 0 < wanted.isnan().sum() < wanted.numel() / 2
    assert torch.equal(found.isfinite(), wanted.isfinite())
    assert relative_error(found.nan_to_num(0, 0, 0), wanted.nan_to_num(0, 0, 0)) < FLOAT_BOUND


@pytest.mark.parametrize("target", [*PLANS, "h100"])
def test_a_part_is_no_long_sum(target: str) -> None:
    """A large image has parts of few rows, and small ones have parts that take no more memory than they do."""
    device = of_device(KNOWN[target], half=True, matrix=True) if target in KNOWN else TARGETS[target]
    for case in (Case(32, 64, (112, 112), (3, 3), padding=(1, 1)), Case(4, 64, (7, 7), (7, 7), padding=(3, 3))):
        schedule = plan(Function(case.gradient), *case.arguments(), target=device)
        (parts,) = [t for t in schedule.order.run if t.reason == "parts of a long sum"]
        count = parts.out.shape[0].const
        places = case.batch * case.image[0] * case.image[1]
        assert count * 8192 >= places and count * case.kernel[0] * case.kernel[1] <= places
