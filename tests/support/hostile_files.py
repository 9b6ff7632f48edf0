"""Program files that are built to cost much: tables that name the same parts again and again, long names, huge sizes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import flatbuffers
import numpy as np

from lapilli import player
from lapilli.program import schema as s

_HEADER = 64


def file_of(structure: bytes, data: bytes = b"") -> bytes:
    """A file with these parts and a checksum that fits."""
    data_at = (_HEADER + len(structure) + 63) // 64 * 64
    head = bytearray(struct.pack("<8sIIQQQQQQ", b"LAPILLI\0", 2, 64, 64, len(structure), data_at, len(data), 0, 0))
    body = structure + bytes(data_at - _HEADER - len(structure)) + data
    struct.pack_into("<Q", head, 48, player.checksum(body, seed=player.checksum(bytes(head))))
    return bytes(head) + body


def parts_of(file: bytes) -> tuple[Any, bytearray]:
    """The tables of a file as objects, and its data section."""
    start, size, data_at, data_size = struct.unpack_from("<QQQQ", file, 16)
    root = s.Program.GetRootAs(file[start : start + size], 0)
    return s.ProgramT.InitFromObj(root), bytearray(file[data_at : data_at + data_size])


def file_from(program: Any, data: bytes | bytearray) -> bytes:
    """The file of such objects."""
    builder = flatbuffers.Builder(1024)
    builder.Finish(program.Pack(builder), file_identifier=b"LAPI")
    return file_of(bytes(builder.Output()), bytes(data))


class _Tables:
    def __init__(self, size: int) -> None:
        self.b = flatbuffers.Builder(size + (1 << 20))

    def repeated(self, offset: int, count: int) -> int:
        """A vector of `count` offsets to one thing."""
        b = self.b
        b.StartVector(4, count, 4)
        base = b.Offset()
        values = (base - offset + 4 * np.arange(count, 0, -1)).astype("<u4")
        b.head -= 4 * count
        b.Bytes[b.head : b.head + 4 * count] = values.tobytes()
        return int(b.EndVector())

    def expressions(self, count: int, op: int = 1) -> int:
        """All of them symbol 0 (op 1), or each the sum of the two before (op 2)."""
        items = np.zeros(count, np.dtype([("value", "<i8"), ("a", "<u4"), ("b", "<u4"), ("op", "u1"), ("pad", "V7")]))
        if op == 2:
            items["op"] = 2
            items["a"] = items["b"] = np.maximum(np.arange(count), 1) - 1
            items["op"][0] = 1
        else:
            items["op"] = op
        b = self.b
        b.StartVector(24, count, 8)
        b.head -= 24 * count
        b.Bytes[b.head : b.head + 24 * count] = items.tobytes()
        return int(b.EndVector())

    def table(self, kind: str, **fields: int) -> int:
        getattr(s, f"{kind}Start")(self.b)
        for name, value in fields.items():
            getattr(s, f"{kind}Add{name}")(self.b, value)
        return int(getattr(s, f"{kind}End")(self.b))

    def finish(self, **fields: int) -> bytes:
        self.b.Finish(self.table("Program", **fields), file_identifier=b"LAPI")
        return file_of(bytes(self.b.Output()))


def plans(size: int) -> bytes:
    """Methods that share one vector of plans."""
    t = _Tables(size)
    method = t.table("Method", Plans=t.repeated(t.table("Plan"), size // 4))
    return t.finish(Methods=t.repeated(method, 15))


def inputs_by_plans(size: int) -> bytes:
    """As many inputs, plans and methods as are allowed, and a long vector beside them."""
    t = _Tables(size)
    spec = t.table("TensorSpec", Dtype=8)
    method = t.table("Method", Plans=t.repeated(t.table("Plan"), 64), Inputs=t.repeated(spec, 4096))
    return t.finish(Methods=t.repeated(method, 1024), Metadata=t.repeated(t.table("Metadata"), size // 4))


def symbol_name(size: int) -> bytes:
    """A name of half the file, and expressions that are it."""
    t = _Tables(size)
    symbol = t.table("Symbol", Name=t.b.CreateString("N" * (size // 2)))
    expressions = t.expressions(size // 48)
    t.b.StartVector(4, 1, 4)
    t.b.PrependUint32(0)
    spec = t.table("TensorSpec", Dtype=8, Shape=t.b.EndVector())
    method = t.table("Method", Plans=t.repeated(t.table("Plan"), 1), Inputs=t.repeated(spec, 1), Exprs=expressions,
                     Symbols=t.repeated(symbol, 1))  # fmt: skip
    return t.finish(Methods=t.repeated(method, 1))


def expressions(size: int) -> bytes:
    """As many expressions as fit, each the double of the one before, in several methods."""
    t = _Tables(size)
    symbol = t.table("Symbol", Name=t.b.CreateString("N" * 250))
    pool = t.expressions(min(size // 24, 1_000_000), 2)
    t.b.StartVector(4, 1, 4)
    t.b.PrependUint32(0)
    spec = t.table("TensorSpec", Dtype=8, Shape=t.b.EndVector())
    method = t.table("Method", Plans=t.repeated(t.table("Plan"), 64), Inputs=t.repeated(spec, 1), Exprs=pool,
                     Symbols=t.repeated(symbol, 1))  # fmt: skip
    return t.finish(Methods=t.repeated(method, 1), Metadata=t.repeated(t.table("Metadata"), size // 8))


def metadata(size: int) -> bytes:
    """One entry again and again, with a value of a quarter of the file."""
    t = _Tables(size)
    entry = t.table("Metadata", Value=t.b.CreateString("v" * (size // 4)))
    return t.finish(Metadata=t.repeated(entry, size // 8))


def names(size: int) -> bytes:
    """As many states as are allowed, with names that begin alike, and long names that are shared."""
    t = _Tables(size)
    states = []
    for n in range(16384):
        name = t.b.CreateString(f"{'s' * 40}{n}")
        states.append(t.table("State", Name=name, Dtype=1))
    t.b.StartVector(4, len(states), 4)
    for state in reversed(states):
        t.b.PrependUOffsetTRelative(state)
    vector = t.b.EndVector()
    host = t.repeated(t.b.CreateString("h" * 60000), size // 8)
    method = t.table("Method", Plans=t.repeated(t.table("Plan"), 1))
    return t.finish(Methods=t.repeated(method, 1), States=vector, HostOperators=host)


def buffers(size: int) -> bytes:
    """As many buffers of one plan as are allowed, which all live at the same time, and more."""
    t = _Tables(size)
    buffer = t.table("Buffer", Kind=2, Size=0)
    plan = t.table("Plan", Buffers=t.repeated(buffer, 32768))
    method = t.table("Method", Plans=t.repeated(plan, 64), Exprs=t.expressions(1, 0))
    return t.finish(Methods=t.repeated(method, 1024), Metadata=t.repeated(t.table("Metadata"), size // 8))


def specs(size: int) -> bytes:
    """Constants with long shapes, shared."""
    t = _Tables(size)
    shape = t.b.CreateNumpyVector(np.zeros(64, np.uint32))
    constant = t.table("Constant", Shape=shape, Name=t.b.CreateString("c" * 1000))
    return t.finish(Constants=t.repeated(constant, size // 5))


BOMBS: dict[str, Callable[[int], bytes]] = {
    f.__name__: f for f in (plans, inputs_by_plans, symbol_name, expressions, metadata, names, buffers, specs)
}
