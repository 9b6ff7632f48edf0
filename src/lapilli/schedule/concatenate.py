"""Concatenations without copies: each part is computed directly in a window of the result.

If all parts but one are read by the concatenation only, the kernels that compute them store into the result itself; the
concatenation has no kernel of its own, or a smaller one for the part that is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lapilli.ir.axes import fresh_axes, index_of
from lapilli.ir.expr import Expr, Load, Select, rewrite
from lapilli.ir.integer import Atom, Int, Var, as_int, of, product
from lapilli.ir.node import Graph, Map, Node
from lapilli.schedule.layout import Layout, is_word
from lapilli.schedule.task import Task, readers


@dataclass(frozen=True)
class Window:
    """The position of a value in the memory of another: its first element in every dimension."""

    whole: Node
    first: tuple[Int, ...]


@dataclass(frozen=True)
class _Joined:
    """out[..., i, ...] = value where start <= i < end, in dimension `dim`."""

    dim: int
    start: Int
    end: Int
    value: Expr


def write_into_concat(
    tasks: Sequence[Task], layouts: dict[int, Layout], graph: Graph, half: bool
) -> tuple[list[Task], dict[int, Window]]:
    """The tasks, and the window of every result that is part of another value, by id. Such results get the layout of that value.

    half: whether 16-bit elements can be stored one by one.
    """
    by_out = {t.out.id: t for t in tasks}
    read = readers(tasks)
    kept = {n.id for n in graph.results}
    stored = {new.id for _, new in graph.stores}
    windows: dict[int, Window] = {}
    done: list[Task] = []
    for task in tasks:
        parts = _parts(task) if is_word(task.out.dtype, half) and task.out.id not in stored else None
        if parts is None:
            done.append(task)
            continue
        found = [_source(p, task) for p in parts]
        free = [
            n is not None
            and n.id in by_out
            and read[n.id] == 1
            and n.id not in kept
            and n.id not in windows
            and layouts[n.id].order == layouts[task.out.id].order
            and _is_aligned(p, n, task.out, layouts[task.out.id])
            for p, n in zip(parts, found, strict=True)
        ]
        if not any(free) or free.count(False) > 1 or any(n is not None and found.count(n) > 1 for n in found):
            done.append(task)
            continue
        for p, n, own in zip(parts, found, free, strict=True):
            if not own or n is None:
                copied = _copy(p, task)
                done.append(copied)
                n = copied.out
            first = tuple(p.start if d == p.dim else as_int(0) for d in range(task.out.rank))
            _place(n, Window(task.out, first), windows, layouts)
    return done, windows


def _place(n: Node, window: Window, windows: dict[int, Window], layouts: dict[int, Layout]) -> None:
    """Puts a value, and the windows already in it, into a window."""
    inside = {i: w for i, w in windows.items() if w.whole is n}
    for i, w in inside.items():
        windows[i] = Window(window.whole, tuple(a + b for a, b in zip(w.first, window.first, strict=True)))
    if not inside:
        windows[n.id] = window
    for i in inside or (n.id,):
        layouts[i] = layouts[window.whole.id].window(windows[i].first)


def _parts(task: Task) -> list[_Joined] | None:
    """The parts that a task concatenates; None if it does anything else."""
    if task.reduction is not None or task.row is not None or task.template is not None:
        return None
    if any(s != (0 if a.extent == 1 else of(a)) for s, a in zip(task.store, task.axes, strict=True)):
        return None
    found: list[_Joined] = []
    value, start, dim = task.value, as_int(0), None
    while isinstance(value, Select) and len(value.guards) == 1:
        axes = [d for d, a in enumerate(task.axes) if a in value.guards[0].atoms()]
        if len(axes) != 1 or dim not in (None, axes[0]):
            return None
        dim = axes[0]
        end = value.guards[0] + of(task.axes[dim]) + 1
        if any(isinstance(a, Var) for a in end.atoms()):
            return None
        found.append(_Joined(dim, start, end, value.then))
        value, start = value.other, end
    if dim is None:
        return None
    return [*found, _Joined(dim, start, task.axes[dim].extent, value)]


def _source(part: _Joined, task: Task) -> Node | None:
    """The value that a part is an unchanged copy of; None if it is computed."""
    value = part.value
    if not isinstance(value, Load):
        return None
    node = value.node
    wanted = [part.end - part.start if d == part.dim else a.extent for d, a in enumerate(task.axes)]
    if node.dtype is not task.out.dtype or list(node.shape) != wanted:
        return None
    for d, (i, a) in enumerate(zip(value.index, task.axes, strict=True)):
        at = index_of(a)
        if i != (at - part.start if d == part.dim else at):
            return None
    return node


def _is_aligned(part: _Joined, node: Node, whole: Node, layout: Layout) -> bool:
    """Whether vectors of four neighbouring elements stay together, aligned to four."""
    inner = layout.order[layout.order.index(part.dim) :]
    run = [product([n.shape[d] for d in inner]) % 4 == 0 for n in (node, whole)]
    outer = product([whole.shape[d] for d in layout.order[: layout.order.index(part.dim)]])
    return part.start * layout.strides[part.dim] % 4 == 0 and (all(run) or outer == 1)


def _copy(part: _Joined, task: Task) -> Task:
    """A task that computes one part."""
    shape = tuple(part.end - part.start if d == part.dim else s for d, s in enumerate(task.out.shape))
    axes, at = fresh_axes(shape)
    mapping: dict[Atom, Int] = {
        a: i + part.start if d == part.dim else i for d, (a, i) in enumerate(zip(task.axes, at, strict=True))
    }
    body = rewrite(part.value, mapping)
    out = Map(shape, task.out.dtype, f"{task.out.name}_part", task.out.origin, axes=axes, body=body)
    return replace(Task(out, axes, at, body), origins=task.origins, reason="part of a concatenation")
