"""All integer types, through all operators, with values and numbers in and out of their range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import Function
from integer_cases import CONVERTED, INTEGERS, NUMBERS, OPERATORS, OUTSIDE, ROWS, accepted, together, used, values
from torch import Tensor

import lapilli
from lapilli import autoload
from lapilli.ir import interpret
from lapilli.legalize.passes import prepare
from lapilli.lower import lower

autoload.register()

Run = Callable[[Callable[..., Any], tuple[Tensor, ...]], list[Tensor]]


def interpreted(f: Callable[..., Any], args: tuple[Tensor, ...]) -> list[Tensor]:
    graph = lower(prepare(torch.export.export(Function(f), args)))
    return [torch.from_numpy(r) for r in interpret.run(graph, [a.numpy() for a in args])]


def program(f: Callable[..., Any], args: tuple[Tensor, ...]) -> list[Tensor]:
    return list(lapilli.compile(Function(f), args, fallback="error")(*args))


def compiled(f: Callable[..., Any], args: tuple[Tensor, ...]) -> list[Tensor]:
    torch._dynamo.reset()
    return list(torch.compile(f, backend="vulkan")(*args))


def way(dtype: torch.dtype, run: Run) -> Any:
    return pytest.param(dtype, run, id=f"{str(dtype).removeprefix('torch.')}-{run.__name__}")


WAYS = [*(way(dtype, program) for dtype in reversed(INTEGERS)), way(torch.int8, interpreted)]
"""int64 first."""


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def check(names: list[list[str]], f: Callable[..., Any], args: tuple[Tensor, ...], run: Run) -> None:
    """What a function gives, which has its results of the same kind in one tensor, each with a name."""
    wrong = []
    got, want = run(f, args), f(*args)
    assert len(got) == len(want)
    for k, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert ours.dtype is theirs.dtype and ours.shape == theirs.shape, (names[k], ours.dtype, theirs.dtype)
        same = torch.isclose(ours, theirs, 1e-6, 0, equal_nan=True) if ours.is_floating_point() else ours == theirs
        wrong += [names[k][row] for row in (~same).reshape(len(same), -1).any(1).nonzero().flatten().tolist()]
    assert not wrong, wrong


def batch(
    cases: dict[str, Callable[..., Tensor]], args: tuple[Tensor, ...]
) -> tuple[list[list[str]], Callable[..., list[Tensor]]]:
    """All functions as one, and the names of its results."""

    def f(*args: Tensor) -> list[Tensor]:
        results = [case(*args) for case in cases.values()]
        return together(results) + together([used(case(*args)) for case in cases.values()])

    kinds: dict[Any, list[str]] = {}
    for prefix, change in (("", lambda r: r), ("used ", used)):
        for name, case in cases.items():
            kinds.setdefault((prefix, change(case(*args)).dtype), []).append(prefix + name)
    return list(kinds.values()), f


@pytest.mark.parametrize("dtype, run", [*WAYS, way(torch.uint8, compiled), way(torch.bool, program)])
@pytest.mark.part(6)
def test_operators(dtype: torch.dtype, run: Run) -> None:
    a, b = values(dtype)
    cases = {n: f for n, f in OPERATORS.items() if accepted(lambda f=f: f(a, b))}
    if dtype is torch.bool:  # torch shifts bools, and refuses to compile that
        cases = {n: f for n, f in cases.items() if "shift" not in n}
    cases |= {f"to {n}": (lambda a, b, f=f: f(a)) for n, f in CONVERTED.items()}
    cases |= {f"sum to {n}": (lambda a, b, f=f: f(a + b)) for n, f in CONVERTED.items()}
    assert dtype is torch.bool or len(cases) > 50
    check(*batch(cases, (a, b)), (a, b), run)


@pytest.mark.parametrize(
    "dtype, run", [way(torch.uint8, program), way(torch.int32, program), way(torch.int8, interpreted)]
)
@pytest.mark.part(6)
def test_numbers(dtype: torch.dtype, run: Run) -> None:
    """Python numbers that do not fit are converted first, where torch does so."""
    a = values(dtype)[0][::5]
    if dtype is torch.int64:
        a = a % 64
    cases = {
        f"{name} {n}": (lambda a, f=f, n=n: f(a, n))
        for name, f in NUMBERS.items()
        for n in OUTSIDE
        if (n < 2**31 or (dtype is not torch.int64 and name != "maximum"))  # what kernels compute in 32 bits
        and accepted(lambda f=f, n=n: f(a, n))
        and not _is_wide(f(a, n))
    }
    assert len(cases) > 60
    check(*batch(cases, (a,)), (a,), run)


def _is_wide(r: Tensor) -> bool:
    return r.dtype is torch.int64 and bool((r.abs() >= 2**31).any())


@pytest.mark.parametrize(
    "dtype, run", [way(torch.int64, program), way(torch.uint8, program), way(torch.int8, interpreted)]
)
@pytest.mark.part(2)
def test_rows(dtype: torch.dtype, run: Run) -> None:
    """Reductions, scans, sorting, products and views."""
    m = values(dtype)[0].view(12, 12)[:, :9].T.contiguous() + values(dtype)[1].view(12, 12)[:9] * 3
    m = m if dtype is not torch.int64 else m % 32
    cases = {n: f for n, f in ROWS.items() if accepted(lambda f=f: f(m))}
    assert len(cases) == len(ROWS)

    def every(m: Tensor) -> list[Tensor]:
        return [r.unsqueeze(0) for f in cases.values() for r in flat(f(m))]

    names = [[n] for n, f in cases.items() for _ in flat(f(m))]
    check(names, every, (m,), run)


def test_rows_by_kernels_of_gpus(gpu_plans: None) -> None:
    def on_gpu(f: Callable[..., Any], args: tuple[Tensor, ...]) -> list[Tensor]:
        return list(lapilli.compile(Function(f), args, fallback="error", target="gpu-fp32")(*args))

    test_rows(torch.int32, on_gpu)


@pytest.mark.filterwarnings("ignore:.*runs on the CPU:UserWarning")
def test_numbers_on_the_eager_device() -> None:
    """There a number is known when a kernel runs; what torch refuses is refused as by torch."""
    a = values(torch.uint8)[0][::7]
    names = ("add", "radd", "floordiv", "remainder", "eq", "lt", "shift right", "clamp", "masked_fill", "alpha")
    for name in names:
        for n in (7, -3, 300):
            f = NUMBERS[name]
            if accepted(lambda f=f, n=n: f(a, n)):
                assert torch.equal(f(a.to("vulkan"), n).cpu(), f(a, n)), (name, n)
            else:
                with pytest.raises(RuntimeError, match="overflow"):
                    f(a.to("vulkan"), n)
