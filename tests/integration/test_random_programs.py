"""The generator of random programs itself, and what it has found, as tests of the class. `make test` runs programs as well."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from whole_programs import families, generate, networks, reference, shrink, ways
from whole_programs.program import Leaf, Program, Step, defined, dump

import lapilli
from lapilli import player

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


def _numbers(numbers: list[float]) -> Leaf:
    return Leaf("x", (len(numbers),), "float32", "literal", 0, data=dump(torch.tensor(numbers)))


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
    text = "({0} * 0.3).topk(3).indices"  # equal but for their rounding: of the three last, only the first is definite
    (order, *_) = reference.expected(_program(text, _numbers([5, 2, 2, 2, 1])), 5)
    assert order.bound.isinf().tolist() == [False, True, True]


def test_what_may_be_equal_after_rounding() -> None:
    """Two numbers within their rounding of each other, and a sum of two within its rounding of 0: computed in a device's precision
    they may be the same, though disturbed numbers never are."""
    x, third = (
        _numbers([1.0, 2.0, 4.0]),
        Leaf("y", (3,), "float32", "literal", 0, data=dump(torch.tensor([0.3, 0.6, 1.5]))),
    )
    (unequal, *_) = reference.expected(_program("{0} * 0.3 != {1}", x, third), 5)
    assert unequal.bound.isinf().tolist() == [True, True, False]
    (zero, *_) = reference.expected(
        _program("torch.logaddexp2({0}, {0}).logical_not()", _numbers([-1.0, -2.0, 1.0])), 5
    )
    assert zero.bound.isinf().tolist() == [True, False, False]
    (cancelled, *_) = reference.expected(
        _program("(({0} + 1e8) - {0} - 1e8).logical_and({0})", _numbers([1.0, 2.0])), 5
    )
    assert cancelled.bound.isinf().all(), "what is left of a sum may be 0"
    (kept, *_) = reference.expected(_program("{0} + 0.5", _numbers([float("inf"), 1.0])), 5)
    assert not kept.bound.isinf().any(), "infinity is not small beside itself"
    infinite = [float("inf"), float("-inf"), float("nan")]
    (added, *_) = reference.expected(_program("torch.logaddexp({0}, {0})", _numbers(infinite)), 5)
    assert torch.equal(added.value.nan_to_num(7), torch.tensor(infinite, dtype=torch.float64).nan_to_num(7))
    assert not added.bound.isinf().any()


def test_torchs_failures_are_alike_whatever_addresses_they_name() -> None:
    text = "BackendCompilerFailed: backend='{}' raised: s1**2 (<class 'torch.SymInt'>, {}) of <Tracer object at {}>"
    ours = ways.Outcome("fails", text.format("vulkan", 140207419805968, "0x7f8496c95e50"))
    torchs = ways.Outcome("fails", text.format("aot_eager", 139931934339856, "0x7f447130b790"))
    assert ways._is_alike(ours, torchs)
    assert not ways._is_alike(ours, ways.Outcome("fails", torchs.text.replace("s1**2", "s1**3")))


def test_changed_arguments_are_given_as_they_were() -> None:
    steps = (Step((), "{0}.add_({0})", ("x",)), Step(("v",), "{0} * 1", ("x",)))
    program = Program(0, (_numbers([3.0, 5.0]),), steps, ("v",))
    result, after = reference.expected(program, 5)
    for found in (result, after):
        assert found.value.tolist() == [6, 10] and bool((found.bound < 1e-4).all())


def test_distances_of_many_points_by_a_product() -> None:
    """As torch computes them from 26 points on: of points that are near each other there are half of the digits."""
    points = torch.linspace(1, 1.003, 30)
    (far, *_) = reference.expected(_program("torch.cdist({0}[:, None], {0}[:, None])", _numbers(points.tolist())), 5)
    assert float(far.bound[0, 29]) > 1e-5


def test_devices_may_lack_denormals_and_digits() -> None:
    """exp(-95) is a denormal, or zero; in half precision 1.0001 is 1."""
    (small, *_) = reference.expected(_program("torch.exp({0}) > 0", _numbers([-95.0, -80.0])), 5)
    assert small.bound.isinf().tolist() == [True, False]
    text, often = "{0}.mode().values", _numbers([1.0, 1.0001, 0.9999, 3.0, 3.0])
    for half in (False, True):
        (most, *_) = reference.expected(_program(text, often), 5, half)
        assert bool(most.bound > 1) is half


def test_gradients_of_what_has_them() -> None:
    """floor_divide has no derivative; what does not depend on it is compared all the same, in both orders."""
    steps = (Step(("a",), "{0} // 2", ("x",)), Step(("b",), "{0}.exp()", ("x",)), Step(("c",), "{0} * {1}", ("a", "b")))
    program = Program(0, (Leaf("x", (3,), "float32", "normal", 1),), steps, ("c", "b"))
    for order in (1, 2):
        part = reference.with_derivatives(program, order)
        assert part is not None and part.outputs == ("b",) and len(part.steps) == 1
        found = reference.expected_gradients(part, 5, order)
        assert found is not None and len(found) == 1 and bool(found[0].value.all())


def test_failures_become_small() -> None:
    """A fault that only one call of many has is found."""
    program = next(
        p
        for p in map(generate.program, range(100))
        if len(p.steps) < 30 and any("torch.unbind" in s.text for s in p.steps[3:])
    )
    found = shrink.smallest(program, lambda p: any("torch.unbind" in s.text for s in p.steps), shrink.candidates)
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
            F.conv_transpose2d(x, getattr(self, f"w{k}"), None, stride, 0, output_padding)  # type: ignore[arg-type]
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


SCALED = {
    "linear": ((1, 2, 999), dict(scale_factor=1.5)),
    "bilinear": ((1, 1, 7, 700), dict(scale_factor=(0.7, 1.3))),
    "trilinear": ((1, 2, 3, 9, 1), dict(scale_factor=1.5)),
    "bicubic": ((1, 1, 5, 600), dict(size=(3, 1000))),
    "bilinear corners": ((1, 1, 5, 600), dict(size=(1, 1001), align_corners=True)),
}


@pytest.mark.parametrize("mode", SCALED)
def test_interpolation_has_no_rounded_places(mode: str) -> None:
    """A place of float32 is wrong by its own last digits, the more the larger the image is; as a fraction of integers it is not."""
    shape, options = SCALED[mode]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.interpolate(x, mode=mode.split()[0], **options)  # type: ignore[arg-type]

    with lapilli.compile(Scaled(), (x,)) as program:
        found = program(x)
    torch.testing.assert_close(found.double(), Scaled()(x.double()), rtol=1e-6, atol=3e-6)  # torch: 2e-4


def _outer(x: torch.Tensor) -> torch.Tensor:
    return torch.kron(x, x * 2)


def test_values_of_ten_dimensions() -> None:
    """kron of five dimensions has ten on its way: between forward and backward, and between calls on the device."""
    x = torch.randn(1, 2, 1, 3, 2, requires_grad=True)
    (wanted,) = torch.autograd.grad(_outer(x).square().sum(), x)
    torch.compiler.reset()
    (found,) = torch.autograd.grad(torch.compile(_outer, backend="vulkan")(x).square().sum(), x)
    torch.testing.assert_close(found, wanted)

    class Whole(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(1, 2, 1, 2, 1, 3, 1, 2, 1, 1) * 2

    y = torch.randn(2, 2, 3, 2)
    with lapilli.compile(Whole(), (y,)) as program:
        torch.testing.assert_close(program(y), Whole()(y))


def test_too_many_dimensions_are_refused() -> None:
    class Whole(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[(None,) * 15] * 2

    with pytest.raises(
        lapilli.CompileError, match="has 17 dimensions; a program takes and gives at most 16. Flatten some"
    ):
        lapilli.compile(Whole(), (torch.randn(2, 3),))
    assert player.MAX_RANK == player._player()[1].LAPILLI_MAX_RANK


FUNCTIONS = {
    f.__name__: f for f in (torch.asin, torch.acos, torch.atan, torch.sinh, torch.asinh, torch.acosh, torch.atanh)
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_a_variance(name: str) -> None:
    """A branch before the bits of a result's sign: llvmpipe gave 2e-41 for asinh(var(x)), and 9e-44 for asin."""

    class Spread(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return FUNCTIONS[name](x.var(1) * 0.9 + (name == "acosh"))

    x = torch.tensor([[1.4, 0.9, 1.3, 0.9], [0.5, -0.7, 0.1, 1.0]])
    with lapilli.compile(Spread(), (x,)) as program:
        torch.testing.assert_close(program(x), Spread()(x))


def test_constants_as_results_beside_operators_of_the_cpu() -> None:
    """They are tensors, and the caller's own."""
    torch.compiler.reset()

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tensor([True, False]))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.logical_not(self.mask), torch.linalg.eigvalsh(x)  # type: ignore[arg-type]

    x, model = torch.eye(3), Whole()
    compiled = torch.compile(model, backend="vulkan")
    with lapilli.compile(model, (x,)) as program:
        for run in (compiled, program):
            for _ in range(2):
                found, values = run(x)
                assert found.tolist() == [False, True] and values.tolist() == [1, 1, 1]
                found.logical_not_()


def test_open_sizes_that_are_one() -> None:
    """(h - 3) // 2 + 1 is 1 here, which torch has tested and the expression does not say: it is repeated all the same."""
    torch.compiler.reset()

    def repeated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        v = F.conv2d(x, w, stride=2)
        return v * v.repeat_interleave(2, 2) + v.expand(-1, -1, 2, -1)

    compiled = torch.compile(repeated, backend="vulkan", dynamic=True)
    for h, width in ((4, 6), (3, 9), (4, 5)):
        x, w = torch.randn(2, 3, h, width), torch.randn(4, 3, 3, 5)
        torch.testing.assert_close(compiled(x, w), repeated(x, w), rtol=1e-4, atol=1e-4)


def test_what_is_only_noise_has_wide_bounds() -> None:
    """One over the deviation of numbers that bfloat16 hardly tells apart; a tenth that float16 rounds; equals that mode takes."""
    near = Leaf("x", (6,), "bfloat16", "literal", 0, data=dump((1 + torch.arange(6) / 256).bfloat16()))
    (noise, *_) = reference.expected(_program("1 / torch.i0({0} / 16).var()", near), 5)
    assert noise.bound > noise.value / 2
    (rounded, *_) = reference.expected(
        _program(
            "torch.linspace(-0.1, 0.9, 6, dtype={0}.dtype) + 0 * {0}",
            replace(near, dtype="float16", data=dump(torch.zeros(6).half())),
        ),
        5,
    )
    assert (rounded.bound >= (torch.linspace(-0.1, 0.9, 6).half().double() - rounded.value).abs()).all()
    (place, *_) = reference.expected(_program("{0}.mode(0)[1] + 0 * {0}[0]", _numbers([0.5, 0.25, 0.5])), 5)
    assert place.bound > 2, "the first or the last"
