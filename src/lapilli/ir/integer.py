"""Integer expressions over axis variables and size symbols, with bounds-driven simplification.

An `Int` is a sum of products of atoms with integer coefficients, kept in canonical form, so that equal expressions are equal
objects by `==`. Division and modulus are simplified if the bounds of their operands allow it:

>>> c, h = var("c", 8), var("h", 4)
>>> (h * 8 + c) // 8
h
>>> ((h * 8 + c) % 8) + 8 * ((h * 8 + c) // 8)
c + 8*h
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Union, overload

if TYPE_CHECKING:
    from lapilli.ir.expr import Expr

IntLike = Union["Int", int]
Monomial = tuple["Atom", ...]
Bounds = tuple[int | None, int | None]
"""Inclusive lower and upper bounds; None means unbounded."""

_ids = itertools.count()
T = TypeVar("T")


class cached(Generic[T]):
    """A property that is computed once, as `functools.cached_property`, which takes a lock before Python 3.12."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        value = instance.__dict__[self.name] = self.compute(instance)
        return value


@dataclass(frozen=True, eq=False)
class Atom:
    """A factor in an integer expression. Atoms of a class are ordered by `key`, which makes the order of terms
    canonical.
    """

    @cached
    def key(self) -> str:
        raise NotImplementedError

    @cached
    def bounds(self) -> Bounds:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return self is other or (type(self) is type(other) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return self.key


@dataclass(frozen=True, eq=False, repr=False)
class Symbol(Atom):
    """A size known only at run time: a dynamic dimension with its bounds."""

    name: str
    min: int = 0
    max: int | None = None

    @cached
    def key(self) -> str:
        # Includes the bounds: programs use the same names for their sizes, and cached divisions depend on the bounds.
        return f"{self.name}[{self.min}..{self.max}]"

    @cached
    def bounds(self) -> Bounds:
        return self.min, self.max

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False, repr=False)
class Var(Atom):
    """An axis variable: 0 <= value < extent."""

    name: str
    extent: Int
    id: int = field(default_factory=_ids.__next__, init=False)

    __eq__ = object.__eq__
    __hash__ = object.__hash__
    """There is one object for each variable. (Python's own are much faster than those of `Atom`.)"""

    @cached
    def key(self) -> str:
        return f"{self.name}.{self.id:012}"  # in the order in which they were made, whatever was made before

    @cached
    def bounds(self) -> Bounds:
        hi = self.extent.bounds[1]
        return 0, None if hi is None else max(hi - 1, 0)

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False, repr=False)
class Quotient(Atom):
    """x // y, rounded toward minus infinity."""

    x: Int
    y: Int

    @cached
    def key(self) -> str:
        return f"({self.x.key})//({self.y.key})"

    @cached
    def bounds(self) -> Bounds:
        (lo, hi), (ylo, yhi) = self.x.bounds, self.y.bounds
        if ylo is None or ylo <= 0:
            return None, None
        low = None if lo is None else (lo // ylo if lo < 0 else (0 if yhi is None else lo // yhi))
        high = None if hi is None else (hi // ylo if hi >= 0 else (-1 if yhi is None else hi // yhi))
        return low, high

    def __repr__(self) -> str:
        return f"({self.x} // {self.y})"


@dataclass(frozen=True, eq=False, repr=False)
class Remainder(Atom):
    """x % y with the sign of y."""

    x: Int
    y: Int

    @cached
    def key(self) -> str:
        return f"({self.x.key})%({self.y.key})"

    @cached
    def bounds(self) -> Bounds:
        hi = self.y.bounds[1]
        xlo, xhi = self.x.bounds
        top = None if hi is None else hi - 1
        if xlo is not None and xlo >= 0 and xhi is not None:
            top = xhi if top is None else min(top, xhi)
        return 0, top

    def __repr__(self) -> str:
        return f"({self.x} % {self.y})"


@dataclass(frozen=True, eq=False, repr=False)
class Extremum(Atom):
    """min(x, y) or max(x, y)."""

    op: str
    x: Int
    y: Int

    @cached
    def key(self) -> str:
        return f"{self.op}({self.x.key},{self.y.key})"

    @cached
    def bounds(self) -> Bounds:
        (al, ah), (bl, bh) = self.x.bounds, self.y.bounds
        if self.op == "min":
            low = None if al is None or bl is None else min(al, bl)
            highs = [v for v in (ah, bh) if v is not None]
            return low, min(highs) if highs else None
        lows = [v for v in (al, bl) if v is not None]
        return (max(lows) if lows else None), (None if ah is None or bh is None else max(ah, bh))

    def __repr__(self) -> str:
        return f"{self.op}({self.x}, {self.y})"


@dataclass(frozen=True, eq=False, repr=False)
class Indirect(Atom):
    """An index computed by a scalar expression (a gather). The lowering guarantees 0 <= value < extent."""

    expr: Expr
    extent: Int

    @cached
    def key(self) -> str:
        return f"indirect[{self.expr.key}]"

    @cached
    def bounds(self) -> Bounds:
        hi = self.extent.bounds[1]
        return 0, None if hi is None else max(hi - 1, 0)


def weight(a: Atom) -> int:
    """See `Int.weight`."""
    return a.x.weight + a.y.weight if isinstance(a, Quotient | Remainder | Extremum) else 1


@dataclass(frozen=True, eq=False)
class Int:
    """An integer expression in canonical form: const + sum of coefficient * monomial."""

    terms: tuple[tuple[Monomial, int], ...]
    const: int

    def __init__(self, terms: tuple[tuple[Monomial, int], ...], const: int) -> None:
        self.__dict__.update(terms=terms, const=const)  # created by the hundred thousand: no time for checks

    @cached
    def key(self) -> str:
        parts = [f"{c}*" + "*".join([a.key for a in m]) for m, c in self.terms]
        return "+".join([*parts, str(self.const)])

    # -- arithmetic
    def __add__(self, other: IntLike) -> Int:
        o = other if type(other) is Int else as_int(other)
        if not o.terms and not o.const:
            return self
        if not self.terms and not self.const:
            return o
        terms = dict(self.terms)
        for m, c in o.terms:
            terms[m] = terms.get(m, 0) + c
        return _make(terms, self.const + o.const)

    __radd__ = __add__

    def __neg__(self) -> Int:
        return self * -1

    def __sub__(self, other: IntLike) -> Int:
        return self + as_int(other)._scaled(-1)

    def __rsub__(self, other: IntLike) -> Int:
        return as_int(other) - self

    def __mul__(self, other: IntLike) -> Int:
        if type(other) is int:
            return self._scaled(other)
        o = as_int(other)
        if not o.terms:
            return self._scaled(o.const)
        if not self.terms:
            return o._scaled(self.const)
        terms: dict[Monomial, int] = {}
        for (m1, c1), (m2, c2) in itertools.product(self._all(), o._all()):
            m = tuple(sorted(m1 + m2, key=lambda a: a.key))
            terms[m] = terms.get(m, 0) + c1 * c2
        const = terms.pop((), 0)
        return _make(terms, const)

    __rmul__ = __mul__

    def __floordiv__(self, other: IntLike) -> Int:
        return floordiv(self, as_int(other))

    def __rfloordiv__(self, other: IntLike) -> Int:
        return floordiv(as_int(other), self)

    def __mod__(self, other: IntLike) -> Int:
        return mod(self, as_int(other))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return not self.terms and self.const == other
        return isinstance(other, Int) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        parts = []
        for m, c in self.terms:
            text = "*".join(map(repr, m))
            parts.append(text if c == 1 else f"{c}*{text}")
        if self.const or not parts:
            parts.append(str(self.const))
        return " + ".join(parts)

    def _scaled(self, factor: int) -> Int:
        """This times a number; the form stays canonical."""
        if factor == 1 or factor == 0:
            return self if factor else _number(0)
        if not self.terms:
            return _number(self.const * factor)
        return Int(tuple([(m, c * factor) for m, c in self.terms]), self.const * factor)

    def _all(self) -> tuple[tuple[Monomial, int], ...]:
        return (*self.terms, ((), self.const)) if self.const else self.terms

    # -- queries
    @property
    def value(self) -> int | None:
        """The number, if the expression is constant."""
        return None if self.terms else self.const

    @cached
    def bounds(self) -> Bounds:
        lo: int | None = self.const
        hi: int | None = self.const
        for m, c in self.terms:
            a, b = _product_bounds(m)
            if c < 0:
                a, b = b, a
            lo = None if lo is None or a is None else lo + c * a
            hi = None if hi is None or b is None else hi + c * b
        return lo, hi

    @cached
    def weight(self) -> int:
        """The number of variables, symbols and constants in the expression as written, with repetitions."""
        return (self.const != 0) + sum(weight(a) for m, _ in self.terms for a in m)

    def atoms(self) -> frozenset[Atom]:
        """All variables and symbols that the expression reads (Indirect atoms as themselves)."""
        return self._atoms

    @cached
    def computed(self) -> tuple[Indirect, ...]:
        """The computed indices among them, in order of their keys."""
        found = [a for a in self._atoms if isinstance(a, Indirect)] if self.terms else ()
        return tuple(sorted(found, key=lambda a: a.key))

    @cached
    def _atoms(self) -> frozenset[Atom]:
        if not self.terms:
            return _NONE
        found: set[Atom] = set()
        for m, _ in self.terms:
            for a in m:
                if isinstance(a, Quotient | Remainder | Extremum):
                    found |= a.x._atoms | a.y._atoms
                else:
                    found.add(a)
        return frozenset(found)

    def substitute(self, mapping: Mapping[Atom, IntLike], indirect: Callable[[Indirect], Int] | None = None) -> Int:
        """Replaces variables or symbols; `indirect` rewrites computed indices."""
        if not self.terms:
            return self
        if not (indirect is not None and self.computed) and (not mapping or mapping.keys().isdisjoint(self._atoms)):
            return self
        terms: dict[Monomial, int] = {}
        const = self.const
        for m, c in self.terms:
            product = _substitute_atom(m[0], mapping, indirect)
            for a in m[1:]:
                product = product * _substitute_atom(a, mapping, indirect)
            const += c * product.const
            for n, factor in product.terms:
                terms[n] = terms.get(n, 0) + c * factor
        return _make(terms, const)

    def step(self, a: Atom) -> int | None:
        """The increase of the value per unit of an atom, if that is constant."""
        if a not in self._atoms:
            return 0
        found = 0
        for m, c in self.terms:
            if m == (a,):
                found += c
            elif any(b == a or (not isinstance(b, Var | Symbol) and a in of(b)._atoms) for b in m):
                return None
        return found

    def evaluate(self, values: Mapping[Atom, Any]) -> Any:
        """The number for given values of variables and symbols (integers or integer arrays)."""
        total: Any = self.const
        for m, c in self.terms:
            product: Any = c
            for a in m:
                product = product * _evaluate_atom(a, values)
            total = total + product
        return total


_NONE: frozenset[Atom] = frozenset()


def unbounded_multiple(i: Int) -> tuple[Int, int] | None:
    """(s, c) if a size is c * s for a symbol s without a known upper bound."""
    if i.const == 0 and len(i.terms) == 1:
        ((atoms, factor),) = i.terms
        if len(atoms) == 1 and isinstance(atoms[0], Symbol) and atoms[0].max is None and factor > 0:
            return of(atoms[0]), factor
    return None


def _evaluate_atom(a: Atom, values: Mapping[Atom, Any]) -> Any:
    if a in values:
        return values[a]
    if isinstance(a, Quotient):
        return a.x.evaluate(values) // a.y.evaluate(values)
    if isinstance(a, Remainder):
        return a.x.evaluate(values) % a.y.evaluate(values)
    if isinstance(a, Extremum):
        x, y = a.x.evaluate(values), a.y.evaluate(values)
        if isinstance(x, int) and isinstance(y, int):  # Python's integers are unbounded; NumPy's have 64 bits
            return min(x, y) if a.op == "min" else max(x, y)
        import numpy as np

        return (np.minimum if a.op == "min" else np.maximum)(x, y)
    raise KeyError(f"no value for {a!r}")


def _substitute_atom(a: Atom, mapping: Mapping[Atom, IntLike], indirect: Callable[[Indirect], Int] | None) -> Int:
    if a in mapping:
        return as_int(mapping[a])
    if isinstance(a, Quotient):
        return floordiv(a.x.substitute(mapping, indirect), a.y.substitute(mapping, indirect))
    if isinstance(a, Remainder):
        return mod(a.x.substitute(mapping, indirect), a.y.substitute(mapping, indirect))
    if isinstance(a, Extremum):
        return _extremum(a.op, a.x.substitute(mapping, indirect), a.y.substitute(mapping, indirect))
    if isinstance(a, Indirect) and indirect is not None:
        return indirect(a)
    return of(a)


def _product_bounds(m: Monomial) -> Bounds:
    lo: int | None = 1
    hi: int | None = 1
    for a in m:
        al, ah = a.bounds
        if al is not None and al >= 0 and lo is not None and lo >= 0:  # the usual case: sizes and indices
            lo = lo * al
            hi = None if hi is None or ah is None else hi * ah
            continue
        if al is None or ah is None or lo is None or hi is None:
            return None, None
        corners = [lo * al, lo * ah, hi * al, hi * ah]
        lo, hi = min(corners), max(corners)
    return lo, hi


def total(parts: Sequence[Int]) -> Int:
    """The sum of all parts."""
    terms: dict[Monomial, int] = {}
    const = 0
    for x in parts:
        const += x.const
        for m, c in x.terms:
            terms[m] = terms.get(m, 0) + c
    return _make(terms, const)


def _make(terms: dict[Monomial, int], const: int) -> Int:
    if not all(terms.values()):
        terms = {m: c for m, c in terms.items() if c}
    if not terms:
        return _number(const)
    if len(terms) == 1:
        return Int(tuple(terms.items()), const)
    terms = _recombine(terms)
    ordered = sorted(terms.items(), key=lambda t: ([a.key for a in t[0]]))
    result = Int(tuple((m, c) for m, c in ordered if m), const + sum(c for m, c in ordered if not m))
    return result


def _recombine(terms: dict[Monomial, int]) -> dict[Monomial, int]:
    """r * (x % y) + r * y * (x // y) = r * x, for any common factor r; and with (x // y) % z for x // y, r * (x % (y * z))."""
    if len(terms) < 2 or not any(isinstance(a, Remainder) for m in terms for a in m):
        return terms
    for m, c in list(terms.items()):
        for a in m:
            if not isinstance(a, Remainder):
                continue
            rest = list(m)
            rest.remove(a)
            quotient = floordiv(a.x, a.y)
            nested = _wider_remainder(terms, (m, c), a, tuple(rest), quotient)
            if nested is not None:
                return _recombine(nested)
            scaled = quotient * a.y * Int(((tuple(rest), c),), 0) if rest else quotient * a.y * c
            whole = list(scaled._all())
            if len(whole) != 1:
                continue
            wm, wc = whole[0]
            if terms.get(wm) == wc and wm != m:
                left = {k: v for k, v in terms.items() if k not in (m, wm)}
                extra = a.x * (Int(((tuple(rest), c),), 0) if rest else c)
                for em, ec in extra._all():
                    left[em] = left.get(em, 0) + ec
                return _recombine({k: v for k, v in left.items() if v})
    return terms


def _wider_remainder(
    terms: dict[Monomial, int], term: tuple[Monomial, int], a: Remainder, rest: Monomial, quotient: Int
) -> dict[Monomial, int] | None:
    """The terms with c * rest * (x % y), which is `term`, and c * rest * y * (quotient % z) as one, if both are there."""
    (m, c), y = term, a.y.value
    if y is None:
        return None
    for other, factor in terms.items():
        if factor != c * y or len(other) != len(m):
            continue
        for b in other:
            if not isinstance(b, Remainder) or b.x != quotient or b.y.value is None:
                continue
            left = list(other)
            left.remove(b)
            if tuple(left) != rest:
                continue
            joined = mod(a.x, as_int(y * b.y.value)) * (Int(((rest, c),), 0) if rest else c)
            found = {k: v for k, v in terms.items() if k not in (m, other)}
            for k, v in joined._all():
                found[k] = found.get(k, 0) + v
            return {k: v for k, v in found.items() if v}
    return None


def as_int(x: IntLike) -> Int:
    return x if type(x) is Int else _number(int(x))  # type: ignore[arg-type] # Int has no subclasses


@lru_cache(maxsize=4096)
def _number(x: int) -> Int:
    return Int((), x)


def of(atom: Atom) -> Int:
    return Int((((atom,), 1),), 0)


def var(name: str, extent: IntLike) -> Int:
    return of(Var(name, as_int(extent)))


def symbol(name: str, min: int = 0, max: int | None = None) -> Int:
    return of(Symbol(name, min, max))


def _divide_term(m: Monomial, c: int, dm: Monomial, dc: int) -> tuple[Monomial, int] | None:
    if c % dc:
        return None
    rest = list(m)
    for a in dm:
        if a not in rest:
            return None
        rest.remove(a)
    return tuple(rest), c // dc


def _upper(x: Int) -> Int:
    """An upper bound of x over its axis variables, as an expression over symbols (only positive linear uses)."""
    result = as_int(x.const)
    for m, c in x.terms:
        product = as_int(c)
        for a in m:
            if isinstance(a, Var) and c > 0:
                product = product * (a.extent - 1)
            elif isinstance(a, Remainder) and c > 0:
                product = product * (a.y - 1)
            else:
                product = product * of(a)
        result = result + product
    return result


def is_below(x: Int, y: Int) -> bool:
    """Whether x < y provably holds for all values."""
    for upper in (x, _upper(x)):
        lo = (y - upper).bounds[0]
        if lo is not None and lo >= 1:
            return True
    return False


def is_nonnegative(x: Int) -> bool:
    """Whether x >= 0 provably holds for all values."""
    lo = x.bounds[0]
    if lo is not None and lo >= 0:
        return True
    negative = Int(tuple((m, c) for m, c in x.terms if c < 0), 0)
    if negative.terms:  # size - 1 - index >= 0
        upper = _upper(-negative)
        lo = (x - negative - upper).bounds[0]
        return lo is not None and lo >= 0
    return False


@lru_cache(maxsize=1 << 14)
def floordiv(x: Int, y: Int) -> Int:
    """x // y, and 0 for y = 0: that occurs only in indices of empty tensors, which are never read."""
    if y.value == 1:
        return x
    if y.value == 0:
        return as_int(0)
    if x.value is not None and y.value is not None:
        return as_int(x.value // y.value)
    if len(y._all()) == 1:
        dm, dc = y._all()[0]
        if dc > 0:
            whole = as_int(0)
            rest = as_int(0)
            for m, c in x._all():
                quotient = _divide_term(m, c, dm, dc)
                if quotient is not None:
                    whole = whole + _term(*quotient)
                elif not dm and not m and abs(c) >= dc:  # constants: keep 0 <= rest < dc
                    whole, rest = whole + c // dc, rest + c % dc
                else:
                    rest = rest + _term(m, c)
            if not rest.terms and rest.const == 0:
                return whole
            if is_nonnegative(rest) and is_below(rest, y):
                return whole
            if whole.terms or whole.const:
                return whole + floordiv(rest, y)
            if not dm:
                reduced = _reduce_by_gcd(rest, dc)
                if reduced is not None:
                    return floordiv(*reduced)
            if len(rest.terms) == 1 and rest.const == 0 and rest.terms[0][1] == 1 and len(rest.terms[0][0]) == 1:
                inner = rest.terms[0][0][0]
                if isinstance(inner, Quotient) and _positive(inner.y):
                    return floordiv(inner.x, inner.y * y)
                if isinstance(inner, Remainder):  # (x % (y * z)) // y = (x // y) % z
                    parts = [_divide_term(m, c, dm, dc) for m, c in inner.y._all()]
                    if len(parts) == 1 and parts[0] is not None:
                        return mod(floordiv(inner.x, y), _term(*parts[0]))
    elif is_nonnegative(x) and is_below(x, y):
        return as_int(0)
    return of(Quotient(x, y))


def _reduce_by_gcd(x: Int, d: int) -> tuple[Int, Int] | None:
    """(g*a + c) // (g*e) = a // e if 0 <= c < g, where c consists of the terms that g does not divide."""
    coefficients = sorted({math.gcd(c, d) for _, c in x._all()} - {1}, reverse=True)
    for g in coefficients:
        small = as_int(0)
        big = as_int(0)
        for m, c in x._all():
            if c % g == 0:
                big = big + _term(m, c // g)
            elif not m:
                big, small = big + c // g, small + c % g
            else:
                small = small + _term(m, c)
        if big.terms and is_nonnegative(small) and is_below(small, as_int(g)):
            return big, as_int(d // g)
    return None


def _term(m: Monomial, c: int) -> Int:
    return Int(((m, c),), 0) if m else as_int(c)


def _positive(x: Int) -> bool:
    lo = x.bounds[0]
    return lo is not None and lo > 0


@lru_cache(maxsize=1 << 14)
def mod(x: Int, y: Int) -> Int:
    """x % y, and 0 for y = 0 as in `floordiv`."""
    if y.value in (0, 1):
        return as_int(0)
    if x.value is not None and y.value is not None:
        return as_int(x.value % y.value)
    if len(y._all()) == 1:
        dm, dc = y._all()[0]
        if dc > 0:
            rest = as_int(0)
            for m, c in x._all():
                if _divide_term(m, c, dm, dc) is not None:
                    continue
                if not dm:
                    c = c % dc if not m else c
                rest = rest + _term(m, c)
            if is_nonnegative(rest) and is_below(rest, y):
                return rest
            if len(rest.terms) == 1 and rest.const == 0 and len(rest.terms[0][0]) == 1 and rest.terms[0][1] == 1:
                inner = rest.terms[0][0][0]
                if isinstance(inner, Remainder) and all(_divide_term(m, c, dm, dc) for m, c in inner.y._all()):
                    return mod(inner.x, y)  # (x % (k * y)) % y = x % y
            if not dm:
                for g in sorted({math.gcd(c, dc) for _, c in rest._all()} - {1}, reverse=True):
                    big = Int(tuple((m, c) for m, c in rest.terms if c % g == 0), rest.const // g * g)
                    small = rest - big
                    if (
                        big.terms
                        and is_nonnegative(small)
                        and is_below(small, as_int(g))
                        and (big.terms != rest.terms or g > 1)
                    ):
                        scaled = Int(tuple((m, c // g) for m, c in big.terms), big.const // g)
                        return mod(scaled, as_int(dc // g)) * g + small
            return of(Remainder(rest, y))
    elif is_nonnegative(x) and is_below(x, y):
        return x
    return of(Remainder(x, y))


def forget_divisions() -> None:
    """Empties the caches of `floordiv` and `mod`: variables are new in each program, so that hardly any entry is of use for the
    next one, and a language model leaves some hundred thousand objects.
    """
    floordiv.cache_clear()
    mod.cache_clear()


def _extremum(op: str, x: Int, y: Int) -> Int:
    if x == y:
        return x
    difference = (x - y).bounds
    if difference[0] is not None and difference[0] >= 0:
        return y if op == "min" else x
    if difference[1] is not None and difference[1] <= 0:
        return x if op == "min" else y
    return of(Extremum(op, x, y))


def minimum(x: IntLike, y: IntLike) -> Int:
    return _extremum("min", as_int(x), as_int(y))


def maximum(x: IntLike, y: IntLike) -> Int:
    return _extremum("max", as_int(x), as_int(y))


def ceildiv(x: IntLike, y: IntLike) -> Int:
    return (as_int(x) + as_int(y) - 1) // as_int(y)


def product(sizes: tuple[Int, ...] | list[Int]) -> Int:
    return math.prod(sizes, start=as_int(1))
