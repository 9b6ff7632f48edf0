"""A driver whose compiler takes every number for finite, as far as a software driver can be made one: kernels are changed before
they are written into programs.

What is x - x, behind whatever signs, becomes 0, x / x 1, x * 0 and 0 / x 0, x == x true and x < x false. NVIDIA's driver does so
with some of these. Kernels are right if their results stay: the compiler decides such forms by bits (`lapilli/ir/expr.py`)."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable
from typing import Any

import kept_kernels

from lapilli.codegen.spirv import instructions

_EXTENDED, _BOOL, _FLOAT, _VECTOR = 12, 20, 22, 23
_TRUE, _FALSE, _CONSTANT, _COMPOSITE, _FUNCTION, _COPY = 41, 42, 43, 44, 54, 83
_NEGATE, _ADD, _SUBTRACT, _MULTIPLY, _DIVIDE = 127, 129, 131, 133, 136
_OF_EQUALS = {180: True, 181: True, 188: True, 189: True, 190: True, 191: True} | dict.fromkeys(range(182, 188), False)
"""Comparisons of floats, and what they are of x and x."""

_PURE = {_EXTENDED, 79, 80, 81, 109, 110, 111, 112, 113, 114, 115, 124, *range(126, 137), 142, *range(164, 200)}
"""What gives the same for the same operands: conversions, arithmetic, logic, shuffles."""

Signed = tuple[bool, Any]
"""Whether there is a minus, and the value without it, as something that is equal for equal values."""


def fold(code: bytes) -> tuple[bytes, int]:
    """The module, changed, and how often it was."""
    words = list(struct.unpack(f"<{len(code) // 4}I", code))
    kernel = _Kernel(words[3])
    head: list[list[int]] = []
    body: list[list[int]] = []
    for instruction in instructions(words):
        if instruction[0] & 0xFFFF == _FUNCTION or body:
            body.append(kernel.folded(instruction))
        else:
            head.append(kernel.declared(instruction))
    out = [*words[:3], kernel.bound, words[4]]
    for instruction in (*head, *kernel.constants, *body):
        out += instruction
    return struct.pack(f"<{len(out)}I", *out), kernel.count


class _Kernel:
    def __init__(self, bound: int) -> None:
        self.bound, self.count = bound, 0
        self.types: dict[int, list[int]] = {}
        self.zeros: set[int] = set()
        self.values: dict[int, Signed] = {}
        self.constants: list[list[int]] = []
        self.made: dict[tuple[int, float | bool], int] = {}

    def declared(self, instruction: list[int]) -> list[int]:
        op = instruction[0] & 0xFFFF
        if op in (_BOOL, _FLOAT, _VECTOR):
            self.types[instruction[1]] = [op, *instruction[2:]]
        elif (
            op == _CONSTANT and instruction[1] in self.types and not any(word & 0x7FFFFFFF for word in instruction[3:])
        ) or (op == _COMPOSITE and self.zeros.issuperset(instruction[3:])):
            self.zeros.add(instruction[2])
        return instruction

    def value(self, name: int) -> Signed:
        return self.values.get(name, (False, name))

    def folded(self, instruction: list[int]) -> list[int]:
        op = instruction[0] & 0xFFFF
        if op not in _PURE or instruction[1] not in self.types:
            if op in _PURE:
                self.values[instruction[2]] = False, (op, instruction[1], *map(self.value, instruction[3:]))
            return instruction
        type_, name, *operands = instruction[1:]
        simple = self.simple(op, operands)
        if simple is not None:
            self.count += 1
            return [4 << 16 | _COPY, type_, name, self.constant(type_, simple)]
        self.values[name] = self.signed(op, type_, operands)
        return instruction

    def simple(self, op: int, operands: list[int]) -> float | bool | None:
        """The number that such a compiler takes for the result."""
        if op not in (_ADD, _SUBTRACT, _MULTIPLY, _DIVIDE, *_OF_EQUALS):
            return None
        (minus_x, x), (minus_y, y) = map(self.value, operands)
        zero_x, zero_y = (operand in self.zeros for operand in operands)
        if op in _OF_EQUALS:
            return _OF_EQUALS[op] if (minus_x, x) == (minus_y, y) and not zero_x else None
        if op == _MULTIPLY:
            return 0.0 if zero_x or zero_y else None
        if op == _DIVIDE:
            return 0.0 if zero_x else None if x != y else 1.0 if minus_x == minus_y else -1.0
        return 0.0 if x == y and not zero_x and (minus_x == minus_y) == (op == _SUBTRACT) else None

    def signed(self, op: int, type_: int, operands: list[int]) -> Signed:
        if op == _EXTENDED:  # a set of functions and a number come first
            return False, (op, type_, *operands[:2], *map(self.value, operands[2:]))
        given = [self.value(operand) for operand in operands] if op not in (79, 81) else []
        if op == _NEGATE:
            return not given[0][0], given[0][1]
        if op in (_MULTIPLY, _DIVIDE):
            (minus_x, x), (minus_y, y) = given
            order = sorted([x, y], key=repr) if op == _MULTIPLY else [x, y]
            return minus_x != minus_y, (op, type_, *order)
        if op in (_ADD, _SUBTRACT):
            x, (minus_y, y) = given
            first, second = sorted([x, (minus_y != (op == _SUBTRACT), y)], key=lambda term: repr(term[1]))
            return first[0], (_ADD, type_, first[1], (first[0] != second[0], second[1]))
        return False, (op, type_, *(given or operands))

    def constant(self, type_: int, value: float | bool) -> int:
        known = self.made.get((type_, value))
        if known is not None:
            return known
        op, *parts = self.types[type_]
        if op == _VECTOR:
            rest = [self.constant(parts[0], value)] * parts[1]
            made = [_COMPOSITE, type_, 0, *rest]
        elif op == _BOOL:
            made = [_TRUE if value else _FALSE, type_, 0]
        else:
            number = struct.pack("<f" if parts[0] == 32 else "<e", value).ljust(4, b"\0")
            made = [_CONSTANT, type_, 0, *struct.unpack("<I", number)]
        made[2] = self.made[type_, value] = self.bound
        self.bound += 1
        self.constants.append([len(made) << 16 | made[0], *made[1:]])
        return made[2]


def install(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """From now on every kernel of this process is folded. What is compiled so is kept apart from what is not."""
    from lapilli.codegen import build

    finish = build.Builder.finish
    put(build.Builder, "finish", lambda self, progress=None: {s: fold(c)[0] for s, c in finish(self, progress).items()})
    kept_kernels.keep_kernels(put)
    os.environ["LAPILLI_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), "lapilli-folded")
