"""Tensors whose elements share memory, with each other or with what is written: refused as torch refuses them, or right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

ELEMENTS = 12.0


def _line(device: str) -> torch.Tensor:
    return torch.arange(ELEMENTS, device=device)


def _repeated(device: str) -> torch.Tensor:
    return torch.arange(3.0, device=device).expand(4, 3)


REFUSED: dict[str, Callable[[str], object]] = {
    "add_ in place": lambda d: _repeated(d).add_(1),
    "copy_": lambda d: _repeated(d).copy_(torch.ones(4, 3, device=d)),
    "relu_": lambda d: _repeated(d).relu_(),
    "cumsum_": lambda d: _repeated(d).cumsum_(0),
    "clamp_": lambda d: _repeated(d).clamp_(0, 3),
    "add, out=": lambda d: torch.add(torch.ones(4, 3, device=d), 1, out=_repeated(d)),
    "mm, out=": lambda d: torch.mm(torch.ones(4, 2, device=d), torch.ones(2, 3, device=d), out=_repeated(d)),
    "add_ of halves": lambda d: _repeated(d)[:1].half().expand(4, 3).add_(1),
    "normal_": lambda d: _repeated(d).normal_(),
    "scatter_": lambda d: _repeated(d).scatter_(0, torch.zeros(1, 3, dtype=torch.int64, device=d), 3.0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_torch_refuses(name: str) -> None:
    with pytest.raises(RuntimeError) as on_cpu:
        REFUSED[name]("cpu")
    with pytest.raises(RuntimeError) as on_device:
        REFUSED[name]("vulkan")
    assert str(on_device.value)[:60] == str(on_cpu.value)[:60]


@pytest.mark.parametrize("change", ["add_", "mul_", "sub_", "lerp_"])
def test_what_is_read_overlaps_what_is_written(change: str) -> None:
    for device in ("cpu", "vulkan"):
        x = _line(device)
        more = (0.5,) if change == "lerp_" else ()
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            getattr(x[2:8], change)(x[0:6], *more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8, torch.int64])
@pytest.mark.parametrize(("to", "of"), [((2, 8), (0, 6)), ((0, 6), (2, 8)), ((1, 9), (2, 10))])
def test_a_copy_of_a_part_onto_another(to: tuple[int, int], of: tuple[int, int], dtype: torch.dtype) -> None:
    """torch refuses it on the CPU. Here it is as if the part had been taken out first."""
    x = torch.arange(ELEMENTS, device="vulkan").to(dtype)
    wanted = x.cpu().clone()
    wanted[slice(*to)] = wanted[slice(*of)].clone()
    x[slice(*to)] = x[slice(*of)]
    assert torch.equal(x.cpu(), wanted)


def test_a_copy_of_the_transpose() -> None:
    x = torch.arange(9.0, device="vulkan").reshape(3, 3)
    wanted = x.cpu().t().clone()
    x.copy_(x.t())
    assert torch.equal(x.cpu(), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool])
def test_repeated_elements_are_filled(dtype: torch.dtype) -> None:
    for device in ("cpu", "vulkan"):
        x = torch.arange(3, device=device).to(dtype)
        x.expand(4, 3).fill_(1)
        assert x.tolist() == [1, 1, 1]
        x[1:].expand(2, 2).zero_()
        assert x.tolist() == [1, 0, 0]


def test_repeated_elements_are_read_at_any_offset() -> None:
    """A weight in the middle of a buffer, repeated for every row of a batch."""
    torch.manual_seed(0)
    room, x = torch.randn(7), torch.randn(1, 8, 2, 2).expand(4, 8, 2, 2)
    weight = room[3:7].reshape(2, 2)
    on_device = room.to("vulkan")[3:7].reshape(2, 2)
    torch.testing.assert_close(F.linear(x.to("vulkan"), on_device).cpu(), F.linear(x, weight))
    assert torch.equal((on_device.expand(3, 2, 2) * 2).cpu(), weight.expand(3, 2, 2) * 2)
