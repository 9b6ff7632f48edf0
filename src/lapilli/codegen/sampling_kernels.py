"""Kernels that draw an element of each row of logits (ir/draw.py, kernels/sampling.slang)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lapilli.codegen.emit import Emitter
from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.template import Context, KernelTemplate, simple_task
from lapilli.codegen.wrapper import Wrapper, with_sizes
from lapilli.ir.axes import unravel
from lapilli.ir.draw import Sampling
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, Load, const, load, loads, rewrite, select, unary
from lapilli.ir.integer import Int, Var, as_int, ceildiv, of, product, total
from lapilli.ir.narrow import OPERATIONS as NARROW
from lapilli.ir.node import Node
from lapilli.schedule.task import Task

_INVOCATIONS, _TEAM = 256, 128  # of a work group: of a piece, and of a whole row
_PIECES = {"gpu": 4096, "any": 8192}
"""Elements of a work group, by kind of target. Their probabilities are added as integers of 32 bits, in units of 2^-31 for each
element and of that squared: an element's is off by less than 2^-37 or 2^-35 of the largest. Software devices have few cores, and
every work group reads the histograms of all."""
_BUFFERS = 12  # of a step at most: logits and random words, three parameters, results of steps before it, and its own
_FLOPS = {"drawn": 60, "row": 240}  # of an element, about
_DRAWS = {"gpu": 4, "any": 1}  # of an invocation that are written out
_SLOT = 3 * _INVOCATIONS + 8  # words of a histogram, as in sampling.slang


def choose(task: Task, note: Sampling, ctx: Context) -> None:
    """Selects the template for the task of a draw, and its steps."""

    def known(e: Expr | None) -> Expr | None:
        return None if e is None else ctx.seen(e)

    seen = _Seen(
        note, ctx.seen(note.logit), known(note.temperature), known(note.top_k), known(note.top_p), known(note.word)
    )  # fmt: skip
    if ctx.target.invocations < _INVOCATIONS or ctx.target.bindings < _BUFFERS:
        task.template = _of_row(task, seen, ctx)
        return
    size = _PIECES[ctx.target.kind]
    rows, pieces = product([a.extent for a in note.rows]), ceildiv(note.element.extent, size)
    steps: list[Task] = []

    def step(name: str, width: int, reads: str, call: str, inputs: Sequence[Node | None]) -> Node:
        node = Node((rows, pieces, as_int(width)), DType.int32, f"{task.out.name}_{name}", task.out.origin)
        ctx.dense(node)
        made = simple_task(node, task.origins[:1], "a step of a draw")
        made.template = _Step(seen, tuple(inputs), reads, call, name)
        steps.append(made)
        return node

    best = step("best", 2, "L", f"best_of_piece<L, O, {size}>", ())
    drawn = None
    if seen.temperature is not None:
        kind, digits = _key_of(seen.logit)

        def histogram(part: int, digit: int, *inputs: Node | None) -> Node:
            call = f"bins_of_piece<L, C, W0, W1, W2, W3, O, {part}, {digit}, {digits}, {kind}, {size}>"
            return step(f"bins{part}{digit}", _SLOT, "LC", call, (best, *inputs))

        first = histogram(0, 0, None, None, None) if seen.top_k is not None or seen.top_p is not None else None
        by_k = by_p = first
        for digit in range(1, digits) if seen.top_k is not None else ():
            by_k = histogram(1, digit, None, by_k, None)
        for digit in range(1, digits) if seen.top_p is not None else ():
            by_p = histogram(2, digit, first, by_k, by_p)
        drawn = step(
            "drawn", 2, "LNC", f"draw_of_piece<L, N, C, W0, W1, W2, O, {digits}, {kind}, {size}, {_DRAWS[ctx.target.kind]}>",
            (best, by_k if seen.top_k is not None else None, by_p if seen.top_p is not None else None),
        )  # fmt: skip
    call = f"choose<C, W0, W1, T, {int(drawn is not None)}>"
    task.template = _Choice(seen, (best, drawn), "C", call, "choice", tuple(steps))


def _of_row(task: Task, seen: _Seen, ctx: Context) -> _Choice:
    """The template of a row in one work group. What it reads lies together where it would bind too many buffers."""
    kind, digits = _key_of(seen.logit)
    axes, steps = seen.note.rows, list[Task]()
    rows = product([a.extent for a in axes])
    row = total([of(a) * product([b.extent for b in axes[k + 1 :]]) for k, a in enumerate(axes)])

    def in_memory(name: str, width: Int, words: Callable[[Int], Expr]) -> Node:
        """What is computed for each row and place, in memory."""
        i, j = Var("row", rows), Var("place", width)
        value = rewrite(words(of(j)), unravel(of(i), axes))
        node = Node((rows, width), value.dtype, f"{task.out.name}_{name}", task.out.origin)
        ctx.dense(node)
        steps.append(
            Task(node, (i, j), (of(i), of(j)), value, origins=task.origins[:1], reason="what a draw reads, together")
        )
        return node

    def reads(*read: Expr | None) -> int:
        return len({ld.node.id for e in read if e is not None for ld in loads(e)})

    given = seen.temperature, seen.top_k, seen.top_p
    if reads(*given) > 1:
        words = [const(0) if e is None else e if e.dtype is DType.int32 else unary("as_int", e) for e in given]
        node = in_memory("given", as_int(3), lambda j: select([-j], words[0], select([1 - j], words[1], words[2])))
        word = [load(node, [row, as_int(k)]) for k in range(3)]
        kept = [
            None if e is None else w if e.dtype is DType.int32 else unary("as_float", w)
            for e, w in zip(given, word, strict=True)
        ]
        seen = replace(seen, temperature=kept[0], top_k=kept[1], top_p=kept[2])
    element = seen.note.element

    def in_one(name: str, e: Expr) -> Expr:
        if reads(e) <= 1:
            return e
        return load(in_memory(name, element.extent, lambda j: rewrite(e, {element: j})), [row, of(element)])

    word_of = None if seen.word is None else in_one("word", seen.word)
    seen = replace(seen, logit=in_one("logit", seen.logit), word=word_of)
    call = f"draw_of_row<L, N, C, T, {digits}, {kind}, {int(seen.temperature is not None)}>"
    return _Choice(seen, (), "LNC", call, "row", tuple(steps))


def _key_of(logit: Expr) -> tuple[str, int]:
    """How the keys of logits are made, and the number of their digits: fewer if they are kept in 16 bits."""
    for dtype, kind in ((DType.float16, "HALVES"), (DType.bfloat16, "BFLOATS")):
        rounded = getattr(logit, "op", None) == NARROW[dtype]
        if rounded or (isinstance(logit, Load) and logit.node.dtype is dtype):
            return kind, 2
    return "FLOATS", 4


@dataclass(frozen=True)
class _Seen:
    """What is known of a row and its elements, in terms of values with memory."""

    note: Sampling
    logit: Expr
    temperature: Expr | None
    top_k: Expr | None
    top_p: Expr | None
    word: Expr | None


@dataclass(frozen=True)
class _Step(KernelTemplate):
    """inputs: results of earlier steps, W0, W1, ...; None where the kernel reads none. reads: which of L, the logits, N, their
    random words, and C, the parameters. call: the function of sampling.slang.
    """

    seen: _Seen
    inputs: tuple[Node | None, ...]
    reads: str
    call: str
    name: str

    @property
    def operands(self) -> list[Node]:
        seen = self.seen
        given: dict[str, list[Expr | None]] = {
            "L": [seen.logit],
            "N": [seen.word],
            "C": [seen.temperature, seen.top_k, seen.top_p],
        }
        read = [e for kind in self.reads for e in given[kind] if e is not None]
        made = [n for n in self.inputs if n is not None]
        return list({n.id: n for n in (*made, *(ld.node for e in read for ld in loads(e)))}.values())

    def write(self, task: Task, ctx: Context) -> KernelSource:
        return with_sizes(ctx, lambda sizes_as_params: self._write(task, ctx, sizes_as_params))

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        note = self.seen.note
        w = Wrapper(task, ctx, "sampling", sizes_as_params=sizes_as_params)
        rows, pieces = product([a.extent for a in note.rows]), ceildiv(note.element.extent, _PIECES[ctx.target.kind])
        w.params(n=note.element.extent, pieces=pieces)
        if "L" in self.reads:
            w.structs.append(self._function(w, "L : ILogits", "float at(uint row, uint i)", self.seen.logit))
        if "N" in self.reads:
            word = const(0) if self.seen.word is None else self.seen.word
            w.structs.append(self._function(w, "N : IRandom", "int word(uint row, uint i)", word))
        if "C" in self.reads:
            self._choices(w)
        for k, node in enumerate(self.inputs):
            text = "0" if node is None else f"uint({w.kernel.bind(node, 'int')}[i])"
            w.structs.append(f"struct W{k} : IWords\n{{\n    static uint load(uint i) {{ return {text}; }}\n}};\n")
        self._results(w)
        groups = (pieces if self.name not in ("choice", "row") else as_int(1), as_int(1), rows)
        size = _TEAM if self.name == "row" else _INVOCATIONS
        written = w.finish(f"{self.call}(P.t, gid, li);", groups, (size, 1, 1), f"sample_{self.name}", "SamplingParams")
        written.shared = 4 * _INVOCATIONS * (5 if self.name == "row" else 7 if "bins" in self.name else 4) + 32
        written.flops = rows * note.element.extent * _FLOPS.get(self.name, 20 if "bins" in self.name else 1)
        return written

    def _function(self, w: Wrapper, struct: str, signature: str, e: Expr) -> str:
        """A struct with one function of a row, and of an element."""
        return f"struct {struct}\n{{\n{self._method(w, signature, e)}}};\n"

    def _method(self, w: Wrapper, signature: str, e: Expr) -> str:
        emitter, text = self._emitted(w, e)
        return f"    static {signature}\n    {{\n{emitter.text()}        return {text};\n    }}\n"

    def _emitted(self, w: Wrapper, e: Expr, values: dict[int, str] | None = None) -> tuple[Emitter, str]:
        note = self.seen.note
        row = Var("row", product([a.extent for a in note.rows]))
        emitter = Emitter(w.kernel, {row: "int(row)", note.element: "int(i)"}, None, values, "        ")
        return emitter, emitter.value(rewrite(e, unravel(of(row), note.rows)))

    def _choices(self, w: Wrapper) -> None:
        given = (
            ("float temperature(uint row)", self.seen.temperature, const(0.0)),
            ("int top_k(uint row)", self.seen.top_k, const(0)),
            ("float top_p(uint row)", self.seen.top_p, const(1.0)),
        )
        methods = "".join(self._method(w, signature, other if e is None else e) for signature, e, other in given)
        w.structs.append(f"struct C : IParameters\n{{\n{methods}}};\n")

    def _results(self, w: Wrapper) -> None:
        buffer = w.kernel.bind(w.task.out, "int", written=True)
        w.structs.append(
            f"struct O : IOutput\n{{\n    static void store(uint i, uint word) {{ {buffer}[i] = int(word); }}\n}};\n"
        )


@dataclass(frozen=True)
class _Choice(_Step):
    """The last step, which stores the result."""

    made: tuple[Task, ...]

    @property
    def steps(self) -> tuple[Task, ...]:
        return self.made

    def _results(self, w: Wrapper) -> None:
        note = self.seen.note
        assert w.task.reduction is not None
        row = Var("row", product([a.extent for a in note.rows]))
        emitter = Emitter(w.kernel, {row: "int(row)"}, None, {w.task.reduction.id: "token"}, "        ")
        w.store(emitter, unravel(of(row), note.rows))
        w.structs.append(
            f"struct T : IToken\n{{\n    static void store(uint row, int token)\n    {{\n{emitter.text()}    }}\n}};\n"
        )
