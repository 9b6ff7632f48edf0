"""The wrapper of a hand-written kernel: Slang with its buffers, parameters, operands as sources, epilogue and entry point."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from lapilli.codegen.emit import (
    BYTE,
    BYTE_TYPES,
    IN_FOURS,
    LANES,
    WHOLE,
    Emitter,
    KernelBuilder,
    NotVectorizable,
    converted,
    declarations,
    lane_steps,
    stored_as,
    vector_of,
)
from lapilli.codegen.kernel import MAX_GROUPS, MAX_PARAMS, KernelSource
from lapilli.codegen.read_ahead import INDENT, Known
from lapilli.codegen.template import Context
from lapilli.ir.axes import unravel
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, Load, rewrite, substitute
from lapilli.ir.integer import Atom, Int, IntLike, Var, as_int, minimum, of, product
from lapilli.ir.node import Convolution, Matmul, Node
from lapilli.schedule.contraction import Depths
from lapilli.schedule.task import Task
from lapilli.target import Target

SIGNATURE = "uint b, uint m, uint n"
"""The batch, row and column of an element, as kernels count them."""


def with_sizes(ctx: Context, write: Callable[[bool], KernelSource]) -> KernelSource:
    """A kernel from `write(sizes are parameters)`. They are compiled in where speed is worth more pipelines, on matrix units, and
    where they are more than a kernel takes."""
    return write(False) if ctx.target.cooperative_matrix else within_limit(write)


def within_limit(write: Callable[[bool], KernelSource]) -> KernelSource:
    """With sizes as parameters if they fit, else with sizes as literals."""
    written = write(True)
    return written if len(written.params) <= MAX_PARAMS else write(False)


class BatchMapping:
    """The axes of a task from (b, m, n), as a kernel counts them; with groups, b is the group of the columns."""

    def __init__(self, batch: Sequence[Var], rows: Sequence[Var], column: Var, groups: int = 1) -> None:
        self.batch, self.rows, self.column, self.groups = batch, rows, column, groups
        count = as_int(groups) if groups > 1 else product([a.extent for a in batch])
        self.var = Var("b", count)

    def __call__(self, m: Int, n: Int) -> dict[Atom, Int]:
        b = as_int(0) if self.var.extent == 1 else of(self.var)
        rows = unravel(m, self.rows)
        if self.groups == 1:
            return {self.column: n, **rows, **unravel(b, self.batch)}
        column = b * (self.column.extent // self.groups) + n
        return {self.column: column, **rows, **{a: as_int(0) for a in self.batch}}


def batched(task: Task, flat_rows: bool = False, groups: int = 1) -> BatchMapping:
    """b is a batch, an image, or a group of channels. flat_rows: it is 0, and the rows are those of all batches or images."""
    reduction = task.reduction
    assert reduction is not None
    contraction, axes = reduction.contraction, list(reduction.axes)
    batch: list[Var]
    if isinstance(contraction, Matmul):
        batch, rows, column = list(contraction.batch), list(contraction.rows), contraction.column
    elif isinstance(contraction, Convolution):
        deep = 1 if len(axes) == 5 else 0  # the depths of a 3-D one count as images
        batch, rows, column = [axes[0], *axes[2 : 2 + deep]], axes[2 + deep :], axes[1]
    else:  # a matrix that a kernel makes for another one
        batch, rows, column = [], axes[:-1], axes[-1]
    if flat_rows:
        return BatchMapping([], [*batch, *rows], column, groups)
    return BatchMapping(batch, rows, column, groups)


_NOTHING_AHEAD = [
    "    static const int AHEAD = 0;",
    *Known.of([], []).struct_and_read("read4", SIGNATURE),
    f"    static void end4({SIGNATURE}, float4 v, Known known) {{}}",
]
"""Of an epilogue that reads nothing beside weights."""


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

    def epilogue(
        self,
        rows: Int,
        columns: Int,
        mapping: BatchMapping,
        vector: bool = True,
        ahead: bool = False,
        weights: bool = False,
    ) -> bool:
        """struct E with store and store4. rows, columns: how many the kernel counts in a batch. ahead: as IEpilogueAhead; weights:
        which reads weights before, too.

        Returns whether four columns are stored together.
        """
        wide = vector and columns % LANES == 0
        four = self._store(rows, columns, mapping, LANES) if wide else None
        body4 = four if four is not None else "".join(f"        store(b, m, n + {k}, v[{k}]);\n" for k in range(LANES))
        one = self._store(rows, columns, mapping, 1) if four is None else "        ;\n"
        more: Sequence[str] = ()
        if ahead:
            more = _NOTHING_AHEAD if four is None else self._ahead(rows, columns, mapping, weights)
        self.structs.append(
            f"struct E : {'IEpilogueAhead' if ahead else 'IEpilogue'}\n{{\n"
            f"    static void store({SIGNATURE}, float v)\n    {{\n{one}    }}\n"
            f"    static void store4({SIGNATURE}, float4 v)\n    {{\n{body4}    }}\n"
            + "".join(f"{line}\n" for line in more)
            + "};\n"
        )
        return wide

    def _ahead(self, rows: Int, columns: Int, mapping: BatchMapping, weights: bool) -> list[str]:
        """The same, with what it reads read before. weights: those, too."""
        e, axes = self._emitter(rows, columns, mapping, LANES)
        self.ahead(e, axes, constants=weights)
        first = len(e.lines)
        self.store(e, axes)
        known = Known.of(e.lines[:first], e.lines[first:])
        if known.is_empty:
            return _NOTHING_AHEAD
        return known.reader("read4", SIGNATURE, f"void end4({SIGNATURE}, float4 v, Known known)", e.lines[first:])

    def values(self, name: str, interface: str, task: Task, rows: Int, columns: Int) -> None:
        """A struct with value4: what the epilogue of another task makes of four of its sums, with what it reads read before. Raises
        NotVectorizable.
        """
        e, axes = self._emitter(rows, columns, batched(task), LANES, task)
        value = rewrite(task.value, axes)
        e.ahead(value)
        first = len(e.lines)
        text = e.value(value)
        known = Known.of(e.lines[:first], [*e.lines[first:], text])
        declaration = f"float4 value4({SIGNATURE}, float4 v, Known known)"
        members = known.reader("read4", SIGNATURE, declaration, [*e.lines[first:], f"{INDENT}return {text};"])
        lines = [f"struct {name} : {interface}", "{", *members, "};"]
        self.structs.append("".join(f"{line}\n" for line in lines))

    def _emitter(
        self, rows: Int, columns: Int, mapping: BatchMapping, lanes: int, of_other: Task | None = None
    ) -> tuple[Emitter, dict[Atom, Int]]:
        """For an epilogue, and the axes at which it stores. of_other: the task whose epilogue it is, if it is not the kernel's."""
        task = of_other or self.task
        assert task.reduction is not None
        m = Var("m", rows)
        names: dict[Atom, str] = {m: "int(m)", mapping.var: "int(b)"}
        if lanes > 1:
            n4, lane = Var("n4", columns // LANES), Var("lane", as_int(LANES))
            names[n4] = "int(n / 4)"
            column, lane_int = of(n4) * LANES + of(lane), of(lane)
        else:
            n = Var("n", columns)
            names[n] = "int(n)"
            column, lane_int = of(n), None
        axes: dict[Atom, Int] = mapping(of(m), column)
        values = {task.reduction.id: "v" if task.reduction.dtype.is_float else "asint(v)"}
        if task.template is not None and task.template.second is not None:
            values[task.template.second.id] = "second_sums" if lanes > 1 else "second_sums[n % 4]"
        return Emitter(self.kernel, names, lane_int, values, INDENT), axes

    def _store(self, rows: Int, columns: Int, mapping: BatchMapping, lanes: int) -> str | None:
        e, axes = self._emitter(rows, columns, mapping, lanes)
        saved = list(self.kernel.bindings), list(self.kernel.params)
        try:
            self.store(e, axes)
        except NotVectorizable:
            if lanes == 1:
                raise  # codes are stored in fours alone
            self.kernel.bindings, self.kernel.params = saved
            return None
        return e.text()

    def store(self, e: Emitter, axes: Mapping[Atom, Int], on_load: Callable[[Load], Expr | None] | None = None) -> None:
        """Statements that store the task's value at some axes. on_load: what loads in it become. Raises NotVectorizable."""
        task = self.task
        kind = BYTE if task.out.dtype in BYTE_TYPES else stored_as(task.out.dtype, self.kernel.half)
        offset, value = self._stored(axes, on_load)
        text = e.value(value)
        guard = self._guard(e, axes)
        if e.lane is None:
            if kind in IN_FOURS:
                raise NotVectorizable("bytes are stored in fours")
            buffer = self.kernel.bind(task.out, kind, written=True)
            e.line(f"{guard}{buffer}[{e.integer(offset)}] = {converted(kind, text)};")
            return
        lane = next(iter(e.lane.atoms()))
        first = substitute(offset, {lane: 0})
        if lane_steps(offset, lane) == [1, 2, 3] and first % LANES == 0 and kind in (*WHOLE, *IN_FOURS):
            buffer = self.kernel.bind(task.out, vector_of(kind), written=True)
            stored = converted(kind, text, LANES, self.kernel.number(task.out.least))
            e.line(f"{guard}{buffer}[{e.integer(first // LANES)}] = {stored};")
            return
        if kind not in WHOLE:
            raise NotVectorizable
        buffer = self.kernel.bind(task.out, kind, written=True)
        for k in range(LANES):
            e.line(f"{guard}{buffer}[{e.integer(substitute(offset, {lane: k}))}] = {converted(kind, f'{text}[{k}]')};")

    def ahead(
        self, e: Emitter, axes: Mapping[Atom, Int], on_load: Callable[[Load], Expr | None] | None = None,
        constants: bool = True,
    ) -> None:  # fmt: skip
        """Statements for what `store` reads that does not depend on sums. constants: also weights."""
        task = self.task
        for place, _ in task.within:
            e.ahead_of(substitute(place, axes))
        offset, value = self._stored(axes, on_load)
        e.ahead_of(offset)
        e.ahead(value, constants)

    def _stored(self, axes: Mapping[Atom, Int], on_load: Callable[[Load], Expr | None] | None) -> tuple[Int, Expr]:
        """Where the task's value is stored, and the value."""
        task = self.task
        offset = self.ctx.layouts[task.out.id].offset([substitute(i, axes) for i in task.store])
        return offset, rewrite(rewrite(task.value, axes), {}, on_load)  # what is not computed there is not asked for

    def _guard(self, e: Emitter, axes: Mapping[Atom, Int]) -> str:
        """Of a statement that stores at a computed place, which may be out of range."""
        texts = [f"{place} >= 0 && {place} < {size}" for place, size in e.places(self.task.within, axes)]
        return f"if ({' && '.join(texts)}) " if texts else ""

    def finish(self, call: str, groups: tuple[IntLike, IntLike, IntLike], local: tuple[int, int, int], name: str,
               struct: str, imports: Sequence[str] = (), plain: bool = False) -> KernelSource:  # fmt: skip
        """call: the statement that runs the template, whose parameters are `P.t` of type `struct` (plain: `struct` declares the
        members itself).
        """
        x, y, z = (as_int(g) for g in groups)
        most = z.bounds[1]
        if most is None or most > MAX_GROUPS:  # a work group does several batches, one after the other
            count = self.kernel.param(z)
            call = re.sub(r"\bgid\b", "uint3(gid.xy, batch)", call)
            call = (
                f"for (uint batch = gid.z; batch < uint({count}); batch += {MAX_GROUPS})\n    {{\n        {call}\n"
                "        GroupMemoryBarrierWithGroupSync();\n    }"
            )
            z = minimum(z, MAX_GROUPS)
        lines = [
            *self.kernel.imports(),
            "import operands;",
            f"import {self.module};",
            *(f"import {i};" for i in imports),
        ]
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
        return KernelSource(self.task, "\n".join(lines), self.kernel.bindings, words, (x, y, z), local, name)


def source8(w: Wrapper, name: str, node: Node, codes_as: DType = DType.float16) -> None:
    """struct `name`, which reads eight elements of 16 bits at a time. codes_as: the type to which codes are converted."""
    if node.dtype is DType.code:
        low, high = (w.kernel.read_vector(node, f"2 * i + {k}") for k in (0, 1))
        kind = SHORT[codes_as]
        words = ", ".join(f"{kind}.pack({x})" for x in ("low.xy", "low.zw", "high.xy", "high.zw"))
        read = f"float4 low = {low}, high = {high}; return uint4({words});"
    else:
        read = f"return {w.kernel.bind(node, 'uint4')}[i];"
    w.structs.append(
        f"struct {name} : ISource8, ILine8\n{{\n    static uint4 load8(uint i) {{ {read} }}\n"
        "    static uint4 fetch8(uint i, uint line, uint step) { return load8(i); }\n"
        "    static uint4 line8(uint4 fetched, uint line, uint step) { return fetched; }\n};\n"
    )


def source(w: Wrapper, name: str, node: Node, vector: bool) -> None:
    """struct `name`, which reads four elements at a time, or one by one: only the form that is used gets a buffer."""
    four = vector_load(w, node) if vector else "float4(0.0f)"
    one = "0.0f" if vector else scalar_load(w, node, "int(i)")
    w.structs.append(
        f"struct {name} : ISource, ILine4\n{{\n    static float4 load4(uint i) {{ return {four}; }}\n"
        f"    static float4 line4(uint i, uint line, uint step, uint part) {{ return load4(i); }}\n"
        f"    static float4 block4(uint i, uint line, uint block, uint step, uint part) {{ return load4(i); }}\n"
        f"    static float load(uint i) {{ return {one}; }}\n}};\n"
    )


def depths_source(w: Wrapper, depths: Depths | None) -> str:
    """struct D, the third dimension of a convolution. Returns the name of the type, which without one is that of none."""
    if depths is None:
        return "NoDepths"
    w.structs.append(
        "struct D : IDepths\n{\n"
        f"    static const int TAPS = {depths.kernel};\n    static const int STRIDE = {depths.stride};\n"
        f"    static const int PADDING = {depths.padding};\n    static const int DILATION = {depths.dilation};\n"
        f"    static int size() {{ return {w.kernel.param(depths.size)}; }}\n"
        f"    static int results() {{ return {w.kernel.param(depths.results)}; }}\n}};\n"
    )
    return "D"


def parts_source(w: Wrapper, parts: Node | None, counters: Node | None, first: int) -> str:
    """struct J, of results in parts (kernels/parts.slang), which lie in `parts`, by fours, and are counted from byte `first` of
    `counters` on. Returns the name of the type, which without parts is that of none.
    """
    if parts is None or counters is None:
        return "NoParts"
    memory = w.kernel.bind(parts, "float4", written=True, coherent=True)
    counted = w.kernel.bind(counters, "uint", written=True, coherent=True, start=first)
    w.structs.append(
        "struct J : IParts\n{\n"
        f"    static void store(uint i, float4 v) {{ {memory}[i] = v; }}\n"
        f"    static float4 load(uint i) {{ return {memory}[i]; }}\n"
        "    static uint arrive(uint result)\n    {\n        uint before;\n"
        f"        InterlockedAdd({counted}[result], 1u, before);\n        return before;\n    }}\n}};\n"
    )
    return "J"


def scalar_load(w: Wrapper, node: Node, index: str) -> str:
    """One element of a buffer as a float, or an integer's bits, at an offset given as text."""
    i = Var("i", as_int(1 << 30))
    return float_bits(node, Emitter(w.kernel, {i: index}).load_at(node, of(i)))


def vector_load(w: Wrapper, node: Node) -> str:
    """Four elements of a buffer as floats, or integers' bits, at index `i`."""
    return float_bits(node, w.kernel.read_vector(node, "i"))


def float_bits(node: Node, text: str) -> str:
    """Integers as floats of the same bits, as templates read them."""
    return text if node.dtype.is_float else f"asfloat({text})"


def all_multiples(n: int, *values: IntLike) -> bool:
    return all(as_int(v) % n == 0 for v in values)


def short_type(*nodes: Node) -> DType | None:
    """The type of values that are all stored as the same 16-bit floats; None for others."""
    kinds = {n.dtype for n in nodes}
    dtype = kinds.pop()
    return dtype if not kinds and dtype.is_short_float else None


def on_units(target: Target, *nodes: Node) -> DType | None:
    """The type of values that are all of one that the target's matrix units multiply."""
    dtype = short_type(*nodes)
    return dtype if target.multiplies(dtype) else None


SHORT = {DType.float16: "Halves", DType.bfloat16: "BFloats"}
"""How kernels that are generic over them (IShort) call 16-bit floats."""
