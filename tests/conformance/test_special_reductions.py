"""Reductions, scans and transposed convolutions of numbers at the ends of the range, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import as_gpu
import pytest
import torch
from agreement import Function
from torch import Tensor
from torch.nn import functional as F

import lapilli
from lapilli import autoload

autoload.register()
INF, NAN = float("inf"), float("nan")
EPS = 2.0**-24


def compiled(f: Callable[..., Any], *tensors: Tensor, target: str | None = None) -> Any:
    with lapilli.compile(Function(f), tensors, target=target) as program:
        return program(*tensors)


@pytest.fixture(params=["gpu-fp32", "cpu-fp32"])
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    as_gpu.on_any_device(monkeypatch.setattr)
    return str(request.param)


def spreads(x: Tensor) -> tuple[Tensor, ...]:
    along = {"dim": -1, "keepdim": True, "correction": 0}
    return (
        *torch.std_mean(x, -1), *torch.var_mean(x, -1), *torch.std_mean(x), *torch.var_mean(x, **along),
        x.std(**along), x.var(-1), x.var(), x.std(),
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 5), (4, 300), (2, 20_000)], ids=str)
def test_squares_that_overflow(target: str, shape: tuple[int, ...]) -> None:
    """The sum of squares is infinite, the variance is not; in rows of one kernel, and of several. Beside it, rows with infinite
    variances but finite roots, and ordinary ones."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x[0] *= 1e19
    x[1] *= 3e36 if len(x) > 3 else 1.0
    for f in (spreads, lambda x: spreads(x[-1:])):
        for k, (ours, exact) in enumerate(zip(compiled(f, x, target=target), f(x.double()), strict=True)):
            relative = EPS * shape[-1] ** 0.5 * 8
            scale = x.abs().max().item() * 1e-6 if f is spreads else 1e-6  # means next to zero
            torch.testing.assert_close(ours, exact.float(), rtol=relative, atol=scale, msg=lambda m, k=k: f"{k}: {m}")


@pytest.mark.parametrize("rows", [3, 8, 60, 3000, 20_000])
def test_equal_elements_have_no_variance(target: str, rows: int) -> None:
    """Although their sum is rounded: a root's gradient, which is masked at 0, would be any number."""
    x = torch.rand(1, 20, generator=torch.Generator().manual_seed(2)).expand(rows, -1).contiguous()
    for spread in compiled(lambda x: (x.std(0), x.var(0), x.T.contiguous().std(1)), x, target=target):
        assert (spread == 0).all()
    if rows < 100:
        given = x.clone().requires_grad_()
        torch.compile(lambda x: x.std(0), backend="vulkan")(given).sum().backward()
        assert (given.grad == 0).all()


def test_deviations_of_numbers_that_are_far_apart(target: str) -> None:
    """Their differences are infinite."""
    x = torch.tensor(
        [[2e38, -2e38, 2e38, -2e38], [1e30, 1e30, 1e30, 1e30], [3e38, 3e38, 3e38, 3e38], [1e35, 0.0, 0.0, 0.0]]
    )
    ours = compiled(lambda x: (x.std(-1, correction=0), x.var(-1)), x, target=target)
    for found, exact in zip(ours, (x.double().std(-1, correction=0), x.double().var(-1)), strict=True):
        torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=0)


def test_sums_behind_a_computed_bound(target: str) -> None:
    x, order = torch.randn(40, 40), torch.randperm(40)
    f = lambda x, i: torch.diagonal(x.tril()[i]).sum()  # noqa: E731
    torch.testing.assert_close(compiled(f, x, order, target=target), f(x, order), rtol=1e-5, atol=1e-5)


def test_means_beside_infinity_and_nan() -> None:
    x = torch.tensor([[1.0, INF, 2.0], [INF, -INF, 0.0], [NAN, 1.0, 2.0], [-0.0, 0.0, 0.0]])
    for name in ("std", "var"):
        spread, mean = compiled(lambda x, name=name: getattr(torch, f"{name}_mean")(x, 1), x)
        torch.testing.assert_close(spread, getattr(x, name)(1), equal_nan=True)
        torch.testing.assert_close(mean, x.mean(1), equal_nan=True)
    assert all(t.isnan().all() for t in compiled(lambda x: torch.std_mean(x[:, :1], 1, correction=1), x)[:1])
    assert all(t.isnan().all() for t in compiled(lambda x: torch.var_mean(x[:, :0], 1), x))


def test_gradients_of_standard_deviations() -> None:
    """Of numbers whose squares overflow, eagerly and compiled."""
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(2)) * torch.tensor([[1e25], [1e-3], [1.0]])
    exact = x.double().requires_grad_()
    torch.std_mean(exact, dim=1)[0].sum().backward()
    for device in ("cpu", "vulkan"):
        own = x.detach().clone().to(device).requires_grad_()
        f = torch.compile(torch.std_mean, backend="vulkan") if device == "cpu" else torch.std_mean
        f(own, dim=1)[0].sum().backward()
        torch.testing.assert_close(own.grad.cpu(), exact.grad.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 3, 17, 128, 129, 300, 17_000])
def test_products_that_overflow_on_the_way(target: str, n: int) -> None:
    g = torch.Generator().manual_seed(n)
    x = torch.exp2(torch.rand(5, n, generator=g) - 0.5)
    large = min(1e30, 10 ** (200 / n))  # products remain far below float64's limit, and far above float32's
    x[0, : n // 2] *= large
    x[0, n // 2 :] /= large
    x[1] = 1.4  # all significands at the upper end
    x[2, 0], x[2, n // 2] = INF, 1e-40
    x[3, n // 2] = 0.0
    x[4] = -0.71
    bound = 4 * n * EPS
    exact = x.double().prod(1).float()
    torch.testing.assert_close(compiled(lambda x: x.prod(1), x, target=target), exact, rtol=bound, atol=1e-37)
    whole = x[3:].reshape(1, 2, n)
    torch.testing.assert_close(
        compiled(lambda x: (x.prod(), x.prod(1, keepdim=True)), whole, target=target),
        (whole.prod(), whole.double().prod(1, keepdim=True).float()),
        rtol=bound,
        atol=1e-37,
    )
    if n <= 300:
        running = compiled(lambda x: x.cumprod(1), x, target=target)
        torch.testing.assert_close(running, x.double().cumprod(1).float(), rtol=bound, atol=1e-37)


def test_products_of_nothing_and_of_special_values() -> None:
    x = torch.tensor([[INF, 0.0, 1.0], [NAN, 2.0, 3.0], [-INF, 2.0, -1e-45], [1e-45, 1e38, 1e38], [3.4e38, 10.0, -0.5]])
    f = lambda x: (x.prod(1), x.cumprod(1), x[:, :0].prod(1), x.half().prod(0), x.prod(1, dtype=torch.float64))  # noqa: E731
    for ours in (compiled(f, x), [t.cpu() for t in f(x.to("vulkan"))]):
        exact = x.double().prod(1)
        torch.testing.assert_close(ours[0], exact.float(), equal_nan=True)
        torch.testing.assert_close(ours[1], x.double().cumprod(1).float(), equal_nan=True)
        assert ours[2].tolist() == [1.0] * 5
        torch.testing.assert_close(ours[3], x.half().double().prod(0).half(), equal_nan=True)


@pytest.mark.part(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dimensions", [1, 2])
def test_transposed_convolutions_with_infinite_weights(dimensions: int, dtype: torch.dtype) -> None:
    """Neither the zeros of the padding nor those between elements meet the weights, be they constants or given in a run."""
    g = torch.Generator().manual_seed(3)
    f = getattr(F, f"conv_transpose{dimensions}d")
    x, w = (torch.randn(s + (5,) * dimensions, generator=g).to(dtype) for s in ((2, 4), (4, 3)))
    w.view(-1)[0], w.view(-1)[37], w.view(-1)[-1] = INF, -INF, NAN
    grouped = w[:, :2]
    for weight, settings in (
        (w, {"padding": 1}), (w, {}), (w, {"padding": 4}), (w, {"stride": 2, "padding": 1}), (w, {"dilation": 2}),
        (grouped, {"padding": 2, "groups": 2}), (w.nan_to_num(1, 1, 1), {"padding": 1}),
    ):  # fmt: skip
        expected = f(
            x.double(), weight.double(), **settings
        ).float()  # in float32, torch's own meets zeros with a stride
        known = compiled(lambda x, weight=weight, settings=settings: f(x, weight, **settings), x)
        given = compiled(lambda x, w, settings=settings: f(x, w, **settings), x, weight)
        eager = f(x.to("vulkan"), weight.to("vulkan"), **settings).cpu()
        bound = 1e-5 if dtype is torch.float32 else 2.0**-10
        for ours in (known, given, eager):
            torch.testing.assert_close(ours.float(), expected, rtol=bound, atol=60 * bound, equal_nan=True)


def test_interpolation_beside_infinity() -> None:
    """lerp begins at the nearer end; the pixel at a border is its own neighbour nowhere."""
    a, b = torch.tensor([-INF, -INF, 1.0, 2.0, 3.0]), torch.tensor([1.0, -INF, -INF, INF, 1e30])
    for weight in (0.0, 0.25, 0.5, 0.75, 1.0):
        expected = torch.lerp(a, b, weight)
        torch.testing.assert_close(compiled(lambda a, b, w=weight: torch.lerp(a, b, w), a, b), expected, equal_nan=True)
        torch.testing.assert_close(torch.lerp(a.to("vulkan"), b.to("vulkan"), weight).cpu(), expected, equal_nan=True)
    rows = torch.tensor([[-INF, -INF, 1.0, 0.5, 2.0], [INF, 1.0, 2.0, -3.0, 4.0]])
    torch.testing.assert_close(rows.to("vulkan").quantile(0.25, 1).cpu(), rows.quantile(0.25, 1), equal_nan=True)
    image = torch.randn(1, 2, 9, 10, generator=torch.Generator().manual_seed(4))
    image[0, 0, 0, 0], image[0, 1, -1, -1] = -INF, INF
    for size in ((5, 13), (18, 20), (9, 20), (4, 10)):  # torch does not read neighbours along what keeps its size
        expected = F.interpolate(image, size=size, mode="bilinear")
        ours = F.interpolate(image.to("vulkan"), size=size, mode="bilinear").cpu()
        torch.testing.assert_close(ours, expected, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_a_scale_does_not_count_where_the_size_stays() -> None:
    for n in (2, 3, 4, 5):
        x = torch.arange(float(n)).reshape(1, 1, n)
        expected = F.interpolate(x, scale_factor=1.25, mode="linear")
        torch.testing.assert_close(F.interpolate(x.to("vulkan"), scale_factor=1.25, mode="linear").cpu(), expected)
        torch.testing.assert_close(compiled(lambda x: F.interpolate(x, scale_factor=1.25, mode="linear"), x), expected)


def test_bilinear_products_beside_infinity(target: str) -> None:
    """(x W) y, in torch's order: the sum of all products has infinities of both signs where this has one."""
    torch.manual_seed(4)
    x, y, w = torch.randn(6, 4), torch.randn(6, 5), torch.randn(3, 4, 5)
    x[0, 2], x[1, 1], y[2, 3], y[3, 0], x[4, 3], y[4, 4], x[5, 0] = INF, -INF, INF, -INF, -INF, INF, NAN
    wanted = F.bilinear(x.double(), y.double(), w.double()).float()
    assert wanted.isinf().sum() == 6
    for ours in (compiled(F.bilinear, x, y, w, target=target), F.bilinear(*(t.to("vulkan") for t in (x, y, w))).cpu()):
        torch.testing.assert_close(ours, wanted, equal_nan=True)


@pytest.mark.parametrize("sizes", [(300.0, 300.0, 1e-4), (1e-4, 1e-4, 1e4)], ids=str)
def test_no_product_of_two_of_three_factors_is_stored_as_a_half(sizes: tuple[float, ...]) -> None:
    """As a half it would be infinite, or zero."""

    class Trilinear(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            return torch._trilinear(a, b, c, [2, 3], [1, 3], [1, 2], [0])

    given = tuple(torch.full((16, n), size) for n, size in zip((20, 24, 28), sizes, strict=True))
    with lapilli.compile(Trilinear(), given, precision="fp16", fallback="error") as program:
        torch.testing.assert_close(program(*given), Trilinear()(*given), rtol=2**-8, atol=0)
