"""Converts torch's sizes (sympy expressions) to integers of the kernel IR and to trees, and finds where a size can
be read.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from fractions import Fraction
from functools import reduce
from typing import Any, TypeVar

import sympy
import torch

from lapilli.errors import UnsupportedOperatorError
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, const, index, unary
from lapilli.ir.integer import Atom, Extremum, Int, Quotient, Remainder, Symbol, as_int, maximum, minimum, symbol
from lapilli.lower.registry import Shared
from lapilli.runtime.sizes import Tree, joined

Place = TypeVar("Place")


def linear(e: Any, s: sympy.Symbol) -> tuple[Any, Any] | None:
    """(factor, offset) with e = factor * s + offset, where the factor consists of other sizes and is not negative; None
    otherwise.
    """
    if not e.is_polynomial(s) or sympy.degree(e, s) != 1:
        return None
    factor, offset = sympy.Poly(e, s).all_coeffs()
    return (factor, offset) if factor.is_nonnegative else None


def solve(shown: Iterable[tuple[Place, Any]], known: Container[str]) -> Iterator[tuple[str, Place, Any, Any]]:
    """(size, place, factor, offset) for every unknown size that can be read at a place, where factor * size + offset is
    found and all other sizes in that are known.

    shown: places, and the torch expressions found there. The caller adds the sizes it receives to `known`.
    """
    places = list(shown)
    found: set[str] = set()
    count = -1
    while count != len(found):
        count = len(found)
        for place, e in places:
            unknown = [s for s in e.free_symbols if s.name not in known]
            solved = linear(e, unknown[0]) if len(unknown) == 1 else None
            if solved is not None:
                found.add(unknown[0].name)
                yield unknown[0].name, place, *solved


def tree(i: Int) -> Tree:
    """A size as it is written in program files and host scripts."""
    terms = [joined("*", [*map(_tree_of_atom, m), *([c] if c != 1 else [])]) for m, c in i.terms]
    return joined("+", [*terms, *([i.const] if i.const or not terms else [])])


def _tree_of_atom(a: Atom) -> Tree:
    if isinstance(a, Symbol):
        return a.name
    assert isinstance(a, Quotient | Remainder | Extremum), f"{a!r} is no size"
    return [a.op if isinstance(a, Extremum) else "//" if isinstance(a, Quotient) else "%", tree(a.x), tree(a.y)]


def scaled_size(e: Any) -> tuple[Fraction, Any] | None:
    """(factor, size) of a size scaled by a float, int(1.5 * n), if the product is exact in floats. Otherwise (0.7 * n) it
    is rounded, and integers cannot express the result.
    """
    if type(e).__name__ != "TruncToInt" or not isinstance(e.args[0], sympy.Mul) or len(e.args[0].args) != 2:
        return None
    number, size = e.args[0].args
    if not isinstance(number, sympy.Float) or type(size).__name__ != "ToFloat" or number <= 0:
        return None
    factor = Fraction(float(number))
    return (factor, size.args[0]) if factor.denominator <= 1024 and factor.numerator <= 1 << 20 else None


_ROUNDINGS = frozenset(("TruncToInt", "FloorToInt", "CeilToInt", "RoundToInt"))


def _divides_by_one(e: Any) -> bool:
    return type(e).__name__ == "FloatTrueDiv" and bool(e.args[1].is_number) and float(e.args[1]) == 1


def _is_whole(e: Any) -> bool:
    """Whether a number is made of integers alone, though torch has it as a float: a range of floats has such an end."""
    if isinstance(e, sympy.Float):
        return float(e).is_integer()
    if isinstance(e, sympy.Add | sympy.Mul):
        return all(map(_is_whole, e.args))
    if _divides_by_one(e):
        return _is_whole(e.args[0])
    return type(e).__name__ == "ToFloat" or bool(e.is_integer)


class Symbols:
    """torch's size symbols as those of the IR, created on demand with torch's bounds."""

    def __init__(self, ranges: Mapping[sympy.Symbol, Any]) -> None:
        self.ranges = ranges
        self.known: dict[str, Int] = {}
        self.shared = Shared(known=self.known)

    def size(self, value: int | torch.SymInt | sympy.Expr) -> Int:
        if isinstance(value, torch.SymInt):
            value = value.node.expr
        if isinstance(value, int | sympy.Integer):
            return as_int(int(value))
        return self._expr(value)

    def _expr(self, e: Any) -> Int:
        if isinstance(e, int | sympy.Integer) or (isinstance(e, sympy.Float) and _is_whole(e)):
            return as_int(int(e))
        if isinstance(e, sympy.Symbol):
            return self._symbol(e)
        scaled = scaled_size(e)
        if scaled is not None:
            factor, size = scaled
            return self._expr(size) * factor.numerator // factor.denominator
        kind = type(e).__name__
        if kind == "ToFloat" or _divides_by_one(e) or (kind in _ROUNDINGS and _is_whole(e.args[0])):
            return self._expr(e.args[0])
        if kind in _ROUNDINGS:
            raise UnsupportedOperatorError(
                f"the size {e} is rounded from a float: scale by a fraction of a power of two, such as 1.5, or give the size"
            )
        args = [self._expr(a) for a in e.args]
        if isinstance(e, sympy.Add):
            return sum(args[1:], args[0])
        if isinstance(e, sympy.Mul):
            result = args[0]
            for a in args[1:]:
                result = result * a
            return result
        if isinstance(e, sympy.Pow) and isinstance(e.exp, sympy.Integer) and e.exp > 0:
            result = args[0]
            for _ in range(int(e.exp) - 1):
                result = result * args[0]
            return result
        binary: dict[str, Callable[[Int, Int], Int]] = {
            "FloorDiv": lambda a, b: a // b, "CleanDiv": lambda a, b: a // b, "Mod": lambda a, b: a % b,
            "PythonMod": lambda a, b: a % b, "Min": minimum, "Max": maximum,
        }  # fmt: skip
        if kind in binary:
            result = args[0]
            for a in args[1:]:
                result = binary[kind](result, a)
            return result
        raise TypeError(f"sizes of the form {e} ({kind}) are not supported")

    def number(self, value: torch.SymFloat) -> Expr:
        """A floating-point number computed from sizes. Raises TypeError for one that is read from a tensor."""
        return self._number(value.node.expr)

    def _number(self, e: Any) -> Expr:
        if isinstance(e, sympy.Number):
            return const(float(e))
        if e.is_integer:
            return index(self._expr(e), DType.float32)
        if type(e).__name__ == "ToFloat":
            return self._number(e.args[0])
        operations: dict[str, Callable[[Expr, Expr], Expr]] = {
            "Add": lambda a, b: a + b, "Mul": lambda a, b: a * b, "IntTrueDiv": lambda a, b: a / b,
            "FloatTrueDiv": lambda a, b: a / b, "FloatPow": lambda a, b: binary("pow", a, b),
        }  # fmt: skip
        kind = type(e).__name__
        if kind == "OpaqueUnaryFn_sqrt":
            return unary("sqrt", self._number(e.args[0]))
        if kind not in operations:
            raise TypeError(f"a number of the form {e} ({kind}) is not computed on the GPU")
        return reduce(operations[kind], map(self._number, e.args))

    def _symbol(self, s: sympy.Symbol) -> Int:
        if s.name not in self.known:
            bounds = self.ranges.get(s)
            lo, hi = 0, None
            if bounds is not None:
                lo = min([int(bounds.lower), *self._derived_bounds(s)]) if bounds.lower.is_Integer else 0
                hi = int(bounds.upper) if bounds.upper.is_Integer and int(bounds.upper) < 2**40 else None
            self.known[s.name] = symbol(s.name, lo, hi)
        return self.known[s.name]

    def _derived_bounds(self, s: sympy.Symbol) -> list[int]:
        """Lower bounds of a symbol that follow from derived sizes (2*s + 1): for a symbol that is no size itself, torch
        assumes at least 2.
        """
        found = []
        for size, bounds in self.ranges.items():
            factor = sympy.diff(size, s)
            if size != s and size.free_symbols == {s} and factor.is_Integer and factor > 0:
                found.append(int(sympy.ceiling((bounds.lower - size.subs(s, 0)) / factor)))
        return found
