"""Operators that create tensors: constants and ranges. Uninitialised tensors are zeros."""

from __future__ import annotations

from typing import Any

import torch

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, as_expr, binary, cast_to, index, narrow
from lapilli.ir.integer import Int
from lapilli.ir.node import Constant, Map, Node
from lapilli.lower.registry import Call, Operand, exactly, lowering, member

aten = torch.ops.aten


@lowering(aten.full.default, aten.full_like.default, aten.fill.Scalar, aten.fill.Tensor)
def full(call: Call, _: Any, value: Operand, **__: Any) -> Node:
    """Every element is `value`, rounded to the tensor's dtype: 1e-8 is 0 in half precision. The shape is `size`, or that of
    the first argument.
    """
    value = exactly(value, call.dtype)
    return call.map(lambda *at: narrow(member(value, at, call.dtype), call.dtype))


@lowering(aten.new_full.default)
def new_full(call: Call, _: Node, size: Any, value: Operand, **__: Any) -> Node:
    """Every element is `value`; the shape is `size`."""
    return full(call, None, value)


@lowering(
    aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.empty.memory_format, aten.empty_like.default,
    aten.empty_strided.default, aten.empty_permuted.default, aten.new_empty.default, aten.new_empty_strided.default,
)  # fmt: skip
def zeros(call: Call, *_: Any, **__: Any) -> Node:
    """Zeros of the given size, or of the shape of the first argument. Also serves `empty`."""
    return full(call, None, 0)


@lowering(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(call: Call, *_: Any, **__: Any) -> Node:
    """Ones of the given size, or of the shape of the first argument."""
    return full(call, None, 1)


@lowering(aten.scalar_tensor.default)
def scalar_tensor(call: Call, value: float, **_: Any) -> Node:
    """A tensor of shape []."""
    return full(call, None, value)


@lowering(aten.arange.start_step)
def arange(call: Call, start: Any, end: Any, step: Any = 1, **_: Any) -> Map:
    """start + i * step: [ceil((end - start) / step)]. Raises TypeError if an integer may exceed 32 bits."""

    def body(i: Any) -> Expr:
        if call.dtype.is_float:
            return index(i, DType.float32) * as_expr(float(step)) + as_expr(float(start))
        first, by = (int(v) if isinstance(v, float) else v for v in (start, step))
        value = i * by + first
        low, high = value.bounds
        if (low is not None and low < -(2**31)) or (high is not None and high >= 2**31):
            raise TypeError("it has integers that do not fit into the 32 bits in which the GPU computes them")
        return index(value)

    return call.map(body)


@lowering(aten.arange.start)
def arange_start(call: Call, start: Any, end: Any, **_: Any) -> Map:
    """start + i: [end - start]."""
    return arange(call, start, end)


@lowering(aten.arange.default)
def arange_end(call: Call, end: Any, **_: Any) -> Map:
    """0, 1, ..., end - 1."""
    return arange(call, 0, end)


@lowering(aten.eye.default, aten.eye.m)
def eye(call: Call, *_: Any, **__: Any) -> Map:
    """The identity matrix, [n, n] or [n, m]."""
    return call.map(lambda i, j: cast_to(binary("eq", index(i), index(j)), call.dtype.compute))


@lowering(aten.logspace.default)
def logspace(call: Call, start: float, end: float, steps: int, base: float = 10.0, **named: Any) -> Node:
    """base^e for `steps` exponents e from start to end: [steps]. torch computes it, in double precision: large powers
    amplify the rounding error of their exponent.
    """
    if isinstance(steps, Int):
        raise TypeError(f"{call.op}: the number of steps must be known when the model is compiled")
    kept = call.storage(call.dtype)
    values = torch.logspace(start, end, steps, base, dtype=named.get("dtype")).to(torch.float64).numpy()
    return Constant(call.shape, kept, call.name, call.op, value=values.astype(kept.name))
