"""The generator of random programs itself, and what it has found, as tests of the class. `make test` runs programs as well."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from whole_programs import families, generate, networks, reference, shrink
from whole_programs.program import Leaf, Program, Step, defined

import lapilli

assert families.FAMILIES and networks  # all families are there


@pytest.mark.parametrize("seed", range(5))
def test_programs_are_what_their_seed_says(seed: int) -> None:
    """The same each time, as text too, and as Python gives what its steps give."""
    program = generate.program(seed)
    assert program == generate.program(seed) == Program.of_json(program.to_json())
    n = program.sizes[0]
    values = program.make(n)
    whole = defined(program.function(), "program")(*values.values())
    wanted, _ = reference.native(program, program.make(n))
    for one, other in zip(whole, wanted, strict=True):
        assert one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())


def _program(text: str, *leaves: Leaf) -> Program:
    return Program(0, leaves, (Step(("v",), text, tuple(leaf.name for leaf in leaves)),), ("v",))


def test_what_may_differ_and_what_may_not() -> None:
    """Sums may differ by their rounding, comparisons of what is nearly equal may be one or the other, the rest may not."""
    x, y = Leaf("x", (4, 50), "float32", "normal", 1), Leaf("y", (6,), "float32", "ties", 2)
    (total, *_) = reference.expected(_program("{0}.sum(1)", x), 5)
    assert bool((total.bound > 0).all() and (total.bound < 1e-4).all())
    wrong = total.value.float()
    assert reference.complaint(wrong, total, "it") is None
    wrong[2] += 1e-3
    assert "1 of 4 elements are wrong, the first at (2,)" in str(reference.complaint(wrong, total, "it"))
    assert "torch.float64" in str(reference.complaint(wrong.double(), total, "it"))
    (equal, *_) = reference.expected(_program("{0} == {0} * 3 / 3", x), 5)
    assert bool(equal.bound.isinf().any())
    (definite, *_) = reference.expected(_program("{0} > 1", y), 5)
    assert not definite.bound.any()
    (order, *_) = reference.expected(_program("{0}.topk(6).indices", replace(y, data="", seed=3)), 5)
    assert bool(order.bound.isinf().any())


def test_failures_become_small() -> None:
    """A fault that only one call of thirty has is found."""
    program = next(p for p in map(generate.program, range(100)) if any("torch.unbind" in s.text for s in p.steps[3:]))
    found = shrink.smallest(
        program, lambda p: any("torch.unbind" in s.text for s in p.steps), lambda p: list(shrink.candidates(p))
    )
    assert len(found.steps) == 1 and len(found.outputs) == 1
    assert all(size in (1, 2, 3, 4) for leaf in found.leaves for size in leaf.shape)


class _Transposed(torch.nn.Module):
    """Several transposed convolutions that are products of matrices but for positions that only the output has."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = ((1, 5, 2, 1), (4, 4, 2, 1), (8, 4, 3, 2), (4, 4, (1, 2), (0, 1)), (4, 8, 1, 0))
        for k, (channels, out, *_) in enumerate(self.sizes):
            self.register_buffer(f"w{k}", torch.randn(channels, out, 1, 1))

    def forward(self, *images: torch.Tensor) -> list[torch.Tensor]:
        return [
            F.conv_transpose2d(x, getattr(self, f"w{k}"), None, stride, 0, output_padding)
            for k, (x, (_, _, stride, output_padding)) in enumerate(zip(images, self.sizes, strict=True))
        ]


@pytest.mark.parametrize("target", ["any-fp32", "cpu-fp32", "gpu-fp32"])
def test_transposed_convolution_with_more_positions_than_its_input(gpu_plans: None, target: str) -> None:
    torch.manual_seed(0)
    model = _Transposed()
    images = tuple(torch.randn(2, channels, 3, 4) for channels, *_ in model.sizes)
    with lapilli.compile(model, images, target=target) as program:
        for found, wanted in zip(program(*images), model(*images), strict=True):
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_of_halves_in_training(dtype: torch.dtype) -> None:
    """torch's formulas convert by a copy into an empty tensor."""
    torch.compiler.reset()

    def statistics(x: torch.Tensor) -> list[torch.Tensor]:
        return [*torch.var_mean(x * 1, 2), *torch.std_mean(x * 2, 1), x.var((0, 1))]

    x = torch.arange(24).reshape(2, 3, 4).to(dtype).requires_grad_()
    for found, wanted in zip(torch.compile(statistics, backend="vulkan")(x), statistics(x), strict=True):
        torch.testing.assert_close(found, wanted)
        (one,), (other,) = (
            torch.autograd.grad(found.sum(), x, retain_graph=True),
            torch.autograd.grad(wanted.sum(), x, retain_graph=True),
        )
        torch.testing.assert_close(one, other)
