"""Gradients of interpolation, against torch's in float64: also with numbers that are not finite, which stay within windows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import FLOAT_BOUND, Function, relative_error
from torch import Tensor
from torch.nn import functional as F

import lapilli
import lapilli.backend

aten = torch.ops.aten
SIZES = ((1, 5), (5, 1), (2, 7), (7, 2), (3, 13), (13, 3), (5, 5), (13, 26), (26, 13), (3, 4))
KINDS: dict[str, tuple[int, tuple[tuple[bool, ...], ...]]] = {
    "upsample_nearest1d": (1, ((),)),
    "_upsample_nearest_exact1d": (1, ((),)),
    "upsample_linear1d": (1, ((False,), (True,))),
    "upsample_bilinear2d": (2, ((False,), (True,))),
    "upsample_bicubic2d": (2, ((False,), (True,))),
    "_upsample_bilinear2d_aa": (2, ((False,), (True,))),
    "_upsample_bicubic2d_aa": (2, ((False,),)),
}


def calls(name: str) -> list[tuple[Any, ...]]:
    """What follows the gradient among the arguments: sizes, options, scales. Of one dimension, or the last of two."""
    rank, options = KINDS[name]
    found: list[tuple[Any, ...]] = []
    for source, target in SIZES:
        # With other scales for sizes that are equal, or one twice the other, torch's gradient is not that of its forward.
        usual = source == target or target == 2 * source or min(source, target) == 1
        scales = (None,) if usual else (None, (target + 0.4) / source)
        for option in options:
            for scale in (None,) if any(option) else scales:
                sizes = ([5, target], [1, 2, 5, source]) if rank == 2 else ([target], [1, 2, source])
                found.append((*sizes, *option, *[None] * (rank - 1), scale))
    if "_aa" not in name:  # places far behind the image
        found.append(
            (*(([5, 20], [1, 2, 5, 4]) if rank == 2 else ([20], [1, 2, 4])), *options[0], *[None] * (rank - 1), 2.0)
        )
    return found


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.part(9)
def test_gradients(name: str) -> None:
    """Of ordinary numbers, and of one that is not finite: torch multiplies it by the weights of its window, zeros among them.

    What torch has as finite is finite. Ours may be another than torch's NaN or infinity where torch's weight is zero but for
    rounding."""
    backward = getattr(aten, f"{name}_backward").default
    generator = torch.Generator().manual_seed(1)
    given = []
    for call in calls(name):
        target = call[0][-1]
        places = sorted({0, min(1, target - 1), target // 2, target - 1})
        grad = torch.randn(1 + len(places), 2, *call[0], generator=generator)
        for strange, place in zip(grad[1:], places, strict=True):
            strange[0].reshape(-1, target)[-1, place] = math.nan
            strange[1].reshape(-1, target)[0, place] = math.inf
        given.append((grad, (call[0], [len(grad), *call[1][1:]], *call[2:])))

    def gradients(*grads: Tensor) -> list[Tensor]:
        return [backward(g, *call) for g, (_, call) in zip(grads, given, strict=True)]

    grads = [g for g, _ in given]
    with lapilli.compile(Function(gradients), tuple(grads)) as program:
        ours = program(*grads)
    differ = 0
    for found, (grad, call) in zip(ours, given, strict=True):
        wanted = backward(grad.double(), *call)
        finite = wanted.isfinite()
        assert found[finite].isfinite().all(), call
        assert relative_error(found[finite], wanted[finite]) < FLOAT_BOUND, call
        differ += int((_kinds(found) != _kinds(wanted)).flatten(2).any(2).sum())
    assert differ <= OTHERWISE.get(name, 0)


def _kinds(x: Tensor) -> Tensor:
    """2 for NaN, 1 and -1 for infinities, 0 for finite numbers."""
    return torch.where(x.isnan(), 2, x.isinf() * x.sign())


OTHERWISE = {"upsample_linear1d": 3, "upsample_bicubic2d": 4, "_upsample_bilinear2d_aa": 3, "_upsample_bicubic2d_aa": 1}
"""Images in which what is not finite is of another kind than in torch: places behind the image, which torch moves to its last
pixel but one with a weight of zero, and weights that are zero but for rounding."""


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear", "smooth"])
@pytest.mark.parametrize("aligned", [False, True])
def test_open_sizes_keep_what_is_not_finite_in_its_window(mode: str, aligned: bool) -> None:
    """One graph for all sizes: what torch has as finite is finite, and right."""
    rank = {"linear": 1, "trilinear": 3}.get(mode, 2)
    options: dict[str, Any] = {"mode": "bilinear", "antialias": True} if mode == "smooth" else {"mode": mode}
    if aligned and "nearest" in mode:
        pytest.skip("these modes have no such option")
    if "nearest" not in mode:
        options["align_corners"] = aligned

    def up(x: Tensor, like: Tensor) -> Tensor:
        return F.interpolate(x, size=like.shape[2:], **options)

    torch._dynamo.reset()
    compiled = torch.compile(up, backend="vulkan", dynamic=True)
    for source, target in ((8, 3), (3, 8), (4, 17), (13, 2), (6, 7), (9, 5)):
        generator = torch.Generator().manual_seed(source)
        x = torch.randn(1, 2, *[source] * rank, generator=generator)
        like = torch.empty(1, 2, *[target] * rank)
        for place in (0, target // 2, target - 1):
            weights = torch.randn(like.shape, generator=generator)
            weights[(0, 0) + (place,) * rank], weights[(0, 1) + (place,) * rank] = math.inf, math.nan
            found, wanted = (
                torch.autograd.grad(f(leaf, like), leaf, w)[0]
                for f, leaf, w in (
                    (compiled, x.clone().requires_grad_(), weights),
                    (up, x.double().requires_grad_(), weights.double()),
                )
            )
            finite = wanted.isfinite()
            assert found[finite].isfinite().all(), (source, target, place)
            assert relative_error(found[finite], wanted[finite]) < FLOAT_BOUND
            assert mode in ("bicubic", "smooth") or (found.isfinite() & ~finite).sum() <= 1


def _root(x: Tensor) -> Tensor:
    return torch.sqrt(F.interpolate(x, size=(8, 8), mode="bilinear", antialias=True).abs())


def _gradient(f: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    leaf = x.to(device, dtype).requires_grad_()
    (found,) = torch.autograd.grad(f(leaf).float().sum(), leaf)
    return found.cpu()


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_a_pixel_of_zeros_stays_alone(way: str) -> None:
    x = torch.randn(1, 2, 16, 16, generator=torch.Generator().manual_seed(2))
    x[0, 0, 2:9, 3:8] = 0
    wanted = _gradient(_root, x, torch.float64)
    assert 0 < wanted.isnan().sum() < 100
    f = torch.compile(_root, backend="vulkan") if way == "compiled" else _root
    found = _gradient(f, x, torch.float32, "vulkan" if way == "eager" else "cpu")
    assert relative_error(found, wanted) < FLOAT_BOUND


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_16_bits_are_added_in_32(dtype: torch.dtype) -> None:
    """Their error is that of what comes in and goes out; torch's sums have it too."""

    def up(x: Tensor) -> Tensor:
        return F.interpolate(x, size=(11, 9), mode="bicubic").square()

    x = torch.randn(2, 3, 7, 5, generator=torch.Generator().manual_seed(3)).to(dtype)
    found = _gradient(up, x, dtype, "vulkan")
    assert found.dtype == dtype
    assert relative_error(found.float(), _gradient(up, x, torch.float64)) < 2 * torch.finfo(dtype).eps


@pytest.mark.long
def test_open_sizes() -> None:
    def up(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=1.5, mode="bilinear").square()

    compiled = torch.compile(up, backend="vulkan", dynamic=True)
    for size in ((5, 7), (13, 4)):
        x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(4))
        assert relative_error(_gradient(compiled, x, torch.float32), _gradient(up, x, torch.float64)) < FLOAT_BOUND


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear"])
@pytest.mark.part(12)
def test_training_keeps_interpolation_whole(mode: str, dynamic: bool) -> None:
    """PyTorch's Python formulas take it apart: places in float32, and gradients scattered one by one, a thousand times slower."""
    rank = {"linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3}.get(mode, 2)
    size = [9, 14, 4][:rank]

    def by_size(x: Tensor) -> Tensor:
        return F.interpolate(x, size=size, mode=mode)

    def by_scale(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2.0, mode=mode)

    x = torch.randn(2, 3, *[5, 6, 7][:rank], generator=torch.Generator().manual_seed(8))
    for f in (by_size, by_scale):
        torch._dynamo.reset()
        before = [report for _, report in lapilli.backend.reports()]
        compiled = torch.compile(f, backend="vulkan", dynamic=dynamic)
        found = []
        for call, given in ((compiled, x), (f, x.double())):
            leaf = given.clone().requires_grad_()
            result = call(leaf)
            weights = torch.linspace(-1, 1, result.numel(), dtype=given.dtype).reshape(result.shape)
            found.append((result.detach(), torch.autograd.grad(result, leaf, weights)[0]))
        for ours, exact in zip(*found, strict=True):
            assert relative_error(ours.numpy(), exact) < FLOAT_BOUND
        new = [report for _, report in lapilli.backend.reports() if not any(report is old for old in before)]
        operators = {o.operator for report in new for o in report.operators}
        assert any("upsample" in o for o in operators) and not any("index_put" in o for o in operators), operators


@pytest.mark.long
def test_pytorchs_own_formulas_of_interpolation_are_back_afterwards() -> None:
    def keys() -> dict[str, list[Any]]:
        packets = [aten.upsample_bilinear2d, aten.upsample_nearest2d, aten.upsample_bicubic2d]
        return {
            str(overload): [(k, id(f)) for k, f in overload.py_kernels.items()]
            for packet in packets
            for overload in (packet.default, packet.vec)
        }

    before = keys()
    test_training_keeps_interpolation_whole("bilinear", True)
    assert keys() == before
