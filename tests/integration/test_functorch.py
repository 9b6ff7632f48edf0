"""The transforms of torch.func: on tensors of the device, and inside of what torch.compile compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

Matrix = torch.Tensor
Vector = torch.Tensor


def _loss(w: Matrix, r: Vector) -> torch.Tensor:
    return (F.linear(r, w).sin() * (w @ r)).sum()


TRANSFORMS: dict[str, Callable[[Matrix, Vector], Any]] = {
    "grad": lambda w, r: grad(_loss)(w, r),
    "grad of grad": lambda w, r: grad(lambda r: grad(_loss, 1)(w, r).square().sum())(r),
    "jacrev": lambda w, r: jacrev(lambda r: (w @ r).sin())(r),
    "jacfwd": lambda w, r: jacfwd(lambda r: w @ r)(r),
    "jacfwd of a matrix": lambda w, r: jacfwd(lambda w: torch.tanh(w.mT @ r))(w),
    "hessian": lambda w, r: hessian(lambda r: _loss(w, r))(r),
    "vmap": lambda w, r: vmap(lambda row: F.linear(row, w) @ r)(w),
    "vmap of grad": lambda w, r: vmap(grad(lambda row: (row * r).sin().sum()))(w),
    "vmap of jvp": lambda w, r: vmap(lambda v: jvp(lambda r: w @ r, (r,), (v,))[1])(w),
    "jvp": lambda w, r: jvp(_loss, (w, r), (w.cos(), r.sin())),
    "jvp through a view in place": lambda w, r: jvp(_in_place, (w, r), (w.cos(), r.sin())),
    "vjp": lambda w, r: vjp(lambda r: w @ r, r)[1](r),
    "linearize": lambda w, r: linearize(lambda r: (w @ r).exp(), r)[1](r),
}


def _in_place(w: Matrix, r: Vector) -> torch.Tensor:
    changed = w.clone()
    changed.mT[1:].mul_(r)
    return changed @ r


def _compare(found: Any, wanted: Any) -> None:
    """All are smooth functions of numbers near 1, in some dozen operations: a few units in the last place."""
    for one, other in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-5, atol=1e-5)


def _given() -> tuple[Matrix, Vector]:
    torch.manual_seed(0)
    return torch.randn(4, 4), torch.randn(4)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_on_the_device(name: str) -> None:
    w, r = _given()
    _compare(TRANSFORMS[name](w.to("vulkan"), r.to("vulkan")), TRANSFORMS[name](w.double(), r.double()))


@pytest.mark.parametrize("device", ["cpu", "vulkan"])
def test_transforms_inside_of_what_is_compiled(device: str) -> None:
    """Each is a graph of its own; without gradients, so that composite operators would be kept whole."""
    w, r = _given()

    def several(names: list[str], w: Matrix, r: Vector) -> list[Any]:
        return [TRANSFORMS[name](w, r) for name in names]

    names = [name for name in TRANSFORMS if name not in ("linearize", "jvp through a view in place")]
    torch.compiler.reset()
    compiled = torch.compile(several, backend="vulkan")
    with torch.no_grad():
        found = compiled(names, w.to(device), r.to(device))
    _compare(found, tree_map(lambda t: t, several(names, w.double(), r.double())))


def test_autograd_inside_of_what_is_compiled() -> None:
    w, r = _given()

    def slope(w: Matrix, r: Vector) -> torch.Tensor:
        r = r.detach().requires_grad_()
        return torch.autograd.grad(_loss(w, r), r)[0]

    torch.compiler.reset()
    _compare(torch.compile(slope, backend="vulkan")(w, r), slope(w.double(), r.double()))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", ["cpu", "vulkan"])
def test_quantile_compiled(device: str, dynamic: bool) -> None:
    """It changes the sizes of a tensor in place while it is traced."""
    w, _ = _given()
    torch.compiler.reset()
    found = torch.compile(lambda w: torch.quantile(w, 0.3, 1), backend="vulkan", dynamic=dynamic)(w.to(device))
    torch.testing.assert_close(found.cpu(), torch.quantile(w, 0.3, 1))
