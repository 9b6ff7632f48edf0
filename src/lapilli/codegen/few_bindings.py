"""Kernels that read more values than a device binds at once: what is too much is copied into one value, one after the other.

Vulkan promises four storage buffers to a kernel. Copies of constants are made when the program is loaded and cost nothing later.
What hand-written kernels read themselves stays as it is; the values of what follows them, of rows and of generated loops are
copied, as they are computed with: floats or integers of 32 bits, so that values of several types can share one. A contraction
whose own kernel binds too many all the same stores its sums, and what follows them is a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product as pairs

from lapilli.codegen.alike import Kernels
from lapilli.codegen.template import Context
from lapilli.ir.axes import fresh_axes, index_of
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, Load, cast_to, load, rewrite, select
from lapilli.ir.integer import Int, as_int, product, total
from lapilli.ir.node import Constant, Convolution, Matmul, Node
from lapilli.schedule.layout import Layout, estimate
from lapilli.schedule.task import Task
from lapilli.target import MAX_BINDINGS


def within_bindings(tasks: Sequence[Task], ctx: Context, kernels: Kernels) -> list[Task]:
    """The tasks, each preceded by copies of what its kernel could not bind otherwise. Kernels that need more all the same (a
    draw's) stay as they are, and the player refuses them. kernels: of these tasks' templates.
    """
    if ctx.target.bindings >= MAX_BINDINGS:
        return list(tasks)
    return [t for task in tasks for t in _within(task, ctx, kernels)]


def _within(task: Task, ctx: Context, kernels: Kernels) -> list[Task]:
    room = most = ctx.target.bindings
    copies: list[Task] = []
    found = task
    while _bindings(found, ctx, kernels) > most:
        merged = _Merging(task, room, ctx).merged() if room > 1 else None
        if merged is None:
            break
        copies, found = merged
        room -= 1  # for templates that bind a value twice: by fours, and one by one
    else:
        return [*copies, found]
    if task.template is None or task.reduction is None or task.reduction_body is None:
        return [task]
    if not isinstance(task.reduction.contraction, Matmul | Convolution):
        return [task]
    if (apart := _apart(task, ctx)) is not None and _bindings(apart[0], ctx, kernels) <= most:
        return [apart[0], *_within(apart[1], ctx, kernels)]
    return _within(replace(task, template=None, reduction_body=ctx.seen(task.reduction_body)), ctx, kernels)


def _apart(task: Task, ctx: Context) -> tuple[Task, Task] | None:
    """A contraction, and what follows it, as two tasks; None if nothing does, or if it stores a part of a value."""
    reduction = task.reduction
    assert reduction is not None
    at = tuple(map(index_of, task.axes))
    if task.partial or task.within or task.members or task.axes != reduction.axes or task.value == load(reduction, at):
        return None
    sums = Node(tuple(a.extent for a in task.axes), reduction.dtype.compute, f"{reduction.name}_sums", reduction.origin)
    order = ctx.layouts[task.out.id].order if task.store == at else range(sums.rank)
    ctx.layouts[sums.id] = Layout.of(sums.shape, order)

    def on_load(ld: Load) -> Expr | None:
        if ld.node is not reduction:
            return None
        assert ld.index == at, "the sums of another place"
        return load(sums, at)

    first = replace(task, out=sums, store=at, value=load(reduction, at))
    second = replace(
        task, value=rewrite(task.value, on_load=on_load), reduction=None, reduction_body=None, template=None, reason="after a sum",
    )  # fmt: skip
    return first, second


def _count(task: Task, ctx: Context) -> int:
    """The buffers of a kernel that binds every value once."""
    scratch = task.template.scratch if task.template is not None else ()
    return sum(map(ctx.target.parts, (task.out, *task.reads(), *scratch)))


def _bindings(task: Task, ctx: Context, kernels: Kernels) -> int:
    count = _count(task, ctx)
    return count if task.template is None or count > ctx.target.bindings else len(kernels.of(task).bindings)


@dataclass
class _Merging:
    """Merges what a task reads until it binds no more than `room` buffers."""

    task: Task
    room: int
    ctx: Context
    copies: list[Task] = field(default_factory=list)

    def merged(self) -> tuple[list[Task], Task] | None:
        """The copies, and the task that reads them; None if it binds more even so."""
        chosen = self._choice()
        if chosen is None:
            return None
        places: dict[int, tuple[Node, Int]] = {}
        for dtype, nodes in chosen:
            if len(nodes) > 1:
                places |= self._copied(nodes, dtype)

        def on_load(ld: Load) -> Expr | None:
            if ld.node.id not in places:
                return None
            whole, start = places[ld.node.id]
            return cast_to(load(whole, (start + self._number(ld.node, ld.index),)), ld.dtype)

        return self.copies, self.task.reading(on_load)

    def _choice(self) -> list[tuple[DType, list[Node]]] | None:
        """The values to merge, by the type that they are copied as: the fewest bytes, of which constants have none."""
        template = self.task.template
        fixed = {n.id for n in template.fixed} if template is not None else set()
        free = [
            n
            for n in self.task.reads()
            if n.id not in fixed and product(n.shape) != 0 and self.ctx.target.parts(n) == 1
        ]
        free.sort(key=lambda n: (not isinstance(n, Constant), estimate(product(n.shape))))
        kinds = {t: [n for n in free if _kept_as(n) is t] for t in (DType.float32, DType.int32)}
        excess = _count(self.task, self.ctx) - self.room
        found = [
            [(dtype, nodes[:n]) for (dtype, nodes), n in zip(kinds.items(), counts, strict=True)]
            for counts in pairs(*(range(len(nodes) + 1) for nodes in kinds.values()))
            if sum(max(0, n - 1) for n in counts) >= excess
        ]
        return min(found, key=lambda groups: sum(_cost(nodes) for _, nodes in groups), default=None)

    def _copied(self, nodes: Sequence[Node], dtype: DType) -> dict[int, tuple[Node, Int]]:
        """Where each value lies in the copy of all. Copying kernels bind no more than others, so copies are copied."""
        items: list[tuple[Node, dict[int, Int]]] = [(n, {n.id: as_int(0)}) for n in nodes]
        while len(items) > 1:
            items = [self._joined(group, dtype) for group in _groups(items, self.ctx.target.bindings - 1)]
        whole, starts = items[0]
        return {i: (whole, start) for i, start in starts.items()}

    def _joined(self, items: Sequence[tuple[Node, dict[int, Int]]], dtype: DType) -> tuple[Node, dict[int, Int]]:
        if len(items) == 1:
            return items[0]
        sizes = [product(n.shape) for n, _ in items]
        first = [total(sizes[:k]) for k in range(len(items))]
        whole = Node((total(sizes),), dtype, f"{self.task.out.name}_reads", self.task.out.origin)
        self.ctx.dense(whole)
        axes, (at,) = fresh_axes(whole.shape)
        value: Expr | None = None
        for (n, _), start, size in reversed(list(zip(items, first, sizes, strict=True))):
            one = cast_to(load(n, self._place(n, at - start)), dtype)
            value = one if value is None else select((start + size - 1 - at,), one, value)
        assert value is not None
        self.copies.append(Task(whole, axes, (at,), value, origins=["copy"], reason="values that share a buffer"))
        return whole, {i: f + s for f, (_, starts) in zip(first, items, strict=True) for i, s in starts.items()}

    def _number(self, n: Node, index: Sequence[Int]) -> Int:
        """Which element of a value it is, in the order of its memory."""
        number = as_int(0)
        for d in self.ctx.layouts[n.id].order:
            number = number * n.shape[d] + index[d]
        return number

    def _place(self, n: Node, number: Int) -> tuple[Int, ...]:
        """The index of an element."""
        at = [as_int(0)] * n.rank
        order = self.ctx.layouts[n.id].order
        for d in reversed(order):
            at[d] = number if d == order[0] else number % n.shape[d]
            number = number // n.shape[d]
        return tuple(at)


def _kept_as(n: Node) -> DType:
    return DType.float32 if n.dtype.compute is DType.float32 else DType.int32


def _cost(nodes: Sequence[Node]) -> int:
    """Elements that are copied in each run."""
    if len(nodes) < 2:
        return 0
    return 1 + sum(estimate(product(n.shape)) for n in nodes if not isinstance(n, Constant))


def _groups(items: Sequence[tuple[Node, dict[int, Int]]], most: int) -> Iterator[Sequence[tuple[Node, dict[int, Int]]]]:
    for k in range(0, len(items), most):
        yield items[k : k + most]
