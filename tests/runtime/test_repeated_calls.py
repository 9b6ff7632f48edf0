"""Calls that are repeated on the device "vulkan" take shorter ways than first ones: both give what torch gives on the CPU, whatever
the tensors' types, strides and places, and whatever memory they share."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from installed import run_installed
from torch import Tensor

from lapilli import autoload

autoload.register()
aten = torch.ops.aten
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
SIZES = (1, 2, 3, 5, 8, 17)
MEMORY = 2 * 17**3 + 512


def laid_out(draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Where in a vector of numbers a tensor lies. Offsets are multiples of what devices bind, or not."""
    offset = draw.choice((0, 0, 0, 128, 512, 1, 3))
    order = [*range(len(shape))]
    if draw.random() < 0.5:
        draw.shuffle(order)
    gap = draw.choice((1, 1, 1, 2))
    strides, step = [0] * len(shape), gap
    for d in reversed(order):
        strides[d] = step
        step *= shape[d]
    return lambda memory: memory.to(dtype).as_strided(shape, strides, offset)


def moving(x: Tensor) -> list[int]:
    """The strides of dimensions with more than one element."""
    return [stride for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1]


@pytest.mark.parametrize("seed", range(4))
def test_copies(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(25):
        shape = tuple(draw.choice(SIZES) for _ in range(draw.randint(1, 3)))
        of, to = draw.choice(FLOATS), draw.choice(FLOATS)
        read, written = laid_out(draw, shape, of), laid_out(draw, shape, to)
        places = [(read, written)] * 2 + [(laid_out(draw, shape, of), written), (read, laid_out(draw, shape, to))]
        for turn, (read, written) in enumerate(places):
            numbers = torch.randn(MEMORY, generator=torch.Generator().manual_seed(turn)) * 100
            results = []
            for device in ("cpu", "vulkan"):
                source, target = read(numbers.to(device)), written(torch.zeros(MEMORY, device=device))
                if turn == 3:
                    source = torch._neg_view(source)
                # torch forgets the sign between float32 and halves on the CPU.
                target.copy_(source.resolve_neg() if device == "cpu" else source)
                whole = target.as_strided((MEMORY,), (1,), 0)  # what lies around it is not changed
                made = [source.to(to), source.contiguous().to(to), source.to(to, copy=True)]
                results.append(([x.cpu() for x in (whole, *made)], [moving(x) for x in made]))
            (theirs, wanted), (ours, strides) = results
            assert strides == wanted
            for what, x, y in zip(("copied", "converted", "of a dense one", "a copy"), ours, theirs, strict=True):
                assert torch.equal(x, y), (what, shape, of, to, turn)


def test_conversions_in_one_storage() -> None:
    results = []
    for device in ("cpu", "vulkan"):
        memory = torch.arange(2048.0, device=device)
        for _ in range(3):
            halves = memory.view(torch.float16)
            halves[:1024].copy_(memory[1024:])  # another part of the same memory
            memory[:512].copy_(halves[512:1024])
        results.append(memory.cpu())
    assert torch.equal(*results)


def statistics(kind: str, device: str) -> tuple[Tensor, Tensor]:
    """The running mean and variance, and how they lie."""
    if kind == "apart":
        return torch.zeros(6, device=device), torch.ones(6, device=device)
    memory = torch.arange(1, 513.0, device=device) / 100
    if kind == "in one storage":
        return memory[:6], memory[256:262]
    if kind == "neighbours":
        return memory[:6], memory[6:12]
    if kind == "strided":
        return memory[:12:2], memory[256:268:2]
    return memory[:6], memory[:6].view(6)  # the same


@pytest.mark.parametrize("kind", ["apart", "in one storage", "neighbours", "strided"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_batch_norm_updates_its_statistics(kind: str, dtype: torch.dtype) -> None:
    results = []
    for device in ("cpu", "vulkan"):
        mean, variance = statistics(kind, device)
        weight, bias = torch.linspace(0.5, 2, 6, device=device), torch.linspace(-1, 1, 6, device=device)
        found = []
        for turn in range(4):
            x = torch.randn(3, 6, 5, 4, generator=torch.Generator().manual_seed(turn)).to(device, dtype)
            normed = torch.nn.functional.batch_norm(x, mean, variance, weight, bias, training=turn != 3, momentum=0.3)
            found += [normed.float().cpu(), mean.cpu().clone(), variance.cpu().clone()]
        results.append(found)
    # Roundings of sums of 60 numbers; of halves, those of the result.
    bound = 1e-5 if dtype is torch.float32 else 2e-3
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


def test_statistics_that_are_the_input() -> None:
    """The running mean lies in the memory that is normed: what is read is what was there before."""
    results = []
    for device in ("cpu", "vulkan"):
        for _ in range(2):
            memory = torch.arange(512.0, device=device)
            x, mean, variance = memory[:24].view(4, 6), memory[:6], memory[256:262]
            if device == "cpu":  # torch's kernel norms what it has just overwritten
                x = x.clone()
            y = torch.nn.functional.batch_norm(x, mean, variance, training=True, momentum=0.5)
            found = [y.cpu(), mean.cpu(), variance.cpu()]
        results.append(found)
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_several_results(wanted: tuple[bool, bool]) -> None:
    results = []
    for device in ("cpu", "vulkan"):
        found: list[Tensor | None] = []
        for turn in range(3):
            draw = torch.Generator().manual_seed(turn)
            grad, x, weight = (
                torch.randn(*s, generator=draw).to(device) for s in ((2, 5, 7, 7), (2, 3, 7, 7), (5, 3, 3, 3))
            )
            given = [torch.ones(3, device=device), torch.zeros(3, device=device)]
            found += aten.convolution_backward(
                grad, x, weight, [5], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [*wanted, turn == 1]
            )
            found += aten.native_batch_norm_backward(
                x, x + 1, given[0], *given[::-1], *given[::-1], True, 1e-5, [*wanted, True]
            )
        results.append(found)
    for theirs, ours in zip(*results, strict=True):
        if ours is not None and theirs is not None:  # who was not asked may give a gradient, or None
            torch.testing.assert_close(
                ours.cpu(), theirs, rtol=1e-4, atol=1e-4
            )  # sums of 98 products of numbers up to 3


def test_a_process_ends_while_kernels_are_compiled(tmp_path: Path) -> None:
    """Nobody reads the results. lavapipe compiles kernels when they run, in a thread that crashed when the process ended."""
    run_installed(
        """
        import torch

        x = torch.randn(4, 8, 6, 6, device="vulkan")
        ones, zeros = torch.ones(8, device="vulkan"), torch.zeros(8, device="vulkan")
        results = torch.ops.aten.native_batch_norm(x, ones, zeros, zeros.clone(), ones.clone(), True, 0.1, 1e-5)
        """,
        tmp_path,
        XDG_CACHE_HOME=str(tmp_path),
    )
