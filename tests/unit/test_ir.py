"""Scalar expressions and tensor values."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import numpy as np
import pytest

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
    cost,
    index,
    indirect,
    load,
    loads,
    reads,
    rewrite,
    select,
    substitute,
    unary,
    where,
)
from lapilli.ir.integer import Int, Var, as_int, of, var
from lapilli.ir.interpret import evaluate, run
from lapilli.ir.node import Constant, Graph, Input, Map, Node, Reduce, operands


def vector(n: int = 6) -> Input:
    return Input((as_int(n),), DType.float32, "x")


def the_var(i: Int) -> Var:
    atom = i.terms[0][0][0]
    assert isinstance(atom, Var)
    return atom


def mapped(x: Node, f: Callable[[Expr], Expr]) -> Map:
    i = var("i", x.shape[0])
    return Map(x.shape, DType.float32, "y", axes=(the_var(i),), body=f(load(x, [i])))


def test_expressions_that_are_built_alike_are_one_object() -> None:
    x = vector()
    i = var("i", 6)
    assert load(x, [i]) * 2.0 is load(x, [i]) * 2.0
    assert load(x, [i]) is not load(x, [i + 1])
    assert const(0.0) is not const(-0.0)
    assert const(1) is not const(1.0) and const(True) is not const(1)


def test_identities_that_hold_for_every_value() -> None:
    e = load(vector(), [var("i", 6)])
    assert e * 1.0 is e and e / 1.0 is e and e - 0.0 is e
    assert e + 0.0 is not e  # -0 + 0 is 0
    assert e * 0.0 is not const(0.0)  # NaN
    assert cast_to(e, DType.float32) is e
    assert cast_to(const(2), DType.float32) is const(2.0)


def test_what_drivers_take_for_zero_or_one_is_decided_by_bits() -> None:
    """Behind signs and in any order, too: NVIDIA's driver takes x + -x for 0, whatever x is."""
    x = vector()
    e, other = (load(x, [var(name, 6)]) for name in "ij")
    zero, one, neg = e - e, e / e, operator.neg
    for same in (e + -e, -e + e, -e - -e, e - neg(-e)):
        assert same is zero
    assert neg(-e) is e and -e / -e is one and -e / e is e / -e is not one
    product = e * other
    for same in (product + -e * other, e * -other + product, other * e - product, -e * -other - product):
        assert same is product - product
    assert (e - other) + (other - e) is -(other - e) - (e - other)
    assert unary("exp", product) - unary("exp", other * e) is unary("exp", product) - unary("exp", product)
    assert unary("abs", e) - unary("abs", -e) is unary("abs", e) - unary("abs", e)
    assert isinstance(made := other + e, Op) and made.op == "add"
    assert binary("lt", product, other * e) is const(False) and binary("le", product, -product) is not const(False)


def test_long_chains_of_operators_have_values() -> None:
    e = load(vector(), [var("i", 6)])
    for _ in range(5000):
        e = unary("exp", -e)
    assert e - e is e + -e


def test_types_must_meet() -> None:
    with pytest.raises(TypeError, match="add of float32 and int32"):
        binary("add", const(1.0), const(1))


def test_an_order_of_bools_is_logic() -> None:
    """Shaders cannot compare bools: all four pairs give what numbers would."""
    for name, want in (("lt", np.less), ("le", np.less_equal), ("gt", np.greater), ("ge", np.greater_equal),
                       ("min", np.minimum), ("max", np.maximum)):  # fmt: skip
        for a in (False, True):
            for b in (False, True):
                node = Map(
                    (as_int(1),), DType.bool, axes=(the_var(var("i", 1)),), body=binary(name, const(a), const(b))
                )
                assert evaluate(node, {}, {})[0] == want(a, b)


def test_guards_that_always_hold_vanish() -> None:
    i = var("i", 6)
    e = load(vector(), [i])
    assert select([i, 5 - i], e, const(0.0)) is e
    assert select([i - 6], e, const(0.0)) is const(0.0)
    kept = select([i - 1, 5 - i], e, const(0.0))
    assert isinstance(kept, Select) and kept.guards == (i - 1,)
    assert where(const(True), e, e) is e


def test_rewriting_substitutes_axes_everywhere() -> None:
    x, i, j = vector(), var("i", 6), var("j", 3)
    e = select([i - 1], load(x, [i]) * cast_to(index(i), DType.float32), const(0.0))
    new = rewrite(e, {the_var(i): j + 1})
    assert new is load(x, [j + 1]) * cast_to(index(j + 1), DType.float32)  # the guard is known now


def test_rewriting_replaces_loads() -> None:
    x, y, i = vector(), vector(), var("i", 6)
    e = load(x, [i]) + load(x, [5 - i])
    new = rewrite(e, on_load=lambda ld: load(y, ld.index) * 2.0)
    assert [ld.node for ld in loads(new)] == [y, y]


def test_computed_indices_are_seen_and_rewritten() -> None:
    x, at, i = vector(), Input((as_int(4),), DType.int32, "at"), var("i", 4)
    place = indirect(load(at, [i]), 6)
    e = load(x, [place])
    assert {ld.node for ld in loads(e)} == {x, at}
    assert reads(place, the_var(i)) and not reads(place, the_var(var("k", 4)))
    fixed = substitute(place, {the_var(i): 2})
    assert fixed == indirect(load(at, [as_int(2)]), 6)
    assert indirect(index(i), 6) == i


def test_cost_counts_each_operation_once() -> None:
    e = load(vector(), [var("i", 6)])
    assert cost(e) == 0
    assert cost(e + e * e) == 2
    assert cost(unary("exp", e)) > cost(e + 1.0)


def test_nodes_come_in_topological_order() -> None:
    x = vector()
    a = mapped(x, lambda e: e + 1.0)
    b = mapped(a, lambda e: e * 2.0)
    graph = Graph([x], [b, a], {})
    assert [n.id for n in graph.nodes()] == [x.id, a.id, b.id]
    assert operands(b) == [a]


def test_views_are_told_from_computations() -> None:
    x = vector()
    assert isinstance(mapped(x, lambda e: e).view_of, Load)
    assert mapped(x, lambda e: e + 1.0).view_of is None


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "argmin", "argmax"])
def test_interpreted_reductions(op: str) -> None:
    values = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    x = Constant((as_int(3), as_int(5)), DType.float32, "x", value=values)
    i, r = var("i", 3), var("r", 5)
    dtype = DType.int64 if op.startswith("arg") else DType.float32
    node = Reduce((as_int(3),), dtype, axes=(the_var(i),), raxes=(the_var(r),), op=op, body=load(x, [i, r]))
    want = getattr(np, op)(values.astype(np.float64) if op in ("sum", "prod") else values, axis=1)
    np.testing.assert_allclose(run(Graph([], [node], {}), [])[0], want, rtol=1e-6)


def test_storage_types_compute_in_few_types() -> None:
    assert {d.compute for d in DType} == {DType.float32, DType.int32, DType.bool}
    assert DType.float16.size == 2 and DType.bfloat16.is_float and not DType.bool.is_float
    assert isinstance(const(2.5), Const) and of(the_var(var("i", 2))).bounds == (0, 1)


def test_constants_are_computed_in_float32() -> None:
    """Sums and products that every device has alike; the rest is left to the device."""
    tiny = const(2.0**-126)
    assert (const(1.0) + const(2.0**-24)) is const(1.0)
    assert (const(3.0) * const(0.1)) is const(float(np.float32(3) * np.float32(0.1)))
    assert (const(0.0) * const(-2.0)).value == 0  # type: ignore[attr-defined]
    for left in (
        tiny * const(0.5),
        const(3e38) * const(10.0),
        const(2.0**-100) * const(2.0**-100),
        const(math.inf) - 1.0,
    ):
        assert not isinstance(left, Const)
