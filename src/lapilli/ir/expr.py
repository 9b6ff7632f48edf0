"""Scalar expressions: what a kernel computes for one element.

Expressions are immutable and interned: equal expressions are the same object, so that common subexpressions are found by
identity. Types are compute types: float32, int32, bool.
"""

from __future__ import annotations

import itertools
import math
import operator
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from lapilli.ir.dtype import DType
from lapilli.ir.integer import Atom, Indirect, Int, IntLike, as_int, is_nonnegative, of
from lapilli.ir.narrow import OPERATIONS as NARROW
from lapilli.ir.narrow import narrowed
from lapilli.ir.scalar import OPS

if TYPE_CHECKING:
    from lapilli.ir.node import Node

Scalar: TypeAlias = "Expr | int | float | bool"

_interned: weakref.WeakValueDictionary[tuple[Any, ...], Expr] = weakref.WeakValueDictionary()
_ids = itertools.count()

# Comparisons of bools as logic: (operation, whether the left side is negated, the right). Shaders cannot compare bools.
_ON_BOOLS = {
    "lt": ("and", True, False), "le": ("or", True, False), "gt": ("and", False, True), "ge": ("or", False, True),
    "min": ("and", False, False), "max": ("or", False, False),
}  # fmt: skip


class Expr:
    """A scalar value. Build it with the functions below rather than with the classes."""

    __slots__ = ("__weakref__", "_loads", "dtype", "id")
    dtype: DType
    id: int
    _loads: tuple[Load, ...]  # computed on demand

    @property
    def key(self) -> str:
        return f"e{self.id:012}"  # in order of creation, whatever was created before

    @property
    def args(self) -> tuple[Expr, ...]:
        return ()

    def __add__(self, other: Scalar) -> Expr:
        return binary("add", self, other)

    def __radd__(self, other: Scalar) -> Expr:
        return binary("add", other, self)

    def __sub__(self, other: Scalar) -> Expr:
        return binary("sub", self, other)

    def __rsub__(self, other: Scalar) -> Expr:
        return binary("sub", other, self)

    def __mul__(self, other: Scalar) -> Expr:
        return binary("mul", self, other)

    def __rmul__(self, other: Scalar) -> Expr:
        return binary("mul", other, self)

    def __truediv__(self, other: Scalar) -> Expr:
        return binary("div", self, other)

    def __rtruediv__(self, other: Scalar) -> Expr:
        return binary("div", other, self)

    def __neg__(self) -> Expr:
        return unary("neg", self)

    def __repr__(self) -> str:
        return show(self)


class Const(Expr):
    __slots__ = ("value",)
    value: float | int | bool


class Load(Expr):
    """An element of a tensor."""

    __slots__ = ("index", "node")
    node: Node
    index: tuple[Int, ...]


class Index(Expr):
    """An integer expression as a scalar."""

    __slots__ = ("value",)
    value: Int


class Op(Expr):
    __slots__ = ("_args", "_canonical", "op")
    op: str
    _args: tuple[Expr, ...]
    _canonical: tuple[bool, Expr | None]  # computed on demand; see the function

    @property
    def args(self) -> tuple[Expr, ...]:
        return self._args


class Select(Expr):
    """`then` if every guard is >= 0, otherwise `other`; only the chosen branch is evaluated."""

    __slots__ = ("guards", "other", "then")
    guards: tuple[Int, ...]
    then: Expr
    other: Expr

    @property
    def args(self) -> tuple[Expr, ...]:
        return self.then, self.other


def _intern(cls: type[Expr], key: tuple[Any, ...], **fields: Any) -> Expr:
    full = (cls, *key)
    found = _interned.get(full)
    if found is None:
        found = cls()
        found.id = next(_ids)
        for name, value in fields.items():
            setattr(found, name, value)
        _interned[full] = found
    return found


def const(value: float | int | bool, dtype: DType | None = None) -> Expr:
    if dtype is None:
        dtype = DType.bool if isinstance(value, bool) else DType.int32 if isinstance(value, int) else DType.float32
    if dtype is DType.float32:
        value = float(value)
        return _intern(Const, (dtype, struct.pack("<d", value)), dtype=dtype, value=value)
    value = bool(value) if dtype is DType.bool else int(value)
    if not -(2**31) <= value < 2**31:
        raise TypeError(f"the number {value} does not fit into the 32 bits in which the GPU computes integers")
    return _intern(Const, (dtype, value), dtype=dtype, value=value)


def load(node: Node, index: Sequence[Int]) -> Expr:
    index = tuple(index)
    assert len(index) == len(node.shape), f"{node}: {len(index)} indices for rank {len(node.shape)}"
    return _intern(Load, (node.id, *(i.key for i in index)), dtype=node.dtype.compute, node=node, index=index)


def index(value: IntLike, dtype: DType = DType.int32) -> Expr:
    v = as_int(value)
    if v.value is not None:
        return const(v.value, dtype)
    e = _intern(Index, (v.key,), dtype=DType.int32, value=v)
    return cast_to(e, dtype)


def indirect(e: Expr, extent: IntLike) -> Int:
    """A computed index, 0 <= e < extent."""
    if isinstance(e, Index):
        return e.value
    if isinstance(e, Const):
        return as_int(int(e.value))
    return of(Indirect(e, as_int(extent)))


def as_expr(x: Scalar, like: Expr | None = None) -> Expr:
    if isinstance(x, Expr):
        return x
    return const(x, like.dtype if like is not None else None)


def _op(name: str, dtype: DType, *args: Expr) -> Expr:
    return _intern(Op, (name, dtype, *(a.id for a in args)), dtype=dtype, op=name, _args=args)


def unary(name: str, x: Expr) -> Expr:
    assert OPS[name].arity == 1, name
    if name in ("neg", "abs") and (positive := _negated(x)) is not None:
        return positive if name == "neg" else unary("abs", positive)
    return _op(name, OPS[name].result or x.dtype, x)


def binary(name: str, a: Scalar, b: Scalar) -> Expr:
    assert OPS[name].arity == 2, name
    x = as_expr(a, b if isinstance(b, Expr) else None)
    y = as_expr(b, x)
    if x.dtype is not y.dtype:
        raise TypeError(f"{name} of {x.dtype.name} and {y.dtype.name}")
    if x.dtype is DType.bool and name in _ON_BOOLS:
        operation, left, right = _ON_BOOLS[name]
        return _op(operation, DType.bool, unary("not", x) if left else x, unary("not", y) if right else y)
    folded = _fold(name, x, y)
    return folded if folded is not None else _op(name, OPS[name].result or x.dtype, x, y)


def _fold(name: str, x: Expr, y: Expr) -> Expr | None:
    """Identities that hold for every value, including NaN and signed zeros."""
    real = x.dtype is DType.float32
    if (
        real
        and isinstance(x, Const)
        and isinstance(y, Const)
        and (known := _of_constants(name, x.value, y.value)) is not None
    ):
        return const(known)
    if name in ("mul", "add") and isinstance(x, Const):
        x, y = y, x
    if isinstance(y, Const):
        if name in ("mul", "div") and y.value == 1:
            return x
        if name == "mul" and isinstance(x, Const) and x.value == 1:
            return y
        if name == "mul" and y.value == 0 and real:  # drivers and compilers fold x * 0, 0 / x and x - x to 0 for any x
            return where(is_finite(x), _zero_like(x, y.value), const(math.nan))
        if name == "div" and y.value == 0 and real:
            limit = math.copysign(math.inf, y.value)
            below = where(binary("lt", x, 0.0), const(-limit), const(math.nan))
            return where(binary("gt", x, 0.0), const(limit), below)
        if name == "floordiv" and y.value == 0 and real:  # which lavapipe's compiler leaves undefined
            return binary("div", x, y)
        if name == "sub" and y.value == 0 and y.dtype is not DType.bool and math.copysign(1, y.value) > 0:
            return x
        if name == "add" and y.value == 0 and y.dtype is DType.int32:
            return x
        if name == "add" and y.value == 0 and real:  # drivers take this for x: -0 + 0 is 0
            return x if math.copysign(1, y.value) < 0 else where(binary("eq", x, 0.0), const(0.0), x)
        if real and math.isnan(y.value) and name in ("min", "max"):
            return y
    if name == "sub" and real and isinstance(x, Const) and x.value == 0:  # for y = 0: 0, not -0
        return (
            where(binary("eq", y, 0.0), const(0.0), unary("neg", y))
            if math.copysign(1, x.value) > 0
            else unary("neg", y)
        )
    if name == "div" and real and isinstance(x, Const) and x.value == 0:
        return where(binary("gt", unary("abs", y), 0.0), _zero_like(y, x.value), const(math.nan))
    return _of_one_value(name, x, y) if real and not isinstance(x, Const) and not isinstance(y, Const) else None


_OF_ONE_VALUE = frozenset({"add", "sub", "div", "eq", "ne", "le", "ge", "lt", "gt"})


def _of_one_value(name: str, x: Expr, y: Expr) -> Expr | None:
    """What is 0, 1 or -1, or known, where it is a number: of x and x, x and -x, x * y and y * -x. Drivers take that for its result,
    whatever x is.
    """
    if name not in _OF_ONE_VALUE:
        return None
    (minus_x, x), (minus_y, y) = _canonical(x), _canonical(y)
    if x is not y:
        return None
    same = minus_x == minus_y
    if name == "div":
        finite = binary("and", is_finite(x), binary("ne", x, 0.0))
        return where(finite, const(1.0 if same else -1.0), const(math.nan))
    if name in ("add", "sub"):
        return where(is_finite(x), const(0.0), const(math.nan)) if same == (name == "sub") else None
    if not same:
        return None
    return const(False) if name in ("lt", "gt") else _is_nan(x, name == "ne")


def _canonical(e: Expr) -> tuple[bool, Expr]:
    """Whether e is the negative of the other result, which is one object for all that differ in signs and in the order of operands
    alone.
    """
    if not isinstance(e, Op):
        return False, e
    waiting = [] if hasattr(e, "_canonical") else [e]
    while waiting:  # not recursive: a chain of operators may be long
        last = waiting[-1]
        before = [a for a in last._args if isinstance(a, Op) and not hasattr(a, "_canonical")]
        waiting += before
        if not before:
            minus, found = _without_signs(last)
            last._canonical = minus, None if found is last else found  # not itself, which would be a reference cycle
            waiting.pop()
    minus, other = e._canonical
    return minus, e if other is None else other


def _without_signs(e: Op) -> tuple[bool, Expr]:
    given = [_canonical(a) for a in e.args]
    if e.dtype is DType.float32 and e.op in ("neg", "mul", "div", "add", "sub"):
        minus, x = given[0]
        if e.op == "neg":
            return not minus, x
        other, y = given[1]
        if e.op == "div":
            return minus != other, _op("div", e.dtype, x, y)
        if e.op == "mul":
            return minus != other, _op("mul", e.dtype, *((x, y) if x.id <= y.id else (y, x)))
        other ^= e.op == "sub"
        if x.id > y.id:
            minus, x, other, y = other, y, minus, x
        return minus, _op("add" if minus == other else "sub", e.dtype, x, y)
    return False, _op(e.op, e.dtype, *(_op("neg", x.dtype, x) if minus else x for minus, x in given))


def _negated(e: Expr) -> Expr | None:
    """x of -x."""
    return e.args[0] if isinstance(e, Op) and e.op == "neg" else None


def _of_constants(name: str, x: float, y: float) -> float | None:
    """The float32 result. None if devices may give another one: for denormal, infinite and NaN results."""
    if name not in ("add", "sub", "mul", "div") or (name == "div" and y == 0):
        return None
    with np.errstate(all="ignore"):
        a, b = np.float32(x), np.float32(y)
        found = float(a + b if name == "add" else a - b if name == "sub" else a * b if name == "mul" else a / b)
    underflows = name in ("mul", "div") and x != 0 and y != 0 and found == 0
    return found if (found == 0 and not underflows) or 2.0**-126 <= abs(found) < math.inf else None


def is_finite(x: Expr) -> Expr:
    """Checks the bits: a compiler may assume that there are no infinities."""
    return binary("lt", binary("bitand", unary("as_int", x), 2**31 - 1), 0x7F800000)


def _is_nan(x: Expr, holds: bool) -> Expr:
    return unary("isnan", x) if holds else unary("not", unary("isnan", x))


def _zero_like(x: Expr, zero: float | int | bool) -> Expr:
    """x * zero for a finite x: a zero with the sign of the product."""
    sign = binary("bitand", unary("as_int", x), -(2**31))
    return unary("as_float", sign if math.copysign(1, zero) > 0 else binary("bitxor", sign, -(2**31)))


def cast_to(x: Expr, dtype: DType) -> Expr:
    if x.dtype is dtype:
        return x
    if isinstance(x, Const):
        return const(x.value, dtype)
    if isinstance(x, Op) and x.op == "cast" and x.args[0].dtype is dtype is DType.bool:
        return x.args[0]  # a conversion and its inverse
    return _op("cast", dtype, x)


def narrow(x: Expr, dtype: DType) -> Expr:
    """A value rounded or wrapped to `dtype` (see `lapilli.ir.narrow`), in its compute type. 32-bit and wider types leave it
    unchanged.
    """
    name = NARROW.get(dtype)
    if name is None or (isinstance(x, Op) and x.op == name):
        return x
    assert x.dtype is dtype.compute, (x.dtype, dtype)
    return const(narrowed(x.value, dtype).item(), x.dtype) if isinstance(x, Const) else unary(name, x)


def where(condition: Expr, a: Expr, b: Expr) -> Expr:
    """a if the condition holds, otherwise b; both are evaluated."""
    assert condition.dtype is DType.bool and a.dtype is b.dtype, (condition.dtype, a.dtype, b.dtype)
    return a if a is b else _op("where", a.dtype, condition, a, b)


def select(guards: tuple[Int, ...] | list[Int], then: Expr, other: Expr) -> Expr:
    """`then` if all guards are >= 0, otherwise `other`. Guards that always hold are dropped."""
    assert then.dtype is other.dtype, (then.dtype, other.dtype)
    live = tuple(sorted({g for g in guards if not is_nonnegative(g)}, key=lambda g: g.key))
    if not live or then is other:
        return then
    for g in live:
        hi = g.bounds[1]
        if hi is not None and hi < 0:
            return other
    return _intern(
        Select, (*(g.key for g in live), "?", then.id, other.id), dtype=then.dtype, guards=live, then=then, other=other
    )


def ints_of(e: Expr) -> tuple[Int, ...]:
    """Integer expressions that this expression reads itself, not through its arguments."""
    if isinstance(e, Load):
        return e.index
    if isinstance(e, Index):
        return (e.value,)
    return e.guards if isinstance(e, Select) else ()


def walk(root: Expr, through_indirect: bool = True) -> list[Expr]:
    """Every expression in the tree of root, each once, arguments first."""
    found: list[Expr] = []
    _collect(root, through_indirect, set(), found)
    return found


def _collect(e: Expr, through_indirect: bool, seen: set[int], found: list[Expr]) -> None:
    seen.add(e.id)
    for a in e.args:
        if a.id not in seen:
            _collect(a, through_indirect, seen, found)
    if through_indirect:
        for i in ints_of(e):
            for atom in i.computed:
                if atom.expr.id not in seen:
                    _collect(atom.expr, through_indirect, seen, found)
    found.append(e)


def loads(root: Expr) -> Sequence[Load]:
    """All loads in the tree of root, each once."""
    if isinstance(root, Load):  # not cached, which would be a reference cycle
        for i in root.index:
            if i.computed:
                return [e for e in walk(root) if isinstance(e, Load)]
        return (root,)
    try:
        return root._loads
    except AttributeError:
        root._loads = tuple([e for e in walk(root) if isinstance(e, Load)])
        return root._loads


def substitute(
    i: Int, mapping: Mapping[Atom, IntLike] | None = None, on_load: Callable[[Load], Expr | None] | None = None
) -> Int:
    """An integer expression with variables replaced, and loads as in `rewrite`, also within computed indices."""
    return _Rewriting(mapping or {}, on_load).int(i)


def reads(i: Int, atom: Atom) -> bool:
    """Whether an integer expression depends on a variable, possibly through a computed index."""
    return any(
        a == atom or (isinstance(a, Indirect) and any(atom in j.atoms() for e in walk(a.expr) for j in ints_of(e)))
        for a in i.atoms()
    )


def rewrite(
    root: Expr,
    mapping: Mapping[Atom, IntLike] | None = None,
    on_load: Callable[[Load], Expr | None] | None = None,
    parts: Mapping[Expr, Expr] | None = None,
) -> Expr:
    """Substitutes axis variables, and replaces loads: `on_load` is given the load with its new index, and returns None to
    keep it. parts: what replaces parts of the expression.
    """
    rewriting = _Rewriting(mapping or {}, on_load)
    rewriting.done.update((e.id, made) for e, made in (parts or {}).items())
    return rewriting.expr(root)


class _Rewriting:
    """See `rewrite`. No closures, which would refer to each other: such cycles live until the garbage collector runs, and it does
    not during compilation.
    """

    __slots__ = ("done", "mapping", "on_load")

    def __init__(self, mapping: Mapping[Atom, IntLike], on_load: Callable[[Load], Expr | None] | None) -> None:
        self.mapping = mapping
        self.on_load = on_load
        self.done: dict[int, Expr] = {}

    def int(self, i: Int) -> Int:
        return i.substitute(self.mapping, self.computed)

    def computed(self, atom: Indirect) -> Int:
        return indirect(self.expr(atom.expr), atom.extent.substitute(self.mapping))

    def expr(self, e: Expr) -> Expr:
        known = self.done.get(e.id)
        if known is not None:
            return known
        result: Expr
        if isinstance(e, Op):
            args = [self.expr(a) for a in e._args]
            if e.op == "cast":
                result = cast_to(args[0], e.dtype)
            elif len(args) == 2:
                result = binary(e.op, *args)
            else:
                result = _op(e.op, e.dtype, *args)
        elif isinstance(e, Load):
            at = [self.int(i) for i in e.index]
            result = e if all(map(operator.is_, at, e.index)) else load(e.node, at)
            replaced = self.on_load(cast(Load, result)) if self.on_load else None
            result = result if replaced is None else replaced
        elif isinstance(e, Const):
            result = e
        elif isinstance(e, Index):
            result = index(self.int(e.value))
        else:
            assert isinstance(e, Select)
            result = select([self.int(g) for g in e.guards], self.expr(e.then), self.expr(e.other))
        self.done[e.id] = result
        return result


def cost(root: Expr) -> int:
    """The approximate number of arithmetic operations; transcendental functions count as several."""
    return sum(OPS[e.op].cost for e in walk(root) if isinstance(e, Op) and e.op != "cast")


def show(e: Expr) -> str:
    if isinstance(e, Const):
        return repr(e.value)
    if isinstance(e, Load):
        return f"{e.node.name}[{', '.join(map(repr, e.index))}]"
    if isinstance(e, Index):
        return f"({e.value!r})"
    if isinstance(e, Select):
        return f"select({' and '.join(f'{g!r} >= 0' for g in e.guards)}, {show(e.then)}, {show(e.other)})"
    assert isinstance(e, Op)
    name = f"{e.op}<{e.dtype.name}>" if e.op == "cast" else e.op
    return f"{name}({', '.join(map(show, e.args))})"
