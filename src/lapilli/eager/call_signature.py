"""Signatures: what of a call decides about its program.

Two keys tell calls apart. The exact key has all sizes and strides, and leads to a prepared launch with one look into a
dictionary. The signature has sizes as classes only (0, 1, or a symbol that equal sizes share; of matrix products also four times
a symbol), and leads to the programs that were compiled for such a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lapilli.eager.operator_schema import Schema

WIDE = 1 << 31
"""Integers from here on do not fit into kernels."""


aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
"""Operators with faster kernels for sizes that are whole vectors of four."""


class CannotRun(Exception):
    """Why a call cannot run on the device, as a clause."""


@dataclass(frozen=True)
class NumberOperand:
    """A number that a kernel gets when it runs: a Python number, or a tensor of no dimensions on the CPU, whose dtype counts."""

    kind: str  # "float" or "int"
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class TensorOperand:
    """A tensor on the device as a program sees it: dense in the order of its memory, dimension after dimension.

    order: dimensions from the outermost to the innermost; expanded: dimensions whose elements are one and the same;
    strided: it has to be gathered into such memory first."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    expanded: tuple[int, ...] = ()
    strided: bool = False


def operand(tensor: torch.Tensor) -> TensorOperand:
    """How a program sees a tensor."""
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
    """Sizes that a program takes alike: multiples of `unit` from `least` to `most`."""

    unit: int
    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}..{self.most} by {self.unit}"


def range_of(n: int) -> Range:
    """The range of a size of at least 2: there are two to a doubling, each for multiples of eight and for all sizes."""
    power = 1 << n.bit_length() - 1
    middle = power + power // 2
    least, end = (middle, 2 * power) if n >= middle else (power, middle)
    unit = 8 if n % 8 == 0 and n >= 16 else 1
    return Range(unit, least, end - unit)


Leaf = TensorOperand | NumberOperand | Any


@dataclass(frozen=True)
class CallSignature:
    """schema: of the operator; leaves: the arguments in the schema's order, lists as tuples, tensors as Operands, numbers that
    differ from call to call as Numbers, everything else as it is; exact: sizes are fixed; ranges: open sizes have a `Range`."""

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
        """In what an open size is counted."""
        if self.ranges:
            return range_of(size).unit
        product = self.schema.computed in PRODUCTS
        return 4 if product and size >= 8 and size % 4 == 0 else 1

    def text(self) -> str:
        """The signature as text: equal for calls that the same programs can serve."""
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
