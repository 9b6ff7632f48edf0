"""as_strided of tensors that do not lie in memory row by row: the elements that PyTorch finds, by every front door."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lapilli
from lapilli import autoload

autoload.register()

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "row-major": lambda: torch.rand(4, 3, 5),
    "transposed": lambda: torch.rand(5, 3, 4).permute(2, 1, 0),
    "turned": lambda: torch.rand(3, 5, 4).permute(2, 0, 1),
    "offset": lambda: torch.rand(67)[7:].view(4, 3, 5),
    "offset and turned": lambda: torch.rand(67)[7:].view(3, 5, 4).permute(2, 0, 1),
    "one row": lambda: torch.rand(4, 5, 1).permute(0, 2, 1),
}


def forms(seed: int, offset: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """What reads or writes a window of memory. offset: where the memory of the argument begins."""
    draw = random.Random(seed)
    size = (draw.randint(1, 3), draw.randint(1, 3))
    stride = draw.choice([(4, 1), (1, 4), (5, 2), (3, 1)])
    at = draw.randint(0, 5)

    def written(x: Tensor) -> Tensor:
        y = x.cos()
        y.as_strided(size, stride, at).mul_(3)
        return y

    def read_before(x: Tensor) -> Tensor:
        y = x.cos()
        seen = y.as_strided(size, stride, at) * 2
        y.mul_(2)
        return torch.cat([seen.flatten(), y.flatten()])

    return {
        "argument": lambda x: x.as_strided(size, stride, offset + at) * 2,
        "argument, where it begins": lambda x: x.as_strided(size, stride) * 2,
        "value": lambda x: x.sin().as_strided(size, stride, at) * 2,
        "part of a value": lambda x: x.sin()[1:, :, 1:].as_strided(size, stride, at) * 2,
        "part of a value, where it begins": lambda x: x.sin()[1:].transpose(0, 1).as_strided(size, (1, 2)) * 2,
        "view of memory": lambda x: x.sin().as_strided((4, 5), (5, 1), at % 2).as_strided(size, stride) * 2,
        "other views": lambda x: x.cos().swapdims(0, 2)[1:].unflatten(0, (1, -1)).as_strided(size, stride, at) * 2,
        "row-major copy": lambda x: x.transpose(0, 2).contiguous().as_strided(size, stride, at) * 2,
        "flat": lambda x: x.cos().reshape(-1).as_strided(size, stride, at) * 2,
        "scattered": lambda x: torch.as_strided_scatter(x.sin(), x.new_zeros(size), size, stride, at) + 1,
        "written": written,
        "read before": read_before,
        "of the host": lambda x: torch.cumsum(x.sin().double(), 0).as_strided(size, stride, at).float() * 2,
    }


class Model(nn.Module):
    def __init__(self, form: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_of_memory(layout: str, seed: int) -> None:
    torch.manual_seed(0)
    x, wrong = LAYOUTS[layout](), []
    for name, form in forms(seed, int(x.storage_offset())).items():
        wanted = form(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # operators that run on the CPU
            with lapilli.compile(Model(form), (x,)) as program:
                got = {"compile": torch.as_tensor(program(x))}
            for dynamic in (False, True):
                torch._dynamo.reset()
                got[f"torch.compile, dynamic={dynamic}"] = torch.compile(form, backend="vulkan", dynamic=dynamic)(x)
        wrong += [
            f"{name}: {door}: {t} for {wanted}"
            for door, t in got.items()
            if not torch.allclose(t, wanted, rtol=1e-5, atol=1e-6)
        ]
    assert not wrong, wrong


def test_a_size_is_a_stride_of_memory_as_well() -> None:
    """Arguments that share memory come as their base and windows of it; here another argument gives the stride, so that the
    device computes beside it."""

    def split(x: Tensor, y: Tensor, image: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        values = torch.sort(x, dim=0).values
        diagonal = values.diagonal(-1)
        torch._dynamo.graph_break()
        seen = diagonal * 1
        values.transpose(0, 1).copy_(y).mul_(0.5)
        return seen, diagonal + 0, values + 0, nn.functional.conv2d(image, weight, None, 2, 1)

    given = torch.randn(17, 3).t(), torch.rand(17, 3), torch.randn(1, 3, 4, 4), torch.randn(1, 3, 3, 3)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = torch.compile(split, backend="vulkan", dynamic=True)(*given)
    for a, b in zip(got, split(*given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("example", "form", "said"),
    [
        (torch.rand(6, 4)[:, ::2], lambda x: x.as_strided((3,), (2,)) * 2, "gaps or repeated elements"),
        (torch.rand(40)[5:29], lambda x: x.as_strided((3,), (2,), 1) * 2, "reads memory before its tensor"),
        (torch.rand(40)[5:29], lambda x: x.as_strided((3,), (2,), 5 + len(x) // 24) * 2, None),
        (torch.rand(6), lambda x: torch.nonzero(x > 0).t().as_strided((3,), (2,)) * 2, None),
        (
            torch.rand(6, 4),
            lambda x: torch.nonzero(x > 0).t().contiguous().t().as_strided((3,), (2,)) * 2,
            "its order depends on data",
        ),
    ],
)
def test_memory_that_a_program_does_not_have(
    example: Tensor, form: Callable[[Tensor], Tensor], said: str | None
) -> None:
    """Refused; torch.compile has PyTorch do it."""
    wanted = form(example)
    if said is not None:
        with pytest.raises(lapilli.CompileError, match=said):
            lapilli.compile(Model(form), (example,))
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(torch.compile(form, backend="vulkan")(example), wanted)


def test_a_result_that_is_saved_too_is_no_view() -> None:
    """Autograd forbids changing such a view in place. The change itself is seen in the backward pass."""

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        copy = x.clone()
        return torch.asinh(copy * 3), copy

    for x in (torch.rand(2, 3), torch.rand(3, 2).t()):
        torch._dynamo.reset()
        x = x.to("vulkan").clone().requires_grad_()
        first, copy = torch.compile(model, backend="vulkan")(x)
        assert not copy._is_view() and copy.stride() == x.stride()
        copy.mul_(2)
        torch.testing.assert_close(copy.cpu(), x.detach().cpu() * 2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            first.sum().backward()


def test_bools_are_not_subtracted() -> None:
    """PyTorch's own graph of this subtracts them, and cannot run."""

    def model(x: Tensor) -> Tensor:
        y = x.unsqueeze(0).expand_as(x.unsqueeze(0))
        y[0].zero_()
        return y

    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="two bool tensors is not supported"):
        torch.compile(model, backend="vulkan", dynamic=True)(torch.rand(5, 5, 3) > 0.5)
