"""Matrix products and convolutions as kernel templates see them: sizes, and operands with strides into memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lapilli.ir.integer import Int, Var, as_int, product
from lapilli.ir.node import Convolution, Map, Matmul, Node, Reduce
from lapilli.schedule.encoding import DENSE, Encoding
from lapilli.schedule.layout import Layout
from lapilli.schedule.realize import operand_indices
from lapilli.schedule.roots import chase, is_affine


@dataclass(frozen=True)
class Operand:
    """A value in memory: element (i, j, ...) is at offset + i*strides[0] + j*strides[1] + ... encoding: an alternative source
    from which a kernel may compute the elements.
    """

    node: Node
    offset: Int
    strides: tuple[Int, ...]
    encoding: Encoding = DENSE


@dataclass(frozen=True)
class MatmulView:
    """out[b, m, n] = sum_k lhs[b, m, k] * rhs[b, k, n]; operand strides are (batch, row, column)."""

    batch: Int
    m: Int
    n: Int
    k: Int
    lhs: Operand
    rhs: Operand


@dataclass(frozen=True)
class Depths:
    """The third dimension of a convolution: its size, and how it is read."""

    size: Int
    results: Int
    kernel: int
    stride: int
    padding: int
    dilation: int


@dataclass(frozen=True)
class ConvolutionView:
    """A 2-D convolution (1-D ones have height 1); x strides are (n, c, h, w); weight is [out, in/groups, kh, kw].

    Of a 3-D one, n counts the images of all output depths, and the channels of a group are [kd, in/groups]. With
    `depths`, which only depthwise ones have, channels are those of the input, and the images of x are those of all depths.
    """

    n: Int
    channels: Int
    h: Int
    w: Int
    out_channels: Int
    out_h: Int
    out_w: Int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    x: Operand
    weight: Node
    depths: Depths | None = None

    @property
    def images(self) -> Int:
        """Those of x."""
        return self.n if self.depths is None else self.n // self.depths.results * self.depths.size

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1] * (1 if self.depths is None else self.depths.kernel)

    @property
    def rows(self) -> Int:
        """Output positions: n * out_h * out_w."""
        return self.n * self.out_h * self.out_w

    @property
    def is_pointwise(self) -> bool:
        """Whether a 1x1 convolution is a matrix product over positions, each read where it is written. (A transposed one with
        output_padding has more positions than its input.)
        """
        same = (self.out_h, self.out_w) == (self.h, self.w)
        return same and self.kernel == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0) and self.groups == 1

    @property
    def is_depthwise(self) -> bool:
        return self.groups > 1 and self.channels == self.groups and self.out_channels == self.groups


def operand(node: Node, index: tuple[Int, ...], axes: Sequence[Var | None], views: Mapping[int, Map],
            layouts: Mapping[int, Layout]) -> Operand | None:  # fmt: skip
    """`node[index]` as an offset and a stride per axis; None if strides cannot express it, or if the value has no memory of its
    own. An axis of None has size 1.
    """
    root, at = chase(node, index, dict(views))
    if root.id not in layouts or not is_affine(at):
        return None
    place = layouts[root.id].offset(at)
    strides: list[Int] = []
    offset = place
    for a in axes:
        if a is None:
            strides.append(as_int(0))
            continue
        known = place.step(a)
        step = place.substitute({a: 1}) - place.substitute({a: 0}) if known is None else as_int(known)
        if any(isinstance(v, Var) for v in step.atoms()):
            return None
        strides.append(step)
        offset = offset.substitute({a: 0})
    if any(isinstance(v, Var) for v in offset.atoms()):
        return None
    return Operand(root, offset, tuple(strides))


def merged(strides: Sequence[Int], extents: Sequence[Int]) -> Int | None:
    """One stride for nested axes, outermost first; None when they do not nest."""
    real = [(s, e) for s, e in zip(strides, extents, strict=True) if e != 1]
    if not real:
        return as_int(0)
    for (outer, _), (inner, extent) in itertools.pairwise(real):
        if outer != inner * extent:
            return None
    return real[-1][0]


Copy = Callable[[Node, tuple[Int, ...], Sequence[Sequence[Var]]], Operand | None]
"""A dense copy of a value that is read at an index, in the axes of the groups one after the other; with a stride for each group."""


def _flatten(found: Operand | None, groups: Sequence[Sequence[Var]]) -> Operand | None:
    """An operand whose axes are merged group by group; None if they do not nest."""
    if found is None:
        return None
    strides: list[Int] = []
    at = 0
    for group in groups:
        part = found.strides[at : at + len(group)]
        at += len(group)
        one = merged(part, [a.extent for a in group])
        if one is None:
            return None
        strides.append(one)
    return Operand(found.node, found.offset, tuple(strides))


def matmul_view(r: Reduce, views: Mapping[int, Map], layouts: Mapping[int, Layout], copy: Copy) -> MatmulView | None:
    """copy: called for operands whose batches or rows do not lie one stride apart."""
    c = r.contraction
    assert isinstance(c, Matmul)

    def flat(node: Node, index: tuple[Int, ...], groups: Sequence[Sequence[Var]]) -> Operand | None:
        axes = [a for group in groups for a in group]
        return _flatten(operand(node, index, axes, views, layouts), groups) or copy(node, index, groups)

    lhs = flat(c.lhs, c.lhs_index, [c.batch, c.rows, [c.inner]])
    rhs = flat(c.rhs, c.rhs_index, [c.batch, [c.inner], [c.column]])
    if lhs is None or rhs is None:
        return None
    return MatmulView(
        product([a.extent for a in c.batch]), product([a.extent for a in c.rows]), c.column.extent,
        c.inner.extent, lhs, rhs,
    )  # fmt: skip


def convolution_view(r: Reduce, views: Mapping[int, Map], layouts: Mapping[int, Layout]) -> ConvolutionView | None:
    contraction = r.contraction
    assert isinstance(contraction, Convolution)
    spatial = len(contraction.stride)
    if spatial > 2:  # see `volume`
        return None
    ((x, fresh),) = operand_indices(r)
    axes = [next(iter(i.atoms())) for i in fresh]
    found = operand(x, fresh, [a if isinstance(a, Var) else None for a in axes], views, layouts)
    if found is None:
        return None
    missing = 2 - spatial
    zero, one = (as_int(0),) * missing, (1,) * missing
    strides = (*found.strides[:2], *zero, *found.strides[2:])
    h, w = (*(as_int(1),) * missing, *x.shape[2:])
    out_h, out_w = (*(as_int(1),) * missing, *r.shape[2:])
    kernel = tuple(s.value for s in contraction.weight.shape[2:])
    if any(k is None for k in kernel):
        return None
    kh, kw = (*one, *(k for k in kernel if k is not None))
    sh, sw = (*one, *contraction.stride)
    ph, pw = (*(0,) * missing, *contraction.padding)
    dh, dw = (*one, *contraction.dilation)
    return ConvolutionView(
        x.shape[0], x.shape[1], h, w, r.shape[1], out_h, out_w, (kh, kw), (sh, sw), (ph, pw), (dh, dw), contraction.groups,
        Operand(found.node, found.offset, strides), contraction.weight,
    )  # fmt: skip
