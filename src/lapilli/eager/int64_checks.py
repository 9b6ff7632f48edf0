"""Integers that may exceed the 32 bits in which kernels compute: int64 results that are sums, products or powers.

Numbers from the host that are too large are detected on arrival (`storage.exceeds_int32`). Large results are detected by
the largest magnitudes of the operands, if their types are not sufficient. For those, the host waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lapilli.eager.call_signature import CannotRun

aten = torch.ops.aten

MOST = 2**31 - 1
_SMALL = {torch.bool: 1, torch.uint8: 255, torch.int8: 128, torch.int16: 1 << 15}
_STEP = 1 << 20
"""Smaller numbers are added without a check: counters are not expected to come that close to the limit."""

Fits = Callable[[list[int]], bool]


@dataclass(frozen=True)
class Limit:
    """A condition on the magnitudes of operands.

    operands: ("tensor", index of a tensor of the call), ("number", index of a number of the call) or ("value", the number
    itself). fits: whether results of operands with given magnitudes fit into 32 bits.
    """

    operands: tuple[tuple[str, int], ...]
    fits: Fits

    def check(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> None:
        """Raises CannotRun if a result may be too large."""

        def magnitude(operand: tuple[str, int], look: bool) -> int:
            kind, k = operand
            if kind == "tensor":
                return largest(tensors[k]) if look else _SMALL.get(tensors[k].dtype, MOST)
            return abs(int(numbers[k] if kind == "number" else k))

        if not any(self.fits([magnitude(x, look) for x in self.operands]) for look in (False, True)):
            raise CannotRun("its results may not fit into the 32 bits in which the GPU computes integers")


_STRICT = {
    aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.masked_fill.Scalar, aten.add.Tensor,
    aten.sub.Tensor, aten.addcmul.default, aten.constant_pad_nd.default, aten.fill.Scalar, aten.full.default,
    aten.full_like.default, aten.new_full.default, aten.index_fill.int_Scalar, aten.index_add.default, aten.scatter.value,
    aten.where.ScalarSelf, aten.where.ScalarOther, aten.threshold.default, aten.addmm.default, aten.baddbmm.default,
}  # fmt: skip
"""Operators whose Python numbers must fit into the type of the result. Other operators wrap them around."""
_WITHIN = {
    d: (-torch.iinfo(d).max if d is torch.uint8 else torch.iinfo(d).min, torch.iinfo(d).max)
    for d in (torch.uint8, torch.int8, torch.int16)
} | {torch.int64: (-(2**31), 2**31 - 1)}
"""Numbers that fit a type; negative ones for uint8 wrap around, and those for int64 are limited to 32 bits."""


@dataclass(frozen=True)
class Within:
    """A range that all Python numbers of a call must be in."""

    low: int
    high: int

    def check(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> None:
        """Raises CannotRun for a number that torch rejects; torch's own message is better."""
        if not all(self.low <= n <= self.high for n in numbers):
            raise CannotRun("a number does not fit into the type of the result")


def limit(
    op: Any,
    leaves: Sequence[Any],
    places: Sequence[Sequence[int]],
    numbers: Sequence[int | None],
    results: Sequence[Any],
) -> Limit | Within | None:
    """The check for calls of an operator; None if there is none. places, numbers: the indices of the tensors, and of the
    number, of each argument. results: their shapes, strides and dtypes.
    """
    if op in _STRICT and results[0][2] in _WITHIN and not (results[0][2] is torch.int64 and op in _RULES):
        return Within(*_WITHIN[results[0][2]])
    if op not in _RULES or results[0][2] is not torch.int64:
        return None
    arguments, rule = _RULES[op]

    def operand(k: int) -> tuple[str, int]:
        if places[k]:
            return "tensor", places[k][0]
        number = numbers[k]
        return ("value", leaves[k] or 0) if number is None else ("number", number)  # None: a bias that there is not

    return Limit(tuple(operand(k) for k in arguments), rule(leaves, math.prod(results[0][0])))


def largest(tensor: torch.Tensor) -> int:
    """The largest magnitude in a tensor; more than MOST if it has infinities or NaN, which hide the other elements."""
    if not tensor.numel():
        return 0
    bounds = [x.item() for x in tensor.aminmax()]
    return max(abs(int(x)) if math.isfinite(x) else MOST + 1 for x in bounds)


# --- rules: from the arguments and the number of results to a condition


def _sum(terms: int) -> Fits:
    return lambda factors: terms * math.prod(factors) <= MOST


def _power(count: int) -> Fits:
    return lambda base: _raised([*base, count])


def _raised(magnitudes: list[int]) -> bool:
    base, exponent = magnitudes
    return base <= 1 or exponent * math.log2(base) < 31


def _shifted(magnitudes: list[int]) -> bool:
    first, places = magnitudes
    return not first or math.log2(first) + places < 31


def _reduced(leaves: Sequence[Any], made: int) -> int:
    return int(leaves[0].numel()) // max(made, 1)


def _along(leaves: Sequence[Any], made: int) -> int:
    """The number of terms of a cumulative sum or product."""
    return int(leaves[0].shape[leaves[1]]) if leaves[0].dim() else 1


def _inner(leaves: Sequence[Any], made: int) -> int:
    return int(leaves[0].shape[-1])


def _added(magnitudes: list[int]) -> bool:
    first, second, factor = magnitudes
    return second * factor <= _STEP or first + second * factor <= MOST


def _subtracted(magnitudes: list[int]) -> bool:
    first, second, factor = magnitudes
    return _added([second, first, factor])


def _collected(terms: int) -> Fits:
    """An old value plus a sum of others."""
    return lambda magnitudes: magnitudes[0] + terms * math.prod(magnitudes[1:]) <= MOST


def _product_and_sum(terms: int) -> Fits:
    def fits(magnitudes: list[int]) -> bool:
        added, left, right, beta, alpha = magnitudes
        return beta * added + alpha * terms * left * right <= MOST

    return fits


def _combined(reduction: int) -> Callable[[Sequence[Any], int], Fits]:
    """Old values and those that scatter or index_reduce bring to one place. reduction: the argument with its name."""

    def rule(leaves: Sequence[Any], made: int) -> Fits:
        dim, index = leaves[1:3]
        terms = int(index.shape[dim]) if index.dim() > 1 else int(index.numel())
        name = leaves[reduction]
        if name in ("sum", "mean", "add"):
            return _collected(terms)
        if name in ("prod", "multiply"):
            return lambda magnitudes: _raised([max(magnitudes), terms + 1])
        return lambda magnitudes: True

    return rule


def _put(leaves: Sequence[Any], made: int) -> Fits:
    """Values that replace others, or are added to them."""
    return _collected(leaves[2].numel()) if leaves[3] else lambda magnitudes: True


def _pooled(dimensions: int) -> Callable[[Sequence[Any], int], Fits]:
    """The sum of a window, which is then divided."""

    def rule(leaves: Sequence[Any], made: int) -> Fits:
        window = leaves[1]
        return _sum(math.prod(window) if len(window) == dimensions else window[0] ** dimensions)

    return rule


def _convolved(leaves: Sequence[Any], made: int) -> Fits:
    """Products of a window and a filter; of a transposed convolution, filters are along the second dimension."""
    weight, transposed = leaves[1], leaves[6]
    terms = weight.numel() // max(weight.shape[1 if transposed else 0], 1)
    return lambda magnitudes: magnitudes[2] + terms * magnitudes[0] * magnitudes[1] <= MOST


_RULES: dict[Any, tuple[tuple[int, ...], Callable[[Sequence[Any], int], Fits]]] = {
    aten.sum.default: ((0,), lambda x, n: _sum(_reduced(x, n))),
    aten.sum.dim_IntList: ((0,), lambda x, n: _sum(_reduced(x, n))),
    aten.nansum.default: ((0,), lambda x, n: _sum(_reduced(x, n))),
    aten.trace.default: ((0,), lambda x, n: _sum(min(x[0].shape))),
    aten.cumsum.default: ((0,), lambda x, n: _sum(_along(x, n))),
    aten.prod.default: ((0,), lambda x, n: _power(_reduced(x, n))),
    aten.prod.dim_int: ((0,), lambda x, n: _power(_reduced(x, n))),
    aten.cumprod.default: ((0,), lambda x, n: _power(_along(x, n))),
    aten.pow.Tensor_Scalar: ((0, 1), lambda x, n: _raised),
    aten.pow.Tensor_Tensor: ((0, 1), lambda x, n: _raised),
    aten.pow.Scalar: ((0, 1), lambda x, n: _raised),
    aten.bitwise_left_shift.Tensor: ((0, 1), lambda x, n: _shifted),
    aten.bitwise_left_shift.Tensor_Scalar: ((0, 1), lambda x, n: _shifted),
    aten.__lshift__.Tensor: ((0, 1), lambda x, n: _shifted),
    aten.__lshift__.Scalar: ((0, 1), lambda x, n: _shifted),
    aten.mm.default: ((0, 1), lambda x, n: _sum(_inner(x, n))),
    aten.bmm.default: ((0, 1), lambda x, n: _sum(_inner(x, n))),
    aten.mv.default: ((0, 1), lambda x, n: _sum(_inner(x, n))),
    aten.dot.default: ((0, 1), lambda x, n: _sum(_inner(x, n))),
    aten.mul.Tensor: ((0, 1), lambda x, n: _sum(1)),
    aten.mul.Scalar: ((0, 1), lambda x, n: _sum(1)),
    aten.add.Tensor: ((0, 1, 2), lambda x, n: _added),
    aten.sub.Tensor: ((0, 1, 2), lambda x, n: _added),
    aten.rsub.Scalar: ((0, 1, 2), lambda x, n: _subtracted),
    aten.rsub.Tensor: ((0, 1, 2), lambda x, n: _subtracted),
    aten.addmm.default: ((0, 1, 2, 3, 4), lambda x, n: _product_and_sum(_inner(x[1:], n))),
    aten.baddbmm.default: ((0, 1, 2, 3, 4), lambda x, n: _product_and_sum(_inner(x[1:], n))),
    aten.index_add.default: ((0, 3, 4), lambda x, n: _collected(x[3].numel())),
    aten.scatter_add.default: ((0, 3), lambda x, n: _collected(x[3].numel())),
    aten.scatter.reduce: ((0, 3), _combined(4)),
    aten.scatter.value_reduce: ((0, 3), _combined(4)),
    aten.scatter_reduce.two: ((0, 3), _combined(4)),
    aten.index_reduce.default: ((0, 3), _combined(4)),
    aten.put.default: ((0, 2), _put),
    aten.addmv.default: ((0, 1, 2, 3, 4), lambda x, n: _product_and_sum(_inner(x[1:], n))),
    aten.addbmm.default: ((0, 1, 2, 3, 4), lambda x, n: _product_and_sum(_inner(x[1:], n) * x[1].shape[0])),
    aten.addcmul.default: ((0, 1, 2, 3), lambda x, n: _collected(1)),
    aten.vdot.default: ((0, 1), lambda x, n: _sum(_inner(x, n))),
    aten.linalg_cross.default: ((0, 1), lambda x, n: _sum(2)),
    aten.lcm.default: ((0, 1), lambda x, n: _sum(1)),
    aten._trilinear.default: ((0, 1, 2), lambda x, n: _sum(x[1].numel() // max(x[1].shape[0], 1))),
    aten.avg_pool2d.default: ((0,), _pooled(2)),
    aten.avg_pool3d.default: ((0,), _pooled(3)),
    aten.convolution.default: ((0, 1, 2), _convolved),
    aten.index_put.default: ((0, 2), _put),
    aten._unsafe_index_put.default: ((0, 2), _put),
}
"""The relevant arguments, and the condition on their magnitudes."""
