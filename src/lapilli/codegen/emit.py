"""Renders scalar and integer expressions as Slang text.

An `Emitter` writes statements into a block and remembers the names of values, so that each is computed once. With `lanes` of 4
it computes four neighbouring elements at a time: every load must then be the same for all lanes, or read four neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Const, Expr, Index, Load, Op, Select, loads, reads, substitute, walk
from lapilli.ir.integer import (
    Atom,
    Extremum,
    Indirect,
    Int,
    IntLike,
    Monomial,
    Quotient,
    Remainder,
    Symbol,
    Var,
    as_int,
    is_nonnegative,
    of,
    product,
    weight,
)
from lapilli.ir.narrow import OPERATIONS
from lapilli.ir.node import Constant, Node
from lapilli.ir.scalar import OPS, VectorFunction
from lapilli.schedule.layout import Layout

LANES = 4
ALIGNMENT = 256
"""Bytes; every device binds a buffer from a multiple of them on."""
_HEAVY = 24
"""Weight of an integer expression from which it is computed once and has a name. Sizes that are quotients of sums of products of
sizes (the pieces of a long sum, in the gradient of a convolution of open sizes) come in each other's operands several times, and
an unrolled search reads at places made of them at every step: written out, they made kernels of up to nine megabytes."""


def _is_size(a: Atom) -> bool:
    """Whether an atom is the same in all invocations: made of sizes."""
    return all(isinstance(b, Symbol) for b in of(a).atoms())


class NotVectorizable(Exception):
    """Four neighbouring elements cannot be computed together."""


@dataclass
class BufferBinding:
    """A storage buffer of a kernel: the tensor, and the element type to read it as; for a tensor bound in parts, which part."""

    node: Node
    type: str  # element type in Slang
    written: bool = False
    texel: bool = False  # a uniform texel buffer: four elements a fetch
    part: int = 0
    parts: int = 1
    start: int = 0  # bytes of the value before what is bound, a multiple of ALIGNMENT
    coherent: bool = False  # work groups see what others wrote

    def to(self, node: Node) -> BufferBinding:
        """The same binding of another tensor."""
        if node is self.node:
            return self
        return BufferBinding(
            node, self.type, self.written, self.texel, self.part, self.parts, self.start, self.coherent
        )


BFLOAT = "uint16_t"
"""How bfloat16 is stored where 16-bit types may be used: as its bits."""
WHOLE = ("float", "half", "int", BFLOAT)
"""What is stored as one number of a buffer each."""
CODE, BYTE = "uint8", "int8"
"""How codes and integers of a byte are stored: four in a word, which every device can read and write. No buffer has these types."""
IN_FOURS = (CODE, BYTE)
BYTE_TYPES = (DType.int8, DType.uint8)
CODES = "uint4"
"""What a texel of four codes is for kernels."""


def vector_of(kind: str) -> str:
    """The Slang type of four neighbours that are stored as `kind`."""
    return "uint2" if kind == BFLOAT else "uint" if kind in IN_FOURS else f"{kind}4"


def converted(kind: str, text: str, lanes: int = 1, least: str = "0") -> str:
    """The text of a number, or of four, as it is stored: see `stored_as` and `vector_of`. least: the text of the least code."""
    if kind == CODE:
        return f"word_of_codes({text}, {least})" if lanes > 1 else f"uint(int({text}) - ({least}))"
    if kind == BYTE and lanes > 1:
        return f"word_of_bytes({text})"
    if kind == "int2":
        return f"int2({text}, {text} >> 31)"
    if kind == BFLOAT:
        return f"{BFLOAT}(bfloat16_bits({text}))" if lanes == 1 else f"bfloat16_words({text})"
    return f"{kind if lanes == 1 else vector_of(kind)}({text})"


def declaration(number: int, name: str, b: BufferBinding) -> str:
    """The Slang text of a binding."""
    kind = "RWStructuredBuffer" if b.written else "Buffer" if b.texel else "StructuredBuffer"
    coherent = "globallycoherent " if b.coherent else ""
    return f"[[vk::binding({number}, 0)]] {coherent}{kind}<{b.type}> {name};"


def declarations(bindings: Sequence[BufferBinding]) -> list[str]:
    """The lines that declare the buffers of a kernel."""
    return [declaration(k, f"b{k}", b) for k, b in enumerate(bindings)]


@dataclass
class KernelBuilder:
    """The state shared by all generated kernels: bindings and parameters, collected while the code is written."""

    layouts: dict[int, Layout]
    half: bool  # 16-bit types may be used
    texel: bool = False  # vectors are read through texel buffers
    sizes_as_params: bool = False  # sizes become parameters, so that one kernel serves many shapes
    whole_sizes: bool = False  # what is made of sizes alone is one parameter, for there may be fewer of these
    special: bool = False  # functions of lapilli_special.slang are used
    bindings: list[BufferBinding] = field(default_factory=list)
    params: list[tuple[str, Int]] = field(default_factory=list)

    def bind(
        self, node: Node, type: str, written: bool = False, texel: bool = False, coherent: bool = False, start: int = 0
    ) -> str:
        for k, b in enumerate(self.bindings):
            if b.node is node and (b.type, b.written, b.texel) == (type, written, texel):
                return f"b{k}"
        self.bindings.append(BufferBinding(node, type, written, texel, start=start, coherent=coherent))
        return f"b{len(self.bindings) - 1}"

    def read_vector(self, node: Node, index: str) -> str:
        """The text of four neighbours, as float4 or int4. index: the text of their place, in fours."""
        kind = stored_as(node.dtype, self.half)
        if kind == CODE and self.texel:
            return f"codes_of_texel({self.bind(node, CODES, texel=True)}[{index}], {self.number(node.least)})"
        if kind == CODE:
            return f"codes_of_word({self.bind(node, 'uint')}[{index}], {self.number(node.least)})"
        if self.texel and kind in ("float", "half"):
            return f"{self.bind(node, 'float4', texel=True)}[{index}]"
        if self.texel and kind == BFLOAT and product(node.shape) % 8 == 0:  # a texel of 16 bytes has eight
            return f"bfloat16_of_texel({self.bind(node, 'float4', texel=True)}[({index}) / 2], {index})"
        text = f"{self.bind(node, vector_of(kind))}[{index}]"
        return f"from_bfloat16_words({text})" if kind == BFLOAT else f"float4({text})" if kind == "half" else text

    def param(self, value: IntLike, name: str = "") -> str:
        """A size as text: a literal if it is constant, else a member of the parameter block."""
        v = as_int(value)
        if v.value is not None:
            return self.number(v.value)
        return self.runtime(v, name)

    def number(self, value: int) -> str:
        return self.runtime(value) if self.sizes_as_params and abs(value) > 4 else str(value)

    def runtime(self, value: IntLike, name: str = "") -> str:
        """A member of the parameter block, even for a constant: one kernel then serves many sizes."""
        v = as_int(value)
        for known, i in self.params:
            if i == v and (not name or known == name):
                return f"P.{known}"
        known = name or f"p{len(self.params)}"
        self.params.append((known, v))
        return f"P.{known}"

    def imports(self) -> list[str]:
        return ["import lapilli_math;", *(["import lapilli_special;"] if self.special else [])]

    def header(self) -> str:
        lines = [*self.imports(), *declarations(self.bindings)]
        if self.params:
            lines.append("struct Params { " + " ".join(f"int {name};" for name, _ in self.params) + " };")
            lines.append("static Params P;")
        return "\n".join(lines) + "\n"

    def entry(self, size: tuple[int, int, int], body: str) -> str:
        """The entry point. `gid`: work group; `tid`: invocation in it; `li`: its linear index."""
        uniform = ", uniform Params params" if self.params else ""
        start = "    P = params;\n" if self.params else ""
        return (
            f'[shader("compute")]\n[numthreads({size[0]}, {size[1]}, {size[2]})]\n'
            f"void main(uint3 gid : SV_GroupID, uint3 tid : SV_GroupThreadID, uint li : SV_GroupIndex{uniform})\n"
            f"{{\n{start}{body}}}\n"
        )


def stored_as(dtype: DType, half: bool) -> str:
    """The Slang type of a buffer's elements; sub-word types that the device lacks become words."""
    if dtype is DType.float32:
        return "float"
    if dtype is DType.float16 and half:
        return "half"
    if dtype is DType.bfloat16 and half:
        return BFLOAT
    if dtype is DType.int64:
        return "int2"
    if dtype is DType.code:
        return CODE
    return "int" if dtype is DType.int32 else "uint"


_TYPES = {DType.float32: "float", DType.int32: "int", DType.bool: "bool"}
_INFINITE = 2.0**128 - 2.0**103  # what is rounded to infinity in 32 bits begins here


def literal(value: float | int | bool, dtype: DType) -> str:
    if dtype is DType.bool:
        return "true" if value else "false"
    if dtype is DType.int32:
        return str(int(value)) if value > -(2**31) else "(-2147483647 - 1)"
    v = float(value)
    if math.isnan(v):
        return "asfloat(0x7fc00000)"
    if abs(v) >= _INFINITE:
        return "asfloat(0x7f800000)" if v > 0 else "asfloat(0xff800000)"
    return f"{v!r}f" if "e" in repr(v) or "." in repr(v) else f"{v!r}.0f"


def _is_search(computed: Indirect, lane: Atom) -> bool:
    """Whether an index that differs between lanes comes from several dependent loads."""
    if not reads(of(computed), lane):
        return False
    nested = (e for e in walk(computed.expr) if isinstance(e, Load))
    return any(isinstance(a, Indirect) for e in nested for i in e.index for a in i.atoms())


def lane_steps(offset: Int, lane: Atom) -> list[int | None]:
    """Offsets of lanes 1 to 3 from lane 0; None if they vary."""
    if not any(isinstance(a, Indirect) for a in offset.atoms()):
        step = offset.step(lane)
        if step is not None:
            return [n * step for n in range(1, LANES)]
    first = substitute(offset, {lane: 0})
    return [(substitute(offset, {lane: n}) - first).value for n in range(1, LANES)]


_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}


def _with_zero(op: str, x: str) -> str:
    """A comparison of a float with zero, by its bits."""
    simple = {"ne": "nonzero({0})", "eq": "!nonzero({0})", "gt": "above({0})", "lt": "below({0})",
              "ge": "or(above({0}), !nonzero({0}))", "le": "or(below({0}), !nonzero({0}))"}  # fmt: skip
    return simple[op].format(x)


def _with_infinity(op: str, x: str, positive: bool) -> str:
    same = f"and(is_inf({x}), {'!' if positive else ''}below({x}))"
    if op in ("eq", "ne"):
        return same if op == "eq" else f"!{same}"
    if op == ("ge" if positive else "le"):
        return same
    if op == ("gt" if positive else "lt"):
        return f"and({same}, !{same})"
    beyond = f"is_nan({x})" if op in ("ge", "le") else f"or(is_nan({x}), {same})"
    return f"!{beyond}"


def _has_normal_reciprocal(divisor: Expr) -> bool:
    """Whether a compiler may multiply by 1 / divisor instead: the divisor is a constant whose reciprocal is not denormal."""
    return isinstance(divisor, Const) and (2.0**-126 <= abs(divisor.value) <= 2.0**126 or math.isinf(divisor.value))


def _extremum(op: str, e: Op, args: Sequence[str]) -> str:
    """Minimum or maximum; NaN wins."""
    for k in (1, 0):
        bound = e.args[k]
        if e.dtype is DType.float32 and isinstance(bound, Const) and not math.isnan(bound.value):
            if op == "max" and bound.value == 0 and math.copysign(1, bound.value) > 0:
                return f"positive({args[1 - k]})"
            return f"{op}_number({args[1 - k]}, {args[k]})"
    return f"{op}_any({args[0]}, {args[1]})"


class Emitter:
    """Writes a block of statements.

    names: names of variables (axis variables and symbols); lane: the variable 0..3 that enumerates the lanes, when vectorised;
    values: names of loads that are already computed (accumulators), by node id.
    """

    def __init__(
        self,
        kernel: KernelBuilder,
        names: dict[Atom, str],
        lane: Int | None = None,
        values: dict[int, str] | None = None,
        indent: str = "    ",
    ) -> None:
        self.kernel = kernel
        self.names = names
        self.lane = lane
        self.values = values or {}
        self.uniform: set[int] = set()  # of these values, those that are one scalar for all lanes
        self.lines: list[str] = []
        self.indent = indent
        self._known: list[dict[tuple[Expr, bool], str]] = [{}]  # keeps them: another of the same meaning is the same
        self._named: list[dict[str, str]] = [{}]  # heavy integers, by key
        self._counter = [0]
        self._constant: dict[Expr, bool] = {}

    # -- statements
    def line(self, text: str) -> None:
        self.lines.append(self.indent + text)

    def fresh(self) -> str:
        self._counter[0] += 1
        return f"v{self._counter[0]}"

    def name(self, e: Expr, text: str) -> None:
        """Registers existing text as a value's name, for all lanes."""
        self._known[0][e, self.lane is not None] = text

    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)

    def child(self) -> Emitter:
        """An emitter for a nested block, which sees the names of this one."""
        inner = Emitter(self.kernel, dict(self.names), self.lane, dict(self.values), self.indent + "    ")
        inner._known = [*self._known, {}]
        inner._named = [*self._named, {}]
        inner._counter = self._counter
        inner.uniform = set(self.uniform)
        return inner

    # -- integers
    def integer(self, value: IntLike) -> str:
        v = as_int(value)
        if self.kernel.whole_sizes:
            return self._by_strides(v)
        if v.weight < _HEAVY:
            return self._sum(v, self._atom)
        return self._once(v.key, lambda: self._by_strides(v))

    def _sum(self, v: Int, atom: Callable[[Atom], str]) -> str:
        """A sum of products, as it is written."""
        parts: list[str] = []
        for m, c in v.terms:
            factors = [atom(a) for a in m]
            if c == -1 and parts:
                parts.append("- " + " * ".join(factors))
                continue
            if c != 1:
                factors.insert(0, self.kernel.number(abs(c) if parts else c))
            sign = "" if not parts else ("- " if c < 0 else "+ ")
            parts.append(sign + " * ".join(factors))
        if v.const or not parts:
            number = self.kernel.number(abs(v.const) if parts else v.const)
            parts.append(number if not parts else f"{'-' if v.const < 0 else '+'} {number}")
        return (
            parts[0] if len(parts) == 1 and "-" not in parts[0] and "*" not in parts[0] else "(" + " ".join(parts) + ")"
        )

    def _by_strides(self, v: Int) -> str:
        """A heavy sum as places by strides. A stride is a polynomial of sizes, multiplied out; it and all quotients have names."""
        strides: dict[Monomial, Int] = {}
        for m, c in (*v.terms, ((), v.const)):
            place, size = tuple(a for a in m if not _is_size(a)), tuple(a for a in m if _is_size(a))
            strides[place] = strides.get(place, as_int(0)) + (Int(((size, c),), 0) if size else c)
        parts = []
        for place, stride in strides.items():
            factors = [self._named_atom(a) for a in place]
            if self.kernel.whole_sizes and stride.value is None:
                factors.insert(0, self.kernel.param(stride))
            elif place and stride.weight > 1:
                factors.insert(0, self._once(stride.key, partial(self._sum, stride, self._named_atom)))
            elif stride != (1 if place else 0):
                factors.insert(0, self._sum(stride, self._named_atom))
            if factors:
                parts.append(" * ".join(factors))
        return "(" + " + ".join(parts or ["0"]) + ")"

    def _once(self, key: str, code: Callable[[], str]) -> str:
        """The name of an integer, which is computed where it is first asked for."""
        for scope in reversed(self._named):
            if key in scope:
                return scope[key]
        value, name = code(), self.fresh()
        self.line(f"int {name} = {value};")
        self._named[-1][key] = name
        return name

    def _atom(self, a: Atom) -> str:
        known = self.names.get(a)
        if known is not None:
            return known
        if isinstance(a, Symbol):
            return self.kernel.param(Int((((a,), 1),), 0), a.name)
        if weight(a) < _HEAVY:
            return self._combination(a)
        return self._once(a.key, lambda: self._combination(a))

    def _named_atom(self, a: Atom) -> str:
        return (
            self._once(a.key, lambda: self._atom(a))
            if isinstance(a, Quotient | Remainder | Extremum)
            else self._atom(a)
        )

    def _combination(self, a: Atom) -> str:
        if isinstance(a, Quotient | Remainder):
            op, slow = ("/", "floordiv") if isinstance(a, Quotient) else ("%", "floormod")
            if is_nonnegative(a.x) and is_nonnegative(a.y):
                return f"int(uint({self.integer(a.x)}) {op} uint({self.integer(a.y)}))"
            return f"{slow}({self.integer(a.x)}, {self.integer(a.y)})"
        if isinstance(a, Extremum):
            return f"{a.op}_any({self.integer(a.x)}, {self.integer(a.y)})"
        if isinstance(a, Indirect):
            return self.scalar(a.expr)
        assert isinstance(a, Var)
        raise KeyError(f"axis variable {a} has no name in this kernel")

    def places(self, within: Sequence[tuple[Int, Int]], axes: Mapping[Atom, Int]) -> Iterator[tuple[str, str]]:
        """The texts of computed places and of their sizes, of a task's `within` at some axes. Raises NotVectorizable."""
        for place, size in within:
            i = substitute(place, axes)
            if self.lane is not None and reads(i, next(iter(self.lane.atoms()))):
                raise NotVectorizable("places are computed one by one")
            yield self.integer(i), self.kernel.param(size)

    # -- elements
    def scalar(self, e: Expr) -> str:
        """The text of a value that is the same for all lanes."""
        if self.lane is None:
            return self.value(e)
        return self._emit(e, 1)

    def value(self, e: Expr) -> str:
        """The text of a value, for all lanes."""
        return self._emit(e, 1 if self.lane is None else LANES)

    def ahead(self, e: Expr, constants: bool = True) -> None:
        """Computes the parts of a value that read memory and depend on none of `values`; the value itself finds them later.
        constants: also those that read constants alone.
        """
        if isinstance(e, Const | Index | Select):  # what a select reads may be there only where it reads it
            return
        if self._waits(e):
            for a in e.args:
                self.ahead(a, constants)
        elif any(constants or not isinstance(ld.node, Constant) for ld in loads(e)):
            self.value(e)

    def ahead_of(self, i: Int) -> None:
        """The same for an integer."""
        if i.computed and not any(self._waits(a.expr) for a in i.computed):
            self.integer(i)

    def _waits(self, e: Expr) -> bool:
        """Whether a value depends on one of `values`."""
        return any(ld.node.id in self.values for ld in loads(e))

    def _type(self, dtype: DType, lanes: int) -> str:
        return _TYPES[dtype] + ("" if lanes == 1 else str(lanes))

    def _splat(self, text: str, dtype: DType, lanes: int) -> str:
        return text if lanes == 1 else f"{self._type(dtype, lanes)}({text})"

    def _emit(self, e: Expr, lanes: int) -> str:
        for scope in reversed(self._known):
            if (e, lanes > 1) in scope:
                return scope[e, lanes > 1]
        if isinstance(e, Const):
            return self._splat(literal(e.value, e.dtype), e.dtype, lanes)
        if isinstance(e, Load) and e.node.id in self.values:
            text = self.values[e.node.id]
            if e.node.id in self.uniform:
                return self._splat(text, e.dtype, lanes)
            if lanes == 1 and self.lane is not None:
                raise NotVectorizable("a result of each lane is used as an index")
            return text
        if isinstance(e, Select):
            text = self._select(e, lanes)
        else:
            code = (
                self._load(e, lanes)
                if isinstance(e, Load)
                else self._index(e, lanes)
                if isinstance(e, Index)
                else self._op(e, lanes)
            )
            text = self.fresh()
            self.line(f"{self._type(e.dtype, lanes)} {text} = {code};")
        self._known[-1][e, lanes > 1] = text
        return text

    def _index(self, e: Index, lanes: int) -> str:
        if lanes == 1 or self.lane is None:
            return self.integer(e.value)
        if not reads(e.value, next(iter(self.lane.atoms()))):
            return f"int4({self.integer(e.value)})"
        return f"int4({', '.join(map(self.integer, self._of_lanes(e.value)))})"

    def _of_lanes(self, i: Int) -> list[Int]:
        """An integer in each lane."""
        if self.lane is None:
            return [i]
        lane = next(iter(self.lane.atoms()))
        return [substitute(i, {lane: n}) for n in range(LANES)]

    def _select(self, e: Select, lanes: int) -> str:
        if self.lane is not None and lanes > 1:
            lane = next(iter(self.lane.atoms()))
            if any(
                reads(g, lane) and any(substitute(g, {lane: n}) != substitute(g, {lane: 0}) for n in range(1, LANES))
                for g in e.guards
            ):
                raise NotVectorizable("a guard differs between lanes")
            guards = [substitute(g, {lane: 0}) for g in e.guards]
        else:
            guards = list(e.guards)
        text = self.fresh()
        condition = " && ".join(f"{self.integer(g)} >= 0" for g in guards)
        kind = self._type(e.dtype, lanes)
        other_constant = isinstance(e.other, Const)
        self.line(f"{kind} {text}{' = ' + self._emit(e.other, lanes) if other_constant else ''};")
        then = self.child()
        then.line(f"{text} = {then._emit(e.then, lanes)};")
        self.line(f"if ({condition})")
        self.line("{")
        self.lines += then.lines
        self.line("}")
        if not other_constant:
            other = self.child()
            other.line(f"{text} = {other._emit(e.other, lanes)};")
            self.line("else")
            self.line("{")
            self.lines += other.lines
            self.line("}")
        return text

    def _op(self, e: Expr, lanes: int) -> str:
        assert isinstance(e, Op)
        args = [self._emit(a, lanes) for a in e.args]
        if self._is_narrow_already(e):
            return args[0]
        if e.op in _WRITERS:
            return _WRITERS[e.op](self, e, args, lanes)
        slang = OPS[e.op].slang
        return slang.format(*args) if isinstance(slang, str) else self._function(slang, e, args, lanes)

    def _is_narrow_already(self, e: Op) -> bool:
        """Whether an operation rounds a value to the 16-bit type that it is stored in: 14 instructions that change nothing."""
        x = e.args[0]
        if not isinstance(x, Load) or x.node.id in self.values or not x.node.dtype.is_short_float:
            return False
        return e.op == OPERATIONS[x.node.dtype]

    def _function(self, f: VectorFunction, e: Op, args: Sequence[str], lanes: int) -> str:
        """A call of a vector function."""
        self.kernel.special |= f.module == "lapilli_special"
        if lanes > 1:
            return f"{f.name}({', '.join(args)})"
        kind = f"vector<{_TYPES[e.args[0].dtype]}, 1>"
        return f"{f.name}({', '.join(f'{kind}({a})' for a in args)})[0]"

    def _cast(self, e: Op, args: Sequence[str], lanes: int) -> str:
        if e.dtype is not DType.bool:
            return f"{self._type(e.dtype, lanes)}({args[0]})"
        if e.args[0].dtype is not DType.int32:
            return f"nonzero({args[0]})"
        return f"({args[0]} != {self._splat('0', DType.int32, lanes)})"

    def _product(self, e: Op, args: Sequence[str], lanes: int) -> str:
        if e.dtype is DType.float32:
            for k in (0, 1):
                if not isinstance(e.args[k], Const) and self._is_known(e.args[k]):
                    return self._function(VectorFunction("by_known"), e, (args[1 - k], args[k]), lanes)
        return f"({args[0]} * {args[1]})"

    def _difference(self, e: Op, args: Sequence[str], lanes: int) -> str:
        if e.dtype is DType.float32 and not any(isinstance(x, Const) for x in e.args):
            return f"difference({args[0]}, {args[1]})"
        return f"({args[0]} - {args[1]})"

    def _is_known(self, e: Expr) -> bool:
        """Whether a compiler of the kernel may know a value in a lane: it is made of constants, and of places that are constant
        in one."""
        found = self._constant.get(e)
        if found is None:
            if isinstance(e, Index):
                found = any(i.value is not None for i in self._of_lanes(e.value))
            else:
                args = e.args[1:] if isinstance(e, Op) and e.op == "where" else e.args  # both branches may be 0
                found = isinstance(e, Const) or (isinstance(e, Op) and all(map(self._is_known, args)))
            self._constant[e] = found
        return found

    def _extremum(self, e: Op, args: Sequence[str], lanes: int) -> str:
        return _extremum(e.op, e, args)

    def _reciprocal(self, e: Op, args: Sequence[str], lanes: int) -> str:
        return f"({self._splat('1.0f', e.dtype, lanes)} / {args[0]})"

    def _sign(self, e: Op, args: Sequence[str], lanes: int) -> str:
        kind = self._type(e.dtype, lanes)
        if e.dtype is not DType.int32:
            return f"({kind}(above({args[0]})) - {kind}(below({args[0]})))"
        zero = self._splat("0", DType.int32, lanes)
        return f"({kind}({args[0]} > {zero}) - {kind}({args[0]} < {zero}))"

    def _quotient(self, e: Op, args: Sequence[str], lanes: int) -> str:
        if e.dtype is DType.int32:
            return self._function(VectorFunction("intdiv_any"), e, args, lanes)
        if not isinstance(e.args[0], Const) and self._is_known(e.args[0]):
            return self._function(VectorFunction("of_known"), e, args, lanes)
        if _has_normal_reciprocal(e.args[1]):
            return f"({args[0]} / {args[1]})"
        return f"quotient({args[0]}, {args[1]})"

    def _is_nan(self, e: Op, args: Sequence[str], lanes: int) -> str:
        return "false" if e.args[0].dtype is DType.int32 else f"is_nan({args[0]})"

    def _compared(self, e: Op, args: Sequence[str], lanes: int) -> str:
        """A comparison; of floats, in a form that a compiler cannot replace by the negated opposite, which differs for NaN."""
        op, slang = e.op, OPS[e.op].slang
        assert isinstance(slang, str)
        text = slang.format(*args)
        if e.args[0].dtype is DType.int32:
            return text
        if any(isinstance(x, Const) and math.isnan(x.value) for x in e.args):
            return self._splat("true" if op == "ne" else "false", DType.bool, lanes)
        for bound, x, name in ((e.args[1], args[0], op), (e.args[0], args[1], _MIRRORED.get(op, op))):
            if isinstance(bound, Const) and bound.value == 0:
                return _with_zero(name, x)
            if isinstance(bound, Const) and abs(bound.value) >= _INFINITE:
                return _with_infinity(name, x, bound.value > 0)
        for a in dict.fromkeys(a for a, x in zip(args, e.args, strict=True) if not isinstance(x, Const)):
            text = f"or({text}, is_nan({a}))" if op == "ne" else f"and({text}, !is_nan({a}))"
        return text

    # -- memory
    def _load(self, e: Load, lanes: int) -> str:
        offset = self.kernel.layouts[e.node.id].offset(e.index)
        if self.lane is None or lanes == 1:
            return self.load_at(e.node, offset)
        lane = next(iter(self.lane.atoms()))
        if any(isinstance(a, Indirect) and _is_search(a, lane) for a in offset.atoms()):
            raise NotVectorizable("a long computation of an index would be repeated for every lane")
        first = substitute(offset, {lane: 0})
        steps = lane_steps(offset, lane)
        if all(s == 0 for s in steps):
            return self._splat(self.load_at(e.node, first), e.dtype, lanes)
        if steps == [1, 2, 3] and first % LANES == 0 and self._wide(e.node):
            return self.kernel.read_vector(e.node, self.integer(first // LANES))
        texts = [self.load_at(e.node, substitute(offset, {lane: n})) for n in range(LANES)]
        return f"{self._type(e.dtype, lanes)}({', '.join(texts)})"

    def _wide(self, node: Node) -> bool:
        return stored_as(node.dtype, self.kernel.half) in (*WHOLE, CODE)

    def load_at(self, node: Node, offset: Int) -> str:
        """The element at an offset, converted to its compute type."""
        dtype = node.dtype
        kind = stored_as(dtype, self.kernel.half)
        buffer = self.kernel.bind(node, "uint" if kind == CODE else kind)
        if kind in ("float", "int"):
            return f"{buffer}[{self.integer(offset)}]"
        if kind == "half":
            return f"float({buffer}[{self.integer(offset)}])"
        if kind == BFLOAT:
            return f"asfloat(uint({buffer}[{self.integer(offset)}]) << 16)"
        if dtype is DType.int64:
            return f"{buffer}[{self.integer(offset)}].x"
        per_word = 4 // dtype.size
        bits = 8 * dtype.size
        word = f"{buffer}[{self.integer(offset // per_word)}]"
        shift = offset % per_word
        raw = f"({word} >> (uint({self.integer(shift)}) * {bits}u))" if shift != 0 else f"({word})"
        if dtype is DType.float16:
            return f"unpackHalf2x16ToFloat({raw} & 0xffffu).x"
        if dtype is DType.bfloat16:
            return f"asfloat({raw} << 16)"
        if dtype is DType.bool:
            return f"(({raw} & 0xffu) != 0u)"
        if dtype is DType.uint8:
            return f"int({raw} & 0xffu)"
        if dtype is DType.code:
            return f"float(int({raw} & 0xffu) + ({self.kernel.number(node.least)}))"
        return f"(int({raw} << {32 - bits}u) >> {32 - bits})"


_WRITERS: dict[str, Callable[[Emitter, Op, Sequence[str], int], str]] = {
    "cast": Emitter._cast, "min": Emitter._extremum, "max": Emitter._extremum, "reciprocal": Emitter._reciprocal,
    "sign": Emitter._sign, "sub": Emitter._difference, "mul": Emitter._product, "div": Emitter._quotient, "isnan": Emitter._is_nan,
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), Emitter._compared),
}  # fmt: skip
"""Operations whose text depends on types, lanes or known operands; that of all others is in their row (`ir/scalar.py`)."""
