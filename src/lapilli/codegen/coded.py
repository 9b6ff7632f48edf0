"""Matrices that kernels decode as they read them: packed codes, and beside them what blocks of elements share. A template has such
a matrix as its right operand, a `Coded`, which has no memory; its kernel asks for elements by line and step (`ILine4`, `ILine8`).

For GPUs a line is a column of the product along K, as torch's weights lie: codes of a constant are read from the file's own bytes.
For drivers of type CPU a line is four columns, in which the four of each k follow each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from lapilli.codegen.emit import LANES, Emitter, KernelBuilder, NotVectorizable
from lapilli.codegen.template import Context
from lapilli.codegen.wrapper import SHORT, Wrapper, source, source8
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, Load, Op, binary, cast_to, const, load, loads, reads, rewrite, walk
from lapilli.ir.integer import Atom, Int, Quotient, Var, as_int, ceildiv, minimum, of
from lapilli.ir.node import Matmul, Node
from lapilli.schedule.contraction import MatmulView, Operand
from lapilli.schedule.encoding import Blocks
from lapilli.schedule.task import Task

_WORD = 32
_OFFSET_BITS = 0x4B000000
"""2^23 as a float."""
_TEXEL = 4
"""Words that a CPU kernel reads at once."""


@dataclass(eq=False, repr=False)
class Coded(Node):
    """words: the codes, a row for each line. per_line: words of a line. flip: bits of a word that are inverted before it is taken
    apart; codes then begin at `low`. value: an element, of `code`, at `inner` and `column`. by_columns: a line is four columns.
    """

    words: Node = None  # type: ignore[assignment]
    per_line: int = 0
    bits: int = 8
    flip: int = 0
    low: int = 0
    code: Expr = None  # type: ignore[assignment]
    value: Expr = None  # type: ignore[assignment]
    inner: Var = None  # type: ignore[assignment]
    column: Var = None  # type: ignore[assignment]
    by_columns: bool = False

    @property
    def parts(self) -> int:
        """Fours of a word."""
        return _WORD // self.bits // LANES

    @property
    def reads(self) -> list[Node]:
        """What it is computed from."""
        inside = set(loads(self.code))
        others = [ld.node for ld in loads(self.value) if ld not in inside]
        return list({n.id: n for n in (self.words, *others)}.values())


def in_memory(*nodes: Node) -> list[Node]:
    """Operands of a template, as those that have memory."""
    return [n for node in nodes for n in (node.reads if isinstance(node, Coded) else [node])]


# -- matrices


def lines_of_codes(v: MatmulView, task: Task, ctx: Context) -> Operand | None:
    """The right operand [N, K] in codes, for GPUs; None if it has none, or if four neighbours are computed in different ways."""
    return _coded(v, task, ctx, _lines)


def columns_of_codes(v: MatmulView, task: Task, ctx: Context) -> Operand | None:
    """The right operand in codes, for drivers of type CPU: [N / 4, K, 4]."""
    return _coded(v, task, ctx, _columns)


def _coded(
    v: MatmulView, task: Task, ctx: Context, make: Callable[[MatmulView, Blocks, Matmul, Context], Coded]
) -> Operand | None:
    assert task.reduction is not None
    contraction, blocks = task.reduction.contraction, v.rhs.encoding
    if not isinstance(blocks, Blocks) or v.n.value is None or v.k.value is None or v.n == 0 or v.k == 0:
        return None
    assert isinstance(contraction, Matmul)
    made = make(v, blocks, contraction, ctx)
    try:
        _line4(KernelBuilder(ctx.layouts, ctx.target.half, ctx.target.texel), made)
    except NotVectorizable:
        return None
    return Operand(made, as_int(0), (as_int(0), as_int(1), v.k))


def _lines(v: MatmulView, blocks: Blocks, contraction: Matmul, ctx: Context) -> Coded:
    count = _WORD // blocks.bits
    per_line = ceildiv(v.k, count)
    words, flip, low = blocks.lying(contraction, ctx.layouts) if v.k % count == 0 else (None, 0, 0)
    if words is None:
        words, low = _packed(blocks, contraction, ctx, [v.n, per_line], lambda n, w, i: (n, w * count + i)), blocks.low
    return _made(v, blocks, contraction, words, per_line, flip, low)


def _columns(v: MatmulView, blocks: Blocks, contraction: Matmul, ctx: Context) -> Coded:
    steps = _WORD // blocks.bits // LANES  # of a word
    per_line = ceildiv(ceildiv(v.k, LANES) * LANES, steps * _TEXEL) * _TEXEL
    words = _packed(
        blocks, contraction, ctx, [ceildiv(v.n, LANES), per_line],
        lambda n4, w, i: (n4 * LANES + i % LANES, w * steps + i // LANES),
    )  # fmt: skip
    made = _made(v, blocks, contraction, words, per_line, 0, blocks.low)
    made.by_columns = True
    made.value = _with_columns(made, contraction, ctx)
    return made


def _made(v: MatmulView, blocks: Blocks, contraction: Matmul, words: Node, per_line: Int, flip: int, low: int) -> Coded:
    node = v.rhs.node
    count = per_line.value
    assert count is not None
    return Coded(
        (v.k, v.n), node.dtype if node.dtype in SHORT else DType.float32, f"{node.name}_coded", node.origin,
        words=words, per_line=count, bits=blocks.bits, flip=flip, low=low, code=blocks.code, value=blocks.value,
        inner=contraction.inner, column=contraction.column,
    )  # fmt: skip


def _packed(
    blocks: Blocks,
    contraction: Matmul,
    ctx: Context,
    shape: list[Int],
    place: Callable[[Int, Int, int], tuple[Int, Int]],
) -> Node:
    """Codes packed into words, lowest bits first; beyond the matrix, those at its edge. place: column and k of a code."""
    key = ("codes", blocks.code, tuple(shape), contraction.column.id, contraction.inner.id)
    if key in ctx.copies:
        return ctx.copies[key]
    n, k = contraction.column.extent, contraction.inner.extent

    def body(line: Int, word: Int) -> tuple[list[Int], Expr]:
        packed: Expr = const(0, DType.int32)
        for i in range(_WORD // blocks.bits):
            column, inner = place(line, word, i)
            at: dict[Atom, Int] = {contraction.column: _below(column, n), contraction.inner: _below(inner, k)}
            part = binary("shl", binary("sub", rewrite(blocks.code, at), blocks.low), blocks.bits * i)
            packed = part if i == 0 else binary("bitor", packed, part)
        return [], packed

    node = ctx.copies[key] = ctx.packed("codes", contraction.rhs, shape, body, DType.int32)
    return node


def _below(i: Int, n: Int) -> Int:
    """An index, or the last one, if it may be beyond."""
    high, count = i.bounds[1], n.value
    return i if high is not None and count is not None and high < count else minimum(i, n - 1)


def _with_columns(m: Coded, contraction: Matmul, ctx: Context) -> Expr:
    """The element, with what blocks share copied so that four columns lie together."""
    n, k, inner, column = m.column.extent, m.inner.extent, m.inner, m.column
    wide = ceildiv(n, LANES) * LANES
    inside = set(loads(m.code))

    def copy(ld: Expr) -> Expr | None:
        assert isinstance(ld, Load)
        if ld in inside or not (reads_any(ld, column) or reads_any(ld, inner)):
            return None
        size = _block(ld, inner)
        if size is None:
            return None
        rows = ceildiv(k, size)

        def body(row: Int, at: Int) -> tuple[list[Int], Expr]:
            return [], rewrite(ld, {inner: _below(row * size, k), column: _below(at, n)})

        node = ctx.packed("shared", ld.node, [rows, wide], body)
        return load(node, [of(inner) // size, of(column)])

    return rewrite(m.value, {}, copy)


def reads_any(ld: Load, v: Var) -> bool:
    return any(reads(i, v) for i in ld.index)


def _block(ld: Load, inner: Var) -> int | None:
    """How many neighbours along an axis have the same value of a parameter; None if that differs."""
    if not reads_any(ld, inner):
        return max(inner.extent.value or 1, 1)
    sizes = {a.y.value for i in ld.index for a in _quotients(i)} - {None}
    for size in sorted((s for s in sizes if s is not None and s > 1), reverse=True):
        q, r = Var("q", ceildiv(inner.extent, size)), Var("r", as_int(size))
        found = rewrite(ld, {inner: of(q) * size + of(r)})
        assert isinstance(found, Load)
        if not reads_any(found, r):
            return size
    return None


def _quotients(i: Int) -> Iterator[Quotient]:
    for m, _ in i.terms:
        for a in m:
            if isinstance(a, Quotient):
                yield a
                yield from _quotients(a.x)


# -- how kernels read them


def matrix_source(w: Wrapper, name: str, node: Node) -> None:
    """struct `name`, which reads four elements of a line."""
    if not isinstance(node, Coded):
        source(w, name, node, vector=True)
        return
    w.structs.append(f"struct {name} : ILine4\n{{\n{_line4(w.kernel, node)}}};\n")


def scaled_source(w: Wrapper, name: str, node: Node) -> None:
    """struct `name`, which reads four numbers of a line and what they are multiplied by."""
    if not isinstance(node, Coded):
        source(w, name, node, vector=True)
        return
    w.structs.append(f"struct {name} : IScaled4\n{{\n{_scaled4(w.kernel, node)}}};\n")


def matrix_source8(w: Wrapper, name: str, node: Node) -> None:
    """struct `name`, which reads eight numbers of 16 bits of a line."""
    if not isinstance(node, Coded):
        source8(w, name, node)
        return
    w.structs.append(f"struct {name} : ILine8\n{{\n{_line8(w.kernel, node)}}};\n")


@contextmanager
def _literal_sizes(kernel: KernelBuilder) -> Iterator[None]:
    """Sizes of weights as literals: divisions by them must cost nothing."""
    kept, kernel.sizes_as_params = kernel.sizes_as_params, False
    try:
        yield
    finally:
        kernel.sizes_as_params = kept


def _named(*variables: Var) -> dict[Atom, str]:
    """The texts of variables: arguments of their names."""
    return {v: f"int({v.name})" for v in variables}


def _line4(kernel: KernelBuilder, m: Coded) -> str:
    step, part = Var("step", as_int(max(m.per_line, 1))), Var("part", as_int(LANES if m.by_columns else m.parts))
    with _literal_sizes(kernel):
        if m.by_columns:
            line = Var("line", ceildiv(m.column.extent, LANES))
            step = Var("step", ceildiv(m.inner.extent, LANES))
            word = _word_of_columns(kernel, m)
            inner: Int = _below(of(step) * LANES + of(part), m.inner.extent)
            text = _decoded(kernel, m, word, _named(line, step, part), inner, line)
        else:
            line = Var("line", m.column.extent)
            shift = f" >> (part * {LANES * m.bits})" if m.parts > 1 else ""
            word = f"{_lines_word(kernel, m, f'line * {m.per_line} + step')}{shift}"
            text = _decoded(
                kernel, m, word, _named(line, step, part), of(step) * (m.parts * LANES) + of(part) * LANES, line
            )
    return f"    static float4 line4(uint i, uint line, uint step, uint part)\n    {{\n{text}    }}\n"


def _scaled4(kernel: KernelBuilder, m: Coded) -> str:
    step, part = Var("step", as_int(max(m.per_line, 1))), Var("part", as_int(m.parts))
    line = Var("line", m.column.extent)
    names = _named(line, step, part)
    first = of(step) * (m.parts * LANES) + of(part) * LANES
    at: list[dict[Atom, Int]] = [{m.inner: first + k, m.column: of(line)} for k in range(LANES)]
    numbers, scale = _factored(m.value, m.code, at)
    shift = f" >> (part * {LANES * m.bits})" if m.parts > 1 else ""
    with _literal_sizes(kernel):
        word = _lines_word(kernel, m, f"line * {m.per_line} + step")
        text = _decoded(kernel, replace(m, value=numbers), f"word{shift}", names, first, line)
        e = Emitter(kernel, names, None, indent="        ")
        e.line(f"return {e.value(rewrite(scale, at[0]))};")
    return (
        f"    static uint word(uint line, uint step) {{ return {word}; }}\n"
        f"    static float4 numbers4(uint word, uint i, uint line, uint step, uint part)\n    {{\n{text}    }}\n"
        f"    static float scale(uint line, uint step, uint part)\n    {{\n{e.text()}    }}\n"
    )


def _factored(value: Expr, code: Expr, at: Sequence[Mapping[Atom, Int]]) -> tuple[Expr, Expr]:
    """An element as a product with what it shares with its neighbours, whose indices are given; 1 if there is nothing."""
    if isinstance(value, Op) and value.op == "mul":
        for number, scale in (value.args, value.args[::-1]):
            shared = [rewrite(scale, place) for place in at]
            if code not in walk(scale) and all(s is shared[0] for s in shared):
                return number, scale
    return value, const(1.0)


def _line8(kernel: KernelBuilder, m: Coded) -> str:
    step, line = Var("step", ceildiv(m.inner.extent, 2 * LANES)), Var("line", m.column.extent)
    names: dict[Atom, str] = {line: "int(line)", step: "int(step)"}
    texts = []
    with _literal_sizes(kernel):
        for part in range(2):
            if m.parts == 2:
                word = f"{_lines_word(kernel, m, f'line * {m.per_line} + step')} >> {part * LANES * m.bits}"
            else:
                word = _lines_word(kernel, m, f"line * {m.per_line} + 2 * step + {part}")
            texts.append(_decoded(kernel, m, word, names, of(step) * (2 * LANES) + part * LANES, line))
    functions = "".join(
        f"    static float4 four{k}(uint line, uint step)\n    {{\n{text}    }}\n" for k, text in enumerate(texts)
    )
    return (
        functions + "    static uint4 line8(uint i, uint line, uint step)\n    {\n"
        "        float4 a = four0(line, step), b = four1(line, step);\n"
        f"        return uint4({', '.join(f'{SHORT[m.dtype]}.pack({x})' for x in ('a.xy', 'a.zw', 'b.xy', 'b.zw'))});\n    }}\n"
    )


def _lines_word(kernel: KernelBuilder, m: Coded, at: str) -> str:
    flipped = f" ^ {m.flip:#x}u" if m.flip else ""
    kind = "int" if m.words.dtype is DType.int32 else "uint"
    return f"(uint({kernel.bind(m.words, kind)}[{at}]){flipped})"


def _word_of_columns(kernel: KernelBuilder, m: Coded) -> str:
    """The word with the codes of four columns at k = 4 * step + part. Texels have four words."""
    per_texel = _TEXEL * m.parts  # values of k
    texels = m.per_line // _TEXEL
    at = f"line * {texels} + step / {per_texel // LANES}" if m.parts > 1 else f"line * {texels} + step"
    which = f"(step % {m.parts} * {LANES // m.parts} + part / {m.parts})" if m.parts > 1 else "part"
    shift = f" >> (part % {m.parts} * {LANES * m.bits})" if m.parts > 1 else ""
    words = (
        f"asuint({kernel.bind(m.words, 'float4', texel=True)}[{at}])"
        if kernel.texel
        else f"uint4({kernel.bind(m.words, 'int4')}[{at}])"
    )
    return f"one_of({words}, {which}){shift}"


def _decoded(kernel: KernelBuilder, m: Coded, word: str, names: dict[Atom, str], inner: Int, line: Var) -> str:
    """Statements that return four elements: neighbours along K, or columns. Raises NotVectorizable."""
    lane = Var("lane", as_int(LANES))
    if m.by_columns:
        column, padded = of(line) * LANES + of(lane), inner
    else:
        column, padded = of(line), _below(inner + of(lane), m.inner.extent)
    at: dict[Atom, Int] = {m.inner: padded, m.column: column}
    e = Emitter(kernel, names, of(lane), indent="        ")
    low = f" + {m.low}" if m.low > 0 else f" - {-m.low}" if m.low else ""
    shifts = ", ".join(str(i * m.bits) for i in range(LANES))
    code = rewrite(m.code, at)
    e.line(f"uint4 bits = (uint4({word}) >> uint4({shifts})) & {(1 << m.bits) - 1};")
    e.line(f"int4 code = int4(bits){low};")
    e.name(code, "code")
    # As numbers without a conversion, which is slow on GPUs: the bits are the last ones of 2^23 and more.
    e.line(f"float4 number = asfloat(bits | {_OFFSET_BITS:#x}u) - {2**23 - m.low}.0f;")
    e.name(cast_to(code, DType.float32), "number")
    e.line(f"return {e.value(rewrite(m.value, at))};")
    return e.text()


def parts_of(node: Node) -> int:
    """Fours of a step of a matrix, as `ILine4` counts."""
    return node.parts if isinstance(node, Coded) else 1
