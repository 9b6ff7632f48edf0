"""Signatures: the properties of a call that determine its program.

There are two keys for calls. The exact key has all sizes and strides, and leads to a prepared launch with one dictionary
lookup. The signature only has classes of sizes (0, 1, or a symbol that equal sizes share; for matrix products also four
times a symbol), and leads to the programs that were compiled for such calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lapilli.eager.operator_schema import Schema

WIDE = 1 << 31
"""The smallest magnitude of integers that kernels cannot represent."""


aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
"""Operators with faster kernels for sizes that are multiples of four."""


class CannotRun(Exception):
    """The reason why a call cannot run on the device, as a clause."""


@dataclass(frozen=True)
class NumberOperand:
    """A number that a kernel gets at run time: a Python number, or a CPU tensor without dimensions, whose dtype matters."""

    kind: str  # "float" or "int"
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class TensorOperand:
    """A tensor on the device as a program sees it: dense, with its dimensions in memory order.

    order: dimensions from the outermost to the innermost. expanded: dimensions whose elements are all the same (stride 0).
    strided: whether it must first be gathered into dense memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    expanded: tuple[int, ...] = ()
    strided: bool = False


def operand(tensor: torch.Tensor) -> TensorOperand:
    """A tensor as a program sees it."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    return describe_operand(shape, strides, tensor.dtype)


def describe_operand(shape: tuple[int, ...], strides: Sequence[int], dtype: torch.dtype) -> TensorOperand:
    rows = tuple(range(len(shape)))
    if 0 in shape:
        return TensorOperand(shape, dtype, rows)
    expanded = tuple(d for d in rows if strides[d] == 0 and shape[d] > 1)
    moving = [d for d in rows if shape[d] > 1 and strides[d]]
    inwards = sorted(moving, key=lambda d: -strides[d])
    order = rows if inwards == moving else (*(d for d in rows if d not in moving), *inwards)
    step = 1
    for d in reversed(inwards):
        if strides[d] != step:
            return TensorOperand(shape, dtype, order, (), True)
        step *= shape[d]
    return TensorOperand(shape, dtype, order, expanded)


@dataclass(frozen=True)
class Range:
    """Sizes that share a program: multiples of `unit` from `least` to `most`."""

    unit: int
    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}..{self.most} by {self.unit}"


def range_of(n: int) -> Range:
    """The range of a size of at least 2. There are two ranges per power of two, each for multiples of eight and for all
    sizes.
    """
    power = 1 << n.bit_length() - 1
    middle = power + power // 2
    least, end = (middle, 2 * power) if n >= middle else (power, middle)
    unit = 8 if n % 8 == 0 and n >= 16 else 1
    return Range(unit, least, end - unit)


Leaf = TensorOperand | NumberOperand | Any


@dataclass(frozen=True)
class CallSignature:
    """The properties of a call that determine its program.

    schema: of the operator. leaves: the arguments in the schema's order, with lists as tuples, tensors as TensorOperands,
    numbers that vary between calls as NumberOperands, and everything else unchanged. exact: sizes are fixed. ranges:
    dynamic sizes have a `Range`.
    """

    schema: Schema
    leaves: tuple[Leaf, ...]
    exact: bool = False
    ranges: bool = False

    def operands(self) -> list[TensorOperand]:
        return [
            x
            for leaf in self.leaves
            for x in (leaf if isinstance(leaf, tuple) else (leaf,))
            if isinstance(x, TensorOperand)
        ]

    def unit(self, size: int) -> int:
        """The unit in which a dynamic size is counted."""
        if self.ranges:
            return range_of(size).unit
        product = self.schema.computed in PRODUCTS
        return 4 if product and size >= 8 and size % 4 == 0 else 1

    def text(self) -> str:
        """The signature as text; equal for calls that can share programs."""
        symbols: dict[int, str] = {}

        def size(n: int) -> str:
            if self.exact or n < 2:
                return str(n)
            unit = f"{self.unit(n)}*" if self.unit(n) > 1 else ""
            within = f" {range_of(n)}" if self.ranges else ""
            return symbols.setdefault(n, f"{unit}s{len(symbols)}{within}")

        def one(leaf: Leaf) -> str:
            if isinstance(leaf, TensorOperand):
                sizes = ",".join(map(size, leaf.shape))
                order = "" if leaf.order == tuple(range(len(leaf.order))) else f" order {leaf.order}"
                expanded = f" expanded {leaf.expanded}" if leaf.expanded else ""
                return f"{leaf.dtype}[{sizes}]{order}{expanded}"
            if isinstance(leaf, NumberOperand):
                return f"number {leaf.kind} {leaf.dtype}"
            if isinstance(leaf, tuple):
                return "(" + "; ".join(map(one, leaf)) + ")"
            return repr(leaf)

        return f"{torch.get_default_dtype()} {self.schema.op}({'; '.join(map(one, self.leaves))})"
