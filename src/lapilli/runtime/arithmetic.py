"""Numbers that a run computes on the host: sizes and the numbers of a model. Integers stay within 64 bits, as in torch."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from lapilli.errors import InvalidInputError
from lapilli.runtime.sizes import OPERATIONS

INT_MIN, INT_MAX = -(1 << 63), (1 << 63) - 1
NEARLY_32_BITS = 2**31 - 2**20
"""A limit for magnitudes of integers that leaves room to add a small number within 32 bits."""


def _power(base: Any, exponent: Any) -> Any:
    """Rejects powers that exceed 64 bits before computing them."""
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and exponent > 0 and exponent * (abs(int(base)).bit_length() - 1) > 64:
        raise OverflowError("the power of integers does not fit into 64 bits")
    return base**exponent


_FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int]] = {
    **{f: (getattr(operator, f), 2, 2) for f in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_",
    )},
    **{f: (getattr(math, f), 1, 1) for f in ("ceil", "floor", "trunc", "sqrt")},
    "neg": (operator.neg, 1, 1), "pow": (_power, 2, 2), "sym_float": (float, 1, 1), "sym_int": (int, 1, 1),
    "sym_not": (operator.not_, 1, 1), "sym_max": (max, 2, 64), "sym_min": (min, 2, 64), "round": (round, 1, 2),
}  # fmt: skip

NUMBERS: dict[str, tuple[int, int]] = {name: (least, most) for name, (_, least, most) in _FUNCTIONS.items()}
"""Functions of numbers that a model computes on the host, by name, with the least and the largest number of arguments."""


def size(operation: str, a: int, b: int) -> int:
    """The value of an operation of a TREE. Raises InvalidInputError if there is no 64-bit result."""
    try:
        return int(bounded(OPERATIONS[operation](a, b)))
    except ArithmeticError as error:
        raise InvalidInputError(f"A size cannot be computed: {a} {operation} {b}: {error}.") from error


def number(function: str, arguments: list[Any]) -> Any:
    """The value of a function of numbers. Raises InvalidInputError if there is no result, or none within 64 bits."""
    try:
        return bounded(_FUNCTIONS[function][0](*arguments))
    except (ArithmeticError, ValueError, TypeError) as error:
        shown = ", ".join(map(str, arguments))
        raise InvalidInputError(f"A number cannot be computed: {function}({shown}): {error}.") from error


def bounded(value: Any) -> Any:
    """The number itself. Raises OverflowError for an integer beyond 64 bits, and TypeError for anything but a number."""
    if isinstance(value, int) and not INT_MIN <= value <= INT_MAX:
        raise OverflowError("the integer does not fit into 64 bits")
    if not isinstance(value, int | float | complex):
        raise TypeError(f"{type(value).__name__} is no number")
    return value
