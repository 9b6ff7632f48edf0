"""Views as results, at fixed and at computed places, out of every front door: the elements, and out of torch.compile and the
eager device also the memory, as PyTorch has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch._dynamo
from counting import Counting
from torch import Tensor, nn
from torch.export import Dim
from torch.utils.mobile_optimizer import optimize_for_mobile
from view_cases import COMPUTED, FIXED, KINDS, View

import lapilli
import lapilli.mobile
from lapilli import autoload, backend
from lapilli.export import to_vulkan

autoload.register()
lapilli.mobile.install()
CPU_OR_DEVICE = pytest.mark.parametrize("device", ["cpu", "vulkan"])
SIZES = (6, 4), (10, 8)


def tensors(n: int, m: int, device: str) -> dict[str, Tensor]:
    """One of every kind. On the device their strides and offsets are the same."""
    torch.manual_seed(n)
    made = {name: kind(n, m) for name, kind in KINDS.items()}
    if device == "cpu":
        return made
    whole = {name: torch.empty(0).set_(t.untyped_storage()).to(device) for name, t in made.items()}
    return {name: whole[name].as_strided(t.shape, t.stride(), t.storage_offset()) for name, t in made.items()}


def place(tensor: Tensor) -> Any:
    """Where a tensor lies in its memory; strides of dimensions of one element mean nothing."""
    strides = [step for step, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1]
    return list(tensor.shape), strides, tensor.storage_offset(), tensor.dtype


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def views_of(*given: Tensor, views: dict[str, View]) -> list[Tensor]:
    """Of every argument, and of values that are computed from the first two."""
    computed = [x.relu() + 1 for x in given[:2]]
    return [view(x) for x in (*given, *computed) for view in views.values()]


def fixed(*given: Tensor) -> list[Tensor]:
    return views_of(*given, views=FIXED)


def computed(*given: Tensor) -> list[Tensor]:
    return views_of(*given, views=COMPUTED)


def check(
    got: list[Tensor], want: list[Tensor], given: list[Tensor], like: list[Tensor], views: dict[str, View]
) -> None:
    """The same elements, and the same places in the memory of arguments. given: the arguments; like: PyTorch's."""
    wrong = []
    kinds = [*KINDS, *(f"value that is computed from a {kind}" for kind in KINDS)]
    names = [f"{view} of a {kind}" for kind in kinds for view in views]
    ours, theirs = [memory(t) for t in given], [memory(t) for t in like]
    for name, a, b in zip(names, got, want, strict=False):
        of_ours, of_theirs = [of.index(memory(t)) if memory(t) in of else None for t, of in ((a, ours), (b, theirs))]
        if not a.detach().cpu().equal(b.detach()):
            wrong.append(f"{name}: other elements")
        elif of_ours != of_theirs or (of_theirs is not None and place(a) != place(b)):
            wrong.append(f"{name}: it lies at {place(a)} of {of_ours}, not at {place(b)} of {of_theirs}")
    assert not wrong and len(got) == len(want), "\n".join(wrong)


@CPU_OR_DEVICE
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.part(2)
def test_out_of_torch_compile(dynamic: bool, device: str) -> None:
    """Results share memory where they do in PyTorch, and with nothing else; what is written there is seen."""
    torch._dynamo.reset()
    function, views = (computed, COMPUTED) if dynamic else (fixed, FIXED)
    counting = Counting()
    run = torch.compile(function, backend=counting, dynamic=dynamic, fullgraph=True)
    for n, m in SIZES if dynamic else SIZES[:1]:
        given, like = [list(tensors(n, m, d).values()) for d in (device, "cpu")]
        got, want = run(*given), function(*like)
        check(got, want, given, like, views)
        for a, b in zip(got, want, strict=True):
            assert [memory(a) == memory(x) for x in got] == [memory(b) == memory(x) for x in want]
        for results in (got, want):
            results[0].fill_(7)
        assert all(a.cpu().equal(b) for a, b in zip((*given, *got), (*like, *want), strict=True))
    assert counting.graphs == 1


@CPU_OR_DEVICE
def test_out_of_torch_compile_with_gradients(device: str) -> None:
    torch._dynamo.reset()
    run = torch.compile(computed, backend=backend.vulkan, dynamic=True, fullgraph=True)
    for n, m in SIZES:
        given, like = [list(tensors(n, m, d).values())[-2:] for d in (device, "cpu")]
        for x in (*given, *like):
            x.requires_grad_()
        got, want = run(*given), computed(*like)
        check(got, want, given, like, COMPUTED)
        for results in (got, want):
            sum(((t.cos() * (k + 1)).sum() for k, t in enumerate(results)), torch.zeros(())).backward()
        for a, b in zip(given, like, strict=True):
            torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-4, atol=1e-3)


def test_of_the_eager_device() -> None:
    """Views, and what kernels read through them."""
    given, like = [list(tensors(*SIZES[0], d).values()) for d in ("vulkan", "cpu")]
    for function, views in ((fixed, FIXED), (computed, COMPUTED)):
        got, want = function(*given), function(*like)
        check(got, want, given, like, views)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close([(a * 2).cpu(), a.sum(-1).cpu()], [b * 2, b.sum(-1)])


class Views(nn.Module):
    def __init__(self, views: dict[str, View]) -> None:
        super().__init__()
        self.views = views

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(view(t) for t in (x, x.relu() + 1) for view in self.views.values())


KEPT = {name: view for name, view in FIXED.items() if name != "as_integers"}
"""Without what the CPU does, and torch.jit.trace refuses."""

OPEN = COMPUTED | {name: FIXED[name] for name in ("rows", "transposed", "of_views")}
DIMS = ({0: 2 * Dim("half_n", min=2, max=32), 1: 2 * Dim("half_m", min=2, max=32)},)


def agree(got: Sequence[Any], want: Sequence[Tensor], what: str, views: dict[str, View]) -> None:
    """Programs take values, not memory: what as_strided finds there is what lies there in a tensor like the example."""
    names = [f"{view} of {of} {what}" for of in ("given", "computed") for view in views]
    wrong = [name for name, a, b in zip(names, got, want, strict=True) if not torch.as_tensor(a).equal(b)]
    wrong = [name for name in wrong if what == "contiguous" or not name.startswith("strided")]
    assert not wrong, wrong


@pytest.mark.parametrize("dynamic", [False, True])
def test_out_of_programs(dynamic: bool) -> None:
    """Called with tensors and arrays of all strides, and bound."""
    views = OPEN if dynamic else KEPT
    model, example = Views(views), torch.rand(*SIZES[0])
    with lapilli.compile(model, (example,), dynamic_shapes=DIMS if dynamic else None) as program:
        for n, m in SIZES if dynamic else SIZES[:1]:
            for kind, x in tensors(n, m, "cpu").items():
                agree(program(x), model(x), kind, views)
                agree(program(x.numpy()), model(x), f"{kind} array", views)
            x = torch.rand(n, m)
            run = program.bind(x)
            run()
            agree(run.outputs, model(x), "bound", views)


@pytest.mark.parametrize("dynamic", [False, True])
def test_out_of_exported_programs(dynamic: bool) -> None:
    some = ("half", "chunk_of_columns", "transposed_half", "flattened_at", "strided_at")
    views = {name: COMPUTED[name] for name in some} if dynamic else FIXED
    model, example = Views(views), torch.rand(*SIZES[0])
    lowered = to_vulkan(torch.export.export(model, (example,), dynamic_shapes=DIMS if dynamic else None)).module()
    for n, m in SIZES if dynamic else SIZES[:1]:
        for kind, x in tensors(n, m, "cpu").items():
            agree(lowered(x), model(x), kind, views)


def test_out_of_optimize_for_mobile() -> None:
    model = Views(KEPT)
    traced = torch.jit.trace(model, torch.rand(*SIZES[0]))
    optimized = optimize_for_mobile(traced, backend="vulkan")
    for kind, x in tensors(*SIZES[0], "cpu").items():
        agree(optimized(x), model(x), kind, KEPT)
