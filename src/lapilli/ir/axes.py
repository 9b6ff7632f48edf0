"""Axes of values, and the indices of elements after a reshape: shared by lowering, scheduling and codegen."""

from __future__ import annotations

from collections.abc import Sequence

from lapilli.ir.integer import Atom, Int, Var, as_int, of, var


def fresh_axes(shape: tuple[Int, ...], names: str = "ijklmnop") -> tuple[tuple[Var, ...], tuple[Int, ...]]:
    """New axis variables for a shape, and the indices that they give: an axis of size 1 has index 0."""
    made = [var(names[d % len(names)], size) for d, size in enumerate(shape)]
    axes: list[Var] = []
    for v in made:
        atom = v.terms[0][0][0]
        assert isinstance(atom, Var)
        axes.append(atom)
    return tuple(axes), tuple(map(index_of, axes))


def index_of(axis: Var) -> Int:
    """The index that an axis gives: 0 for an axis of size 1."""
    return as_int(0) if axis.extent == 1 else of(axis)


def reshape_index(at: Sequence[Int], to: Sequence[Int], source: Sequence[Int]) -> list[Int]:
    """The index, in a tensor of shape `source`, of the element `at` of a tensor of shape `to` with as many elements.

    Dimensions are matched in groups with equal products, so that unchanged dimensions keep their index.
    """
    result: list[Int] = []
    i = j = 0
    while j < len(source) or i < len(to):
        outs, ins = [i], [j]
        p = to[i] if i < len(to) else as_int(1)
        q = source[j] if j < len(source) else as_int(1)
        i, j = i + 1, j + 1
        while p != q:
            smaller = _smaller(p, q)
            if i < len(to) and (smaller == "p" or j >= len(source)):
                p, i = p * to[i], i + 1
                outs.append(i - 1)
            elif j < len(source):
                q, j = q * source[j], j + 1
                ins.append(j - 1)
            else:
                break
        linear = as_int(0)
        for d in outs:
            if d < len(to):
                linear = linear * to[d] + at[d]
        indices: list[Int] = []
        for d in reversed([d for d in ins if d < len(source)]):
            indices.append(linear % source[d] if d != ins[0] else linear)
            linear = linear // source[d]
        result += reversed(indices)
    return result


def _smaller(p: Int, q: Int) -> str:
    lo = (q - p).bounds[0]
    if lo is not None and lo >= 0:
        return "p"
    hi = (q - p).bounds[1]
    if hi is not None and hi <= 0:
        return "q"
    return "p" if len(p.terms) <= len(q.terms) else "q"  # symbolic: grow the simpler side


def unravel(index: Int, axes: Sequence[Var]) -> dict[Atom, Int]:
    """The axes of a row-major index; the first is not reduced by its extent."""
    found: dict[Atom, Int] = {}
    for a in reversed(axes):
        found[a] = index % a.extent if a is not axes[0] else index
        index = index // a.extent
    return found
