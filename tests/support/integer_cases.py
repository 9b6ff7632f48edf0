"""Integers of all types through all operators that take them: values at the ends of their types, numbers that fit and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
INTEGERS = DTYPES[1:]
Function = Callable[[Tensor, Tensor], Any]


def values(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Every pair of some numbers, each [144]: 0, 1, some between, and both ends of the type (of int64: numbers whose results have
    32 bits)."""
    if dtype is torch.bool:
        found = torch.tensor([False, True])
        return torch.meshgrid(found, found, indexing="ij")[0].flatten(), found.repeat(2)
    low, high = (-1000, 1000) if dtype is torch.int64 else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    some = [0, 1, 2, 3, 7, 31, 100, high - 1, high, low, low + 1, 129 if low == 0 else -3]
    found = torch.tensor(some, dtype=torch.int64).to(dtype)
    a, b = torch.meshgrid(found, found, indexing="ij")
    return a.flatten(), b.flatten()


def not_zero(b: Tensor) -> Tensor:
    return torch.where(b == 0, torch.ones_like(b), b)


def below_ends(a: Tensor) -> Tensor:
    """Without the least number, whose quotient by -1 is none of its type."""
    return torch.where(a == torch.iinfo(a.dtype).min, torch.ones_like(a), a)


OPERATORS: dict[str, Function] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: below_ends(a) // not_zero(b),
    "truncdiv": lambda a, b: torch.div(below_ends(a), not_zero(b), rounding_mode="trunc"),
    "div": lambda a, b: a / not_zero(b),
    "remainder": lambda a, b: below_ends(a) % not_zero(b),
    "fmod": lambda a, b: torch.fmod(below_ends(a), not_zero(b)),
    "pow": lambda a, b: a ** (b & 3),
    "pow of a number": lambda a, b: 3 ** (b & 3),
    "square": lambda a, b: a.square() + a**3,
    "alpha": lambda a, b: torch.add(a, b, alpha=5) - torch.sub(a, b, alpha=3),
    "addcmul": lambda a, b: torch.addcmul(a, b, b, value=3),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a, b: ~a,
    "shift left": lambda a, b: a << (b & 3),
    "shift right": lambda a, b: a >> (b & 15),
    "shift by any number": lambda a, b: (a >> b) - (below_ends(a) >> (b | 64)),
    "shift out": lambda a, b: a << (b | 64),
    "neg": lambda a, b: -a,
    "abs": lambda a, b: a.abs(),
    "sign": lambda a, b: a.sign() + a.sgn(),
    "gcd": lambda a, b: torch.gcd(below_ends(a), below_ends(b)),
    "lcm": lambda a, b: torch.lcm(below_ends(a) & 127, below_ends(b) & 127),
    "maximum": lambda a, b: torch.maximum(a, b) - torch.minimum(a, b),
    "least of three": lambda a, b: torch.minimum(torch.minimum(a, -b), -(a ^ b)),
    "greatest of three": lambda a, b: torch.maximum(torch.maximum(-a, -b), a - b),
    "fmax": lambda a, b: torch.fmax(a, b) ^ torch.fmin(a, b),
    "clamp": lambda a, b: a.clamp(3, 50) + a.clamp(min=b) + a.clamp(max=b),
    "where": lambda a, b: torch.where(a > b, a, b + 1),
    "relu": lambda a, b: F.relu(a - b),
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a + 1 == b,
    "ge": lambda a, b: (a >= b) ^ (a - b > 7) ^ (a * 2 <= b) ^ (a != b),
    "logical": lambda a, b: torch.logical_and(a, b) ^ torch.logical_or(a, b) ^ torch.logical_xor(a, b) ^ a.logical_not(),
    "bool arithmetic": lambda a, b: (a > 3) * b + (a > b),
    "floats": lambda a, b: (a + b).float() * 0.5 + (a * b).sqrt().nan_to_num(3),
    "true": lambda a, b: a + True,
    "copysign": lambda a, b: torch.copysign(a, b - 3),
    "heaviside": lambda a, b: torch.heaviside(a, b),
    "isin": lambda a, b: torch.isin(a - b, b[:7]),
    "to half": lambda a, b: a.half().float() + b,
}  # fmt: skip
"""Of two tensors of one integer type; torch gives a definite result for all values."""

NUMBERS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "add": lambda a, n: a + n,
    "radd": lambda a, n: n - a,
    "mul": lambda a, n: a * n,
    "floordiv": lambda a, n: a // n,
    "rfloordiv": lambda a, n: n // not_zero(a),
    "truncdiv": lambda a, n: torch.div(a, n, rounding_mode="trunc"),
    "remainder": lambda a, n: a % n,
    "fmod": lambda a, n: torch.fmod(a, n),
    "div": lambda a, n: a / n,
    "bits": lambda a, n: (a & n) ^ (a | n) ^ (n ^ a),
    "shift left": lambda a, n: a << n,
    "shift right": lambda a, n: a >> n,
    "shift of a number": lambda a, n: (n << (a & 7)) + (n >> (a & 7)),
    "eq": lambda a, n: a == n,
    "ne": lambda a, n: a != n,
    "lt": lambda a, n: a < n,
    "ge": lambda a, n: (a >= n) ^ (a <= n) ^ (a > n),
    "maximum": lambda a, n: torch.maximum(a, torch.tensor(n)),
    "rpow": lambda a, n: n ** (a & 3),
    "isin": lambda a, n: torch.isin(a, n),
    "clamp": lambda a, n: a.clamp(min=n),
    "clamp both": lambda a, n: a.clamp(n, 100),
    "where": lambda a, n: torch.where(a > 3, a, n),
    "masked_fill": lambda a, n: a.masked_fill(a > 3, n),
    "full_like": lambda a, n: torch.full_like(a, n) + a,
    "alpha": lambda a, n: torch.add(a, a, alpha=n),
    "addcmul": lambda a, n: torch.addcmul(a, a, a, value=n),
    "threshold": lambda a, n: F.threshold(a, 3, n),
    "pad": lambda a, n: F.pad(a, (2, 1), value=n)[1:-2],
    "index_fill": lambda a, n: a.index_fill(0, torch.tensor([0, 3]), n),
    "scatter": lambda a, n: a.scatter(0, torch.tensor([0, 3]), n),
}  # fmt: skip
"""Of a tensor and a Python number. Where the number does not fit, most convert it first; those from "clamp" on may refuse."""

OUTSIDE = (-3, 200, 300, -300, 70000, 2**31 + 9, 2**33 + 5)

ROWS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda m: m.sum(1) - m.sum(),
    "sum in its type": lambda m: m.sum(1, dtype=m.dtype),
    "prod in its type": lambda m: m.prod(1, dtype=m.dtype),
    "prod": lambda m: (m & 3).prod(0),
    "mean": lambda m: m.float().mean(1),
    "extrema": lambda m: (m.amin(1), m.amax(0), m.max(), m.min(), *m.max(1), *m.min(0), *torch.aminmax(m, dim=1)),
    "places": lambda m: (m.argmax(1), m.argmin(0), m.argmax()),
    "any": lambda m: (m.any(1), m.all(0), m.count_nonzero(1)),
    "cumsum": lambda m: (m.cumsum(1), m.cumsum(0, dtype=m.dtype), m.cumsum(1, dtype=torch.uint8)),
    "cumprod": lambda m: (m.cumprod(0, dtype=torch.int16), m.cumprod(1, dtype=torch.uint8), (m & 1).cumprod(1)),
    "cummax": lambda m: (*m.cummax(1), m.cummin(0).values),
    "sort": lambda m: (*m.sort(dim=1, stable=True), m.sort(0, descending=True).values, (m + m).sort(1).values),
    "chosen": lambda m: (m.topk(3, 1).values, m.kthvalue(2, 0).values, m.median(1).values, m.median(), m.mode(1).values),
    "after": lambda m: ((m + 100).sum(1), (m * 2).amax(1), (m - 5).argmin(1), (m + m).cumsum(0), (-m).amin(0),
                        (-m).amin(1), (-m).amax(1), (-m).amax()),
    "scatter": lambda m: (
        m.scatter_add(1, (m & 1).long(), m), m[0].index_add(0, (m[0] & 7).long() % m.shape[1], m[1]),
        m.scatter_reduce(1, (m & 1).long(), m, "prod"), m.scatter_reduce(1, (m & 1).long(), m, "amax"),
    ),
    "products": lambda m: (m @ m.T, m.T @ m, m[0].dot(m[1]), m @ m[0], torch.bmm(m[None], m.T[None]),
                           torch.addmm(m[:, :4], m, m.T[:, :4])),
    "views": lambda m: (torch.cat([m, -m]).float(), m.flip(1)[:, :3] + m[:, :3], F.pad(m, (1, 2), value=5), m.t().clone()),
    "outer": lambda m: (torch.outer(m[0], m[1]), torch.kron(m[:2, :2], m[:2, :2]), torch.diff(m, dim=1), m.roll(1, 0)),
    "search": lambda m: torch.searchsorted(m[0].sort().values, m),
    "unfold": lambda m: m.unfold(1, 3, 2).sum(-1),
}  # fmt: skip
"""Of a matrix of integers of one type."""

CONVERTED: dict[str, Callable[[Tensor], Tensor]] = {
    str(d).removeprefix("torch."): (lambda a, d=d: a.to(d)) for d in (*DTYPES, torch.float32)
}


def used(r: Tensor) -> Tensor:
    """A result read by the kernel that computes it, where anything beyond its type would show."""
    if r.is_floating_point():
        return r.float() + 0.5
    if r.dtype is torch.int64:
        return r // 3
    return (r >> 1) ^ (r < 0) if r.dtype is torch.int32 else r.int() * 3


def together(results: list[Tensor]) -> list[Tensor]:
    """Tensors of one shape, those of a dtype in one: few kernels compute them all."""
    kinds: dict[tuple[Any, ...], list[Tensor]] = {}
    for r in results:
        kinds.setdefault((r.dtype, *r.shape), []).append(r)
    return [torch.stack(same) for same in kinds.values()]


def accepted(make: Callable[[], Any]) -> bool:
    """Whether torch gives a result."""
    try:
        make()
    except (RuntimeError, TypeError, ValueError):
        return False
    return True
