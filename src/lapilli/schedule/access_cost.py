"""The cost of a task's memory accesses under given layouts, in bytes.

Neighbouring invocations should access neighbouring elements. An access with a large stride along the task's fastest axis costs
a multiple of its bytes; an operand that a convolution cannot read in its layout costs a copy by a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from lapilli.ir.expr import Expr, loads
from lapilli.ir.integer import Int, Var, product
from lapilli.ir.node import Constant, Convolution, DepthwiseGradient, Matmul, Node
from lapilli.schedule.layout import Layout, estimate, in_memory
from lapilli.schedule.task import Task

STRIDED = 3  # of a cache line of 32 bytes and more, a strided access uses one element; caches give some of it back
DISPATCH = 1 << 18  # bytes that are moved while a kernel starts


@dataclass(eq=False)
class Access:
    """A value that is read or written at an index; `size` is the total in bytes."""

    node: Node
    index: Sequence[Int]
    size: int
    _steps: dict[Var, tuple[int | None, ...]] = field(default_factory=dict)
    _axes: dict[tuple[int, ...], list[Var]] = field(default_factory=dict)

    def steps(self, axis: Var) -> tuple[int | None, ...]:
        """The stride of each index along an axis; None if it varies often."""
        if axis not in self._steps:
            self._steps[axis] = tuple(_usual_step(i, axis) for i in self.index)
        return self._steps[axis]

    def axes(self, layout: Layout) -> list[Var]:
        """The axes that the access depends on, from the largest stride in memory to the smallest."""
        if layout.order not in self._axes:
            self._axes[layout.order] = in_memory(self.index, layout)
        return self._axes[layout.order]

    def follows(self, axis: Var, layout: Layout) -> bool:
        """Whether the access stays in place or moves to the next element along an axis."""
        moving = [(s, layout.strides[d]) for d, s in enumerate(self.steps(axis)) if s != 0]
        return not moving or (len(moving) == 1 and moving[0][0] == 1 and moving[0][1] == 1)


_TOGETHER = 16
"""Neighbours that a subgroup should find side by side. Then an axis may jump, as that of all channels of all images does."""


def _usual_step(i: Int, axis: Var) -> int | None:
    """The stride of an index along an axis, if that is the same for many neighbours."""
    step = i.step(axis)
    if step is not None or (axis.extent.value or _TOGETHER) < _TOGETHER:
        return step
    places = [i.substitute({axis: k}) for k in range(_TOGETHER)]
    steps = {after - before for before, after in pairwise(places)}
    return steps.pop().value if len(steps) == 1 else None


class AccessCost:
    """The accesses of a task, and their cost in given layouts."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._nodes: list[Node] | None = None
        self._costs: dict[tuple[tuple[int, ...], ...], int] = {}  # by the orders of all nodes
        reduction = task.reduction
        contraction = reduction.contraction if reduction is not None else None
        self.size = estimate(product([a.extent for a in task.axes]))
        self.store = Access(task.out, task.store, self.size * task.out.dtype.size)
        self.contraction = contraction
        inner = estimate(product([a.extent for a in reduction.raxes])) if reduction is not None else 1
        self.read = self._accesses(task.value, self.size)
        self.operands = (
            self._accesses(task.reduction_body, self.size * inner) if task.reduction_body is not None else []
        )
        for member in task.members:
            part = AccessCost(member)
            self.read += [*part.read, *part.operands]
        inside = {task.out.id, *(m.out.id for m in task.members)}
        self.read = [a for a in self.read if a.node.id not in inside]
        self.operands = [a for a in self.operands if a.node.id not in inside]
        if contraction is not None:  # blocks of operands are read once
            for a in self.operands:
                a.size = estimate(product(a.node.shape)) * a.node.dtype.size

    def _accesses(self, e: Expr, times: int) -> list[Access]:
        reduction = self.task.reduction
        return [
            Access(ld.node, ld.index, min(times, 4 * estimate(product(ld.node.shape))) * ld.node.dtype.size)
            for ld in loads(e)
            if ld.node is not reduction and not isinstance(ld.node, Constant)
        ]

    def nodes(self) -> list[Node]:
        """The values read and written, each once."""
        if self._nodes is None:
            self._nodes = list({a.node.id: a.node for a in (self.store, *self.read, *self.operands)}.values())
        return self._nodes

    def wishes(self, layouts: Mapping[int, Layout]) -> list[tuple[Access, list[Var], int]]:
        """Accesses, the axes of which one should be contiguous in memory, and the cost if none is."""
        reduction, contraction = self.task.reduction, self.contraction
        found: list[tuple[Access, list[Var], int]] = []
        if isinstance(contraction, Matmul):
            fast = [contraction.column]
            for a in self.operands:
                left = contraction.column.extent != 1 and not any(a.steps(contraction.column))
                copied = a.size * STRIDED * (4 if left else 1) + (DISPATCH if left else 0)
                found.append((a, [contraction.inner] if left else [contraction.inner, contraction.column], copied))
        elif isinstance(contraction, Convolution):
            assert reduction is not None
            fast = [reduction.axes[1]]
            channel = reduction.axes[1] if contraction.x.shape[1] == contraction.groups else reduction.raxes[0]
            found += [(a, [channel], 2 * a.size + DISPATCH) for a in self.operands]
        elif isinstance(contraction, DepthwiseGradient):
            assert reduction is not None
            fast = [reduction.axes[0]]
            found += [(a, fast, 2 * a.size + DISPATCH) for a in self.operands]
        else:
            fast = self._fastest(layouts)
            along = [*fast, *(reduction.raxes if reduction is not None else ())]
            found += [(a, along, STRIDED * a.size) for a in self.operands]
        found += [(a, fast, STRIDED * a.size) for a in (self.store, *self.read)]
        return [(a, axes, cost) for a, axes, cost in found if all(x.extent != 1 for x in axes) and axes]

    def _fastest(self, layouts: Mapping[int, Layout]) -> list[Var]:
        """The fastest axis of the kernel: that of the result, or, if a row stores a single number, that of the largest value
        read.
        """
        access = self.store
        row = self.task.row
        if row is not None and row.whole:
            access = max((*self.operands, *self.read), key=lambda a: a.size, default=access)
        return access.axes(layouts[access.node.id])[-1:]

    def cost(self, layouts: Mapping[int, Layout]) -> int:
        """The total for dense layouts, memoized: the search asks for the same few repeatedly."""
        orders = tuple(layouts[n.id].order for n in self.nodes())
        if orders not in self._costs:
            self._costs[orders] = sum(cost for _, cost in self.paid(layouts))
        return self._costs[orders]

    def paid(self, layouts: Mapping[int, Layout]) -> list[tuple[Access, int]]:
        """The accesses that no layout serves, with their cost in bytes."""
        return [
            (a, cost)
            for a, axes, cost in self.wishes(layouts)
            if not any(a.follows(x, layouts[a.node.id]) for x in axes)
        ]
