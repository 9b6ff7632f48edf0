"""Singular values, pseudoinverses and symmetric eigenvalues by one-sided Jacobi rotations (Hestenes 1958).

Pairs of columns are rotated until all columns are orthogonal; their lengths are then the singular values. A round rotates
disjoint pairs in parallel, and moves columns like players in a round-robin tournament (Brent and Luk 1985), so that every
round consists of the same two kernels. The number of sweeps is fixed; convergence is quadratic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, const, indirect, load, select, unary, where
from lapilli.ir.integer import Int, as_int, minimum, product
from lapilli.ir.node import Constant, Map, Node
from lapilli.lower.linalg import Element, identity, matrix, part, small, step, transposed
from lapilli.lower.orthogonal import columns_of_q, factored
from lapilli.lower.registry import Call, element, lowering
from lapilli.lower.sort import permutation

aten = torch.ops.aten

LARGEST = 16
_SWEEPS = 8


def orthogonalized(call: Call, a: Element, batch: Sequence[Int], rows: int, columns: int) -> tuple[Node, Node]:
    """[*batch, rows + columns, columns]: A V with orthogonal columns, the longest first, above V; and the columns' lengths
    [*batch, columns].
    """
    players = columns + columns % 2  # with an odd number, one column is paired with zeros
    shape = (*batch, as_int(rows + columns), as_int(players))

    def start(*at: Int) -> Expr:
        value = select([rows - 1 - at[-2]], a(at[:-2], at[-2], at[-1]), identity((), at[-2] - rows, at[-1]))
        return select([columns - 1 - at[-1]], value, const(0.0))

    w: Node = step(call, shape, start)
    if columns > 1:
        moves = _moves(call, players)
        for n in range(_SWEEPS * (players - 1)):
            w = _round(call, w, moves, rows, players, n)
    squares = call.reduce(
        "sum",
        lambda at, r: load(w, [*at[:-1], r[0], at[-1]]) * load(w, [*at[:-1], r[0], at[-1]]),
        (*batch, as_int(columns)),
        [as_int(rows)],
        DType.float32,
        "_lengths",
    )
    order = permutation(call, squares, len(batch), descending=True)

    def place(at: Sequence[Int], k: Int) -> Int:
        return indirect(load(order, [*at, k]), columns)

    ordered = step(
        call, (*shape[:-1], as_int(columns)), lambda *at: load(w, [*at[:-1], place(at[:-2], at[-1])])
    )  # fmt: skip
    lengths = step(
        call, squares.shape, lambda *at: unary("sqrt", load(squares, [*at[:-1], place(at[:-1], at[-1])]))
    )  # fmt: skip
    return ordered, lengths


def _moves(call: Call, players: int) -> Constant:
    """The previous position of the column at each position, for one round. Pairs are (0, 1), (2, 3), ...; column 0
    stays.
    """
    upper, lower = list(range(0, players, 2)), list(range(1, players, 2))
    new_upper = [upper[0], lower[0], *upper[1:-1]][: len(upper)]
    new_lower = [*lower[1:], upper[-1]] if len(upper) > 1 else lower
    table = np.asarray([p for pair in zip(new_upper, new_lower, strict=True) for p in pair], np.int32)
    return Constant((as_int(players),), DType.int32, f"{call.name}_moves", "constant", value=table)


def _round(call: Call, w: Node, moves: Constant, rows: int, players: int, n: int) -> Map:
    """One round: rotates every pair of columns to make it orthogonal, and moves the columns on. The rotation angle is that
    of Golub and Van Loan, Matrix Computations, 4th edition, section 8.5.
    """
    batch = w.shape[:-2]

    def products(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        """Dot products of a pair: first with first, second with second, first with second."""
        pair, which = at[-2] * 2, at[-1]
        left, right = pair + which % 2, pair + (which + 1) // 2
        return load(w, [*at[:-2], r[0], left]) * load(w, [*at[:-2], r[0], right])

    dots = call.reduce(
        "sum", products, (*batch, as_int(players // 2), as_int(3)), [as_int(rows)], DType.float32, f"_products{n}"
    )

    def body(*at: Int) -> Expr:
        source = indirect(load(moves, [at[-1]]), players)
        pair, second = source // 2, source % 2
        alpha, beta, gamma = (load(dots, [*at[:-2], pair, as_int(k)]) for k in range(3))
        still = binary("eq", gamma, 0.0)
        zeta = (beta - alpha) / (where(still, const(1.0), gamma) * 2.0)
        size = 1.0 / (unary("abs", zeta) + unary("sqrt", zeta * zeta + 1.0))
        tangent = where(still, const(0.0), where(binary("lt", zeta, 0.0), -size, size))
        cosine = unary("rsqrt", tangent * tangent + 1.0)
        a, b = (load(w, [*at[:-1], pair * 2 + k]) for k in range(2))
        return select([second - 1], (a * tangent + b) * cosine, (a - b * tangent) * cosine)

    return step(call, w.shape, body)


def _tall(call: Call, x: Node, hermitian: bool = False) -> tuple[Element, int, int, bool]:
    """The matrix, or its transpose, such that it has no more columns than rows; and whether it is the transpose."""
    rows, columns = small(call, x, LARGEST)
    if hermitian:
        return _symmetric(x, True), rows, columns, False
    wide = columns > rows
    return (transposed(matrix(x)), columns, rows, True) if wide else (matrix(x), rows, columns, False)


def _symmetric(x: Node, lower: bool) -> Element:
    """The symmetric matrix given by one triangle."""

    def at(batch: Sequence[Int], i: Int, j: Int) -> Expr:
        return select([i - j if lower else j - i], matrix(x)(batch, i, j), matrix(x)(batch, j, i))

    return at


def _empty(x: Node) -> bool:
    return product(x.shape) == 0


@lowering(aten._linalg_svd.default)
def svd(
    call: Call, x: Node, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> list[Node]:
    """[*, rows, columns] -> U [*, rows, k], S [*, k] and V^T [*, k, columns] with k = min(rows, columns), or square U and V
    if full_matrices. Signs are arbitrary. U is the Q of A V, which makes it orthogonal even beyond the rank.
    """
    if _empty(x):
        return [
            part(call, n).map(lambda *at: identity((), at[-2], at[-1]) if len(at) > 1 else const(0.0)) for n in range(3)
        ]
    a, rows, columns, wide = _tall(call, x)
    w, lengths = orthogonalized(call, a, x.shape[:-2], rows, columns)
    values = part(call, 1).map(lambda *at: load(lengths, at))
    if not compute_uv:
        return [call.map(lambda *at: const(0.0)), values, part(call, 2).map(lambda *at: const(0.0))]
    reflected, tau = factored(call, step(call, (*x.shape[:-2], as_int(rows), as_int(columns)), lambda *at: load(w, at)))
    q = columns_of_q(call, reflected, tau, as_int(rows if full_matrices else columns))

    def left(batch: Sequence[Int], i: Int, k: Int) -> Expr:
        e = load(q, [*batch, i, k])
        r = load(reflected, [*batch, minimum(k, columns - 1), minimum(k, columns - 1)])
        return select([columns - 1 - k], where(binary("lt", r, 0.0), -e, e), e)

    def right(batch: Sequence[Int], i: Int, k: Int) -> Expr:
        return load(w, [*batch, i + rows, k])

    u, v = (right, left) if wide else (left, right)
    return [
        call.map(lambda *at: u(at[:-2], at[-2], at[-1])),
        values,
        part(call, 2).map(lambda *at: v(at[:-2], at[-1], at[-2])),
    ]


Bound = Node | float | None


def _cut(s: Node, size: int, batch: Sequence[Int], atol: Bound, rtol: Bound) -> Expr:
    """The threshold below which singular values count as 0: max(atol, rtol * the largest)."""
    usual = 0.0 if atol is not None else torch.finfo(torch.float32).eps * size
    relative = element(usual if rtol is None else rtol, batch, DType.float32)
    cut = relative * load(s, [*batch, as_int(0)])
    return cut if atol is None else binary("max", cut, element(atol, batch, DType.float32))


@lowering(aten.linalg_pinv.atol_rtol_tensor, aten.linalg_pinv.atol_rtol_float)
def pinv(call: Call, x: Node, *, atol: Bound = None, rtol: Bound = None, hermitian: bool = False) -> Node:
    """[*, rows, columns] -> [*, columns, rows]: V S^-1 U^T = sum over k of v_k (A v_k)^T / s_k^2, over the s_k that do not
    count as 0.
    """
    if _empty(x):
        return call.map(lambda *at: const(0.0))
    a, rows, columns, wide = _tall(call, x, hermitian)
    w, s = orthogonalized(call, a, x.shape[:-2], rows, columns)

    def term(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        batch, k = at[:-2], r[0]
        i, j = (at[-2], at[-1]) if wide else (at[-1], at[-2])
        length = load(s, [*batch, k])
        each = load(w, [*batch, j + rows, k]) / length * (load(w, [*batch, i, k]) / length)
        return where(binary("gt", length, _cut(s, max(rows, columns), batch, atol, rtol)), each, const(0.0))

    return call.reduce("sum", term, call.shape, [as_int(columns)])


@lowering(aten.pinverse.default, aten.linalg_pinv.default)
def pinverse(call: Call, x: Node, rcond: float = 1e-15, hermitian: bool = False) -> Node:
    """As `pinv`, with a relative tolerance."""
    return pinv(call, x, rtol=rcond, hermitian=hermitian)


@lowering(aten.linalg_matrix_rank.atol_rtol_tensor, aten.linalg_matrix_rank.atol_rtol_float)
def matrix_rank(call: Call, x: Node, *, atol: Bound = None, rtol: Bound = None, hermitian: bool = False) -> Node:
    """[*, rows, columns] -> [*]: the number of singular values that do not count as 0."""
    if _empty(x):
        return call.map(lambda *at: const(0))
    a, rows, columns, _ = _tall(call, x, hermitian)
    _, s = orthogonalized(call, a, x.shape[:-2], rows, columns)
    return call.reduce(
        "sum",
        lambda at, r: where(
            binary("gt", load(s, [*at, r[0]]), _cut(s, max(rows, columns), at, atol, rtol)), const(1), const(0)
        ),
        call.shape,
        [as_int(columns)],
    )


@lowering(aten._linalg_eigh.default)
def eigh(call: Call, x: Node, uplo: str = "L", compute_v: bool = True) -> list[Node]:
    """[*, n, n] -> eigenvalues of symmetric matrices in ascending order, [*, n], and eigenvectors [*, n, n] with arbitrary
    signs.

    With c the largest row sum of magnitudes, A + c I is positive semidefinite (Gershgorin), so that its eigenvalues are its
    singular values.
    """
    second = part(call, 1)
    if _empty(x):
        return [call.map(lambda *at: const(0.0)), second.map(lambda *at: const(0.0))]
    n, _ = small(call, x, LARGEST)
    batch = x.shape[:-2]
    symmetric = _symmetric(x, uplo.upper() == "L")
    sums = call.reduce(
        "sum",
        lambda at, r: unary("abs", symmetric(at[:-1], at[-1], r[0])),
        x.shape[:-1],
        [as_int(n)],
        DType.float32,
        "_rows",
    )
    shift = call.reduce("max", lambda at, r: load(sums, [*at, r[0]]), batch, [as_int(n)], DType.float32, "_shift")

    def shifted(at: Sequence[Int], i: Int, j: Int) -> Expr:
        return symmetric(at, i, j) + select([i - j, j - i], load(shift, at), const(0.0))

    w, s = orthogonalized(call, shifted, batch, n, n)
    values = call.map(lambda *at: load(s, [*at[:-1], n - 1 - at[-1]]) - load(shift, at[:-1]))
    if not compute_v:
        return [values, second.map(lambda *at: const(0.0))]
    return [values, second.map(lambda *at: load(w, [*at[:-2], at[-2] + n, n - 1 - at[-1]]))]
