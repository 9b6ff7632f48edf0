"""What is compiled does not depend on what was compiled before: programs name their sizes alike, and differ in their bounds."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.export import Dim

from lapilli.capture import capture
from lapilli.codegen.select import schedule_of, write_all
from lapilli.ir import integer
from lapilli.legalize.passes import prepare
from lapilli.lower import lower
from lapilli.target import ANY, GPU, Target

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "padded convolution": lambda x: F.conv1d(x[:, None], torch.ones(2, 1, 3), padding=1),
    "strided": lambda x: x[:, ::2].cumsum(1),
    "repeated and cut": lambda x: x.repeat(1, 2)[:, 1:] + 1,
    "halves": lambda x: torch.cat([x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]], 1).flip(1),
    "shifted": lambda x: x.roll(1, 1) - x,
    "padded": lambda x: F.pad(x, (2, 1)).sum(1),
    "windows": lambda x: x.unfold(1, 3, 1).amax(-1),
}


class One(torch.nn.Module):
    def __init__(self, f: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(x)


BOUNDS = ((4, 7), (4, 8), (4, 4096), (5, 9))


def kernels(name: str, bounds: tuple[int, int], target: Target) -> list[str]:
    low, high = bounds
    shapes = ({1: Dim("n", min=low, max=high)},)
    module = prepare(capture(One(FUNCTIONS[name]).eval(), (torch.zeros(2, low + 1),), shapes))
    written = write_all(schedule_of(lower(module), target))
    return [f"{w.source} {w.groups} {w.params}" for w in written.values()]


def forget() -> None:
    """As a new process would begin."""
    for f in vars(integer).values():
        if hasattr(f, "cache_clear"):
            f.cache_clear()


@pytest.mark.part(2)
@pytest.mark.parametrize("target", [ANY, GPU], ids=lambda t: t.name)
def test_kernels_are_the_same_in_any_order(target: Target) -> None:
    cases = list(itertools.product(FUNCTIONS, BOUNDS))
    found = {}
    for case in cases:
        forget()
        found[case] = kernels(*case, target)
    random.Random(3).shuffle(cases)
    for case in cases:
        assert kernels(*case, target) == found[case], case
    # Bounds do matter here, or the test would see nothing.
    assert any(len({str(found[name, b]) for b in BOUNDS}) > 1 for name in FUNCTIONS)


PLAIN: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), ((1, 4, 64, 64),) * 3),
    "layer norm": (lambda x: F.layer_norm(x, (768,)), ((3, 768),)),
    "softmax": (lambda x: (x * 2).softmax(-1) + x, ((5, 100),)),
    "bicubic": (lambda x: F.interpolate(x, size=(5, 7), mode="bicubic"), ((1, 2, 9, 9),)),
    "windows": (lambda x: F.avg_pool2d(x, 3, 1).relu(), ((1, 2, 9, 9),)),
}


@pytest.mark.parametrize("target", [ANY, GPU], ids=lambda t: t.name)
@pytest.mark.parametrize("name", PLAIN)
def test_kernels_are_the_same_whatever_is_collected(name: str, target: Target) -> None:
    """Expressions are shared while they live: kernels may not depend on how long that is, nor on how many there were."""
    f, shapes = PLAIN[name]

    class Many(torch.nn.Module):
        def forward(self, *x: torch.Tensor) -> torch.Tensor:
            return f(*x)

    module = prepare(capture(Many().eval(), tuple(torch.zeros(s) for s in shapes)))

    def written() -> list[str]:
        return [f"{w.source} {w.groups} {w.params}" for w in write_all(schedule_of(lower(module), target)).values()]

    before = gc.get_threshold()
    found = []
    try:
        for threshold in (0, 1, 3, 50, 700):
            gc.set_threshold(threshold, 2, 2)
            found.append(written())
    finally:
        gc.set_threshold(*before)
    assert all(kernels == found[0] for kernels in found[1:])
