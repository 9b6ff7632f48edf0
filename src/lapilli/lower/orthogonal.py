"""Householder reflections: QR factorisation, and products with a Q that is stored as reflectors.

A reflector H = I - tau v v^T is stored in column k of a matrix: v is 0 above row k, 1 in row k, and the column's elements
below (Golub and Van Loan, Matrix Computations, section 5.1, with LAPACK's signs).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, cast_to, const, load, select, unary, where
from lapilli.ir.integer import Int, as_int, minimum
from lapilli.ir.node import Map, Node
from lapilli.lower.linalg import Element, identity, matrix, part, small, step
from lapilli.lower.registry import Call, lowering

aten = torch.ops.aten


def _reflector(v: Node, batch: Sequence[Int], k: int, i: Int) -> Expr:
    """Element i of the reflector stored in column k of v."""
    below = cast_to(load(v, [*batch, i, as_int(k)]), DType.float32)
    return select([i - k], select([k - i], const(1.0), below), const(0.0))


def applied(call: Call, v: Node, tau: Node, order: Iterable[int], w: Node, name: str = "") -> Node:
    """Applies the reflectors numbered `order`, one after another, to w [*batch, rows, columns] from the left."""
    rows = w.shape[-2]
    for k in order:

        def projection(at: tuple[Int, ...], r: tuple[Int, ...], w: Node = w, k: int = k) -> Expr:
            i = r[0] + k
            return _reflector(v, at[:-1], k, i) * load(w, [*at[:-1], i, at[-1]])

        s = call.reduce(
            "sum", projection, (*w.shape[:-2], w.shape[-1]), [rows - k], DType.float32, f"_projection{name}{k}"
        )

        def body(*at: Int, w: Node = w, k: int = k, s: Node = s) -> Expr:
            batch, i, j = at[:-2], at[-2], at[-1]
            t = cast_to(load(tau, [*batch, as_int(k)]), DType.float32)
            return load(w, at) - t * _reflector(v, batch, k, i) * load(s, [*batch, j])

        w = step(call, w.shape, body)
    return w


def factored(call: Call, x: Node) -> tuple[Node, Node]:
    """R in the upper triangle with the reflectors below it, [*batch, rows, columns]; and tau, [*batch, min(rows,
    columns)].
    """
    rows, columns = small(call, x)
    batch, count = x.shape[:-2], min(rows, columns)
    height = max(rows, count)
    shape = (*batch, as_int(height), as_int(columns + 1))  # the last column holds tau
    w: Node = step(
        call, shape, lambda *at: select([columns - 1 - at[-1]], matrix(x)(at[:-2], at[-2], at[-1]), const(0.0))
    )
    for k in range(count):
        w = _reflected(call, w, k, rows, columns)
    tau = step(call, (*batch, as_int(count)), lambda *at: load(w, [*at, as_int(columns)]))
    return step(call, x.shape, lambda *at: load(w, at)), tau


def _reflected(call: Call, w: Node, k: int, rows: int, columns: int) -> Node:
    """One step: reflects column k onto the k-th unit vector, and applies the reflection to the columns right of it."""
    batch = w.shape[:-2]
    first = as_int(k)
    squares = call.reduce(
        "sum",
        lambda at, r: load(w, [*at, r[0] + k + 1, first]) * load(w, [*at, r[0] + k + 1, first]),
        batch,
        [as_int(rows - k - 1)],
        DType.float32,
        f"_squares{k}",
    )

    def head(at: Sequence[Int]) -> tuple[Expr, Expr, Expr]:
        """(whether the column has elements below the diagonal, its old diagonal element, the new one)"""
        alpha, below = load(w, [*at, first, first]), load(squares, at)
        size = unary("sqrt", alpha * alpha + below)
        beta = where(binary("ge", alpha, 0.0), -size, size)
        return binary("gt", below, 0.0), alpha, beta

    def vector(at: Sequence[Int], i: Int) -> Expr:
        some, alpha, beta = head(at)
        scaled = load(w, [*at, i, first]) / where(some, alpha - beta, const(1.0))
        return select([i - k], select([k - i], const(1.0), scaled), const(0.0))

    projected = call.reduce(
        "sum",
        lambda at, r: vector(at[:-1], r[0] + k) * load(w, [*at[:-1], r[0] + k, at[-1]]),
        (*batch, as_int(columns)),
        [as_int(rows - k)],
        DType.float32,
        f"_projected{k}",
    )

    def body(*at: Int) -> Expr:
        b, i, j = at[:-2], at[-2], at[-1]
        some, alpha, beta = head(b)
        tau = where(some, (beta - alpha) / where(some, beta, const(1.0)), const(0.0))
        later = load(w, at) - tau * vector(b, i) * load(projected, [*b, minimum(j, columns - 1)])
        column = select([i - k], select([k - i], where(some, beta, alpha), vector(b, i)), load(w, at))
        changed = select([j - k - 1], later, select([j - k], column, load(w, at)))
        kept = select([i - k, k - i], tau, load(w, at))
        return select([columns - 1 - j], changed, kept)

    return step(call, w.shape, body)


@lowering(aten.geqrf.default)
def geqrf(call: Call, x: Node) -> list[Node]:
    """[*, rows, columns] -> R and reflectors in one matrix of the same shape, and tau [*, min(rows, columns)]."""
    w, tau = factored(call, x)
    return [call.map(lambda *at: load(w, at)), part(call, 1).map(lambda *at: load(tau, at))]


def columns_of_q(call: Call, v: Node, tau: Node, columns: Int) -> Node:
    """The first columns of Q: [*, rows, columns]."""
    count = tau.shape[-1].value or 0
    w: Node = step(
        call, (*v.shape[:-1], columns), lambda *at: identity((), at[-2], at[-1])
    )  # fmt: skip
    return applied(call, v, tau, reversed(range(count)), w)


@lowering(aten.linalg_householder_product.default, aten.orgqr.default)
def householder_product(call: Call, v: Node, tau: Node) -> Map:
    """Reflectors v [*, rows, columns] and tau [*, k] -> the first columns of Q, [*, rows, columns]."""
    small(call, v)
    q = columns_of_q(call, v, tau, v.shape[-1])
    return call.map(lambda *at: load(q, at))


@lowering(aten.linalg_qr.default)
def qr(call: Call, x: Node, mode: str = "reduced") -> list[Node]:
    """[*, rows, columns] -> Q and R. With k = min(rows, columns), "reduced": [*, rows, k] and [*, k, columns]; "complete":
    [*, rows, rows] and [*, rows, columns]; "r": an empty Q and the reduced R.
    """
    w, tau = factored(call, x)
    second = part(call, 1)
    r = second.map(lambda *at: select([at[-1] - at[-2]], load(w, at), const(0.0)))
    if mode == "r":
        return [call.map(lambda *at: const(0.0)), r]
    q = columns_of_q(call, w, tau, call.shape[-1])
    return [call.map(lambda *at: load(q, at)), r]


@lowering(aten.ormqr.default)
def ormqr(call: Call, v: Node, tau: Node, x: Node, left: bool = True, transpose: bool = False) -> Map:
    """op(Q) X (left) or X op(Q), with Q given by reflectors v and tau, and op the transpose if `transpose`; the shape of x.
    X op(Q) is computed as the transpose of op(Q)^T X^T.
    """
    small(call, v)
    count = tau.shape[-1].value or 0
    shape = x.shape if left else (*x.shape[:-2], x.shape[-1], x.shape[-2])
    source: Element = matrix(x)
    w: Node = step(
        call, shape, lambda *at: source(at[:-2], at[-2], at[-1]) if left else source(at[:-2], at[-1], at[-2])
    )
    order = range(count) if transpose == left else reversed(range(count))
    w = applied(call, v, tau, order, w)
    return call.map(lambda *at: load(w, at if left else [*at[:-2], at[-1], at[-2]]))
