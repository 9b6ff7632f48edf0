"""Chooses the memory layout of every realised value, by minimising a cost over the whole graph.

Inputs, also those that are rounded to float16, outputs, states and constants are row-major. The initial choice is channels-last
for what a convolution reads or writes, so that a vector of channels is one load; other values follow what they read, so that
neighbours stay neighbours. Then a local search tries other orders for tasks that still read or write with large strides
(`access_cost.py` defines the cost), together with the changes that this requires elsewhere, and accepts those that lower the total
cost.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence

from lapilli.ir.expr import Load, loads
from lapilli.ir.integer import Atom, Var, of, product
from lapilli.ir.node import Constant, Convolution, Input, Matmul, Node, State
from lapilli.schedule.access_cost import AccessCost
from lapilli.schedule.layout import Layout, channels_last, estimate
from lapilli.schedule.realize import operand_indices
from lapilli.schedule.roots import chase
from lapilli.schedule.task import Task

_SWEEPS = 3
_FOLLOWERS = 32  # values that change with one at most


def assign(
    tasks: Sequence[Task], inputs: Sequence[Node], outputs: Sequence[Node], wish: str = "auto"
) -> dict[int, Layout]:
    """The layout of every realised value, by node id. Tasks that still access memory badly record it in their reasons.

    wish: "auto", or one layout for all: "contiguous" (row-major), "channels-last" (values with four dimensions).
    """
    layouts = _first(tasks, inputs, outputs)
    if wish != "auto":
        fixed = {n.id for n in [*inputs, *outputs]}
        for out in (t.out for t in tasks if t.out.id not in fixed):
            is_image = wish == "channels-last" and out.rank == 4
            layouts[out.id] = Layout.of(out.shape, channels_last(4) if is_image else range(out.rank))
        return layouts
    search = _Search(tasks, layouts, {n.id for n in [*inputs, *outputs]})
    search.improve()
    for movement in search.movements:
        if names := dict.fromkeys(a.node.name for a, _ in movement.paid(layouts)):
            movement.task.reason += f"; strided in memory: {', '.join(names)}"
    return layouts


def _first(tasks: Sequence[Task], inputs: Sequence[Node], outputs: Sequence[Node]) -> dict[int, Layout]:
    """The initial choice: channels-last around convolutions, and a vote for other values."""
    dense = {n.id for n in [*inputs, *outputs]}
    wanted = _wanted_by_products(tasks) | _wanted_by_convolutions(tasks)
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
        elif task.reduction is not None and isinstance(task.reduction.contraction, Convolution):
            fix(out, _order_of_store(task, channels_last(task.reduction.rank)))
        elif out.id in wanted:
            fix(out, wanted[out.id])
        else:
            fix(out, _vote(task, layouts))
    return layouts


def _order_of_store(task: Task, reduction_order: Sequence[int]) -> list[int]:
    """The order of the stored value that puts the reduction's axes in the given order."""
    place: list[int] = []
    for c in reduction_order:
        axis = task.axes[c]
        place += [d for d, i in enumerate(task.store) if d not in place and axis in i.atoms()]
    rest = [d for d in range(len(task.store)) if d not in place]  # axes of size 1
    return rest + place


def _wanted_by_convolutions(tasks: Sequence[Task]) -> dict[int, tuple[int, ...]]:
    """Values that a convolution reads, directly or through views, each with the order that makes its channels innermost."""
    wanted: dict[int, tuple[int, ...]] = {}
    for task in tasks:
        if task.reduction is None or not isinstance(task.reduction.contraction, Convolution):
            continue
        ((x, fresh),) = operand_indices(task.reduction)
        root, at = chase(x, fresh)
        order: list[int] = []
        for d in channels_last(len(fresh)):
            axes = fresh[d].atoms()
            order += [k for k, i in enumerate(at) if k not in order and i.atoms() & axes]
        rest = [d for d in range(root.rank) if d not in order]
        wanted.setdefault(root.id, (*rest, *order))
    return wanted


def _wanted_by_products(tasks: Sequence[Task]) -> dict[int, tuple[int, ...]]:
    """Left operands of products with several axes of rows, each with the order that makes the rows lie one stride apart, as kernels
    need them.
    """
    wanted: dict[int, tuple[int, ...]] = {}
    for task in tasks:
        c = task.reduction.contraction if task.reduction is not None else None
        if type(c) is not Matmul or len(c.rows) < 2:
            continue
        root, at = chase(c.lhs, c.lhs_index)
        axes = [a for a in (*c.batch, *c.rows, c.inner) if a.extent != 1]
        order = [d for a in axes for d, i in enumerate(at) if i == of(a)]
        rest = [d for d, i in enumerate(at) if i == 0 and root.shape[d] == 1]
        if len(order) == len(axes) and len(order) + len(rest) == root.rank:
            wanted.setdefault(root.id, (*rest, *order))
    return wanted


def _vote(task: Task, layouts: dict[int, Layout]) -> tuple[int, ...]:
    """The order in which most of the data read is accessed sequentially."""
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
    for e in (task.reduction_body, task.value):
        found += [ld for ld in loads(e) if ld.node is not task.reduction] if e is not None else []
    return found


def _seen_order(ld: Load, axes: Sequence[frozenset[Atom]], layouts: dict[int, Layout]) -> tuple[int, ...] | None:
    """The order of our axes in which a load walks through memory; None if it depends on few of them."""
    layout = layouts.get(ld.node.id)
    if layout is None or isinstance(ld.node, Constant):
        return None
    order: list[int] = []
    for d in reversed(layout.order):
        # An axis that moves along several dimensions, as that of all channels of all images does, is in the innermost place.
        atoms = ld.index[d].atoms()
        order = [*(k for k, a in enumerate(axes) if k not in order and a & atoms), *order]
    rest = [k for k in range(len(axes)) if k not in order]
    moving = [k for k in rest if any(isinstance(a, Var) and a.extent != 1 for a in axes[k])]
    return None if moving else (*rest, *order)


class _Search:
    """Iterated local improvement: every accepted change lowers the total cost of all tasks."""

    def __init__(self, tasks: Sequence[Task], layouts: dict[int, Layout], dense: set[int]) -> None:
        self.layouts = layouts
        self.movements = [AccessCost(t) for t in tasks]
        self.free = {t.out.id for t in tasks} - dense
        self.touching: dict[int, list[AccessCost]] = {}
        for m in self.movements:
            for n in m.nodes():
                self.touching.setdefault(n.id, []).append(m)
        self.known: dict[tuple[int, tuple[int, ...]], Layout] = {}  # by node and order
        self.costs = {m: m.cost(layouts) for m in self.movements}

    def improve(self) -> None:
        for _ in range(_SWEEPS):
            paying = sorted((m for m in self.movements if self.costs[m]), key=lambda m: -self.costs[m])
            if not any([self._settle(m) for m in paying]):
                return

    def _settle(self, movement: AccessCost) -> bool:
        """Applies the best change for one task; returns whether there is any."""
        best: dict[int, Layout] = {}
        least = 0
        for node, layout in self._wanted(movement, self.layouts):
            changes = self._with_followers(node, layout)
            after = ChainMap(changes, self.layouts)
            touched = {m: None for i in changes for m in self.touching[i]}
            gain = sum(m.cost(after) - self.costs[m] for m in touched)
            if gain < least:
                best, least = changes, gain
        self.layouts.update(best)
        for i in best:
            for m in self.touching[i]:
                self.costs[m] = m.cost(self.layouts)
        return bool(best)

    def _with_followers(self, node: Node, layout: Layout) -> dict[int, Layout]:
        """A change, and the changes it requires of tasks whose cost would rise."""
        changes = {node.id: layout}
        after = ChainMap(changes, self.layouts)
        queue = [node.id]
        while queue and len(changes) < _FOLLOWERS:
            for m in self.touching[queue.pop(0)]:
                cost = m.cost(after)
                if cost <= self.costs[m]:
                    continue
                chosen = None
                for other, wanted in self._wanted(m, after):
                    if other.id not in changes and (less := m.cost(ChainMap({other.id: wanted}, *after.maps))) < cost:
                        cost, chosen = less, (other.id, wanted)
                if chosen is not None:
                    changes[chosen[0]] = chosen[1]
                    queue.append(chosen[0])
        return changes

    def _wanted(self, movement: AccessCost, layouts: Mapping[int, Layout]) -> Iterator[tuple[Node, Layout]]:
        """Other layouts that would let a task read or write sequentially, each once."""
        seen: set[tuple[int, tuple[int, ...]]] = set()
        for node, order in self._wanted_orders(movement, layouts):
            if (node.id, order) not in seen:
                seen.add((node.id, order))
                if (node.id, order) not in self.known:
                    self.known[node.id, order] = Layout.of(node.shape, order)
                yield node, self.known[node.id, order]

    def _wanted_orders(
        self, movement: AccessCost, layouts: Mapping[int, Layout]
    ) -> Iterator[tuple[Node, tuple[int, ...]]]:
        store = movement.store
        for access, axes, _ in movement.wishes(layouts):
            if any(access.follows(a, layouts[access.node.id]) for a in axes):
                continue
            for a in axes if access.node.id in self.free else ():
                yield from _innermost(access.node, layouts, [d for d, s in enumerate(access.steps(a)) if s == 1])
            if movement.contraction is None and store.node.id in self.free and access is not store:
                for fast in access.axes(layouts[access.node.id])[-1:]:
                    yield from _innermost(store.node, layouts, [d for d, s in enumerate(store.steps(fast)) if s == 1])


def _innermost(n: Node, layouts: Mapping[int, Layout], dims: Sequence[int]) -> Iterator[tuple[Node, tuple[int, ...]]]:
    """Orders of the value with a dimension innermost: the others as before, or in their logical order."""
    now = layouts[n.id].order
    for d in dims:
        for others in (now, range(n.rank)):
            order = (*(k for k in others if k != d), d)
            if order != now:
                yield n, order
