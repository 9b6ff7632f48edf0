"""The base of kernel templates: the wrapper around a hand-written kernel, with generated sources and epilogue."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lapilli.codegen.emit import LANES, Emitter, KernelBuilder, NotVectorizable, declarations, lane_steps, stored_as
from lapilli.codegen.kernel import MAX_PARAMS, KernelSource
from lapilli.ir.axes import fresh_axes
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, Load, cast_to, const, load, rewrite, select
from lapilli.ir.integer import Atom, Int, IntLike, Var, as_int, of
from lapilli.ir.node import Map, Node, Reduce
from lapilli.schedule.copies import Packed
from lapilli.schedule.layout import Layout
from lapilli.schedule.task import Task, Template
from lapilli.target import Target

PackedBody = Callable[..., tuple[list[Int], Expr]]
"""For the indices of a packed operand: guards, and the element where they hold."""
Mapped = Callable[[Int, Int], dict[Atom, Int]]
"""The axes of a task for a row and a column of its result."""


@dataclass(frozen=True)
class Context:
    """The part of the schedule that templates use."""

    target: Target
    layouts: dict[int, Layout]
    views: Mapping[int, Map]
    tasks: Mapping[int, Task] = field(default_factory=dict)
    """By their results, as they are before kernels take over work of theirs."""
    copies: dict[tuple[Any, ...], Packed] = field(default_factory=dict)
    """Copies that several templates read, by what they are."""

    def dense(self, node: Node) -> None:
        """Gives a new value a row-major layout."""
        self.layouts[node.id] = Layout.of(node.shape, range(node.rank))

    def read(self, node: Node, index: Sequence[Int]) -> Expr:
        """An element of a value, through views that have no memory."""
        return self.seen(load(node, tuple(index)))

    def seen(self, e: Expr) -> Expr:
        """Rewrites an expression to read only values with memory."""

        def through(ld: Expr) -> Expr | None:
            assert isinstance(ld, Load)
            node = ld.node
            if node.id not in self.views and (node.id in self.layouts or not isinstance(node, Map)):
                return None
            assert isinstance(node, Map)
            return cast_to(rewrite(node.body, dict(zip(node.axes, ld.index, strict=True)), through), ld.dtype)

        return rewrite(e, {}, through)

    def is_whole(self, node: Node) -> bool:
        """Whether each element of a value is one float, half or int of a buffer. Elements of sub-word types that the device
        lacks, and of int64, are not.
        """
        return stored_as(node.dtype, self.target.half) in ("float", "half", "int")

    def packed(
        self, name: str, like: Node, shape: Sequence[IntLike], body: PackedBody, dtype: DType | None = None
    ) -> Packed:
        """Declares a copy of an operand in a kernel's own layout: body(*axes) gives (guards, value). dtype: default: the
        operand's.
        """
        sizes = tuple(as_int(s) for s in shape)
        axes, at = fresh_axes(sizes)
        guards, value = body(*at)
        padded = select(guards, value, const(0, value.dtype))
        kept = dtype or (like.dtype if self.is_whole(like) else value.dtype)
        node = Packed(sizes, kept, f"{like.name}_{name}", f"pack {name}", axes=axes, body=padded)
        self.dense(node)
        return node


class KernelTemplate(Template):
    """A template that generates the source of a kernel."""

    @abstractmethod
    def write(self, task: Task, ctx: Context) -> KernelSource: ...


def accumulator(shape: Sequence[Int]) -> Reduce:
    """A placeholder for a template's result, if no operator of the graph computes it."""
    axes, _ = fresh_axes(tuple(shape))
    return Reduce(tuple(shape), DType.float32, "acc", "", axes=axes)


def simple_task(out: Node, origins: list[str], reason: str) -> Task:
    """A task that stores a template's result unchanged."""
    reduction = accumulator(out.shape)
    at = tuple(as_int(0) if a.extent == 1 else of(a) for a in reduction.axes)
    return Task(out, reduction.axes, at, load(reduction, at), reduction, None, origins, reason)


class Wrapper:
    """Writes the Slang around a template kernel: buffers, parameter block, sources, epilogue, entry point."""

    def __init__(self, task: Task, ctx: Context, module: str, sizes_as_params: bool = True) -> None:
        self.task, self.ctx, self.module = task, ctx, module
        self.kernel = KernelBuilder(ctx.layouts, ctx.target.half, ctx.target.texel, sizes_as_params)
        self.structs: list[str] = []
        self.fields: list[tuple[str, Int]] = []

    def params(self, member: str = "t", /, **values: IntLike) -> None:
        """The words of a template's parameter struct, in order; member: its name in the block."""
        self.fields += [(f"{member}.{name}", as_int(v)) for name, v in values.items()]

    def vector(self, node: Node) -> str:
        """A buffer read four elements at a time, as a float4 expression at index `i`."""
        return self.kernel.bind_vector(node)

    def epilogue(
        self, rows: Int, columns: Int, mapping: Mapped, signature: str = "uint m, uint n", vector: bool = True
    ) -> bool:
        """struct E with store and store4. mapping(m, n) gives the task's axes for a row and a column.

        Returns whether four columns are stored together.
        """
        wide = vector and columns % LANES == 0
        four = self._store(rows, columns, mapping, LANES) if wide else None
        body4 = (
            four
            if four is not None
            else "".join(f"        store({_arguments(signature, f'n + {k}')}, v[{k}]);\n" for k in range(LANES))
        )
        one = self._store(rows, columns, mapping, 1) if four is None else "        ;\n"
        self.structs.append(
            "struct E : IEpilogue\n{\n"
            f"    static void store({signature}, float v)\n    {{\n{one}    }}\n"
            f"    static void store4({signature}, float4 v)\n    {{\n{body4}    }}\n}};\n"
        )
        return wide

    def _store(self, rows: Int, columns: Int, mapping: Mapped, lanes: int) -> str | None:
        task = self.task
        assert task.reduction is not None
        m = Var("m", rows)
        names: dict[Atom, str] = {m: "int(m)"}
        if lanes > 1:
            n4, lane = Var("n4", columns // LANES), Var("lane", as_int(LANES))
            names[n4] = "int(n / 4)"
            column, lane_int = of(n4) * LANES + of(lane), of(lane)
        else:
            n = Var("n", columns)
            names[n] = "int(n)"
            column, lane_int = of(n), None
        axes: dict[Atom, Int] = mapping(of(m), column)
        batch = getattr(mapping, "var", None)
        if batch is not None:
            names[batch] = "int(b)"
        result = "v" if task.reduction.dtype.is_float else "asint(v)"
        e = Emitter(self.kernel, names, lane_int, {task.reduction.id: result}, "        ")
        kind = stored_as(task.out.dtype, self.kernel.half)
        saved = list(self.kernel.bindings), list(self.kernel.params)
        offset = self.ctx.layouts[task.out.id].offset([i.substitute(axes) for i in task.store])
        try:
            text = e.value(rewrite(task.value, axes))
            if lanes > 1:
                first = offset.substitute({lane: 0})
                if lane_steps(offset, lane) == [1, 2, 3] and first % LANES == 0 and kind in ("float", "half", "int"):
                    buffer = self.kernel.bind(task.out, f"{kind}4", written=True)
                    e.line(f"{buffer}[{e.integer(first // LANES)}] = {kind}4({text});")
                    return e.text()
                if kind not in ("float", "half", "int"):
                    raise NotVectorizable
                buffer = self.kernel.bind(task.out, kind, written=True)
                for k in range(LANES):
                    e.line(f"{buffer}[{e.integer(offset.substitute({lane: k}))}] = {kind}({text}[{k}]);")
                return e.text()
            buffer = self.kernel.bind(task.out, kind, written=True)
            e.line(f"{buffer}[{e.integer(offset)}] = {kind}({text});")
            return e.text()
        except NotVectorizable:
            self.kernel.bindings, self.kernel.params = saved
            return None

    def finish(self, call: str, groups: tuple[IntLike, IntLike, IntLike], local: tuple[int, int, int], name: str,
               struct: str, imports: Sequence[str] = (), plain: bool = False) -> KernelSource:  # fmt: skip
        """call: the statement that runs the template, whose parameters are `P.t` of type `struct` (plain: `struct` declares the
        members itself).
        """
        lines = [*self.kernel.imports(), f"import {self.module};", *(f"import {i};" for i in imports)]
        lines += declarations(self.kernel.bindings)
        extra = "".join(f" int {n};" for n, _ in self.kernel.params)
        members = struct if plain else f"{struct} t;"
        lines.append(f"struct Params {{ {members}{extra} }};")
        lines.append("static Params P;")
        lines += self.structs
        known = self.fields + [(n, v) for n, v in self.kernel.params]
        if self.kernel.sizes_as_params:
            start, words, uniform = "P = params;", [v for _, v in known], ", uniform Params params"
        else:  # what is known goes into the code: on an H100 that saves up to 0.7 microseconds a dispatch
            varying = [v for _, v in known if v.value is None]
            lines.append("struct Varying { " + " ".join(f"int v{k};" for k in range(len(varying))) + " };")
            place = iter(range(len(varying)))
            start = " ".join(f"P.{n} = {f'params.v{next(place)}' if v.value is None else v.value};" for n, v in known)
            words, uniform = varying, ", uniform Varying params" if varying else ""
        lines.append(
            f'[shader("compute")]\n[numthreads({local[0]}, {local[1]}, {local[2]})]\n'
            f"void main(uint3 gid : SV_GroupID, uint3 tid : SV_GroupThreadID, uint li : SV_GroupIndex{uniform})\n"
            f"{{\n    {start}\n    {call}\n}}\n"
        )
        x, y, z = (as_int(g) for g in groups)
        return KernelSource(self.task, "\n".join(lines), self.kernel.bindings, words, (x, y, z), local, name)


def _arguments(signature: str, column: str) -> str:
    names = [part.split()[-1] for part in signature.split(",")]
    return ", ".join(column if n == "n" else n for n in names)


def row_major(others: Sequence[Var], column: Var) -> Callable[[Int, Int], dict[Atom, Int]]:
    """The axes of a task from a linear row index over `others` and a column."""

    def mapping(m: Int, n: Int) -> dict[Atom, Int]:
        axes: dict[Atom, Int] = {column: n}
        rest = m
        for a in reversed(others):
            axes[a] = rest % a.extent if a is not others[0] else rest
            rest = rest // a.extent
        return axes

    return mapping


def within_limit(write: Callable[[bool], KernelSource]) -> KernelSource:
    """With sizes as parameters if they fit, else with sizes as literals."""
    written = write(True)
    return written if len(written.params) <= MAX_PARAMS else write(False)


def scalar_load(w: Wrapper, node: Node, index: str) -> str:
    """One element of a buffer as a float, or an integer's bits, at an offset given as text."""
    i = Var("i", as_int(1 << 30))
    return float_bits(node, Emitter(w.kernel, {i: index}).load_at(node, of(i)))


def vector_load(w: Wrapper, node: Node) -> str:
    """Four elements of a buffer as floats, or integers' bits, at index `i`."""
    text = f"{w.kernel.bind_vector(node)}[i]"
    return f"float4({text})" if node.dtype.is_float else float_bits(node, text)


def float_bits(node: Node, text: str) -> str:
    """Integers as floats of the same bits, as templates read them."""
    return text if node.dtype.is_float else f"asfloat({text})"
