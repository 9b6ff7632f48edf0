"""Proves that int64 results fit into the 32 bits in which kernels compute, by ranges where possible; others are checked in
every run.

A check computes a result a second time, in float32. The int32 result is correct modulo 2^32. It is therefore correct if
both differ by less than 2^31, provided that the rounding error of the second is smaller than that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import fx

from lapilli.graph.module import ModuleState
from lapilli.ir.axes import fresh_axes
from lapilli.ir.dtype import DType
from lapilli.ir.expr import (
    Expr,
    Index,
    Load,
    Op,
    Select,
    binary,
    cast_to,
    const,
    index,
    load,
    rewrite,
    select,
    show,
    unary,
    where,
)
from lapilli.ir.integer import Atom, Int, IntLike, as_int, of, product
from lapilli.ir.interval import INT32, Range
from lapilli.ir.node import Input, Map, Matmul, Node, Reduce
from lapilli.ir.ranges import Ranges, fits, most
from lapilli.lower.registry import Call
from lapilli.runtime.arithmetic import NEARLY_32_BITS

aten = torch.ops.aten

LIMIT = NEARLY_32_BITS
"""The limit for magnitudes of int64 inputs where it proves that results fit: what is added to them is mostly small."""
_COUNTED = 16
"""A state to which every run adds at most this is not checked: it overflows after a hundred million runs."""
_ROUNDING = 2.0**-23
"""Times the number of terms and the sum of their magnitudes: an upper bound on the error of a sum in float32."""
_PRECISE = 2.0**53
"""Rounding a smaller magnitude to float32 changes it by less than 2^31."""
_BEYOND = const(1e30)
_NONE = 1 << 30

_PLACES = frozenset({
    aten.argmax.default, aten.argmin.default, aten.argsort.default, aten.argsort.stable, aten.sort.default, aten.sort.stable,
    aten.topk.default, aten.max.dim, aten.min.dim, aten.median.dim, aten.nanmedian.dim, aten.kthvalue.default,
    aten.mode.default, aten.cummax.default, aten.cummin.default, aten.searchsorted.Tensor, aten.bucketize.Tensor,
    aten.multinomial.default,
})  # fmt: skip
"""Operators whose result, or the second of two, consists of indices into an argument."""


@dataclass
class Checks:
    """What is known of the integers of a graph, and the checks that it needs.

    states: the states of the graph. names: operators whose results are checked, one for each check. limit: the limit that
    the magnitudes of int64 inputs must respect (0: any 32-bit integers).
    """

    states: Mapping[fx.Node, ModuleState] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    limit: int = 0
    _failures: list[Node] = field(default_factory=list)
    _wide: Ranges = field(default_factory=Ranges)  # if inputs are any 32-bit integers
    _narrow: Ranges = field(default_factory=Ranges)  # if inputs are within LIMIT

    def given(self, made: Any) -> None:
        """Records an input."""
        if isinstance(made, Input) and made.dtype is DType.int64:
            self._narrow.known[made.id] = (-LIMIT, LIMIT)

    def computed(self, node: fx.Node, made: Any, operands: Sequence[Any], first: int) -> None:
        """Checks the results of a call. Values that the call created have ids from `first`."""
        val = node.meta["val"]
        several = isinstance(val, list | tuple)
        for k, (expected, result) in enumerate(zip(val, made, strict=True) if several else [(val, made)]):
            if not isinstance(expected, torch.Tensor) or expected.dtype.is_floating_point:
                continue
            if node.target in _PLACES and k == several:
                self._set(result, (0, max(most(product(x.shape)) for x in operands if isinstance(x, Node))))
            elif expected.dtype is not torch.int64:
                self._follow_wrapping(result)
            elif self._is_counter(node):
                self._set(result, INT32)
            else:
                self._look(node, result, first)

    def _is_counter(self, node: fx.Node) -> bool:
        """Whether a call adds a small number to a state, and is the state's next value."""
        if node.target not in (aten.add.Tensor, aten.add.Scalar) or node.kwargs:
            return False
        before, step = node.args
        state = self.states.get(before) if isinstance(before, fx.Node) else None
        return state is not None and state.new is node and isinstance(step, int) and abs(step) <= _COUNTED

    def _set(self, result: Node, known: Range) -> None:
        for ranges in (self._wide, self._narrow):
            ranges.known[result.id] = known

    def _follow_wrapping(self, result: Node) -> None:
        """Records the range of a result of a narrower type, which wraps around as in torch."""
        for ranges in (self._wide, self._narrow):
            found = ranges.node(result)
            ranges.known[result.id] = found if fits(found) else INT32

    def _look(self, node: fx.Node, result: Node, first: int) -> None:
        wide, narrow = self._wide.node(result), self._narrow.node(result)
        if fits(wide):
            return
        self._wide.known[result.id] = INT32
        if fits(narrow):
            self.limit = LIMIT
            return
        self._narrow.known[result.id] = INT32
        failures = _Failures(self._wide, first, str(node.target))
        failures.look(result)
        self.names += [f"{node.name} ({node.target})"] * len(failures.found)
        self._failures += failures.found

    def output(self) -> Map | None:
        """int32 []: the number of the first check that fails, from 1, or 0 if none does. None if there are no checks."""
        if not self._failures:
            return None
        none = const(_NONE)
        found = [where(cast_to(load(f, ()), DType.bool), const(n), none) for n, f in enumerate(self._failures, 1)]
        while len(found) > 1:
            first = [reduce(lambda a, b: binary("min", a, b), found[k : k + 8]) for k in range(0, len(found), 8)]
            found = [load(Map((), DType.int32, "checks", "check", body=e), ()) for e in first]
        return Map((), DType.int32, "checks", "check", body=where(binary("lt", found[0], none), found[0], const(0)))


def _sizes(value: Int) -> Expr:
    """An integer expression over sizes, in float32."""
    found = const(float(value.const))
    for monomial, factor in value.terms:
        term = const(float(factor))
        for atom in monomial:
            term = term * index(of(atom), DType.float32)
        found = found + term
    return found


def _apart(approximate: Expr, exact: Expr) -> Expr:
    return unary("abs", approximate - cast_to(exact, DType.float32))


def _is_over(e: Expr, limit: float) -> Expr:
    """Whether a magnitude reaches a limit. NaN does not: it results from infinities, which have no integer, or from zero
    times an overflow.
    """
    return binary("ge", unary("abs", e), limit)


class _Failures:
    """Builds the checks of one call: each is a bool that is true if a result does not fit."""

    def __init__(self, ranges: Ranges, first: int, op: str) -> None:
        self.ranges, self.first, self.op = ranges, first, op
        self.found: list[Node] = []
        self._approximate: dict[int, Node] = {}

    def look(self, result: Node) -> None:
        """Adds the checks of one result of the call."""

        def failed(*at: Int) -> Expr:
            exact, approximate = load(result, at), load(self._node(result), at)
            if isinstance(result, Map):  # recomputed, so that the result itself need not be stored
                exact = rewrite(result.body, dict(zip(result.axes, at, strict=True)))
            return _is_over(_apart(approximate, exact), 2.0**31)

        self._any(result.shape, failed)

    def _any(self, shape: Sequence[Int], failed: Callable[..., Expr]) -> None:
        call = Call("check", self.op, (tuple(shape),), (DType.bool,), False)
        self.found.append(call.reduce("any", lambda _, r: failed(*r), (), tuple(shape)))

    def _node(self, n: Node) -> Node:
        """A value of the call, computed in float32."""
        assert isinstance(n, Map | Reduce)
        if n.id not in self._approximate:
            if isinstance(n, Reduce) and n.op != "prod":
                self._approximate[n.id] = self._sum(n) if n.op == "sum" else self._extremum(n)
            else:
                self._approximate[n.id] = self._in_float(n, self.float)
        return self._approximate[n.id]

    def _in_float(self, n: Map | Reduce, convert: Callable[[Expr], Expr]) -> Map | Reduce:
        axes, at = fresh_axes(n.shape)
        mapping: dict[Atom, IntLike] = dict(zip(n.axes, at, strict=True))
        made: dict[str, Any] = {"shape": n.shape, "dtype": DType.float32, "name": f"{n.name}_float", "origin": n.origin}
        if isinstance(n, Map):
            return Map(**made, axes=axes, body=rewrite(convert(n.body), mapping))
        raxes, r = fresh_axes(tuple(as_int(a.extent) for a in n.raxes), "rstuvwxy")
        mapping |= dict(zip(n.raxes, r, strict=True))
        body = rewrite(convert(n.body), mapping)
        return Reduce(**made | {"dtype": body.dtype}, axes=axes, raxes=raxes, op=n.op, body=body)

    def _multiplicative(self, n: Reduce, convert: Callable[[Expr], Expr]) -> Map | Reduce:
        """As `_in_float`, for a `convert` that maps products to products. A matrix product of converted operands remains
        one, and gets a matrix product kernel.
        """
        note = n.contraction
        if not isinstance(note, Matmul):
            return self._in_float(n, convert)

        def operand(x: Node) -> Map:
            axes, at = fresh_axes(x.shape)
            body = convert(cast_to(load(x, at), DType.int32))
            return Map(x.shape, body.dtype, f"{x.name}_float", n.origin, axes=axes, body=body)

        lhs, rhs = operand(note.lhs), operand(note.rhs)
        old = (*note.batch, *note.rows, note.column, note.inner)
        new, at = fresh_axes(tuple(as_int(a.extent) for a in old))
        places: dict[Atom, IntLike] = dict(zip(old, at, strict=True))
        rows = len(note.batch), len(note.batch) + len(note.rows)
        left, right = (tuple(i.substitute(places) for i in index) for index in (note.lhs_index, note.rhs_index))
        body = load(lhs, left) * load(rhs, right)
        contraction = Matmul(lhs, rhs, new[: rows[0]], new[rows[0] : rows[1]], new[-2], new[-1], left, right)
        return Reduce(n.shape, body.dtype, f"{n.name}_float", n.origin, axes=new[:-1], raxes=new[-1:], op="sum", body=body,
                      contraction=contraction)  # fmt: skip

    def _sum(self, n: Reduce) -> Node:
        """A sum in float32. Where rounding errors could reach 2^31, the upper and lower bits are summed separately, which
        is exact, or the sum of magnitudes is checked as well.
        """
        terms = product([as_int(a.extent) for a in n.raxes])
        low, high = self.ranges.expr(n.body)
        whole = self._multiplicative(n, self.float)
        if max(-low, high) * most(terms) ** 2 < 2**30 / _ROUNDING:
            return whole
        if self.ranges.fits(n.body) and most(terms) <= 1 << 15:
            upper = self._in_float(n, lambda e: binary("shr", e, 15))
            lower = self._in_float(n, lambda e: binary("bitand", e, (1 << 15) - 1))
            axes, at = fresh_axes(n.shape)
            parts = [cast_to(load(part, at), DType.float32) for part in (upper, lower)]
            body = parts[0] * 2.0**15 + parts[1]
            return Map(n.shape, DType.float32, f"{n.name}_float", n.origin, axes=axes, body=body)
        magnitudes = self._multiplicative(n, lambda e: unary("abs", self.float(e)))
        error = index(terms, DType.float32) * _ROUNDING
        self._any(n.shape, lambda *at: _is_over(load(magnitudes, at) * error, 2.0**30))
        return whole

    def _extremum(self, n: Reduce) -> Node:
        """A maximum or minimum. It is correct if all elements are."""
        wrong = self._in_float(n, lambda e: _apart(self.float(e), e))
        assert isinstance(wrong, Reduce)
        wrong.op = "max"
        axes, at = fresh_axes(n.shape)
        body = where(_is_over(load(wrong, at), 2.0**31), _BEYOND, cast_to(load(n, at), DType.float32))
        return Map(n.shape, DType.float32, f"{n.name}_float", n.origin, axes=axes, body=body)

    def float(self, e: Expr) -> Expr:
        """An integer expression in float32, close to its exact value."""
        if self.ranges.fits(e):
            return cast_to(e, DType.float32)
        if isinstance(e, Load) and e.node.id >= self.first:
            return load(self._node(e.node), e.index)
        if isinstance(e, Index):
            return _sizes(e.value)
        if isinstance(e, Select):
            return select(e.guards, self.float(e.then), self.float(e.other))
        assert isinstance(e, Op), show(e)
        if e.op == "cast":  # from a float, which saturates at the bounds of 32 bits; infinities and NaN have no integer
            x = e.args[0]
            beyond = where(binary("lt", unary("abs", x), math.inf), x * 4.0, cast_to(e, DType.float32))
            inside = binary("and", binary("ge", x, -(2.0**31)), binary("lt", x, 2.0**31))
            return where(inside, cast_to(e, DType.float32), beyond)
        if e.op == "where":
            return where(e.args[0], self.float(e.args[1]), self.float(e.args[2]))
        if e.op in ("neg", "abs"):
            return unary(e.op, self.float(e.args[0]))
        if e.op == "mul":
            return self.float(e.args[0]) * self.float(e.args[1])
        if e.op in ("add", "sub"):
            return self._added(e)
        if e.op == "shl":
            return self.float(e.args[0]) * unary("exp2", cast_to(e.args[1], DType.float32))
        if e.op == "pow":
            x, y = e.args
            size = binary("pow", unary("abs", self.float(x)), cast_to(y, DType.float32))
            odd = binary("and", binary("lt", x, 0), binary("ne", binary("bitand", y, 1), 0))
            return where(binary("lt", y, 0), cast_to(e, DType.float32), where(odd, -size, size))
        if e.op in ("div", "floordiv") and all(map(self.ranges.fits, e.args)):  # -2^31 / -1 overflows
            return cast_to(e.args[0], DType.float32) / cast_to(e.args[1], DType.float32)
        wrong = [_is_over(_apart(self.float(a), a), 2.0**31) for a in e.args if a.dtype is DType.int32]
        return where(reduce(lambda a, b: binary("or", a, b), wrong), _BEYOND, cast_to(e, DType.float32))

    def _added(self, e: Op) -> Expr:
        """A sum or difference; where rounding errors could reach 2^31, a value that fails the check."""
        x, y = map(self.float, e.args)
        if max(abs(bound) for a in e.args for bound in self.ranges.expr(a)) < _PRECISE:
            return binary(e.op, x, y)
        return where(binary("or", _is_over(x, _PRECISE), _is_over(y, _PRECISE)), _BEYOND, binary(e.op, x, y))
