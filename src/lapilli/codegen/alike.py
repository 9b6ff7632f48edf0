"""Tasks that are alike: equal but for which values they read and write, as those of a model's identical layers are.

Their kernels are one kernel. It is written for the first of them, and bound to the values of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from typing import Any

from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.template import Context
from lapilli.ir.expr import Const, Expr, Load, ints_of
from lapilli.ir.integer import Atom, Extremum, Indirect, Int, Symbol, Var
from lapilli.ir.node import Map, Node, Reduce
from lapilli.schedule.copies import Packed
from lapilli.schedule.task import Task

_IGNORED = {"origins", "reason"}
"""What a task says of itself to people."""


class Kernels:
    """The kernels of a schedule's tasks; those that are alike are written once."""

    def __init__(self, ctx: Context, write: Callable[[Task], KernelSource]) -> None:
        """write: may depend on the task, the layouts, views and target of the context, and on what `of` is given."""
        self.ctx, self.write = ctx, write
        self.written = 0  # times that `write` was called
        self._known: dict[Any, tuple[KernelSource, dict[int, int]]] = {}  # and the numbers of its values, by id
        self._memory: dict[int, tuple[Any, ...]] = {}

    def of(self, task: Task, *given: object) -> KernelSource:
        """The kernel of a task."""
        reader = _Reader(self.ctx, self._memory)
        try:
            form = reader.form(task, given)
        except _Unknown:
            self.written += 1
            return self.write(task)
        if form not in self._known:
            self.written += 1
            made = self.write(task)
            place = {node.id: k for k, node in enumerate(reader.values)}
            if all(b.node.id in place for w in made.every for b in w.bindings):
                self._known[form] = made, place
            return made
        made, place = self._known[form]
        return _bound(made, task, lambda node: reader.values[place[node.id]])


def _bound(made: KernelSource, task: Task, instead: Callable[[Node], Node]) -> KernelSource:
    """A kernel with the values of another task."""
    others = tuple(_bound(w, task, instead) for w in made.others)
    return replace(made, task=task, bindings=[b.to(instead(b.node)) for b in made.bindings], others=others)


class _Unknown(Exception):
    """A template holds an object of a kind that is not known here."""


class _Reader:
    """Reads one task into its form: all that a kernel may depend on, in a sequence that says it in one way only.

    Variables, computed values and tensors are numbered in the order in which they occur, so that tasks alike have equal forms.
    Terms of integer expressions are ordered by the ids of variables and of computed indices: the order of these ids is a part of
    the form, too.
    """

    def __init__(self, ctx: Context, memory: dict[int, tuple[Any, ...]]) -> None:
        self.ctx = ctx
        self.memory = memory  # how values lie in memory, by id
        self.values: list[Node] = []  # that occur, by number
        self.parts: list[Any] = []
        self.numbers: dict[tuple[str, int], int] = {}
        self.ordered: list[tuple[bool, int]] = []  # ids of variables, and of computed indices
        self.kept: list[Any] = []  # an address is a name only while its object lives

    def form(self, task: Task, given: tuple[object, ...]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        self.any(given)
        self.any(task)
        rank = {key: k for k, key in enumerate(sorted(self.ordered))}
        return tuple(self.parts), tuple([rank[key] for key in self.ordered])

    def is_known(self, kind: str, number: int) -> bool:
        """Whether something occurred before; then its number stands for it."""
        count = len(self.numbers)
        found = self.numbers.setdefault((kind, number), count)
        self.parts.append(found)
        return found < count

    def any(self, x: Any) -> None:
        kind = type(x)
        if kind in _PLAIN:
            self.parts += (kind, x)
        elif kind is tuple or kind is list:
            self.parts += (kind, len(x))
            for y in x:
                self.any(y)
        elif kind is Int:
            self.int(x)
        else:
            self.other(x, kind)

    def other(self, x: Any, kind: type) -> None:
        reading = _reading(kind)
        if reading is not None:
            reading(self, x)
        elif issubclass(kind, Enum | type):
            self.parts += (kind, x)
        elif kind is float:
            self.parts.append(repr(x))  # -0.0 is not 0.0
        elif kind is dict:
            self.parts += (dict, len(x))
            for key, y in x.items():
                self.any(key)
                self.any(y)
        else:
            self.record(x)

    def record(self, x: Any) -> None:
        """An object with named members."""
        kind: type = type(x)
        if not _is_record(kind) and not _is_ours(kind):
            raise _Unknown
        names = _members(kind) if _is_record(kind) else tuple(vars(x))
        self.kept.append(x)
        if not self.is_known("record", id(x)):
            self.parts += (kind, names)
            for name in names:
                self.any(getattr(x, name))
            if isinstance(x, Task) and x.reduction is not None:
                self.any((x.reduction.axes, x.reduction.raxes, x.reduction.contraction))

    def node(self, n: Node) -> None:
        """A value: how it lies in memory or, if it has none, what it is."""
        if self.is_known("node", n.id):
            return
        self.values.append(n)
        if n.id not in self.memory:
            self.memory[n.id] = self.lying(n)
        self.parts.append(self.memory[n.id])
        if isinstance(n, Reduce):  # a task's own result lies in memory, and is what the task computes
            self.parts.append(n.op)
        computed = n.id in self.ctx.views or n.id not in self.ctx.layouts
        if isinstance(n, Map) and (computed or isinstance(n, Packed)):
            self.any(n.axes)
            self.expr(n.body)
        elif isinstance(n, Reduce) and computed:
            self.any((n.axes, n.raxes, n.contraction))

    def lying(self, n: Node) -> tuple[Any, ...]:
        layout = self.ctx.layouts.get(n.id)
        sizes = [*n.shape, *((*layout.strides, layout.start) if layout is not None else ())]
        if any(not isinstance(a, Symbol) for i in sizes if i.terms for a in i.atoms()):
            raise _Unknown
        order = layout.order if layout is not None else None
        return type(n), n.dtype, n.least, order, tuple([i.key if i.terms else i.const for i in sizes])

    def int(self, i: Int) -> None:
        terms = i.terms
        if not terms:
            self.parts += (Int, i.const)
            return
        self.parts += (len(terms), i.const)
        for atoms, factor in terms:
            self.parts += (len(atoms), factor)
            for a in atoms:
                self.atom(a)

    def atom(self, a: Atom) -> None:
        if isinstance(a, Symbol):
            self.parts.append(a.key)
        elif isinstance(a, Var):
            if not self.is_known("var", a.id):
                self.ordered.append((False, a.id))
                self.parts.append(a.name)
                self.int(a.extent)
        elif isinstance(a, Indirect):
            self.ordered.append((True, a.expr.id))
            self.parts.append(Indirect)
            self.expr(a.expr)
            self.int(a.extent)
        else:
            assert hasattr(a, "x")
            assert hasattr(a, "y")
            self.parts.append((type(a), a.op) if isinstance(a, Extremum) else type(a))
            self.int(a.x)
            self.int(a.y)

    def expr(self, e: Expr) -> None:
        if self.is_known("expr", e.id):
            return
        self.parts += (type(e), e.dtype)
        if isinstance(e, Const):
            self.parts.append(repr(e.value))
            return
        if isinstance(e, Load):
            self.node(e.node)
        else:
            self.parts.append(getattr(e, "op", None))
        inner = ints_of(e)
        self.parts += (len(inner), len(e.args))
        for i in inner:
            self.int(i)
        for x in e.args:
            self.expr(x)


_PLAIN = {type(None), bool, int, str}


@cache
def _reading(kind: type) -> Callable[[_Reader, Any], None] | None:
    """How values of a class are read, if it is one of the languages of kernels."""
    ways: tuple[tuple[type, Callable[[_Reader, Any], None]], ...] = (
        (Expr, _Reader.expr), (Node, _Reader.node), (Atom, _Reader.atom),
    )  # fmt: skip
    return next((way for base, way in ways if issubclass(kind, base)), None)


@cache
def _is_record(kind: type) -> bool:
    return is_dataclass(kind)


@cache
def _members(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind) if not (kind is Task and f.name in _IGNORED))


@cache
def _is_ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] == __name__.split(".")[0]
