"""Places of extrema that several invocations find together, as GPUs do where there are few results of many numbers: the first of
equal ones, or the first NaN. And whether any or all of many hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import as_gpu
import pytest
import torch
from agreement import Function

import lapilli


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def special() -> torch.Tensor:
    """With many equal numbers, rows of infinities, and NaN at several places of a row."""
    x = numbers(9, 1000).round()
    x[3, 500] = x[3, 700] = x[7, 9:] = torch.nan
    x[5], x[6] = -torch.inf, torch.inf
    return x


CASES: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "rows": (lambda x: x.argmax(-1), numbers(37, 1000)),
    "rows, and their values": (lambda x: x.max(-1), numbers(37, 1000)),
    "columns": (lambda x: x.argmin(0), numbers(1000, 37)),
    "columns of a view": (lambda x: x.mT.argmax(0), numbers(37, 1000)),
    "all": (lambda x: x.argmax(), numbers(37, 1000)),
    "equal ones": (lambda x: x.argmin(-1), numbers(9, 1000).round()),
    "special ones, largest": (lambda x: x.argmax(-1), special()),
    "special ones, smallest": (lambda x: x.min(-1), special()),
    "special ones of all": (lambda x: x.argmax(), special()),
    "a prime number": (lambda x: x.argmax(-1, keepdim=True), numbers(3, 65_537)),
    "integers": (lambda x: x.argmax(-1), numbers(5, 700).mul(3).int()),
    "bytes": (lambda x: x.argmin(-1), numbers(5, 700).mul(3).to(torch.int8)),
    "the smallest integers": (lambda x: x.argmax(-1), torch.full((2, 512), -(2**31), dtype=torch.int32)),
    "halves": (lambda x: x.argmax(-1), numbers(5, 600).half()),
    "any of few": (lambda x: ((x > 3).any(-1), (x > 3).any(0), (x > 9).any()), numbers(37, 1000)),
    "all of few": (lambda x: ((x < 3).all(-1), (x < 3).all(0), (x < 9).all()), numbers(37, 1000)),
    "any number, and NaN": (lambda x: (x.any(-1), x.isnan().any(-1), x.isfinite().all(-1)), special()),
    "any of a prime number": (lambda x: (x == x.max()).any(-1, keepdim=True), numbers(3, 65_537)),
}


@pytest.mark.parametrize("name", CASES)
def test_first_of_the_extrema(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path))
    as_gpu.on_any_device(monkeypatch.setattr)
    f, x = CASES[name]
    with lapilli.compile(
        Function(f), (x,), target="gpu-fp32" if x.dtype is not torch.float16 else "gpu-fp16"
    ) as program:
        got, wanted = program(x), f(x)
    for g, w in zip(*(tuple(r) if isinstance(r, tuple | list) else (r,) for r in (got, wanted)), strict=True):
        torch.testing.assert_close(torch.as_tensor(g), w, rtol=0, atol=0, equal_nan=True)
