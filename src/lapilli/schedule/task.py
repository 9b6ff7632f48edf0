"""A task is one future kernel: a domain, the stored value and its indices, and the reduction inside."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lapilli.ir.axes import index_of
from lapilli.ir.expr import Expr, Load, ints_of, load, loads, rewrite, substitute, walk
from lapilli.ir.integer import Atom, Int, Symbol, Var
from lapilli.ir.node import Map, Node, Reduce
from lapilli.ir.recurrence import Recurrence
from lapilli.schedule.realize import Realized, invert
from lapilli.target import Target

if TYPE_CHECKING:
    from lapilli.schedule.fuse_reductions import RowFusion


class Template(ABC):
    """A hand-written kernel that computes a task's reduction, with a generated epilogue. `codegen.template` writes it."""

    @property
    @abstractmethod
    def operands(self) -> list[Node]:
        """The values it reads, including the copies it declares (`schedule.copies.Packed`)."""

    @property
    def fixed(self) -> Sequence[Node]:
        """The operands that it reads in its own way; it reads the others by the loads of its expressions (`reading`)."""
        return self.operands

    def reading(self, on_load: Callable[[Load], Expr | None]) -> Template:
        """The template with the loads of its expressions replaced, as `rewrite` does."""
        return self

    @property
    def steps(self) -> Sequence[Task]:
        """Extra tasks that compute some of its operands."""
        return ()

    @property
    def commands(self) -> int:
        """How many kernels it has, of which the sizes of a run choose one."""
        return 1

    @property
    def scratch(self) -> Sequence[Node]:
        """Memory that its work groups share while it runs."""
        return ()

    @property
    def second(self) -> Reduce | None:
        """Another reduction that it computes beside the task's; the task's value reads its accumulator, too."""
        return None


@dataclass(eq=False)
class Task:
    """out[store(axes)] = value(axes) for all axes. A load of `reduction` in the value means its accumulator, at its own axes."""

    out: Node
    axes: tuple[Var, ...]
    store: tuple[Int, ...]
    value: Expr
    reduction: Reduce | None = None
    reduction_body: Expr | None = None
    origins: list[str] = field(default_factory=list)
    reason: str = ""
    template: Template | None = None
    row: RowFusion | None = None  # further computations of the kernel, row by row
    members: tuple[Task, ...] = ()  # tasks that became part of this one, in order
    partial: bool = False  # other elements of `out` are left as they are
    within: tuple[tuple[Int, Int], ...] = ()  # (i, n): only what has 0 <= i < n is stored
    every_run: bool = False  # also if it reads constants only: kernels change what it stores
    decodes: bool = False  # codes of constants: kernels that can read those instead

    @property
    def label(self) -> str:
        """The operators it computes, in order, each once: "conv2d + relu"."""
        names = (o.removeprefix("aten.").split(".")[0] for o in self.origins if o not in ("output", "constant"))
        return " + ".join(dict.fromkeys(names))

    @property
    def commands(self) -> int:
        """How many dispatches of a plan are for it: those with no work for the sizes of a run are left out."""
        return self.template.commands if self.template is not None else 1

    def reads(self) -> list[Node]:
        if self.row is not None:
            inside = {m.out.id for m in self.members}
            joined = [*(r for m in self.members for r in m.reads()), *self._own_reads()]
            return list({r.id: r for r in joined if r.id not in inside}.values())
        return self._own_reads()

    def _own_reads(self) -> list[Node]:
        """Without those of members."""
        found: dict[int, Node] = {n.id: n for n in self.template.operands} if self.template is not None else {}
        computed = [self.reduction, self.template.second if self.template is not None else None]
        for e in (self.reduction_body if self.template is None else None, self.value):
            for ld in loads(e) if e is not None else ():
                if ld.node not in computed:
                    found.setdefault(ld.node.id, ld.node)
        for i in self.store:
            for atom in i.computed:
                for ld in loads(atom.expr):
                    found.setdefault(ld.node.id, ld.node)
        return list(found.values())

    def reading(self, on_load: Callable[[Load], Expr | None]) -> Task:
        """The task with loads replaced, but for those that its template does itself."""

        def new(e: Expr) -> Expr:
            return rewrite(e, on_load=on_load)

        def at(i: Int) -> Int:
            return substitute(i, on_load=on_load)

        row = self.row
        if row is not None:
            steps = tuple(replace(s, body=new(s.body), value=new(s.value)) for s in row.steps)
            row = replace(row, steps=steps, value=new(row.value), store=tuple(map(at, row.store)))
        return replace(
            self, store=tuple(map(at, self.store)), within=tuple((at(i), n) for i, n in self.within), value=new(self.value),
            row=row, reduction_body=None if self.reduction_body is None else new(self.reduction_body),
            members=tuple(m.reading(on_load) for m in self.members),
            template=None if self.template is None else self.template.reading(on_load),
        )  # fmt: skip

    def is_dynamic(self) -> bool:
        """Whether its expressions contain dynamic sizes."""
        raxes = self.reduction.raxes if self.reduction is not None else ()
        bodies = [e for e in (self.reduction_body, self.value) if e is not None]
        sizes = [*self.out.shape, *self.store, *(a.extent for a in (*self.axes, *raxes))]
        sizes += [i for body in bodies for e in walk(body) for i in ints_of(e)]
        return any(isinstance(a, Symbol) for i in sizes for a in i.atoms()) or any(m.is_dynamic() for m in self.members)


def readers(tasks: Iterable[Task]) -> Counter[int]:
    """How many tasks read each value, by its id."""
    return Counter(node.id for task in tasks for node in task.reads())


def make_tasks(realized: Realized, target: Target) -> list[Task]:
    """One task for every realised value. A Map that finishes reductions takes one of them in: the last one, unless its kernel
    would exceed the bindings of a kernel and that of another would not.
    """
    position = {n.id: k for k, n in enumerate(realized.nodes)}
    absorbed: dict[int, Reduce] = {}  # Map id -> its reduction
    taken: set[int] = set()
    for n in realized.nodes:
        if isinstance(n, Map) and n.id not in realized.updates:
            reductions = [c for c in _cores(n, realized) if c.id not in taken]
            if reductions:
                reduction = max(reductions, key=lambda c: (-_too_many(n, c, realized, target), position[c.id]))
                absorbed[n.id] = reduction
                taken.add(reduction.id)
    tasks = []
    for n in realized.nodes:
        if n.id in taken:
            continue
        body = realized.bodies[n.id]
        if n.id in realized.updates:
            tasks.append(_update(n, realized))
        elif isinstance(n, Reduce):
            at = tuple(map(index_of, n.axes))
            tasks.append(Task(n, n.axes, at, load(n, at), n, body, realized.origins[n.id], realized.reasons[n.id]))
        elif n.id in absorbed:
            tasks.append(_with_core(n, absorbed[n.id], realized))
        else:
            tasks.append(
                Task(
                    n,
                    n.axes,
                    tuple(map(index_of, n.axes)),
                    body,
                    None,
                    None,
                    realized.origins[n.id],
                    realized.reasons[n.id],
                    decodes=n.id in realized.decoded,
                )
            )
    return tasks


def _update(n: Node, realized: Realized) -> Task:
    """A task that stores the new elements of a state alone."""
    u, origins, reason = realized.updates[n.id], realized.origins[n.id], realized.reasons[n.id]
    return Task(n, u.axes, u.place, u.value, origins=origins, reason=reason, partial=True, within=u.within)


def _too_many(n: Node, reduction: Reduce, realized: Realized, target: Target) -> int:
    """The number of bindings by which a task would exceed the limit of a kernel."""
    operands = {ld.node.id: ld.node for ld in loads(realized.bodies[reduction.id])}
    texel = target.texel and reduction.contraction is not None  # templates read their operands so: never in parts
    others = {ld.node.id: ld.node for ld in loads(realized.bodies[n.id]) if ld.node is not reduction} | {n.id: n}
    count = sum(1 if texel else target.parts(v) for i, v in operands.items() if i not in others)
    return max(0, count + sum(map(target.parts, others.values())) - target.bindings)


def _cores(n: Map, realized: Realized) -> list[Reduce]:
    """Reductions that only n reads, element by element, in any shape."""
    by_core: dict[int, list[Load]] = {}
    for ld in loads(realized.bodies[n.id]):
        if isinstance(ld.node, Reduce) and not isinstance(ld.node.contraction, Recurrence):
            by_core.setdefault(ld.node.id, []).append(ld)
    result = []
    for found in by_core.values():
        reduction = found[0].node
        assert isinstance(reduction, Reduce)
        if len(found) == 1 and len(realized.users[reduction.id]) == 1 and _epilogue_axes(n, reduction, found[0].index):
            result.append(reduction)
    return result


def _epilogue_axes(n: Map, reduction: Reduce, at: Sequence[Int]) -> dict[Atom, Int] | None:
    """A map's axes expressed by those of the reduction that it reads at `at`; None unless it reads each element once."""
    return invert(n.axes, at, [*map(index_of, reduction.axes)], reduction.axes)


def _with_core(n: Map, reduction: Reduce, realized: Realized) -> Task:
    body = realized.bodies[n.id]
    mapping = _epilogue_axes(n, reduction, next(ld for ld in loads(body) if ld.node is reduction).index)
    assert mapping is not None
    value = rewrite(body, mapping)
    store = tuple(mapping[a] for a in n.axes)
    return Task(
        n,
        reduction.axes,
        store,
        value,
        reduction,
        realized.bodies[reduction.id],
        [*realized.origins[reduction.id], *realized.origins[n.id]],
        "epilogue of " + reduction.origin,
    )
