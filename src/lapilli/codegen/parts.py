"""Values larger than the device's limit on one storage buffer are bound in parts.

Kernels are written as if every buffer was bound whole. Here, a buffer that may exceed the target's limit becomes several
bindings of consecutive ranges, and a Slang type whose subscript selects the range by index. Any index works, including gathers.
Values are not copied, and kernels that use no such value are unchanged. Texel buffers are not split: their limit is a different
one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lapilli.codegen.emit import BufferBinding, declaration, declarations
from lapilli.codegen.kernel import KernelSource
from lapilli.ir.integer import Int, as_int, minimum
from lapilli.ir.node import Node, nbytes
from lapilli.target import Target

_BYTES = {"float": 4, "int": 4, "uint": 4, "half": 2, "uint16_t": 2}


def largest(written: KernelSource, memory: Callable[[Node], Node]) -> int:
    """Bytes of the largest storage buffer that a kernel binds, not counting those of unbounded size."""
    return max((nbytes(memory(b.node)).bounds[1] or 0 for b in written.bindings if not b.texel), default=0)


def split_bindings(written: KernelSource, memory: Callable[[Node], Node], target: Target) -> KernelSource:
    """The kernel with no binding above the target's limit, as far as sizes are known or bounded. Unbounded values get the
    target's default number of parts.

    memory: the value whose memory holds a value. If there are more parts than a kernel may have bindings, the last part holds
    the rest, and the player refuses what exceeds the device's limit.
    """
    if written.others:
        made = [split_bindings(replace(w, others=()), memory, target) for w in written.every]
        return replace(made[0], others=tuple(made[1:]))
    counts = [1 if b.texel else target.parts(memory(b.node)) for b in written.bindings]
    if all(n == 1 for n in counts):
        return written
    while sum(counts) > target.bindings and max(counts) > 1:
        counts[counts.index(max(counts))] -= 1
    lines: list[str] = []
    bindings: list[BufferBinding] = []
    for k, (b, n) in enumerate(zip(written.bindings, counts, strict=True)):
        name, first = f"b{k}", len(bindings)
        if n == 1:
            lines.append(declaration(first, name, b))
        else:
            lines += [declaration(first + part, f"{name}_{part}", b) for part in range(n)]
            lines.append(_subscript(name, b, n, target.storage // _element(b)))
        bindings += [replace(b, part=part, parts=n) for part in range(n)]
    whole = "\n".join(declarations(written.bindings))
    assert whole in written.source, "buffers are declared in one place"
    return replace(written, source=written.source.replace(whole, "\n".join(lines), 1), bindings=bindings)


def place(b: BufferBinding, size: Int, storage: int) -> tuple[Int, Int]:
    """First byte and number of bytes of a part of a value of `size` bytes."""
    if b.parts == 1:
        return as_int(b.start), size - b.start
    first = minimum(b.part * storage, size)
    rest = size - first
    return first, rest if b.part + 1 == b.parts else minimum(storage, rest)


def _element(b: BufferBinding) -> int:
    kind = b.type.rstrip("234")
    return _BYTES[kind] * int(b.type[len(kind) :] or 1)


def _subscript(name: str, b: BufferBinding, parts: int, elements: int) -> str:
    """A type with the buffer's subscript, and a variable of that type."""

    def choose(low: int, high: int, access: Callable[[str], str]) -> str:
        if high - low == 1:
            index = f"i - {low * elements}" if low else "i"
            return access(f"{name}_{low}[{index}]")
        middle = (low + high) // 2
        lower, upper = choose(low, middle, access), choose(middle, high, access)
        return f"if (i < {middle * elements}) {{ {lower} }} else {{ {upper} }}"

    body = f"get {{ {choose(0, parts, lambda at: f'return {at};')} }}"
    if b.written:
        body += f" set {{ {choose(0, parts, lambda at: f'{at} = newValue;')} }}"
    return f"struct Parts_{name} {{ __subscript(int i) -> {b.type} {{ {body} }} }}; static Parts_{name} {name};"
