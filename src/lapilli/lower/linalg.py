"""Small dense linear algebra: factorisations and linear systems, with one or two kernels per column.

Matrices are [*batch, rows, columns], of known sizes, with at most 64 rows or columns on the shorter side. Their columns are
eliminated one after another; each step is a Map from one state of the whole matrix to the next. The factorisations follow
Golub and Van Loan, Matrix Computations, chapters 3 and 4. Unlike on the CPU, no error is raised: a singular matrix gives
infinities or NaN, and `info` reports it if the operator returns that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, cast_to, const, index, indirect, load, select, unary, where
from lapilli.ir.integer import Int, as_int
from lapilli.ir.node import Map, Node, Reduce
from lapilli.lower.registry import Call, broadcast, lowering

aten = torch.ops.aten

LARGEST = 64
Element = Callable[[Sequence[Int], Int, Int], Expr]  # (batch, row, column) -> element


def small(call: Call, x: Node, largest: int = LARGEST) -> tuple[int, int]:
    """Rows and columns of matrices [*, rows, columns]. Raises TypeError if they are unknown or too large."""
    rows, columns = x.shape[-2].value, x.shape[-1].value
    if rows is None or columns is None or min(rows, columns) > largest:
        raise TypeError(
            f"{call.op}: only matrices of a known size of at most {largest} on the shorter side are factored on the GPU, "
            f"not {x.shape[-2]} x {x.shape[-1]}"
        )
    return rows, columns


def step(call: Call, shape: Sequence[Int], body: Callable[..., Expr]) -> Map:
    """A state of the computation, in full precision."""
    made = call.map(body, shape, DType.float32)
    made.dtype = DType.float32
    return made


def part(call: Call, n: int) -> Call:
    """The call with its n-th result as the first."""
    return replace(call, name=f"{call.name}_{n}", shapes=call.shapes[n:], dtypes=call.dtypes[n:])


def matrix(x: Node) -> Element:
    """The elements of matrices [*batch, rows, columns], whose batch dimensions broadcast."""
    return lambda batch, i, j: cast_to(load(x, broadcast(x, [*batch, i, j])), DType.float32)


def transposed(f: Element) -> Element:
    return lambda batch, i, j: f(batch, j, i)


def identity(batch: Sequence[Int], i: Int, j: Int) -> Expr:
    return select([i - j, j - i], const(1.0), const(0.0))


# -- elimination with pivots


def _pivot(call: Call, w: Node, k: int, rows: int) -> Reduce:
    """[*batch]: the row of the element of column k with the largest magnitude, from row k on, as a distance from row k."""
    return call.reduce(
        "argmax",
        lambda at, r: unary("abs", load(w, [*at, r[0] + k, as_int(k)])),
        w.shape[:-2],
        [as_int(rows - k)],
        DType.int32,
        f"_pivot{k}",
    )


def _swapped(pivot: Node, batch: Sequence[Int], k: int, rows: int) -> tuple[Int, Callable[[Int], Int]]:
    """The pivot's row, and a function that maps each row to its source when rows k and pivot are exchanged."""
    place = load(pivot, batch) + k
    row = indirect(place, rows)

    def source(i: Int) -> Int:
        other = where(binary("eq", index(i), place), const(k), index(i))
        return indirect(where(binary("eq", index(i), const(k)), place, other), rows)

    return row, source


def factored(call: Call, x: Node) -> Node:
    """P A = L U with partial pivoting, as one matrix [*batch, rows, columns + 1]: L below the diagonal, U above. The last
    column holds, for every row, the row that it was exchanged with.
    """
    rows, columns = small(call, x)
    shape = (*x.shape[:-2], as_int(rows), as_int(columns + 1))
    w: Node = step(
        call, shape, lambda *at: select([columns - 1 - at[-1]], matrix(x)(at[:-2], at[-2], at[-1]), const(0.0))
    )
    for k in range(min(rows, columns)):
        w = _eliminated(call, w, _pivot(call, w, k, rows), k, rows, columns)
    return w


def _eliminated(call: Call, w: Node, pivot: Node, k: int, rows: int, columns: int) -> Map:
    """One step of Gaussian elimination: exchanges rows, then eliminates column k."""

    def body(*at: Int) -> Expr:
        batch, i, j = at[:-2], at[-2], at[-1]
        row, source = _swapped(pivot, batch, k, rows)
        own, top = load(w, [*batch, source(i), j]), load(w, [*batch, row, as_int(k)])
        factor = load(w, [*batch, source(i), as_int(k)])
        factor = where(binary("eq", top, 0.0), factor, factor / top)
        below = select([j - k - 1], own - factor * load(w, [*batch, row, j]), select([j - k], factor, own))
        number = select([i - k, k - i], cast_to(load(pivot, batch) + k, DType.float32), load(w, at))
        return select([columns - 1 - j], select([i - k - 1], below, own), number)

    return step(call, w.shape, body)


def _swaps(w: Node, batch: Sequence[Int], k: Int) -> Expr:
    """The row that row k was exchanged with, as a float."""
    return load(w, [*batch, k, w.shape[-1] - 1])


def _pivots(call: Call, w: Node) -> Map:
    """Pivots as torch and LAPACK return them: rows counted from 1."""
    return call.map(lambda *at: cast_to(_swaps(w, at[:-1], at[-1]), DType.int32) + 1)


def _info(call: Call, diagonal: Callable[[Sequence[Int], Int], Expr], n: int, good: Callable[[Expr], Expr]) -> Node:
    """int32 [*batch]: the number of the first diagonal element, from 1, that is not `good`; 0 if there is none."""
    if n == 0:
        return call.map(lambda *at: const(0))
    first = call.reduce(
        "min",
        lambda at, r: where(good(diagonal(at, r[0])), const(n + 1), index(r[0] + 1)),
        call.shape,
        [as_int(n)],
        DType.int32,
        "_first",
    )
    return call.map(lambda *at: where(binary("gt", load(first, at), n), const(0), load(first, at)))


def _singular(call: Call, w: Node, n: int) -> Node:
    """`info` of an LU factorisation: the first zero on the diagonal of U."""
    return _info(call, lambda at, k: load(w, [*at, k, k]), n, lambda e: binary("ne", e, 0.0))


def _matrix_of(call: Call, w: Node) -> Map:
    return call.map(lambda *at: load(w, at))


@lowering(aten.linalg_lu_factor.default)
def lu_factor(call: Call, x: Node, pivot: bool = True) -> list[Node]:
    """[*, rows, columns] -> L and U in one matrix of the same shape, and pivots, int32 [*, min(rows, columns)]."""
    _require_pivot(call, pivot)
    w = factored(call, x)
    return [_matrix_of(call, w), _pivots(part(call, 1), w)]


@lowering(aten.linalg_lu_factor_ex.default, aten._lu_with_info.default)
def lu_factor_ex(call: Call, x: Node, pivot: bool = True, check_errors: bool = False) -> list[Node]:
    """As `lu_factor`, and info, int32 [*]."""
    _require_pivot(call, pivot)
    w = factored(call, x)
    return [_matrix_of(call, w), _pivots(part(call, 1), w), _singular(part(call, 2), w, min(small(call, x)))]


def _require_pivot(call: Call, pivot: bool) -> None:
    if not pivot:
        raise TypeError(f"{call.op}: pivot=False is not supported on the GPU")


def _row_of(n: int, pivot: Callable[[int], Expr], i: Int) -> Expr:
    """The row of A that is row i of P A: applies the exchanges in reverse."""
    row = index(i)
    for k in reversed(range(n)):
        p = pivot(k)
        row = where(binary("eq", row, k), p, where(binary("eq", row, p), const(k), row))
    return row


def _unpacked(call: Call, lu: Node, pivot: Callable[[Sequence[Int], int], Expr]) -> list[Node]:
    """P [*, rows, rows], L [*, rows, k] and U [*, k, columns] of A = P L U, with k = min(rows, columns)."""
    rows, columns = lu.shape[-2], lu.shape[-1]
    k = min(small(call, lu))

    def p(*at: Int) -> Expr:
        same = binary("eq", _row_of(k, lambda n: pivot(at[:-2], n), at[-1]), index(at[-2]))
        return where(same, const(1.0), const(0.0))

    def lower(*at: Int) -> Expr:
        return select([at[-2] - at[-1] - 1], load(lu, at), identity((), at[-2], at[-1]))

    def upper(*at: Int) -> Expr:
        return select([at[-1] - at[-2]], load(lu, at), const(0.0))

    batch = lu.shape[:-2]
    return [
        call.map(p, (*batch, rows, rows)),
        call.map(lower, (*batch, rows, as_int(k))),
        call.map(upper, (*batch, as_int(k), columns)),
    ]


@lowering(aten.linalg_lu.default)
def lu(call: Call, x: Node, pivot: bool = True) -> list[Node]:
    """[*, rows, columns] -> P [*, rows, rows], L [*, rows, k] and U [*, k, columns] with A = P L U and k = min(rows,
    columns).
    """
    _require_pivot(call, pivot)
    w = factored(call, x)
    _, columns = small(call, x)
    packed = step(call, (*x.shape[:-1], as_int(columns)), lambda *at: load(w, at))
    return _unpacked(call, packed, lambda batch, k: cast_to(_swaps(w, batch, as_int(k)), DType.int32))


@lowering(aten.lu_unpack.default)
def lu_unpack(call: Call, x: Node, pivots: Node, data: bool = True, unpack_pivots: bool = True) -> list[Node]:
    """LU data [*, rows, columns] and pivots [*, k] -> P, L and U, as in `lu`. Results that are not requested are empty."""
    found = _unpacked(call, x, lambda batch, k: load(pivots, [*batch, as_int(k)]) - 1)
    wanted = (unpack_pivots, data, data)
    return [
        node if wants else call.map(lambda *at: const(0.0), call.shapes[k])
        for k, (node, wants) in enumerate(zip(found, wanted, strict=True))
    ]


@lowering(aten._linalg_det.default)
def det(call: Call, x: Node) -> list[Node]:
    """[*, n, n] -> the determinant [*], which is the product of U's diagonal times the sign of P; the LU matrix, and the
    pivots.
    """
    n, _ = small(call, x)
    w = factored(call, x)

    def terms(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        return load(w, [*at, r[0], r[0]]) * _sign_of_swap(w, at, r[0])

    value = call.reduce("prod", terms, x.shape[:-2], [as_int(n)], DType.float32) if n else None
    result = call.map(lambda *at: load(value, at) if value is not None else const(1.0))
    return [result, _matrix_of(part(call, 1), w), _pivots(part(call, 2), w)]


def _sign_of_swap(w: Node, batch: Sequence[Int], k: Int) -> Expr:
    """1 if row k stayed in place, and -1 if it was exchanged."""
    return where(binary("eq", _swaps(w, batch, k), index(k, DType.float32)), const(1.0), const(-1.0))


@lowering(aten._linalg_slogdet.default)
def slogdet(call: Call, x: Node) -> list[Node]:
    """[*, n, n] -> sign and logarithm of the magnitude of the determinant, both [*]; the LU matrix, and the pivots."""
    n, _ = small(call, x)
    w = factored(call, x)
    size, batch = [as_int(n)], x.shape[:-2]
    sign = call.reduce(
        "prod",
        lambda at, r: unary("sign", load(w, [*at, r[0], r[0]])) * _sign_of_swap(w, at, r[0]),
        batch,
        size,
        DType.float32,
        "_sign",
    )
    magnitude = call.reduce(
        "sum", lambda at, r: unary("log", unary("abs", load(w, [*at, r[0], r[0]]))), batch, size, DType.float32, "_log"
    )
    return [
        call.map(lambda *at: load(sign, at) if n else const(1.0)),
        part(call, 1).map(lambda *at: load(magnitude, at) if n else const(0.0)),
        _matrix_of(part(call, 2), w),
        _pivots(part(call, 3), w),
    ]


def solved(call: Call, a: Element, batch: Sequence[Int], n: int, b: Element, columns: int) -> Node:
    """X of A X = B by Gauss-Jordan elimination of [A | B]: [*batch, n, n + columns], with X from column n on."""
    shape = (*batch, as_int(n), as_int(n + columns))
    w: Node = step(
        call, shape, lambda *at: select([n - 1 - at[-1]], a(at[:-2], at[-2], at[-1]), b(at[:-2], at[-2], at[-1] - n))
    )
    for k in range(n):
        w = _gauss_jordan(call, w, _pivot(call, w, k, n), k, n)
    return w


def _gauss_jordan(call: Call, w: Node, pivot: Node, k: int, n: int) -> Map:
    """One step: exchanges rows, scales row k, and eliminates column k from all others."""

    def body(*at: Int) -> Expr:
        batch, i, j = at[:-2], at[-2], at[-1]
        row, source = _swapped(pivot, batch, k, n)
        unit = load(w, [*batch, row, j]) / load(w, [*batch, row, as_int(k)])
        other = load(w, [*batch, source(i), j]) - load(w, [*batch, source(i), as_int(k)]) * unit
        return select([j - k - 1], select([i - k, k - i], unit, other), load(w, at))

    return step(call, w.shape, body)


@lowering(aten.linalg_inv.default, aten.inverse.default)
def inv(call: Call, x: Node) -> Map:
    """[*, n, n] -> the inverse, [*, n, n]."""
    n, _ = small(call, x)
    w = solved(call, matrix(x), x.shape[:-2], n, identity, n)
    return call.map(lambda *at: load(w, [*at[:-1], at[-1] + n]))


@lowering(aten.linalg_inv_ex.default)
def inv_ex(call: Call, x: Node, check_errors: bool = False) -> list[Node]:
    """[*, n, n] -> the inverse, [*, n, n], and info, int32 [*]."""
    return [inv(call, x), _singular(part(call, 1), factored(call, x), small(call, x)[0])]


@lowering(aten.linalg_solve.default)
def solve(call: Call, a: Node, b: Node, *, left: bool = True) -> Map:
    """X of A X = B, or of X A = B if not left: a [*, n, n], b [*, n, k] or [*, n] -> the shape of b. Batch dimensions
    broadcast.
    """
    n, _ = small(call, a)
    vector = b.rank == 1 or (b.rank == a.rank - 1 and [repr(s) for s in b.shape] == [repr(s) for s in a.shape[:-1]])
    lhs = matrix(a) if left else transposed(matrix(a))
    if vector:
        rhs: Element = lambda batch, i, j: load(b, broadcast(b, [*batch, i]))  # noqa: E731
        columns = 1
    else:
        rhs = matrix(b) if left else transposed(matrix(b))
        columns = b.shape[-1 if left else -2].value or 0
    batch = call.shape[:-1] if vector else call.shape[:-2]
    w = solved(call, lhs, batch, n, rhs, columns)

    def body(*at: Int) -> Expr:
        if vector:
            return load(w, [*at, as_int(n)])
        return load(w, [*at[:-1], at[-1] + n] if left else [*at[:-2], at[-1], at[-2] + n])

    return call.map(body)


@lowering(aten._linalg_solve_ex.default)
def solve_ex(call: Call, a: Node, b: Node, *, left: bool = True, check_errors: bool = False) -> list[Node]:
    """As `solve`, and the LU matrix of a, its pivots, and info, int32 [*]."""
    w, n = factored(call, a), small(call, a)[0]
    factors = [_matrix_of(part(call, 1), w), _pivots(part(call, 2), w), _singular(part(call, 3), w, n)]
    return [solve(call, a, b, left=left), *factors]


# -- triangular systems


def substituted(
    call: Call, a: Element, b: Element, batch: Sequence[Int], n: int, columns: Int, upper: bool, unit: bool = False
) -> Node:
    """X [*batch, n, columns] of A X = B with triangular A, by substitution: one Map per unknown."""
    shape = (*batch, as_int(n), columns)
    w: Node = step(call, shape, lambda *at: b(at[:-2], at[-2], at[-1]))
    for k in reversed(range(n)) if upper else range(n):

        def body(*at: Int, w: Node = w, k: int = k) -> Expr:
            batch, i, j = at[:-2], at[-2], at[-1]
            x = load(w, [*batch, as_int(k), j])
            if not unit:
                x = x / a(batch, as_int(k), as_int(k))
            later = load(w, at) - a(batch, i, as_int(k)) * x
            return select([i - k, k - i], x, select([k - i if upper else i - k], later, load(w, at)))

        w = step(call, shape, body)
    return w


def _to(call: Call, w: Node, flipped: bool = False) -> Map:
    """The result, transposed if `flipped`, in the call's dtype."""
    return call.map(lambda *at: load(w, [*at[:-2], at[-1], at[-2]] if flipped else at))


@lowering(aten.linalg_solve_triangular.default)
def solve_triangular(
    call: Call, a: Node, b: Node, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Map:
    """X of A X = B, or of X A = B if not left, with triangular A: a [*, n, n], b [*, n, k] -> [*, n, k]."""
    n, _ = small(call, a)
    lhs, rhs = (matrix(a), matrix(b)) if left else (transposed(matrix(a)), transposed(matrix(b)))
    columns = call.shape[-1 if left else -2]
    w = substituted(call, lhs, rhs, call.shape[:-2], n, columns, upper == left, unitriangular)
    return _to(call, w, not left)


@lowering(aten.triangular_solve.default)
def triangular_solve(
    call: Call, b: Node, a: Node, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> list[Node]:
    """X of A X = B with triangular A: b [*, n, k], a [*, n, n] -> X [*, n, k], and a copy of A."""
    n, _ = small(call, a)
    lhs = transposed(matrix(a)) if transpose else matrix(a)
    w = substituted(
        call, lhs, matrix(b), call.shape[:-2], n, call.shape[-1], upper != transpose, unitriangular
    )  # fmt: skip
    return [_to(call, w), part(call, 1).map(lambda *at: matrix(a)(at[:-2], at[-2], at[-1]))]


@lowering(aten.linalg_lu_solve.default)
def lu_solve(call: Call, x: Node, pivots: Node, b: Node, *, left: bool = True, adjoint: bool = False) -> Map:
    """X of A X = B, given the LU matrix [*, n, n] and pivots [*, n] of A; b [*, n, k] -> [*, n, k]. If not left: X A = B.
    adjoint: A^T instead of A.
    """
    n, _ = small(call, x)
    a, rhs = matrix(x), matrix(b) if left else transposed(matrix(b))
    batch, columns = call.shape[:-2], call.shape[-1 if left else -2]

    def row(at: Sequence[Int], i: Int) -> Expr:
        return _row_of(n, lambda k: load(pivots, broadcast(pivots, [*at, as_int(k)])) - 1, i)

    if adjoint == (not left):  # A X = B: P L U
        order = step(call, (*batch, as_int(n)), lambda *at: cast_to(row(at[:-1], at[-1]), DType.float32))

        def placed(at: Sequence[Int], i: Int, j: Int) -> Expr:
            return rhs(at, indirect(cast_to(load(order, [*at, i]), DType.int32), n), j)

        y = substituted(call, a, placed, batch, n, columns, False, True)
        return _to(call, substituted(call, a, matrix(y), batch, n, columns, True), not left)
    y = substituted(call, transposed(a), rhs, batch, n, columns, False)
    z = substituted(call, transposed(a), matrix(y), batch, n, columns, True, True)

    def back(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        """Row r of P A is row i of A."""
        return where(binary("eq", row(at[:-2], r[0]), index(at[-2])), load(z, [*at[:-2], r[0], at[-1]]), const(0.0))

    return _to(call, call.reduce("sum", back, z.shape, [as_int(n)], DType.float32, "_rows"), not left)


# -- positive definite matrices


def cholesky_state(call: Call, x: Node, upper: bool) -> Node:
    """The Cholesky factor L of A = L L^T in the lower triangle of [*, n, n]; the upper triangle is unspecified."""
    n, _ = small(call, x)
    a = transposed(matrix(x)) if upper else matrix(x)
    w: Node = step(call, x.shape, lambda *at: a(at[:-2], at[-2], at[-1]))
    for k in range(n):

        def body(*at: Int, w: Node = w, k: int = k) -> Expr:
            batch, i, j = at[:-2], at[-2], at[-1]
            first = as_int(k)
            d = load(w, [*batch, first, first])
            column = load(w, [*batch, i, first])
            later = load(w, at) - column * load(w, [*batch, j, first]) / d
            done = select([j - k, k - j], column / unary("sqrt", d), load(w, at))
            return select([i - k], select([j - k - 1], later, done), load(w, at))

        w = step(call, x.shape, body)
    return w


def _triangle(call: Call, w: Node, upper: bool) -> Map:
    """The lower triangle, or its transpose if `upper`, with zeros elsewhere."""

    def body(*at: Int) -> Expr:
        i, j = (at[-1], at[-2]) if upper else (at[-2], at[-1])
        return select([i - j], load(w, [*at[:-2], i, j]), const(0.0))

    return call.map(body)


@lowering(aten.linalg_cholesky_ex.default)
def cholesky_ex(call: Call, x: Node, *, upper: bool = False, check_errors: bool = False) -> list[Node]:
    """[*, n, n] -> L of A = L L^T (U of U^T U if upper), [*, n, n], and info, int32 [*]."""
    w = cholesky_state(call, x, upper)
    n, _ = small(call, x)
    info = _info(part(call, 1), lambda at, k: load(w, [*at, k, k]), n, lambda e: binary("gt", e, 0.0))
    return [_triangle(call, w, upper), info]


@lowering(aten.cholesky.default, aten.linalg_cholesky.default)
def cholesky(call: Call, x: Node, upper: bool = False) -> Map:
    """[*, n, n] -> L of A = L L^T (U of U^T U if upper), [*, n, n]."""
    return _triangle(call, cholesky_state(call, x, upper), upper)


def _cholesky_solved(call: Call, l: Node, b: Element, columns: Int, upper: bool) -> Map:  # noqa: E741
    """X of L L^T X = B, by two substitutions."""
    n, _ = small(call, l)
    lower = transposed(matrix(l)) if upper else matrix(l)
    batch = call.shape[:-2]
    y = substituted(call, lower, b, batch, n, columns, False)
    return _to(call, substituted(call, transposed(lower), matrix(y), batch, n, columns, True))


@lowering(aten.cholesky_solve.default)
def cholesky_solve(call: Call, b: Node, l: Node, upper: bool = False) -> Map:  # noqa: E741
    """X of A X = B, given the Cholesky factor of A: b [*, n, k], l [*, n, n] -> [*, n, k]."""
    return _cholesky_solved(call, l, matrix(b), call.shape[-1], upper)


@lowering(aten.cholesky_inverse.default)
def cholesky_inverse(call: Call, l: Node, upper: bool = False) -> Map:  # noqa: E741
    """The inverse of A, given its Cholesky factor: [*, n, n] -> [*, n, n]."""
    return _cholesky_solved(call, l, identity, call.shape[-1], upper)
