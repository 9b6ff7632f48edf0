"""Memory layout: the order in which a value's dimensions are stored (`assign.py` chooses it)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Load
from lapilli.ir.integer import Atom, Int, Symbol, Var, as_int, product, total


@dataclass(frozen=True)
class Layout:
    """order: dimensions from outermost to innermost; strides: per dimension, in elements; start: offset of the first element."""

    order: tuple[int, ...]
    strides: tuple[Int, ...]
    start: Int = field(default_factory=lambda: as_int(0))

    @classmethod
    def of(cls, shape: Sequence[Int], order: Sequence[int]) -> Layout:
        strides: list[Int] = [as_int(1)] * len(shape)
        step = as_int(1)
        for d in reversed(order):
            strides[d] = step
            step = step * shape[d]
        return cls(tuple(order), tuple(strides))

    def offset(self, index: Sequence[Int]) -> Int:
        return total([self.start, *(i * s for i, s in zip(index, self.strides, strict=True))])

    def window(self, first: Sequence[Int]) -> Layout:
        """The layout of a part of the value that begins at an element."""
        return replace(self, start=self.offset(first))


def is_row_major(layout: Layout) -> bool:
    """Whether it is that of inputs."""
    return layout.order == tuple(range(len(layout.order))) and layout.start == 0


def is_word(dtype: DType, half: bool) -> bool:
    """Whether an element can be stored without its neighbours; half: those of 16 bits can."""
    return dtype.size >= 4 or (half and dtype.is_short_float)


def in_memory(index: Sequence[Int], layout: Layout) -> list[Var]:
    """The axes that an index depends on, from the largest stride to the smallest; of equal ones as they were made."""
    order: list[Var] = []
    for d in layout.order:
        at = index[d]
        found = [a for a in at.atoms() if isinstance(a, Var) and a not in order and a.extent != 1]
        order += sorted(found, key=lambda a: (-_pace(at, a), a.key))
    return order


def order_of_reads(read: Iterable[Load], layouts: Mapping[int, Layout]) -> list[Var]:
    """The order of axes, as `in_memory` has it, in which the largest of what is read lies; none if nothing of it has a layout."""
    main = largest_read(read, layouts)
    return in_memory(main.index, layouts[main.node.id]) if main is not None else []


def largest_read(read: Iterable[Load], layouts: Mapping[int, Layout]) -> Load | None:
    """The load of the largest value that has a layout; the first of several."""
    known = (ld for ld in read if ld.node.id in layouts)
    return max(known, key=lambda ld: estimate(product(ld.node.shape)), default=None)


def _pace(i: Int, a: Var) -> int:
    """The stride of an index along an axis; dynamic sizes count as `estimate` says."""
    pace = i.substitute({a: 1}) - i.substitute({a: 0})
    return abs(estimate(pace)) if all(isinstance(x, Symbol) for x in pace.atoms()) else 1


def estimate(size: Int) -> int:
    """A size as a number: dynamic dimensions count as 8, or as their bound if that is smaller; as more if 8 would divide by
    zero.
    """
    if not size.terms:
        return size.const
    symbols = [a for a in size.atoms() if isinstance(a, Symbol)]
    for usual in (8, 64, 1024, 1 << 20):
        values: dict[Atom, int] = {a: max(a.min, min(usual, a.max or usual)) for a in symbols}
        with suppress(ZeroDivisionError):
            return int(size.evaluate(values))
    return 1


def channels_last(rank: int) -> tuple[int, ...]:
    """N, spatial..., C for rank >= 3; row-major below."""
    return (0, *range(2, rank), 1) if rank >= 3 else tuple(range(rank))
