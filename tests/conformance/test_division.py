"""Divisions of integers at which processors raise a signal: by 0, and of the least number by -1. No program ends the process.
And divisions of floats by 0."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from agreement import Function

import lapilli
from lapilli import autoload

autoload.register()

LEAST, MOST = -(2**31), 2**31 - 1
NUMBERS = (LEAST, LEAST + 1, -7, -1, 0, 1, 3, MOST)
WRITTEN = (-1, 0)
OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor | int], torch.Tensor]] = {
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "remainder": torch.remainder,  # type: ignore[dict-item]
    "fmod": torch.fmod,
}


def wrapped(value: int) -> int:
    return (value - LEAST) % 2**32 + LEAST


def reference(name: str, a: int, b: int) -> int:
    """For b other than 0; torch itself dies of the least number by -1."""
    truncated = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    values = {"floor": a // b, "trunc": truncated, "remainder": a % b, "fmod": a - truncated * b}
    return wrapped(values[name])


class Divisions(torch.nn.Module):
    """Both given; the divisor in the program; both in the program, where compilers compute the result."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = []
        for divide in OPERATORS.values():
            results.append(divide(a, b))
            results += [divide(a, y) for y in WRITTEN]
            results += [divide(torch.full_like(a, LEAST), torch.full_like(a, y)) for y in WRITTEN]
        return tuple(results)


def test_every_division_has_a_result() -> None:
    pairs = list(itertools.product(NUMBERS, NUMBERS))
    a, b = (torch.tensor([pair[k] for pair in pairs], dtype=torch.int32) for k in (0, 1))
    results = iter(lapilli.compile(Divisions(), (a, b))(a, b))

    def check(name: str, given: list[tuple[int, int]]) -> None:
        for got, (x, y) in zip(next(results).tolist(), given, strict=True):
            assert y == 0 or got == reference(name, x, y), (name, x, y, got)

    for name in OPERATORS:
        check(name, pairs)
        for y in WRITTEN:
            check(name, [(x, y) for x, _ in pairs])
        for y in WRITTEN:
            check(name, [(LEAST, y)] * len(pairs))


def test_floats_by_zero() -> None:
    """Given, or in the program, where lavapipe's compiler left the result undefined."""
    x = torch.tensor([1.0, -1, 0, -0.0, 2.5, torch.inf, -torch.inf, torch.nan, 3e38])
    signs = torch.tensor([0.0, -0.0]).repeat(5)[:9]

    def quotients(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            x // 0,
            x // 0.0,
            x // -0.0,
            x // y,
            x % 0.0,
            x % y,
            torch.fmod(x, 0.0),
            torch.div(x, 0, rounding_mode="trunc"),
        )

    expected = quotients(x, signs)
    ours = lapilli.compile(Function(quotients), (x, signs))(x, signs)
    eager = quotients(x.to("vulkan"), signs.to("vulkan"))
    for want, found, other in zip(expected, ours, eager, strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(other.cpu(), want, rtol=0, atol=0, equal_nan=True)
