"""Tiny programs written by hand: a Slang kernel, a FlatBuffer, a file: the runtime tested without the compiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import flatbuffers
import numpy as np
from numpy.typing import NDArray

from lapilli.codegen.slang import Compiler
from lapilli.format.container import to_bytes
from lapilli.program import schema as fb

GROUP = 64
SLOW = 1 << 15
DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
SIZES = (1, 1, 1, 2, 4, 8, 2, 2, 4, 8)
Size = int | str

_HEAD = """
struct Params {{ uint n; uint m; }};
[shader("compute")] [numthreads(64, 1, 1)]
void main(uint3 id : SV_DispatchThreadID, uniform Params p, {buffers})
{{ uint i = id.x; if (i >= p.n) return; {body} }}
"""
_WORDS = "StructuredBuffer<uint> x, RWStructuredBuffer<uint> y"
_FLOATS = "StructuredBuffer<float> x, StructuredBuffer<float> w, RWStructuredBuffer<float> y"

KERNELS = {  # buffers, body; params are n (elements) and m
    "copy": (2, _HEAD.format(buffers=_WORDS, body="y[i] = x[i];")),
    "scale": (3, _HEAD.format(buffers=_FLOATS, body="y[i] = x[i] * w[i % p.m];")),
    "slow": (  # m steps of an iteration that no compiler takes out; lavapipe ends every loop after 65,535
        2,
        _HEAD.format(
            buffers=_WORDS, body="uint v = x[i]; for (uint k = 0; k < p.m; k++) v = v * 1664525u + (v >> 7); y[i] = v;"
        ),
    ),
    "classes": (  # score of class i: the mean of the picture's channel i
        2,
        _HEAD.format(
            buffers="StructuredBuffer<float> x, RWStructuredBuffer<float> y",
            body="float s = 0; for (uint k = 0; k < p.m; k++) s += x[i * p.m + k]; y[i] = s / p.m;",
        ),
    ),
}


@cache
def spirv(name: str) -> bytes:
    """SPIR-V of a kernel above."""
    return Compiler().compile(KERNELS[name][1])


class Tiny:
    """A program under construction: one method, one plan. Sizes are numbers or the names of symbols."""

    def __init__(self, metadata: Mapping[str, str] | None = None) -> None:
        self.exprs: list[Any] = []
        self.method, self.plan, self.program = fb.MethodT(), fb.PlanT(), fb.ProgramT()
        self.method.name, self.method.plans = "forward", [self.plan]
        self.method.symbols, self.method.inputs, self.method.outputs = [], [], []
        self.plan.name, self.plan.requirements = "tiny", fb.RequirementsT()
        self.plan.buffers, self.plan.load, self.plan.run = [], [], []
        self.program.producer, self.program.methods = "lapilli tests", [self.method]
        self.program.constants, self.program.kernels, self.program.metadata = [], [], []
        self.kernels: list[str] = []
        self.data: list[bytes] = []
        self.offset = 0
        self.number(0)
        for key, value in sorted((metadata or {}).items()):
            entry = fb.MetadataT()
            entry.key, entry.value = key, value
            self.program.metadata.append(entry)

    def expr(self, op: int, value: int = 0, a: int = 0, b: int = 0) -> int:
        """Index of an expression."""
        entry = fb.ExprT()
        entry.op, entry.value, entry.a, entry.b = op, value, a, b
        self.exprs.append(entry)
        return len(self.exprs) - 1

    def number(self, value: int) -> int:
        return self.expr(fb.ExprOp.constant, value)

    def size(self, size: Size) -> int:
        if isinstance(size, int):
            return self.number(size)
        return self.expr(fb.ExprOp.symbol, [s.name for s in self.method.symbols].index(size))

    def product(self, shape: Sequence[Size], factor: int) -> int:
        total = self.number(factor * prod(size for size in shape if isinstance(size, int)))
        for size in shape:
            if isinstance(size, str):
                total = self.expr(fb.ExprOp.mul, 0, total, self.size(size))
        return total

    def symbol(self, name: str, low: int, high: int, input_: int, axis: int) -> None:
        """A dynamic size."""
        s = fb.SymbolT()
        s.name, s.min, s.max, s.input, s.axis = name, low, high, input_, axis
        self.method.symbols.append(s)

    def _append(self, data: bytes) -> int:
        offset = self.offset
        padded = data + bytes(-len(data) % 64)
        self.data.append(padded)
        self.offset += len(padded)
        return offset

    def buffer(self, kind: int, name: str, size: int, index: int = 0, first: int = 0, last: int = 0) -> int:
        b = fb.BufferT()
        b.kind, b.name, b.size, b.index, b.first, b.last = kind, name, size, index, first, last
        self.plan.buffers.append(b)
        return len(self.plan.buffers) - 1

    def tensor(self, kind: int, name: str, dtype: str, shape: Sequence[Size]) -> int:
        """An input or output with its buffer, of which the index is returned."""
        spec = fb.TensorSpecT()
        code = DTYPES.index(dtype)
        spec.name, spec.dtype, spec.shape = name, code, [self.size(size) for size in shape]
        specs = self.method.inputs if kind == fb.BufferKind.input else self.method.outputs
        specs.append(spec)
        return self.buffer(kind, name, self.product(shape, SIZES[code]), len(specs) - 1)

    def input(self, name: str, dtype: str, shape: Sequence[Size]) -> int:
        return self.tensor(fb.BufferKind.input, name, dtype, shape)

    def output(self, name: str, dtype: str, shape: Sequence[Size]) -> int:
        return self.tensor(fb.BufferKind.output, name, dtype, shape)

    def constant(self, name: str, array: NDArray[np.float32], *, load_only: bool = False) -> int:
        c = fb.ConstantT()
        c.name, c.dtype, c.shape = name, DTYPES.index(str(array.dtype)), list(array.shape)
        c.offset, c.size = self._append(array.tobytes()), array.nbytes
        self.program.constants.append(c)
        kind = fb.BufferKind.load_constant if load_only else fb.BufferKind.constant
        return self.buffer(kind, name, self.number(array.nbytes), len(self.program.constants) - 1)

    def dispatch(
        self, kernel: str, buffers: Sequence[int], count: int, m: int = 0, *, barrier: bool = False, load: bool = False
    ) -> None:
        """One kernel over `count` elements (an expression); the last buffer is written, whole buffers are bound."""
        if kernel not in self.kernels:
            code = spirv(kernel)
            k = fb.KernelT()
            k.name, k.codeSize, k.codeOffset = kernel, len(code), self._append(code)
            k.bindings, k.pushSize, k.localX = KERNELS[kernel][0], 8, GROUP
            self.kernels.append(kernel)
            self.program.kernels.append(k)
        d = fb.DispatchT()
        d.kernel, d.label, d.barrier, d.written = (
            self.kernels.index(kernel),
            f"aten.{kernel}",
            barrier,
            1 << (len(buffers) - 1),
        )
        d.bindings = []
        for buffer in buffers:
            b = fb.BindingT()
            b.buffer, b.offset, b.size = buffer, self.number(0), self.plan.buffers[buffer].size
            d.bindings.append(b)
        rounded = self.expr(fb.ExprOp.add, 0, count, self.number(GROUP - 1))
        one = self.number(1)
        d.params, d.groupsX, d.groupsY, d.groupsZ = (
            [count, self.number(m)],
            self.expr(fb.ExprOp.floordiv, 0, rounded, self.number(GROUP)),
            one,
            one,
        )
        d.flops, d.bytes = count, self.expr(fb.ExprOp.mul, 0, count, self.number(8))
        (self.plan.load if load else self.plan.run).append(d)

    def bytes(self) -> bytes:
        """The file."""
        requirements = self.plan.requirements
        requirements.maxWorkgroupInvocations = requirements.maxWorkgroupSizeX = GROUP
        requirements.maxBindings = 3
        self.method.exprs = self.exprs
        builder = flatbuffers.Builder(1024)
        builder.Finish(self.program.Pack(builder), b"LAPI")
        return bytes(to_bytes(bytes(builder.Output()), self.data))


def copies(*dtypes: str, shape: Sequence[Size] = (4,), metadata: Mapping[str, str] | None = None) -> bytes:
    """Every input is copied to an output of its dtype; the bytes of a tensor must be whole words."""
    tiny = Tiny(metadata)
    for i, dtype in enumerate(dtypes):
        words = tiny.number(prod(int(size) for size in shape) * SIZES[DTYPES.index(dtype)] // 4)
        x, y = tiny.input(f"x{i}", dtype, shape), tiny.output(f"y{i}", dtype, shape)
        tiny.dispatch("copy", (x, y), words)
    return tiny.bytes()


def scales(
    weights: NDArray[np.float32], rows: Size = "N", high: int = 16, metadata: Mapping[str, str] | None = None
) -> bytes:
    """y = x * weights * weights; x of shape (rows, len(weights)), rows dynamic where it is a name.

    Two run commands with an arena tensor between them; the weights are copied to a packed buffer by a load command.
    """
    tiny = Tiny(metadata)
    if isinstance(rows, str):
        tiny.symbol(rows, 1, high, 0, 0)
    n = len(weights)
    x, y = tiny.input("x", "float32", (rows, n)), tiny.output("y", "float32", (rows, n))
    given = tiny.constant("weights", weights, load_only=True)
    packed = tiny.buffer(fb.BufferKind.packed, "weights packed", tiny.number(weights.nbytes))
    count = tiny.product((rows, n), 1)
    middle = tiny.buffer(fb.BufferKind.arena, "x * weights", tiny.product((rows, n), 4), first=0, last=1)
    tiny.dispatch("copy", (given, packed), tiny.number(n), load=True)
    tiny.dispatch("scale", (x, packed, middle), count, n)
    tiny.dispatch("scale", (middle, packed, y), count, n, barrier=True)
    return tiny.bytes()


def classes(side: int, metadata: Mapping[str, str]) -> bytes:
    """Scores of three classes: the mean of each channel of a picture (1, 3, side, side)."""
    tiny = Tiny(metadata)
    x, y = tiny.input("image", "float32", (1, 3, side, side)), tiny.output("scores", "float32", (1, 3))
    tiny.dispatch("classes", (x, y), tiny.number(3), side * side)
    return tiny.bytes()


def slow(rounds: int) -> bytes:
    """SLOW integers through `rounds` steps each."""
    tiny = Tiny()
    x, y = tiny.input("x", "int32", (SLOW,)), tiny.output("y", "int32", (SLOW,))
    tiny.dispatch("slow", (x, y), tiny.number(SLOW), rounds)
    return tiny.bytes()
