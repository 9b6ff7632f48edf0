"""Writes the bytes of a program file from scheduled kernels."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import flatbuffers
import numpy as np
import numpy.typing as npt

import lapilli.program.schema as fb
from lapilli.codegen.emit import CODES, BufferBinding
from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.parts import place
from lapilli.errors import CompileError
from lapilli.format.container import aligned, to_bytes
from lapilli.ir.dtype import DType
from lapilli.ir.integer import (
    Atom,
    Extremum,
    Int,
    Quotient,
    Remainder,
    Symbol,
    as_int,
)
from lapilli.ir.node import Constant, Graph, Input, Node, State, nbytes, reading
from lapilli.schedule.concatenate import Window
from lapilli.schedule.order import Order, commands
from lapilli.schedule.plan import memory_of
from lapilli.schedule.task import Task
from lapilli.target import Target, joined

Array = npt.NDArray[Any]
_FEATURE: dict[str, int] = {name: bit for name, bit in vars(fb.Feature).items() if not name.startswith("_")}
_OPERATION: dict[str, int] = {n: bit for n, bit in vars(fb.SubgroupOperation).items() if not n.startswith("_")}

_SAMPLE = 61  # evenly spread bytes of a constant that are compared before all of it
_MOST_SYMBOLS, _MOST_TENSORS = 1024, 4096
"""Of a method, in a file (docs/format.md)."""
_IN_AND_OUT = 2
"""Bindings of a kernel that reads one value whole and writes another."""
_MOST_RANGE = 1 << 31
"""A cap on the bytes that a device must bind at once for a plan that binds values of dynamic size whole, if another plan binds
them in parts: their bounds may be far larger than the sizes that occur.
"""


@dataclass(frozen=True)
class PlanSource:
    """The source of one plan: kernels, by output of their task.

    outputs: `Graph.written`. stored: results that are stored in a state, by id. windows: results that are part of another value's
    memory. open_range: size in bytes of the largest value with a bound, if the next plan binds it in parts. rounded: results that
    are inputs rounded to float16, by id.
    """

    target: Target
    order: Order
    kernels: Mapping[int, KernelSource]
    outputs: Sequence[Node]
    stored: Mapping[int, State] = field(default_factory=dict)
    windows: Mapping[int, Window] = field(default_factory=dict)
    open_range: int = 0
    rounded: Collection[int] = ()


class _Pool:
    """The expression pool of a method: every integer expression once, operands first."""

    _OPS = {"add": 2, "mul": 4, "floordiv": 5, "mod": 6, "min": 7, "max": 8}  # noqa: RUF012

    def __init__(self) -> None:
        self.exprs: list[Any] = []
        self.known: dict[tuple[int, int, int, int], int] = {}
        self.memo: dict[str, int] = {}
        self.symbols: dict[Atom, int] = {}

    def _add(self, op: int, value: int = 0, a: int = 0, b: int = 0) -> int:
        key = (op, value, a, b)
        if key not in self.known:
            entry = fb.ExprT()
            entry.op, entry.value, entry.a, entry.b = op, value, a, b
            self.known[key] = len(self.exprs)
            self.exprs.append(entry)
        return self.known[key]

    def __call__(self, x: Int | int) -> int:
        v = as_int(x)
        found = self.memo.get(v.key)
        if found is None:
            found = self.memo[v.key] = self._sum(v)
        return found

    def _sum(self, v: Int) -> int:
        total: int | None = None
        for m, c in v.terms:
            term: int | None = None if c == 1 else self._add(0, c)
            for a in m:
                atom = self._atom(a)
                term = atom if term is None else self._add(self._OPS["mul"], 0, term, atom)
            assert term is not None
            total = term if total is None else self._add(self._OPS["add"], 0, total, term)
        if total is None:
            return self._add(0, v.const)
        return self._add(self._OPS["add"], 0, total, self._add(0, v.const)) if v.const else total

    def _atom(self, a: Atom) -> int:
        if isinstance(a, Symbol):
            return self._add(1, self.symbols[a])
        if isinstance(a, Quotient | Remainder):
            return self._add(self._OPS["floordiv" if isinstance(a, Quotient) else "mod"], 0, self(a.x), self(a.y))
        assert isinstance(a, Extremum), f"{a!r} is no size"
        return self._add(self._OPS[a.op], 0, self(a.x), self(a.y))


@dataclass(eq=False)
class _Part:
    """A part of the data section. tables: those of the structure that say where it begins; address: of a constant, in the memory
    of this process."""

    chunk: bytes | memoryview
    tables: list[fb.ConstantT | fb.KernelT]
    address: int | None = None


def _lay_out(parts: Sequence[_Part]) -> list[bytes | memoryview]:
    """Gives all parts their places, and returns what is written. A constant that is a part of another one, such as some rows of a
    weight, lies there.
    """
    inside = _inside(parts)
    offsets: dict[_Part, int] = {}
    end = 0
    for p in parts:
        if p not in inside:
            offsets[p] = aligned(end)
            end = offsets[p] + len(p.chunk)
    for p in parts:
        whole, first = inside.get(p, (p, 0))
        for table in p.tables:
            if isinstance(table, fb.ConstantT):
                table.offset = offsets[whole] + first
            else:
                table.codeOffset = offsets[whole] + first
    return [p.chunk for p in parts if p not in inside]


def _inside(parts: Sequence[_Part]) -> dict[_Part, tuple[_Part, int]]:
    """The constants whose memory is a part of another one's: which, and where it begins there; if a part of a file may."""
    found: dict[_Part, tuple[_Part, int]] = {}
    whole: _Part | None = None
    known = [(p.address, -len(p.chunk), k) for k, p in enumerate(parts) if p.address is not None and len(p.chunk)]
    for address, size, k in sorted(known):
        if whole is not None and whole.address is not None:
            first = address - whole.address
            if first - size <= len(whole.chunk):
                if first == aligned(first):
                    found[parts[k]] = whole, first
                continue
        whole = parts[k]
    return found


@dataclass
class Writer:
    """Collects constants, states, kernels and plans of a program; `bytes` writes the file.

    host_operators: names of the operators that torch computes on the CPU, between the methods."""

    parts: list[_Part] = field(default_factory=list)  # of the data section, in order
    constants: dict[int, int] = field(default_factory=dict)  # id of the array -> index
    contents: dict[tuple[DType, tuple[int, ...], bytes], list[tuple[int, Array]]] = field(default_factory=dict)
    kernels: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)  # by source and views of buffers
    codes: dict[str, _Part] = field(default_factory=dict)  # by source
    states: dict[str, int] = field(default_factory=dict)
    host_operators: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.program = fb.ProgramT()
        self.program.constants, self.program.kernels, self.program.methods = [], [], []
        self.program.metadata, self.program.states = [], []

    def constant(self, node: Constant) -> int:
        key = id(node.value)
        if key not in self.constants:
            self.constants[key] = self.array(node.name, node.dtype, node.value)
        return self.constants[key]

    def array(self, name: str, dtype: DType, value: Array) -> int:
        """Writes a constant from an array (bfloat16 as its bits); equal ones are written once. Returns its index."""
        array = np.ascontiguousarray(value).reshape(np.shape(value))
        raw = array.reshape(-1).view(np.uint8)
        sample = raw[:: max(1, raw.size // _SAMPLE)].tobytes()
        alike = self.contents.setdefault((dtype, array.shape, sample), [])
        for number, other in alike:
            if np.array_equal(raw, other):
                return number
        c = fb.ConstantT()
        c.name, c.dtype, c.shape, c.size = name, dtype.value, list(array.shape), array.nbytes
        self.parts.append(_Part(raw.data, [c], raw.__array_interface__["data"][0]))
        alike.append((len(self.program.constants), raw))
        self.program.constants.append(c)
        return alike[-1][0]

    def state(self, node: State) -> int:
        """Writes a state, once for all methods and plans that use its name. Returns its index."""
        if node.name not in self.states:
            array = np.ascontiguousarray(node.value)
            s = fb.StateT()
            s.name, s.dtype, s.shape = node.name, node.dtype.value, [int(i) for i in node.value.shape]
            if array.reshape(-1).view(np.uint8).any():  # zeros take no space in the file
                s.constant = self.constant(Constant(node.shape, node.dtype, node.name, value=node.value))
            self.states[node.name] = len(self.program.states)
            self.program.states.append(s)
        return self.states[node.name]

    def kernel(self, written: KernelSource, code: bytes) -> int:
        texel = any(b.texel for b in written.bindings)
        seen = tuple(map(_binding_type, written.bindings)) if texel else ()
        if (written.source, seen) not in self.kernels:
            if written.source not in self.codes:
                self.codes[written.source] = _Part(code, [])
                self.parts.append(self.codes[written.source])
            k = fb.KernelT()
            k.name, k.format = written.name, fb.KernelFormat.spirv
            k.codeSize = len(code)
            self.codes[written.source].tables.append(k)
            k.bindings, k.pushSize = len(written.bindings), 4 * len(written.params)
            k.localX, k.localY, k.localZ = written.local
            k.subgroupSize, k.sharedSize = written.needs.subgroup_size, written.shared
            if texel:
                k.texel = list(seen)
            self.kernels[written.source, seen] = len(self.program.kernels)
            self.program.kernels.append(k)
        return self.kernels[written.source, seen]

    def code(self) -> Iterator[tuple[str, str, bytes]]:
        """Name, Slang source and SPIR-V of every kernel, as they are numbered in the file."""
        for (source, _), number in self.kernels.items():
            yield self.program.kernels[number].name, source, bytes(self.codes[source].chunk)

    def method(
        self,
        name: str,
        graph: Graph,
        plans: Sequence[PlanSource],
        codes: Mapping[str, bytes],
        dims: Mapping[str, str] | None = None,
    ) -> None:
        """Writes a method. dims: names for size symbols, if they differ from those in the graph."""
        if len(graph.symbols) > _MOST_SYMBOLS or max(len(graph.inputs), len(graph.written)) > _MOST_TENSORS:
            raise CompileError(
                f"it has {len(graph.symbols)} sizes that may vary, {len(graph.inputs)} inputs and {len(graph.written)} "
                f"outputs; at most {_MOST_SYMBOLS:,} such sizes, {_MOST_TENSORS:,} inputs and {_MOST_TENSORS:,} outputs "
                "are possible: fix some sizes, or join tensors"
            )
        m = fb.MethodT()
        m.name = name
        pool = _Pool()
        pool(0)  # expression 0 of `flops` and `bytes` means "not counted"
        m.symbols = _symbols(graph, pool, dims or {})
        m.inputs = [_spec(n, pool) for n in graph.inputs]
        m.outputs = [_spec(n, pool) for n in graph.written]
        m.checks, m.integerLimit = graph.checks, graph.limit
        m.plans = [_PlanWriter(self, pool, p, codes).write() for p in plans]
        m.exprs = pool.exprs
        self.program.methods.append(m)

    def bytes(self, producer: str, metadata: Mapping[str, str]) -> bytes:
        self.program.producer, self.program.hostOperators = producer, self.host_operators
        for key in sorted(metadata):
            entry = fb.MetadataT()
            entry.key, entry.value = key, metadata[key]
            self.program.metadata.append(entry)
        data = _lay_out(self.parts)
        builder = flatbuffers.Builder(1 << 16)
        builder.Finish(self.program.Pack(builder), b"LAPI")
        return to_bytes(bytes(builder.Output()), data)


def _symbols(graph: Graph, pool: _Pool, dims: Mapping[str, str]) -> list[Any]:
    """The symbols, each with the input axis from which it is read; the others are given with every run."""
    made: list[Any] = []
    for name, value in graph.symbols.items():
        atom = next(iter(value.atoms()))
        assert isinstance(atom, Symbol)
        place = reading(value, graph.inputs)
        s = fb.SymbolT()
        longest = graph.limits.get(value, -1)
        s.name, s.min = dims.get(name, name), max(atom.min, graph.least.get(name, 0))
        s.max = longest if atom.max is None else atom.max
        if place is None:
            s.given = True
        else:
            s.input, s.axis, s.factor, s.offset = place.input.index, place.axis, place.factor, place.offset
        pool.symbols[atom] = len(made)
        made.append(s)
    return made


def _spec(n: Node, pool: _Pool) -> Any:
    t = fb.TensorSpecT()
    t.name = n.name.removesuffix("_out")
    t.dtype, t.shape = n.dtype.value, [pool(s) for s in n.shape]
    return t


def _binding_type(b: BufferBinding) -> int:
    if not b.texel:
        return int(fb.BindingType.storage)
    if b.type == CODES:
        return int(fb.BindingType.texel_uint8)
    half = b.node.dtype is DType.float16
    return int(fb.BindingType.texel_float16 if half else fb.BindingType.texel_float32)


class _PlanWriter:
    def __init__(self, writer: Writer, pool: _Pool, plan: PlanSource, codes: Mapping[str, bytes]) -> None:
        self.writer, self.pool, self.plan, self.codes = writer, pool, plan, codes
        self.buffers: list[Any] = []
        self.index: dict[tuple[int, bool], int] = {}
        self.packed = {t.out.id for t in plan.order.load}
        self.commands = commands(plan.order.run)
        self.read_at_run = {r.id for t in plan.order.run for r in self._nodes(t)}

    def _nodes(self, task: Any) -> list[Node]:
        return [b.node for w in self.plan.kernels[task.out.id].every for b in w.bindings]

    def write(self) -> Any:
        p = fb.PlanT()
        p.name = self.plan.target.name
        order = self.plan.order
        p.load = [d for t, b in zip(order.load, order.load_barriers, strict=True) for d in self._dispatches(t, b, True)]
        p.run = [d for t, b in zip(order.run, order.run_barriers, strict=True) for d in self._dispatches(t, b, False)]
        p.buffers = self.buffers
        p.requirements = self._requirements()
        return p

    def _memory(self, n: Node) -> Node:
        return memory_of(n, self.plan.windows, self.plan.stored)

    def _buffer(self, n: Node, at_load: bool) -> int:
        loading = at_load and isinstance(n, Constant) and n.id not in self.read_at_run
        key = (n.id, loading)
        if key not in self.index:
            b = fb.BufferT()
            b.name, b.size = n.name, self.pool(nbytes(n))
            outputs = [o.id for o in self.plan.outputs]
            if isinstance(n, Constant):
                b.kind = fb.BufferKind.load_constant if loading else fb.BufferKind.constant
                b.index = self.writer.constant(n)
            elif isinstance(n, Input):
                b.kind, b.index = fb.BufferKind.input, n.index
            elif n.id in outputs:
                b.kind, b.index = fb.BufferKind.output, outputs.index(n.id)
            elif isinstance(n, State):
                b.kind, b.index = fb.BufferKind.state, self.writer.state(n)
            elif n.id in self.packed:
                b.kind = fb.BufferKind.packed
            else:
                b.kind = fb.BufferKind.arena
                first, last = self.plan.order.lifetimes[n.id]
                b.first, b.last = self.commands[first][0], self.commands[last][-1]
            self.index[key] = len(self.buffers)
            self.buffers.append(b)
        return self.index[key]

    def _dispatches(self, task: Task, barrier: bool, at_load: bool) -> Iterator[Any]:
        written = self.plan.kernels[task.out.id].every
        assert len(written) == task.commands
        for k, w in enumerate(written):
            yield self._dispatch(task, w, barrier and k == 0, at_load)

    def _dispatch(self, task: Task, w: KernelSource, barrier: bool, at_load: bool) -> Any:
        d = fb.DispatchT()
        d.kernel = self.writer.kernel(w, self.codes[w.source])
        d.bindings, d.written = [], 0
        moved = as_int(0)
        for k, b in enumerate(w.bindings):
            binding = fb.BindingT()
            memory = self._memory(b.node)
            binding.buffer = self._buffer(memory, at_load)
            first, size = place(b, nbytes(memory), self.plan.target.storage)
            binding.offset, binding.size = self.pool(first), self.pool(size)
            d.bindings.append(binding)
            d.written |= int(b.written) << k
            if b.part == 0:
                moved = moved + nbytes(b.node)
        d.params = [self.pool(x) for x in w.params]
        d.groupsX, d.groupsY, d.groupsZ = (self.pool(g) for g in w.groups)
        d.barrier, d.label = barrier, task.label
        d.flops, d.bytes = self.pool(w.flops), self.pool(moved)
        d.roundsInput = task.out.id in self.plan.rounded and len(w.bindings) == _IN_AND_OUT
        return d

    def _requirements(self) -> Any:
        """The record of what all kernels need, as a table of the file."""
        target = self.plan.target
        every = (w for written in self.plan.kernels.values() for w in written.every)
        kernels = {(w.source, len(w.bindings)): w for w in every}  # many tasks have the same one
        needs = joined(w.requirements(target.half) for w in kernels.values())
        r = fb.RequirementsT()
        r.device = fb.DeviceKind.gpu if target.kind == "gpu" else fb.DeviceKind.any
        r.features = sum(_FEATURE[name] for name in needs.features)
        r.maxWorkgroupInvocations = max(needs.invocations, 1)
        r.maxWorkgroupSizeX, r.maxWorkgroupSizeY, r.maxWorkgroupSizeZ = (max(size, 1) for size in needs.workgroup)
        r.sharedMemory, r.subgroupSize = needs.shared_memory, needs.subgroup_size
        r.subgroupOperations = sum(_OPERATION[name] for name in needs.subgroup_operations)
        r.maxBindings, r.maxTexelElements = needs.bindings, needs.texel_elements
        r.storageRange = min(self.plan.open_range, _MOST_RANGE)
        return r
