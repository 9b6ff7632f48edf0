"""The operator registry: an ATen overload is described once, by a function that builds its kernel IR.

@lowering(aten.relu.default)
def relu(call: Call, x: Node) -> Node:
    return call.pointwise(lambda a: binary("max", a, 0.0), x)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from lapilli.ir.axes import fresh_axes
from lapilli.ir.dtype import DType
from lapilli.ir.expr import (
    Const,
    Expr,
    Load,
    Op,
    Select,
    binary,
    cast_to,
    const,
    index,
    is_finite,
    load,
    narrow,
    select,
    unary,
    where,
)
from lapilli.ir.integer import (
    Indirect,
    Int,
    Symbol,
    Var,
    as_int,
    ceildiv,
    is_nonnegative,
    maximum,
    minimum,
    of,
    symbol,
    unbounded_multiple,
)
from lapilli.ir.interval import INT32
from lapilli.ir.narrow import LIMITS, wrapped
from lapilli.ir.narrow import OPERATIONS as NARROW
from lapilli.ir.node import Convolution, Map, Matmul, Node, Reduce, State, Update, neutral, operands
from lapilli.ir.ranges import Ranges

Operand = Node | Int | Expr | int | float | bool
Number = Expr | int | float | bool
"""A Scalar argument: known when it is compiled, or an expression."""
Body = Callable[..., Expr]
Lowering = Callable[..., Any]

LONG = 8192
"""The longest reduction, in elements, that one invocation computes alone by choice, ..."""
LONGEST = 1 << 15
"""... and the longest that it may have to compute: lavapipe silently ends loops after 65,535 iterations."""

LEAST_PART, MOST_PARTS, BESIDE = 1024, 256, 8
"""Of a product's long sum that is divided by choice: terms of a part, enough to be worth a work group, and how many parts; and how
many times as much memory as what all parts give the operands take."""

_TRIED = 4096
"""The number of values of a size that are tried to find the smallest one that an operator accepts."""

lowerings: dict[torch._ops.OpOverload, Lowering] = {}
decompositions: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
"""Operators defined in terms of other ATen operators, by functions on torch tensors."""

FROM_TORCH = {
    torch.bool: DType.bool, torch.uint8: DType.uint8, torch.int8: DType.int8, torch.int16: DType.int16,
    torch.int32: DType.int32, torch.int64: DType.int64, torch.float16: DType.float16, torch.bfloat16: DType.bfloat16,
    torch.float32: DType.float32, torch.float64: DType.float64,
}  # fmt: skip


def from_torch(dtype: torch.dtype) -> DType:
    """The storage type of a torch dtype; complex and quantized types raise TypeError."""
    if dtype not in FROM_TORCH:
        raise TypeError(f"{dtype} tensors are not supported; use a real floating-point, integer or bool type")
    return FROM_TORCH[dtype]


F = TypeVar("F", bound=Callable[..., Any])


def lowering(*overloads: Any) -> Callable[[F], F]:
    """Registers a function as the lowering of operator overloads."""

    def register(f: F) -> F:
        for overload in overloads:
            assert overload not in lowerings, f"{overload} is registered twice"
            lowerings[overload] = f
        return f

    return register


def decomposition(*overloads: Any) -> Callable[[F], F]:
    """Registers a function of torch tensors, with the operator's own arguments, as the definition of operator overloads."""

    def register(f: F) -> F:
        for overload in overloads:
            assert overload not in lowerings and overload not in decompositions, f"{overload} is registered twice"
            decompositions[overload] = f
        return f

    return register


def is_supported(overload: Any) -> bool:
    return overload in lowerings


RANDOM_KEY = ("random0", "random1")
"""The names of the two words of the random numbers' key, if they are symbols."""


@dataclass
class Shared:
    """State shared by the calls of a graph.

    limits: upper bounds given to sizes that have none. least: lower bounds of sizes, by name, that an operator needs. random:
    the key of the random numbers as a state of the program, created by the first call that draws some; with `keyed`, the key is
    two symbols in `known` instead.
    """

    limits: dict[Int, int] = field(default_factory=dict)
    least: dict[str, int] = field(default_factory=dict)
    random: State | None = None
    keyed: bool = False
    known: dict[str, Int] = field(default_factory=dict)

    def word(self, name: str) -> Expr:
        """A 32-bit symbol that is not a size, as a signed integer."""
        if name not in self.known:
            self.known[name] = symbol(name, 0, 2**32 - 1)
        # Negated twice, which hides the symbol's bounds: nothing may be concluded from them.
        return unary("bitnot", unary("bitnot", index(self.known[name])))


class Entries(NamedTuple):
    """Elements that replace some of a tensor's.

    shape: of the entries themselves. place: the index in the tensor, given the index of an entry. value: the value of an
    entry.
    """

    shape: Sequence[Int]
    place: Callable[[Sequence[Int]], Sequence[Int]]
    value: Callable[[Sequence[Int]], Expr]


@dataclass(frozen=True)
class Call:
    """One operator call: torch's shapes and dtypes of its results, and helpers that build their IR."""

    name: str  # of the FX node
    op: str  # "aten.relu.default"
    shapes: tuple[tuple[Int, ...], ...]  # of the results
    dtypes: tuple[DType, ...]
    half: bool  # store float32 intermediates as float16
    dense: bool = True  # whether all tensor arguments are contiguous and own their memory (set for as_strided only)
    shared: Shared = field(default_factory=lambda: Shared())
    given: tuple[Any, ...] = ()  # the positional arguments as torch knows them: fake tensors and numbers

    @property
    def shape(self) -> tuple[Int, ...]:
        return self.shapes[0]

    @property
    def dtype(self) -> DType:
        return self.dtypes[0]

    def longest(self, size: Int, most: int = LONGEST) -> int | None:
        """The largest possible value of a size. A dynamic size without a bound, or a multiple of one, gets `most` as its bound,
        which the player checks. None if the size is any other function of such sizes.
        """
        found = unbounded_multiple(size)
        if found is None:
            return size.bounds[1]
        symbol, factor = found
        limits = self.shared.limits
        limits[symbol] = min(limits.get(symbol, most), most // factor)
        return most

    def some(self, *sizes: Int, least: int = 1) -> None:
        """Requires each size to be at least `least`. A dynamic size gets a lower bound, which the player checks; a constant one
        that is too small raises TypeError.
        """
        for size in sizes:
            low = size.bounds[0]
            if size.value is not None and size.value < least:
                raise TypeError(f"{self.op} of {size.value or 'no'} elements has no result")
            symbols = {a for a in size.atoms() if isinstance(a, Symbol)}
            if (low is not None and low >= least) or len(symbols) != 1 or symbols != size.atoms():
                continue
            (symbol,) = symbols
            values = range(symbol.min, symbol.min + _TRIED)
            enough = next((n for n in values if size.evaluate({symbol: n}) >= least), symbol.min)
            self.shared.least[symbol.name] = max(enough, self.shared.least.get(symbol.name, 0))

    def storage(self, dtype: DType) -> DType:
        """The storage type of a value of this dtype between kernels."""
        if dtype is DType.code:  # whose least value is not known here
            dtype = DType.float32
        if dtype is DType.float32 and self.half:
            return DType.float16
        if dtype is DType.float64:
            raise TypeError(f"{self.op}: float64 is not supported on the GPU; convert the model with .float()")
        if dtype in (DType.bool, DType.uint8, DType.int8, DType.int16, DType.int64):
            return DType.int32
        return dtype

    def map(self, body: Callable[..., Expr], shape: Sequence[Int] | None = None, dtype: DType | None = None) -> Map:
        """out[i, j, ...] = body(i, j, ...), converted to the result's dtype."""
        sizes = tuple(self.shape if shape is None else shape)
        dtype = self.dtype if dtype is None else dtype
        axes, index_ = fresh_axes(sizes)
        return Map(sizes, self.storage(dtype), self.name, self.op, axes=axes, body=self._value(body(*index_), dtype))

    def _value(self, e: Expr, dtype: DType) -> Expr:
        """A result's element, of the result's type."""
        value = convert(e, dtype)
        return _finite_in_half(value) if dtype is DType.float32 and self.half else value

    def update(self, old: Node, body: Callable[..., Expr], entries: Entries) -> Map:
        """out[i, j, ...] = body(i, j, ...), which is `old` with these entries."""
        made = self.map(body)
        axes, at = fresh_axes(tuple(entries.shape))
        place = tuple(entries.place(at))
        within = tuple((i, n) for i, n in zip(place, old.shape, strict=True) if not _is_inside(i, n))
        update = Update(old, axes, place, self._value(entries.value(at), self.dtype), within)
        read = operands(made)
        below = {n.id for r in read for n in (r, *operands(r))}
        if old in read and all(ld.node.id in below for ld in update.loads()):  # else all is replaced, or nothing is
            made.update = update
        return made

    @cached_property
    def common(self) -> DType:
        """The type to which torch promotes the arguments of this call."""
        given = [
            v for v in self.given if isinstance(v, torch.Tensor | bool | int | float | torch.SymInt | torch.SymFloat)
        ]
        return from_torch(elementwise_dtypes(*given, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)[1])

    def pointwise(
        self,
        f: Body,
        *args: Operand,
        compute: DType | None = None,
        dtype: DType | None = None,
        common: DType | None = None,
    ) -> Map:
        """f applied to the elements of broadcast operands, converted to the type `compute` (default: their common compute
        type).

        common: a torch type to which they are converted first; integers out of its range wrap around.
        """
        if common is not None:
            return self.map(lambda *i: f(*(member(a, i, common) for a in args)), dtype=dtype)
        kind = compute or common_type(args)
        return self.map(lambda *i: f(*(element(a, i, kind) for a in args)), dtype=dtype)

    def reduce(
        self,
        op: str,
        body: Callable[[tuple[Int, ...], tuple[Int, ...]], Expr],
        sizes: Sequence[Int],
        over: Sequence[Int],
        dtype: DType | None = None,
        name: str = "",
        longest: int | None = LONG,
    ) -> Reduce:
        """out[axes] = op over r of body(axes, r).

        A result requested as float32 is an intermediate of an operator, and stays float32 in half precision. Long reductions
        are split in two steps, for more parallelism.
        """
        stored = dtype if dtype is DType.float32 else self.storage(dtype or self.dtype)
        total = math.prod(over, start=as_int(1))
        length = total.bounds[1]
        if longest is not None and not op.startswith("arg") and (length is None or length > longest):
            most = None if length is None else min(length, _MOST_TERMS)
            return self._in_two_steps(op, body, tuple(sizes), tuple(over), stored, name, most)
        axes, at = fresh_axes(tuple(sizes))
        raxes, r = fresh_axes(tuple(over), "rstuvwxy")
        return Reduce(
            tuple(sizes), stored, self.name + name, self.op, axes=axes, raxes=raxes, op=op, body=body(at, r)
        )  # fmt: skip

    def _in_two_steps(
        self,
        op: str,
        body: Callable[[tuple[Int, ...], tuple[Int, ...]], Expr],
        sizes: tuple[Int, ...],
        over: tuple[Int, ...],
        stored: DType,
        name: str,
        most: int | None,
    ) -> Reduce:
        """Reduces pieces of LONG elements, or of whole axes, then the results of the pieces. most: elements that there can be."""
        outer = _pieces(over)
        if outer:
            inner = over[outer:]
            of_axes = self.reduce(
                op, lambda at, r: body(at[: len(sizes)], (*at[len(sizes) :], *r)), (*sizes, *over[:outer]), inner, None,
                f"{name}_pieces", None,
            )  # fmt: skip
            return self._joined(op, of_axes, sizes, over[:outer], stored, name, most)
        total = math.prod(over, start=as_int(1))
        length = as_int(LONG)
        if total.value is None:  # short ones, for few results of many elements
            length = minimum(LONG, maximum(_OPEN_PIECE, ceildiv(total, _OPEN_PIECES)))
            most = None if most is None else max(_OPEN_PIECES, -(-most // LONG))
        pieces = ceildiv(total, length)

        def piece(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
            rest = at[-1] * length + r[0]
            place: list[Int] = []
            for size in reversed(over[1:]):
                place.append(rest % size)
                rest = rest // size
            value = body(at[:-1], (rest, *reversed(place)))
            return select([total - 1 - at[-1] * length - r[0]], value, neutral(op, value.dtype))

        partial = self.reduce(op, piece, (*sizes, pieces), (minimum(length, total),), None, f"{name}_pieces", None)
        return self._joined(op, partial, sizes, (pieces,), stored, name, most)

    def _joined(
        self, op: str, partial: Reduce, sizes: tuple[Int, ...], pieces: tuple[Int, ...], stored: DType, name: str,
        most: int | None,
    ) -> Reduce:  # fmt: skip
        """The results of pieces, reduced. most: of them, if their number is open; without a bound two steps must suffice."""
        partial.dtype = partial.body.dtype if partial.body.dtype is not DType.bool else DType.int32

        def result(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
            return cast_to(load(partial, [*at, *r]), partial.body.dtype)

        count = math.prod(pieces, start=as_int(1)).value
        most = most if count is None else count
        if most is not None and most > LONG:
            return self._in_two_steps(op, result, sizes, pieces, stored, name, most)
        whole = self.reduce(op, result, sizes, pieces, None, name, None)
        whole.dtype = stored
        return whole


_MOST_TERMS = 1 << 31
"""Of a reduction: indices have 31 bits. The product of several open sizes has a bound far beyond that, and of so many steps the
lengths together would overflow.
"""
_SHORTEST_PIECE = 64
_OPEN_PIECE, _OPEN_PIECES = 64, 128
"""Of an open number of elements: a piece has so many at least, or is that part of all of them."""


def _pieces(over: Sequence[Int]) -> int:
    """How many of the first axes a reduction's pieces are along: each then is of the others, and neighbours in memory stay
    neighbours. 0: of none, as axes are of unknown size, or pieces would be short or too many.
    """
    sizes = [size.value for size in over]
    if None in sizes:
        return 0
    known = [size or 0 for size in sizes]
    outer = next((k for k in range(len(known)) if math.prod(known[k:]) <= LONG), 0)
    return outer if math.prod(known[outer:]) >= _SHORTEST_PIECE and math.prod(known[:outer]) <= LONG else 0


def _is_inside(i: Int, n: Int) -> bool:
    """Whether a place is known to be in a dimension of n elements."""
    computed = any(isinstance(a, Indirect) for a in i.atoms())  # from numbers that are not checked
    return not computed and is_nonnegative(i) and is_nonnegative(n - 1 - i)


def convert(e: Expr, dtype: DType) -> Expr:
    """Converts to the compute type of a storage type. Integers wrap around as in the storage type; floats are not rounded.
    Floats outside int32 become the smallest int32, as on x86 (for int64, the run reports an overflow: see `integers`).
    """
    real = e.dtype is DType.float32
    if real and dtype.compute is DType.int32 and dtype is not DType.int64 and not isinstance(e, Const):
        if _holds(dtype, e):  # ranges leave infinities and NaN out
            return where(is_finite(e), cast_to(e, DType.int32), convert(const(INT32[0]), dtype))
        e = where(binary("lt", unary("abs", e), 2.0**31), cast_to(e, DType.int32), const(INT32[0]))
    e = cast_to(e, dtype.compute)
    narrower = dtype.compute is DType.int32 and dtype in NARROW
    return narrow(e, dtype) if narrower and (real or not _holds(dtype, e)) else e


def is_rounded(e: Expr, dtype: DType, deepest: int = 8) -> bool:
    """Whether every value of a float expression is known to be representable in a 16-bit type. Computed values need not be:
    they are stored in the type, but not rounded to it before.
    """
    if isinstance(e, Const):
        return math.isnan(e.value) or narrow(e, dtype) is e
    if isinstance(e, Load):
        body = (
            e.node.body
            if isinstance(e.node, Map) or (isinstance(e.node, Reduce) and e.node.op in ("max", "min"))
            else None
        )
        if body is None:
            return e.node.dtype is dtype and not isinstance(e.node, Reduce)
        return deepest > 0 and body.dtype is DType.float32 and is_rounded(body, dtype, deepest - 1)
    if isinstance(e, Select):
        return is_rounded(e.then, dtype, deepest) and is_rounded(e.other, dtype, deepest)
    if not isinstance(e, Op):
        return False
    if e.op in ("neg", "abs", "sign", "min", "max", "where"):
        return all(is_rounded(a, dtype, deepest) for a in e.args if a.dtype is DType.float32)
    return e.op == NARROW[dtype] or (e.op == "cast" and _is_exact(e.args[0], dtype))


def rounded(e: Expr, dtype: DType) -> Expr:
    """A float expression rounded to a 16-bit type, unless it is known to be representable; unchanged for other types."""
    return e if dtype not in _EXACT or is_rounded(e, dtype) else narrow(e, dtype)


_EXACT = {DType.float16: 2048, DType.bfloat16: 256}
"""Up to which all integers are numbers of a type."""


def _is_exact(e: Expr, dtype: DType) -> bool:
    """Whether an expression of integers is known to be representable in a 16-bit type."""
    low, high = Ranges(deepest=_NEAR).expr(e)
    return e.dtype is DType.bool or (e.dtype is DType.int32 and max(-low, high) <= _EXACT[dtype])


def _holds(dtype: DType, e: Expr) -> bool:
    """Whether an expression is known to stay in the range of a type of integers, if it is finite."""
    low, high = Ranges(deepest=_NEAR).expr(e)
    least, most = LIMITS[dtype]
    return least <= low and high <= most


_NEAR = 4
"""The depth to which values are followed to prove that a conversion does nothing."""


def _finite_in_half(e: Expr) -> Expr:
    """Replaces float32's ±max, as used for masks, by float16's ±65504, so that a fully masked row softmaxes to a uniform row
    instead of NaN.
    """
    if isinstance(e, Const) and isinstance(e.value, float) and _EXTREME < abs(e.value) < math.inf:
        return const(math.copysign(65504.0, e.value))
    if isinstance(e, Select):
        return select(e.guards, _finite_in_half(e.then), _finite_in_half(e.other))
    if isinstance(e, Op) and e.op == "where":
        return where(e.args[0], *map(_finite_in_half, e.args[1:]))
    return e


_EXTREME = 1e30
"""A constant with a larger magnitude is a mask rather than a quantity."""


def common_type(args: Sequence[Operand]) -> DType:
    """The compute type to which operands are promoted."""
    kinds = {a.dtype.compute if isinstance(a, Node) else _kind(a) for a in args}
    for kind in (DType.float32, DType.int32):
        if kind in kinds:
            return kind
    return DType.bool


def _kind(x: Any) -> DType:
    if isinstance(x, Expr):
        return x.dtype
    return DType.bool if isinstance(x, bool) else DType.float32 if isinstance(x, float) else DType.int32


def element(a: Operand, at: Sequence[Int], kind: DType | None = None) -> Expr:
    """The element of a broadcast operand at an output index, cast to `kind` if that is given."""
    if isinstance(a, Node):
        e = load(a, broadcast(a, at))
    elif isinstance(a, Expr):
        e = a
    elif isinstance(a, Int):
        if kind is not DType.float32 and _may_be_wide(a):
            raise TypeError(f"the number {a} may not fit into the 32 bits in which the GPU computes integers")
        e = index(a)
    else:
        e = const(a, kind)
    return e if kind is None else cast_to(e, kind)


def member(a: Operand, at: Sequence[Int], dtype: DType) -> Expr:
    """As `element`, converted to a torch type; integers out of its range wrap around."""
    if isinstance(a, int) and not isinstance(a, bool) and dtype is not DType.int64:
        a = wrapped(a, dtype)
    return convert(element(a, at, None if isinstance(a, Node) else dtype.compute), dtype)


def exactly(a: Operand, dtype: DType) -> Operand:
    """A number for an argument that torch accepts only if the type can represent it (negative integers wrap around for uint8).

    Raises TypeError for other numbers. Values known only at run time wrap around.
    """
    if not isinstance(a, int | float) or dtype not in LIMITS or isinstance(a, bool):
        return a
    low, high = LIMITS[dtype]
    wraps = low == 0 and isinstance(a, int)
    if not (-high if wraps else low) <= a <= high:
        raise TypeError(f"the number {a} cannot be converted to {dtype.name} without overflow")
    return wrapped(int(a), dtype)


def _may_be_wide(number: Int) -> bool:
    """Whether an integer computed from sizes exceeds 32 bits, or is a product of unbounded sizes."""
    low, high = number.bounds
    if (low is not None and low < -(2**31)) or (high is not None and high >= 2**31):
        return True
    return any(sum(a.bounds[1] is None for a in monomial) > 1 for monomial, _ in number.terms)


def scalar(a: Number, dtype: DType) -> Expr:
    """A Scalar argument converted to a torch type, in its compute type. Raises TypeError if the type cannot represent it."""
    return convert(element(exactly(a, dtype), (), dtype.compute), dtype)


def broadcast(a: Node, at: Sequence[Int]) -> list[Int]:
    tail = list(at)[len(at) - len(a.shape) :]
    return [broadcast_axis(size, i) for size, i in zip(a.shape, tail, strict=True)]


def broadcast_axis(size: Int, i: Int) -> Int:
    """The index along a broadcast axis for output index i. A dynamic size such as (n - 3) // 2 + 1 may be 1 or equal to the
    result's: torch has checked which, but the expression does not show it. min(i, size - 1) is right for both.
    """
    if size == 1:
        return as_int(0)
    atom = next(iter(i.atoms()), None) if size.value is None else None
    return minimum(i, size - 1) if isinstance(atom, Var) and i == of(atom) and atom.extent != size else i


def normalize_dims(dims: int | Sequence[int] | None, rank: int) -> list[int]:
    """Dimensions as non-negative numbers; None or an empty list means all. A scalar has none."""
    if dims is None or (isinstance(dims, Sequence) and not dims):
        return list(range(rank))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return [d % rank for d in listed] if rank else []


def contraction(call: Call, r: Reduce, note: Matmul | Convolution) -> Reduce:
    r.contraction = note
    return r
