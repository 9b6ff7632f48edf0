"""Matrices that kernels decode as they read them: packed codes, and beside them what blocks of elements share. A template has such
a matrix as its right operand, a `Coded`, which has no memory; its kernel asks for elements by line and step (`ILine4`, `ILine8`),
or by vectors of words (`ILines`).

For GPUs a line is a column of the product along K, as torch's weights lie: codes of a constant are read from the file's own bytes.
For drivers of type CPU a line is four columns, in which the four of each k follow each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from lapilli.code_operators import widths_of
from lapilli.codegen.code_words import BYTE, WORD, CodeWords, below, bits_in_word, packed_words
from lapilli.codegen.emit import LANES, Emitter, KernelBuilder, NotVectorizable
from lapilli.codegen.template import Context
from lapilli.codegen.wrapper import SHORT, Wrapper, source, source8
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, Load, Op, cast_to, const, ints_of, load, loads, reads, rewrite, walk
from lapilli.ir.integer import Atom, Int, Quotient, Var, as_int, ceildiv, of
from lapilli.ir.narrow import OPERATIONS as NARROW
from lapilli.ir.node import Matmul, Node
from lapilli.lower.codes import TABLES
from lapilli.schedule.contraction import MatmulView, Operand
from lapilli.schedule.encoding import Blocks
from lapilli.schedule.layout import estimate
from lapilli.schedule.task import Task

_MANTISSA = 23
"""Bits of a float's fraction."""
_FIELDS = ("offset", "batch", "line")
"""Words of P that say where a matrix of numbers lies, before the name of its struct."""
_TEXEL = 4
"""Words that a CPU kernel reads at once."""


@dataclass(eq=False, repr=False)
class Coded(Node):
    """words: the codes, which begin at `low`. value: an element, of `code`, at `inner` and `column`. by_columns: a line is four
    columns.
    """

    words: CodeWords = None  # type: ignore[assignment]
    low: int = 0
    code: Expr = None  # type: ignore[assignment]
    value: Expr = None  # type: ignore[assignment]
    inner: Var = None  # type: ignore[assignment]
    column: Var = None  # type: ignore[assignment]
    by_columns: bool = False

    @property
    def parts(self) -> int:
        """Fours of a word."""
        return WORD // self.bits // LANES

    @property
    def bits(self) -> int:
        """Of a code in a word."""
        return self.words.bits

    @property
    def per_line(self) -> int:
        """Words of a line."""
        return self.words.per_line

    @property
    def reads(self) -> list[Node]:
        """What it is computed from."""
        inside = set(loads(self.code))
        others = [ld.node for ld in loads(self.value) if ld not in inside]
        return list({n.id: n for n in (*self.words.nodes, *others)}.values())


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
    lying, widths = blocks.lying(contraction, ctx.layouts), widths_of(blocks.width)
    if v.k % (WORD // min(widths)) != 0:  # not whole words
        widths = (blocks.bits,)
    if lying is not None and (lying.widths != widths or v.k % (WORD // min(widths)) != 0):
        lying = None
    bits = bits_in_word(widths)
    count = WORD // bits
    per_line = _fixed(ceildiv(v.k, count))
    if lying is not None:
        return _made(v, blocks, contraction, CodeWords(lying.nodes, widths, bits, per_line, lying.flip), lying.low)
    shape = v.n, per_line
    words = packed_words(blocks, contraction, ctx, widths, shape, lambda n, w, i: (n, w * count + i))
    return _made(v, blocks, contraction, words, blocks.low)


def _fixed(size: Int) -> int:
    value = size.value
    assert value is not None
    return value


def _columns(v: MatmulView, blocks: Blocks, contraction: Matmul, ctx: Context) -> Coded:
    widths = widths_of(blocks.width)
    if v.k % (LANES * BYTE // min(widths)) != 0:  # not whole texels
        widths = (blocks.bits,)
    steps = WORD // bits_in_word(widths) // LANES  # of a word
    per_line = _fixed(ceildiv(ceildiv(v.k, LANES) * LANES, steps * _TEXEL) * _TEXEL)
    words = packed_words(
        blocks, contraction, ctx, widths, (ceildiv(v.n, LANES), per_line),
        lambda n4, w, i: (n4 * LANES + i % LANES, w * steps + i // LANES), blocks.lying(contraction, ctx.layouts),
    )  # fmt: skip
    made = _made(v, blocks, contraction, words, blocks.low)
    made.by_columns = True
    made.value = _with_columns(made, contraction, ctx)
    return made


def _made(v: MatmulView, blocks: Blocks, contraction: Matmul, words: CodeWords, low: int) -> Coded:
    node = v.rhs.node
    return Coded(
        (v.k, v.n), node.dtype if node.dtype in SHORT else DType.float32, f"{node.name}_coded", node.origin,
        words=words, low=low, code=blocks.code, value=blocks.value,
        inner=contraction.inner, column=contraction.column,
    )  # fmt: skip


def _with_columns(m: Coded, contraction: Matmul, ctx: Context) -> Expr:
    """The element, with what blocks share copied so that four columns lie together."""
    n, k, inner, column = m.column.extent, m.inner.extent, m.inner, m.column
    wide = ceildiv(n, LANES) * LANES
    inside = set(loads(m.code))

    def copy(ld: Load, value: Expr) -> Expr | None:
        if ld in inside or not (reads_any(ld, column) or reads_any(ld, inner)):
            return None
        size = _block(ld, inner)
        if size is None:
            return None
        rows = ceildiv(k, size)

        def body(row: Int, at: Int) -> tuple[list[Int], Expr]:
            return [], rewrite(value, {inner: below(row * size, k), column: below(at, n)})

        node = ctx.packed("shared", ld.node, [rows, wide], body, None if value is ld else value.dtype)
        return load(node, [of(inner) // size, of(column)])

    parts = {e: copied for e in _computed_of_one(m.value, inside) if (copied := copy(loads(e)[0], e)) is not None}
    return rewrite(m.value, {}, lambda ld: copy(ld, ld), parts)


def _computed_of_one(value: Expr, inside: set[Load]) -> list[Expr]:
    """The largest parts that are floats computed of a single integer of a block, not just converted: powers of two of exponents.
    They are computed once, for one costs as much as an element.
    """
    found: list[Expr] = []
    seen: set[int] = set()

    def visit(e: Expr) -> None:
        if e.id in seen or not isinstance(e, Op):
            return
        seen.add(e.id)
        if e.dtype is DType.float32 and e.op != "cast" and _is_of_one(e, inside):
            found.append(e)
        else:
            for part in e.args:
                visit(part)

    visit(value)
    return found


def _is_of_one(e: Expr, inside: set[Load]) -> bool:
    read = set(loads(e))
    places = any(ints_of(part) for part in walk(e) if not isinstance(part, Load))
    return len(read) == 1 and not places and not any(ld in inside or ld.node.dtype.is_float for ld in read)


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


def lines_source(w: Wrapper, name: str, node: Node, words: int) -> None:
    """struct `name` : ILines, which reads lines by vectors of so many words. Words of P say where a matrix of numbers lies
    (`line_fields`).
    """
    text = (
        _coded_lines(w.kernel, node, words)
        if isinstance(node, Coded)
        else _lines_of_numbers(w.kernel, name, node, words)
    )
    w.structs.append(f"struct {name} : ILines\n{{\n{text}}};\n")


def line_fields(name: str, x: Operand, words: int) -> list[tuple[str, Int]]:
    """The words of P that say where a matrix of numbers lies, in vectors: it begins, its batches and its lines."""
    if isinstance(x.node, Coded):
        return []
    count = elements_of_word(x.node) * words
    return [
        (f"{field}{name}", as_int(v) // count)
        for field, v in zip(_FIELDS, (x.offset, x.strides[0], x.strides[2]), strict=True)
    ]


def elements_of_word(node: Node) -> int:
    return WORD // node.bits if isinstance(node, Coded) else WORD // (8 * node.dtype.size)


def words_of_vector(x: Operand, k: Int, team: int) -> int:
    """How many words of a line an invocation loads at once: the most of which a team has enough, and whose elements share what they
    are decoded with, if such a number does.
    """
    node, count = x.node, elements_of_word(x.node)
    if not isinstance(node, Coded):
        return next(
            v for v in (4, 2, 1) if all(as_int(n) % (v * count) == 0 for n in (k, x.offset, x.strides[0], x.strides[2]))
        )
    fitting = [v for v in (4, 2, 1) if node.per_line % v == 0 and (v == 1 or node.per_line >= v * team // 2)]
    alike = [v for v in fitting if not _apart(_hoisted(node, v * count)[0], node.code)]
    return (alike or fitting)[0]


def matrix_source8(w: Wrapper, name: str, node: Node) -> None:
    """struct `name` : ILine8, which reads eight numbers of 16 bits of a line."""
    if not isinstance(node, Coded):
        source8(w, name, node)
        return
    w.structs.append(f"struct {name} : ILine8\n{{\n{_line8(w.kernel, node)}}};\n")


_VECTOR = 4
"""Words of a vector of `ICodes`."""


def become_numbers_straight(m: Coded) -> bool:
    """Whether `codes_source` can read a matrix: of halves, which are codes of 4 or 8 bits times a scale, plus an offset, that a
    vector of them shares.
    """
    count = _VECTOR * elements_of_word(m)
    if m.bits not in (4, 8) or m.by_columns or m.inner.extent % count != 0:
        return False
    value, shared = _hoisted(m, count)
    return _affine(m, value, shared) is not None


def become_numbers_alike(one: Coded, other: Coded) -> bool:
    """Whether kernels that read both in this way can make numbers of their codes by the same statement."""
    return (
        one.words.is_like(other.words)
        and one.dtype is other.dtype
        and _numbers_straight(one) == _numbers_straight(other)
    )


def codes_source(w: Wrapper, name: str, matrices: Sequence[Coded], paired: bool) -> None:
    """struct `name` : ICodes. paired: whether results of two matrices belong together."""
    firsts = [0]
    words, shared = "", ""
    for x, m in enumerate(matrices):
        line, at = Var("line", m.column.extent), Var("at", as_int(m.per_line // _VECTOR))
        count = _VECTOR * elements_of_word(m)
        with _literal_sizes(w.kernel):
            vector = m.words.fetched(w.kernel, "line", "at", _VECTOR, _VECTOR)
            places: dict[Atom, Int] = {m.inner: of(at) * count, m.column: of(line)}
            value, common = _hoisted(m, count)
            bits, statements = _shared_affine(
                w.kernel, _known_affine(m, value, common), common, _named(line, at), places
            )
        words += f"        if (x == {x}) return {vector};\n"
        shared += f"        if (x == {x})\n        {{\n{statements}        return uint2({bits});\n        }}\n"
        if len(matrices) > 1 and not paired:
            firsts.append(firsts[-1] + estimate(m.column.extent))
    matrix = " + ".join(f"uint(column >= {n})" for n in firsts[1:-1]) or "0"
    first = " : ".join(f"x == {x} ? {n}" for x, n in enumerate(firsts[:-1])) + " : 0" if len(firsts) > 1 else "0"
    w.structs.append(
        f"struct {name} : ICodes\n{{\n"
        f"    static const int BITS = {matrices[0].bits};\n    static const int COUNT = {len(matrices)};\n"
        f"    static const int PAIRED = {int(paired)};\n"
        f"    static uint matrix(uint column) {{ return {matrix}; }}\n"
        f"    static uint first(uint x) {{ return {first}; }}\n"
        f"    static uint4 words(int x, uint line, uint at)\n    {{\n{words}        return uint4(0);\n    }}\n"
        f"    static uint2 shared(int x, uint line, uint at)\n    {{\n{shared}        return uint2(0);\n    }}\n"
        f"    static uint4 together(uint4 words, uint at) {{ return {matrices[0].words.together('words', 'at', _VECTOR)}; }}\n"
        f"    static uint4 numbers8(uint word, uint2 shared) {{ return {_numbers_straight(matrices[0])}; }}\n}};\n"
    )


def _numbers_straight(m: Coded) -> str:
    """The statement that makes numbers of a word."""
    affine = _known_affine(m, *_hoisted(m, _VECTOR * elements_of_word(m)))
    return f"pairs_of_codes{m.bits}<{affine.form}, {affine.table}>(word, {m.low}.0f, shared[0], shared[1])"


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
    """line4 and block4."""
    with _literal_sizes(kernel):
        one, other = (_columns4 if m.by_columns else _lines4)(kernel, m)
    return (
        f"    static float4 line4(uint i, uint line, uint step, uint part)\n    {{\n{one}    }}\n"
        f"    static float4 block4(uint i, uint line, uint block, uint step, uint part)\n    {{\n{other}    }}\n"
    )


def _lines4(kernel: KernelBuilder, m: Coded) -> tuple[str, str]:
    line, step, part = (
        Var("line", m.column.extent),
        Var("step", as_int(max(m.per_line, 1))),
        Var("part", as_int(m.parts)),
    )
    shift = f" >> (part * {LANES * m.bits})" if m.parts > 1 else ""
    word = f"({m.words.together(m.words.fetched(kernel, 'line', 'step', 1, 2), 'step', 1)}.x{shift})"
    inner = of(step) * (m.parts * LANES) + of(part) * LANES
    text = _decoded(kernel, m, word, _named(line, step, part), inner, line)
    return text, "        return line4(i, line, block + step, part);\n"  # a block is one step


def _columns4(kernel: KernelBuilder, m: Coded) -> tuple[str, str]:
    size = block_of(m)
    line, part = Var("line", ceildiv(m.column.extent, LANES)), Var("part", as_int(LANES))
    step = Var("step", ceildiv(m.inner.extent, LANES))
    inner = below(of(step) * LANES + of(part), m.inner.extent)
    one = _decoded(kernel, m, _word_of_columns(kernel, m, None), _named(line, step, part), inner, line)
    block, step = Var("block", ceildiv(m.inner.extent, LANES * size)), Var("step", as_int(size))
    inner = below(of(block) * (LANES * size) + of(step) * LANES + of(part), m.inner.extent)
    other = _decoded(kernel, m, _word_of_columns(kernel, m, size), _named(line, block, step, part), inner, line)
    return one, other


_BLOCK = 8
"""Steps of a block at most: 32 elements share a scale in most formats."""


def block_of(node: Node) -> int:
    """How many steps of four elements along K a block of `block4` has: as many as share what they are decoded with, up to _BLOCK.
    They divide K, and are even if they can be. 1 of numbers.
    """
    if not isinstance(node, Coded) or not node.by_columns:
        return 1
    inside, k = set(loads(node.code)), node.inner.extent
    sizes = [_block(ld, node.inner) or 1 for ld in loads(node.value) if ld not in inside and reads_any(ld, node.inner)]
    least = 2 if k % (2 * LANES) == 0 else 1
    fitting = (s for s in range(_BLOCK, least, -1) if s % least == 0 and s % node.parts == 0 and k % (s * LANES) == 0)
    return next((s for s in fitting if all(size % (s * LANES) == 0 for size in sizes)), least)


def _coded_lines(kernel: KernelBuilder, m: Coded, words: int) -> str:
    count = words * elements_of_word(m)
    line, at = Var("line", m.column.extent), Var("at", as_int(max(m.per_line // words, 1)))
    names = _named(line, at)
    value, shared = _hoisted(m, count)
    four = Var("four", ceildiv(m.inner.extent, LANES))
    numbers, scale = _factored(value, m.code)
    word = f"words.x >> (part * {LANES * m.bits})" if m.parts > 1 else "words.x"
    table = _table_of(m, numbers)
    with _literal_sizes(kernel):
        vector = m.words.fetched(kernel, "line", "at", words, _VECTOR)
        text = (
            f"        return numbers_of_codes4<{table}>({word});\n"
            if table and kernel.half and m.bits == BYTE // 2
            else _decoded(
                kernel, replace(m, value=numbers), word, _named(line, four), of(four) * LANES, line, "shared", "powers"
            )
        )
        bits, statements = _shared_bits(kernel, shared, names, {m.inner: of(at) * count, m.column: of(line)})
        e = Emitter(kernel, {}, None, _placed("shared"), "        ")
        e.line(f"return {e.value(scale)};")
    return (
        f"    static uint4 words(uint b, uint line, uint at) {{ return {vector}; }}\n"
        f"    static uint4 together(uint4 words, uint at) {{ return {m.words.together('words', 'at', words)}; }}\n"
        f"    static uint2 shared(uint line, uint at)\n    {{\n{statements}"
        f"        return uint2({bits});\n    }}\n    static uint4 powers() {{ return {_powers(m.bits)}; }}\n"
        "    static float4 numbers4(uint4 words, uint part, uint4 powers, uint2 shared, uint line, uint four)\n"
        f"    {{\n{text}    }}\n"
        f"    static float scale(uint2 shared)\n    {{\n{e.text()}    }}\n"
    )


def _lines_of_numbers(kernel: KernelBuilder, name: str, node: Node, words: int) -> str:
    kind = "uint4" if words == 4 else "uint2" if words == 2 else "uint"
    offset, batch, line = (f"P.{field}{name}" for field in _FIELDS)
    loaded = _widened(f"{kernel.bind(node, kind)}[{offset} + b * {batch} + line * {line} + at]", words)
    numbers = "asfloat(words)"
    if node.dtype in SHORT:
        short = SHORT[node.dtype]
        numbers = f"float4({short}.unpack(words.x), {short}.unpack(words.y))"
    return (
        f"    static uint4 words(uint b, uint line, uint at) {{ return {loaded}; }}\n"
        "    static uint4 together(uint4 words, uint at) { return words; }\n"
        "    static uint2 shared(uint line, uint at) { return uint2(0); }\n"
        "    static uint4 powers() { return uint4(0); }\n"
        "    static float4 numbers4(uint4 words, uint part, uint4 powers, uint2 shared, uint line, uint four)\n    {\n"
        f"        return {numbers};\n    }}\n"
        "    static float scale(uint2 shared) { return 1.0f; }\n"
    )


def _widened(text: str, words: int) -> str:
    return text if words == 4 else f"uint4({text}, 0, 0)" if words == 2 else f"uint4({text}, 0, 0, 0)"


# What neighbours share is computed before they are decoded, with their words: up to two numbers of an expression, which may
# be products of others (as scales of scales).

_PLACES = 2
_HOISTED = {(k, d): Node((), d, f"shared{k}") for k in range(_PLACES) for d in (DType.float32, DType.int32)}


def _hoisted(m: Coded, count: int) -> tuple[Expr, list[Expr]]:
    """An element whose largest parts that so many neighbours share are loads of `_HOISTED`, and what these stand for."""
    inside = set(loads(m.code))
    parts: dict[Expr, Expr] = {}
    seen: set[int] = set()
    vector, place = Var("vector", ceildiv(m.inner.extent, count)), Var("place", as_int(count))

    def is_shared(e: Expr) -> bool:
        """Whether it is the same at any place of a vector, as a scale that is some bits of a byte is, too."""
        moved = rewrite(e, {m.inner: of(vector) * count + of(place)})
        return not any(reads(i, place) for part in walk(moved) for i in ints_of(part))

    def visit(e: Expr) -> None:
        if e.id in seen:
            return
        seen.add(e.id)
        read = loads(e)
        known = e.dtype in (DType.float32, DType.int32) and inside.isdisjoint(read)
        if read and known and len(parts) < _PLACES and is_shared(e):
            parts[e] = load(_HOISTED[len(parts), e.dtype], ())
        elif not isinstance(e, Load):
            for part in e.args:
                visit(part)

    visit(m.value)
    return rewrite(m.value, {}, None, parts), [*parts]


def _apart(value: Expr, code: Expr) -> bool:
    """Whether an element has loads of its own."""
    inside = set(loads(code))
    return any(ld not in inside and ld.node not in _HOISTED.values() for ld in loads(value))


def _placed(shared: str) -> dict[int, str]:
    """The texts of what was loaded before, as numbers. shared: the text of its bits."""
    return {n.id: f"{'asfloat' if d is DType.float32 else 'int'}({shared}[{k}])" for (k, d), n in _HOISTED.items()}


def _shared_bits(
    kernel: KernelBuilder, shared: Sequence[Expr], names: dict[Atom, str], at: Mapping[Atom, Int]
) -> tuple[str, str]:
    """The texts of two words with what neighbours share, and the statements before them."""
    e = Emitter(kernel, names, None, indent="        ")
    texts = [
        f"asuint({e.value(rewrite(x, at))})" if x.dtype is DType.float32 else f"uint({e.value(rewrite(x, at))})"
        for x in shared
    ]
    return ", ".join([*texts, *["0"] * (_PLACES - len(texts))]), e.text()


def _factored(value: Expr, code: Expr) -> tuple[Expr, Expr]:
    """An element as a product with what it shares with its neighbours; 1 if there is nothing."""
    if isinstance(value, Op) and value.op == "mul":
        for number, scale in (value.args, value.args[::-1]):
            places = any(ints_of(e) for e in walk(scale) if not isinstance(e, Load))
            if code not in walk(scale) and not places and not _apart(scale, code):
                return number, scale
    return value, const(1.0)


def _line8(kernel: KernelBuilder, m: Coded) -> str:
    """fetch8 and line8."""
    count = 2 * LANES
    words = count // elements_of_word(m)
    step, line = Var("step", ceildiv(m.inner.extent, count)), Var("line", m.column.extent)
    names = _named(line, step)
    value, shared = _hoisted(m, count)
    at: dict[Atom, Int] = {m.inner: of(step) * count, m.column: of(line)}
    affine = _affine(m, value, shared)
    functions = ""
    with _literal_sizes(kernel):
        first = m.words.fetched(kernel, "line", "step", words, 2)
        if affine is not None:
            bits, loads_text = _shared_affine(kernel, affine, shared, names, at)
            call = f"halves_of_codes{m.bits}<{affine.form}, {affine.table}>"
            made = ", ".join(f"{call}(words[{k}], {m.low}.0f, fetched.z, fetched.w)" for k in range(words))
            made = f"return uint4({made});" if words > 1 else f"return {made};"
        else:
            bits, loads_text = _shared_bits(kernel, shared, names, at)
            for part in range(2):
                word = f"words.x >> {part * LANES * m.bits}" if m.parts == 2 else f"words[{part}]"
                inner = of(step) * count + part * LANES
                text = _decoded(kernel, replace(m, value=value), word, names, inner, line, "fetched.zw")
                taken = "uint2 words, uint4 fetched, uint line, uint step"
                functions += f"    static float4 four{part}({taken})\n    {{\n{text}    }}\n"
            packed = ", ".join(f"{SHORT[m.dtype]}.pack({x})" for x in ("a.xy", "a.zw", "b.xy", "b.zw"))
            fours = ", ".join(f"{x} = four{part}(words, fetched, line, step)" for part, x in enumerate("ab"))
            made = f"float4 {fours};\n        return uint4({packed});"
    return (
        functions + "    static uint4 fetch8(uint i, uint line, uint step)\n    {\n"
        f"{loads_text}        return uint4({first}, {bits});\n    }}\n"
        "    static uint4 line8(uint4 fetched, uint line, uint step)\n    {\n"
        f"        uint2 words = {m.words.together('fetched.xy', 'step', words)}.xy;\n        {made}\n    }}\n"
    )


_EXACT = 2048
"""Up to which halves hold all integers. Codes become some by a difference from 1024."""


_WITH_OFFSET, _IN_HALVES, _LESS_ZERO = range(3)
"""Forms of `code_pair` in operands.slang."""


@dataclass(frozen=True)
class _Affine:
    """Codes times a scale, plus an offset, or less a zero point before: which of what neighbours share these are. table: of which
    codes stand for the numbers, 0 if they are the numbers.
    """

    scale: int
    other: int | None
    form: int
    table: int


def _affine(m: Coded, value: Expr, shared: Sequence[Expr]) -> _Affine | None:
    """What neighbours' codes are multiplied by and what is added to them, if that is all, and results are halves."""
    if m.dtype is not DType.float16 or m.low < -_EXACT // 2 or m.low + (1 << m.bits) > _EXACT:
        return None
    if isinstance(value, Op) and value.op == NARROW[DType.float16]:  # as storing halves does
        value = value.args[0]
    places = {load(_HOISTED[k, DType.float32], ()): k for k, e in enumerate(shared) if e.dtype is DType.float32}
    offset: int | None = None
    if isinstance(value, Op) and value.op == "add":
        value, added = value.args if value.args[1] in places else value.args[::-1]
        if added not in places:
            return None
        offset = places[added]
    numbers, scale = _factored(value, m.code)
    zero: int | None = None
    if offset is None and isinstance(numbers, Op) and numbers.op == "sub" and numbers.args[1] in places:
        numbers, zero = numbers.args[0], places[numbers.args[1]]
    table = _table_of(m, numbers)
    if scale not in places or table is None:
        return None
    if zero is not None:
        return _Affine(places[scale], zero, _LESS_ZERO, table)
    used = [shared[places[scale]], *([shared[offset]] if offset is not None else [])]
    return _Affine(places[scale], offset, _IN_HALVES if all(map(_is_half, used)) else _WITH_OFFSET, table)


def _table_of(m: Coded, numbers: Expr) -> int | None:
    """Of which table codes are looked up (`TABLE` in operands.slang), 0 if they are the numbers; None if they are neither."""
    formulas = [formula(m.code) for formula in TABLES.values()] if m.low == 0 else []
    return next((k for k, e in enumerate([cast_to(m.code, DType.float32), *formulas]) if e is numbers), None)


def _known_affine(m: Coded, value: Expr, shared: Sequence[Expr]) -> _Affine:
    found = _affine(m, value, shared)
    assert found is not None, "decoded by floats"
    return found


def _is_half(e: Expr) -> bool:
    return isinstance(e, Load) and e.node.dtype is DType.float16


def _shared_affine(
    kernel: KernelBuilder, affine: _Affine, shared: Sequence[Expr], names: dict[Atom, str], at: Mapping[Atom, Int]
) -> tuple[str, str]:
    """The texts of two words with a scale and what is added or subtracted, as halves if they are some, and the statements before
    them.
    """
    e = Emitter(kernel, names, None, indent="        ")
    pack = "Halves.pack(float2({}, 0.0f))" if affine.form == _IN_HALVES else "asuint({})"
    places = [affine.scale, *([affine.other] if affine.other is not None else [])]
    texts = [pack.format(e.value(rewrite(shared[k], at))) for k in places]
    return ", ".join([*texts, *["0"] * (2 - len(texts))]), e.text()


def _word_of_columns(kernel: KernelBuilder, m: Coded, size: int | None) -> str:
    """The word with the codes of four columns for a `part` of a `step`, of a `block` of so many steps if a size is given. Texels
    have four words.
    """
    found: list[str] = []
    for k, (node, width) in enumerate(zip(m.words.nodes, m.words.widths, strict=True)):
        fours = WORD // width // LANES  # of a word
        whole = size is None or size % fours == 0
        step = "step" if whole else f"(block * {size} + step)"
        before = f" + block * {size // fours}" if size is not None and whole else ""
        at = f"line * {m.per_line * m.parts // fours // _TEXEL}{before} + {step} / {fours}"
        texel = (
            f"asuint({kernel.bind(node, 'float4', texel=True)}[{at}])"
            if kernel.texel
            else f"uint4({kernel.bind(node, 'int4')}[{at}])"
        )
        if fours <= LANES:
            place = f"{step} % {fours} * {LANES // fours} + part / {fours}" if fours > 1 else "part"
            which = f"(part % {fours})"
        else:
            place = f"{step} / {fours // LANES} % {_TEXEL}"
            which = f"({step} % {fours // LANES} * {LANES} + part)"
        found.append(m.words.four(k, f"one_of({texel}, {place})", which))
    return " | ".join(found)


def _places(bits: int) -> list[int]:
    """Where the bits of four codes are in a word when they become numbers: the first ones are where they lie."""
    return [i * bits if (i + 1) * bits <= _MANTISSA else i * bits - WORD // 2 for i in range(LANES)]


def _powers(bits: int) -> str:
    """The text of the powers of two in which four codes become last bits."""
    return f"uint4({', '.join(f'{127 + _MANTISSA - p << _MANTISSA:#x}u' for p in _places(bits))})"


def _decoded(
    kernel: KernelBuilder,
    m: Coded,
    word: str,
    names: dict[Atom, str],
    inner: Int,
    line: Var,
    shared: str = "",
    powers: str = "",
) -> str:
    """Statements that return four elements: neighbours along K, or columns. shared: the text of what they share, if it was loaded
    before; powers: of `_powers`. Raises NotVectorizable.
    """
    lane = Var("lane", as_int(LANES))
    if m.by_columns:
        column, padded = of(line) * LANES + of(lane), inner
    else:
        column, padded = of(line), below(inner + of(lane), m.inner.extent)
    at: dict[Atom, Int] = {m.inner: padded, m.column: column}
    e = Emitter(kernel, names, of(lane), _placed(shared) if shared else None, indent="        ")
    e.uniform = {n.id for n in _HOISTED.values()}
    low = f" + {m.low}" if m.low > 0 else f" - {-m.low}" if m.low else ""
    code = rewrite(m.code, at)
    e.line(f"uint word = {word};")
    # As numbers, with neither shifts nor conversions: a code is among the last bits of a power of two.
    shifts = [i * m.bits for i in range(LANES)]
    turned = [s - p for s, p in zip(shifts, _places(m.bits), strict=True)]
    words = ", ".join(f"word >> {t}" if t else "word" for t in turned)
    masks = ", ".join(f"{(1 << m.bits) - 1 << p:#x}u" for p in _places(m.bits))
    numbers = ", ".join(f"{2 ** (_MANTISSA - p) - m.low}.0f" for p in _places(m.bits))
    e.line(f"uint4 bits = uint4({words}) & uint4({masks});")
    e.line(f"int4 code = int4(bits >> uint4({', '.join(map(str, _places(m.bits)))})){low};")
    e.name(code, "code")
    e.line(f"float4 number = asfloat(bits | {powers or _powers(m.bits)}) - float4({numbers});")
    e.name(cast_to(code, DType.float32), "number")
    e.line(f"return {e.value(rewrite(m.value, at))};")
    return e.text()


def parts_of(node: Node) -> int:
    """Fours of a step of a matrix, as `ILine4` counts; of a unit of `ILines`."""
    return node.parts if isinstance(node, Coded) else 1


def unit_of(node: Node) -> int:
    """Words that are whole fours."""
    return 1 if isinstance(node, Coded) else node.dtype.size
