"""Memory layout: the order of dimensions in which every realised value lies in memory.

Inputs, outputs, states and constants are row-major. What a convolution reads or writes lies channels-last, so that a vector of
channels is one load; everything else follows what it reads, so that neighbouring elements stay neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from lapilli.ir.expr import Load, loads
from lapilli.ir.integer import Atom, Int, Var, as_int, product, total
from lapilli.ir.node import Constant, Convolution, Input, Node, State
from lapilli.schedule.realize import chase, estimate, operand_indices
from lapilli.schedule.task import Task


@dataclass(frozen=True)
class Layout:
    """order: dimensions from outermost to innermost; strides per dimension, in elements; start: where the first element is."""

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
        """Of a part of the value, which begins at an element."""
        return replace(self, start=self.offset(first))


def in_memory(index: Sequence[Int], layout: Layout) -> list[Var]:
    """The axes that an index into memory moves with, from the largest steps to the smallest."""
    order: list[Var] = []
    for d in layout.order:
        at = index[d]
        found = [a for a in at.atoms() if isinstance(a, Var) and a not in order and a.extent != 1]
        order += sorted(found, key=partial(_pace, at), reverse=True)
    return order


def _pace(i: Int, a: Var) -> int:
    """How far an index moves with an axis."""
    pace = (i.substitute({a: 1}) - i.substitute({a: 0})).value
    return 1 if pace is None else abs(pace)


def channels_last(rank: int) -> tuple[int, ...]:
    """N, spatial..., C for rank >= 3; row-major below."""
    return (0, *range(2, rank), 1) if rank >= 3 else tuple(range(rank))


def assign(tasks: Sequence[Task], inputs: Sequence[Node], outputs: Sequence[Node]) -> dict[int, Layout]:
    """The layout of every realised value, by node id."""
    dense = {n.id for n in [*inputs, *outputs]}
    wanted = _wanted_by_convolutions(tasks)
    layouts: dict[int, Layout] = {}

    def fix(n: Node, order: Sequence[int]) -> None:
        layouts[n.id] = Layout.of(n.shape, order)

    for task in tasks:
        for read in task.reads():
            if read.id not in layouts and isinstance(read, Constant | Input | State):
                fix(read, range(read.rank))
        out = task.out
        if out.id in dense:
            fix(out, range(out.rank))
        elif task.core is not None and isinstance(task.core.contraction, Convolution):
            fix(out, _order_of_store(task, channels_last(task.core.rank)))
        elif out.id in wanted:
            fix(out, wanted[out.id])
        else:
            fix(out, _vote(task, layouts))
    return layouts


def _order_of_store(task: Task, core_order: Sequence[int]) -> list[int]:
    """The order of the stored value in which the core's axes come in the given order."""
    place: list[int] = []
    for c in core_order:
        axis = task.axes[c]
        place += [d for d, i in enumerate(task.store) if d not in place and axis in i.atoms()]
    rest = [d for d in range(len(task.store)) if d not in place]  # axes of size 1
    return rest + place


def _wanted_by_convolutions(tasks: Sequence[Task]) -> dict[int, tuple[int, ...]]:
    """Values that a convolution reads, seen through views, and the order in which its channels come last."""
    wanted: dict[int, tuple[int, ...]] = {}
    for task in tasks:
        if task.core is None or not isinstance(task.core.contraction, Convolution):
            continue
        ((x, fresh),) = operand_indices(task.core)
        root, at = chase(x, fresh)
        order: list[int] = []
        for d in channels_last(len(fresh)):
            axes = fresh[d].atoms()
            order += [k for k, i in enumerate(at) if k not in order and i.atoms() & axes]
        rest = [d for d in range(root.rank) if d not in order]
        wanted.setdefault(root.id, (*rest, *order))
    return wanted


def _vote(task: Task, layouts: dict[int, Layout]) -> tuple[int, ...]:
    """The order in which most of what is read is read in sequence."""
    axes = [i.atoms() for i in task.store]
    votes: dict[tuple[int, ...], int] = {}
    for ld in _loads(task):
        order = _seen_order(ld, axes, layouts)
        if order is not None:
            votes[order] = votes.get(order, 0) + estimate(product(ld.node.shape))
    identity = tuple(range(len(task.store)))
    return max(votes, key=lambda o: (votes[o], o == identity)) if votes else identity


def _loads(task: Task) -> list[Load]:
    found = []
    for e in (task.core_body, task.value):
        found += [ld for ld in loads(e) if ld.node is not task.core] if e is not None else []
    return found


def _seen_order(ld: Load, axes: Sequence[set[Atom]], layouts: dict[int, Layout]) -> tuple[int, ...] | None:
    """The order of our axes in which a load walks through memory; None when it reads few of them."""
    layout = layouts.get(ld.node.id)
    if layout is None or isinstance(ld.node, Constant):
        return None
    order: list[int] = []
    for d in layout.order:
        atoms = ld.index[d].atoms()
        order += [k for k, a in enumerate(axes) if k not in order and a & atoms]
    rest = [k for k in range(len(axes)) if k not in order]
    moving = [k for k in rest if any(isinstance(a, Var) and a.extent != 1 for a in axes[k])]
    return None if moving else (*rest, *order)
