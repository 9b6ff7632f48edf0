"""Convolution in one to three dimensions, also transposed, with any stride, padding, dilation and groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, cast_to, const, indirect, is_finite, load, select, unary, where
from lapilli.ir.integer import Int, as_int, product
from lapilli.ir.node import Constant, Convolution, Map, Node, Reduce
from lapilli.ir.ranges import least_code
from lapilli.lower.registry import LONGEST, Call, lowering

aten = torch.ops.aten

_FEW_KERNELS, _MUCH_WORK = 4, 1 << 24
"""Convolutions that a transposed one may be whatever its size is, and multiplications from which on it may be more, unless there
would be too many zeros.
"""
_SPREAD, _MOST_SPREAD = 8, 64
"""The most by which inserted zeros may enlarge the input of a transposed convolution that could be computed by phases, and of
others. Beyond that these are gathered, which takes some fifty times as long for each multiplication.
"""


@lowering(aten.convolution.default)
def convolution(
    call: Call, x: Node, weight: Node, bias: Node | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> Node:  # fmt: skip
    """x [N, C, *in] or [C, *in], weight [O, C / groups, *kernel] (transposed: [C, O / groups, *kernel]), bias [O] -> [N, O,
    *out].

    out[n, o, i] = bias[o] + sum over c, k of x[n, c, i * stride - padding + k * dilation] * weight[o, c, k], where c are
    the input channels of o's group.
    """
    n = len(weight.shape) - 2
    if x.rank == n + 1:  # no batch
        one = as_int(1)
        batched = replace(call, shapes=((one, *call.shape),))
        first = batched.map(lambda *at: load(x, at[1:]), shape=(one, *x.shape), dtype=x.dtype)
        whole = convolution(batched, first, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
        return call.map(lambda *at: load(whole, [as_int(0), *at]))
    build = _transposed if transposed else _forward
    r = build(call, x, weight, _each(stride, n), _each(padding, n), _each(dilation, n), groups)
    if bias is None:
        return r
    return call.map(lambda *at: load(r, at) + load(bias, [at[1]]))


def _each(value: int | Sequence[int], n: int) -> list[int]:
    """A number for every spatial dimension."""
    listed = [value] if isinstance(value, int) else list(value)
    return listed * n if len(listed) == 1 else listed


def _direct(
    call: Call, x: Node, weight: Node, bias: Node | None = None, stride: Sequence[int] = (1,), padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,), groups: int = 1,
) -> Node:  # fmt: skip
    """As `convolution`, not transposed."""
    return convolution(call, x, weight, bias, stride, padding, dilation, False, (0,), groups)


lowering(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)(_direct)


def _forward(
    call: Call, x: Node, w: Node, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Reduce:
    """The convolution without bias, as one reduction that is annotated as `Convolution`."""
    per_group = w.shape[0] // groups
    channels = w.shape[1]

    def body(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        places = [i * s - p + k * d for i, s, p, k, d in zip(at[2:], stride, padding, r[1:], dilation, strict=True)]
        guards = [g for i, size in zip(places, x.shape[2:], strict=True) for g in (i, size - 1 - i)]
        c = r[0] if groups == 1 else at[1] // per_group * channels + r[0]
        return select(guards, load(x, [at[0], c, *places]), const(0, x.dtype.compute)) * load(w, [at[1], *r])

    result = call.reduce("sum", body, call.shape, w.shape[1:], longest=LONGEST)
    if len(result.raxes) == len(w.shape) - 1:  # not split in two steps
        result.contraction = Convolution(x, w, tuple(stride), tuple(padding), tuple(dilation), groups)
    return result


def _transposed(
    call: Call, x: Node, w: Node, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Node:
    """The transposed convolution, with w [C, O / groups, *kernel]: output o is the sum over inputs i with i * stride -
    padding + k * dilation = o.

    With a stride it is computed by phases (`_by_phases`), otherwise as a convolution of the input with the flipped kernel. With a
    stride and a dilation, or codes, there are zeros between the input's elements. It is gathered instead if there were many zeros,
    or if the padding crops more than the kernel's reach.

    A weight that is infinite or NaN, times a zero that is no element, would give NaN. Constant weights with such values are
    gathered; weights that are computed are checked in every run.
    """
    rest = [as_int(d) * (k - 1) - p for k, p, d in zip(w.shape[2:], padding, dilation, strict=True)]
    phases = _has_phases(x, w, stride, dilation, groups)
    gathered = math.prod(stride) > _MOST_SPREAD and not phases
    gathered = gathered or not all(r.value is not None and r.value >= 0 for r in rest)
    if gathered or (isinstance(w, Constant) and not np.isfinite(w.numbers).all()):
        return _gathered(call, x, w, stride, padding, dilation, groups)
    strange = None
    inserted = math.prod(stride) > 1 or any(r.const for r in rest)
    if inserted and not isinstance(w, Constant) and not _is_of_integers(w):
        strange = call.reduce(
            "any",
            lambda _, r: unary("not", is_finite(cast_to(load(w, r), DType.float32))),
            [],
            w.shape,
            DType.bool,
            "_strange",
        )
    plain: Node
    if phases:
        plain = _by_phases(call, x, w, stride, padding, groups, strange is not None)
    else:
        spread, backwards = _spread(call, x, stride), _backwards(call, w, groups, strange is not None)
        plain = _forward(call, spread, backwards, [1] * len(stride), [r.const for r in rest], dilation, groups)
    if strange is None:
        return plain
    needed = [indirect(cast_to(cast_to(load(strange, []), DType.bool), DType.int32), 2) - 1]
    exact = _gathered(call, x, w, stride, padding, dilation, groups, needed)
    return call.map(lambda *at: select(needed, load(exact, at), load(plain, at)))


@dataclass(frozen=True)
class _Phases:
    """Places of the output, modulo the stride, that read as many elements of a kernel along a dimension: `count` of them, from
    `first` on. A place has the elements first + place + stride * k.
    """

    first: int
    count: int
    taps: int


def _phases_of(kernel: int, stride: int) -> list[_Phases]:
    longer = kernel % stride
    found = [_Phases(0, longer, kernel // stride + 1), _Phases(longer, stride - longer, kernel // stride)]
    return found if longer else found[1:]


def _has_phases(x: Node, w: Node, stride: list[int], dilation: list[int], groups: int) -> bool:
    """Whether a transposed convolution is computed by phases. Zeros cost less where channels are by themselves, or where many
    kernels have little to do.
    """
    kernel = [k.value for k in w.shape[2:]]
    if math.prod(stride) == 1 or any(d != 1 for d in dilation) or None in kernel:
        return False
    of_floats = x.dtype.is_float and w.dtype.is_float and not _is_of_integers(w)
    if not of_floats or (groups > 1 and w.shape[1] == 1):
        return False
    kernels = math.prod(sum(p.taps > 0 for p in _phases_of(k or 0, s)) for k, s in zip(kernel, stride, strict=True))
    work = product([*x.shape, *w.shape[1:]]).value
    is_small = work is not None and work < _MUCH_WORK and math.prod(stride) <= _SPREAD
    return kernels <= _FEW_KERNELS or not is_small


def _by_phases(call: Call, x: Node, w: Node, stride: list[int], padding: list[int], groups: int, finite: bool) -> Map:
    """The transposed convolution without zeros between elements: a place o of the output, with padding, reads the elements
    o % stride, + stride, ... of the kernel. So the places of one remainder are a convolution of the input, whose kernel has these
    elements alone, and remainders with as many elements are channels of one convolution. finite: as of `_backwards`.
    """
    firsts = [p // s for p, s in zip(padding, stride, strict=True)]  # of the input, for the first place
    sizes = [
        (size - 1 + p) // s - first + 1
        for size, p, s, first in zip(call.shape[2:], padding, stride, firsts, strict=True)
    ]
    choices = [_phases_of(k.const, s) for k, s in zip(w.shape[2:], stride, strict=True)]
    made: dict[tuple[_Phases, ...], Node | None] = {}
    for chosen in itertools.product(*choices):
        taps = [p.taps for p in chosen]
        if 0 in taps:
            made[chosen] = None
            continue
        kernel = _of_phases(call, w, stride, chosen, groups, finite)
        part = replace(call, shapes=((call.shape[0], kernel.shape[0], *sizes),), name=f"{call.name}_phases{len(made)}")
        before = [n - 1 - first for n, first in zip(taps, firsts, strict=True)]
        made[chosen] = _forward(part, x, kernel, [1] * len(stride), before, [1] * len(stride), groups)
    per_group, offsets = w.shape[1], [p % s for p, s in zip(padding, stride, strict=True)]

    def body(*at: Int) -> Expr:
        places = [(i + p) // s for i, p, s in zip(at[2:], offsets, stride, strict=True)]
        remainders = [(i + p) % s for i, p, s in zip(at[2:], offsets, stride, strict=True)]

        def value(chosen: tuple[_Phases, ...]) -> Expr:
            d = len(chosen)
            if d < len(stride):
                *longer, rest = choices[d]
                found = value((*chosen, rest))
                for p in longer:
                    found = select([p.count - 1 - remainders[d]], value((*chosen, p)), found)
                return found
            node = made[chosen]
            if node is None:
                return const(0, call.dtype.compute)
            phase, count = as_int(0), 1
            for r, p in zip(remainders, chosen, strict=True):
                phase, count = phase * p.count + (r - p.first), count * p.count
            o = phase * per_group + at[1]
            if groups > 1:
                o = (at[1] // per_group * count + phase) * per_group + at[1] % per_group
            return load(node, [at[0], o, *places])

        return value(())

    return call.map(body)


def _of_phases(call: Call, w: Node, stride: list[int], phases: tuple[_Phases, ...], groups: int, finite: bool) -> Map:
    """[C, O / groups, *kernel] -> [groups * phases * O / groups, C / groups, *taps], with kernels flipped."""
    per_group, channels = w.shape[1], w.shape[0] // groups
    count = math.prod(p.count for p in phases)

    def body(*at: Int) -> Expr:
        rest, o = at[0] // per_group, at[0] % per_group
        group, phase = rest // count, rest % count
        places: list[Int] = []
        for tap, s, p in zip(at[:1:-1], stride[::-1], phases[::-1], strict=True):
            places.append(as_int(p.first) + phase % p.count + (p.taps - 1 - tap) * s)
            phase = phase // p.count
        e = load(w, [group * channels + at[1], o, *places[::-1]])
        return where(is_finite(e), e, const(0.0)) if finite and e.dtype is DType.float32 else e

    return call.map(body, [per_group * groups * count, channels, *(as_int(p.taps) for p in phases)], w.dtype)


def _is_of_integers(w: Node) -> bool:
    """Whether weights are integers as floats."""
    return isinstance(w, Map) and least_code(w.body) is not None


def _gathered(
    call: Call, x: Node, w: Node, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    needed: Sequence[Int] = (),
) -> Reduce:  # fmt: skip
    """The transposed convolution as a gather. needed: extra guards, nonnegative where the result is used; it is not
    computed elsewhere.
    """
    per_group = w.shape[1]
    channels = x.shape[1] // groups

    def body(at: tuple[Int, ...], r: tuple[Int, ...]) -> Expr:
        places, guards = [], list(needed)
        for i, s, p, k, d, size in zip(at[2:], stride, padding, r[1:], dilation, x.shape[2:], strict=True):
            t = i + p - k * d
            places.append(t // s)
            guards += [t, size - 1 - places[-1]]
            if s > 1:
                guards.append(-(t % s))
        c = r[0] if groups == 1 else at[1] // per_group * channels + r[0]
        o = at[1] if groups == 1 else at[1] % per_group
        term = load(x, [at[0], c, *places]) * load(w, [c, o, *r[1:]])
        return select(guards, term, const(0, term.dtype))

    return call.reduce("sum", body, call.shape, [channels, *w.shape[2:]], name="_gathered" if needed else "")


def _spread(call: Call, x: Node, stride: list[int]) -> Node:
    """x [N, C, *in] with stride - 1 zeros between neighbouring elements."""
    if all(s == 1 for s in stride):
        return x
    shape = [*x.shape[:2], *((size - 1) * s + 1 for size, s in zip(x.shape[2:], stride, strict=True))]

    def body(*at: Int) -> Expr:
        places = [i // s for i, s in zip(at[2:], stride, strict=True)]
        guards = [-(i % s) for i, s in zip(at[2:], stride, strict=True)]
        return select(guards, load(x, [*at[:2], *places]), const(0, x.dtype.compute))

    made = call.map(body, shape, x.dtype)
    if x.dtype is DType.code:
        made.dtype, made.least = x.dtype, x.least
    return made


def _backwards(call: Call, w: Node, groups: int, finite: bool) -> Node:
    """[C, O / groups, *kernel] as [O, C / groups, *kernel], with kernels flipped. finite: infinities and NaN are replaced
    by 0.
    """
    per_group, channels = w.shape[1], w.shape[0] // groups

    def body(*at: Int) -> Expr:
        c = at[1] if groups == 1 else at[0] // per_group * channels + at[1]
        o = at[0] if groups == 1 else at[0] % per_group
        e = load(w, [c, o, *(size - 1 - k for k, size in zip(at[2:], w.shape[2:], strict=True))])
        return where(is_finite(e), e, const(0.0)) if finite and e.dtype is DType.float32 else e

    return call.map(body, [per_group * groups, channels, *w.shape[2:]], w.dtype)
