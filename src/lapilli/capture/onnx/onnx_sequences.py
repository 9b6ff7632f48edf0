"""Sequences and optional values: lists of Python, and None, while a model is captured."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lapilli.capture.onnx.onnx_registry import OnnxCall, axis_of, operator
from lapilli.capture.onnx.onnx_values import ConstantTensor
from lapilli.errors import CompileError

Tensor = torch.Tensor


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise CompileError("it needs a sequence")
    return value


def _place(call: OnnxCall, index: int, default: int) -> int:
    place = call.number(index, default)
    if not isinstance(place, int):
        raise CompileError("the position in a sequence must be known when the model is compiled")
    return place


@operator("SequenceEmpty")
def sequence_empty(call: OnnxCall) -> Any:
    return ([],)


@operator("SequenceConstruct")
def sequence_construct(call: OnnxCall, *values: Tensor) -> Any:
    return (list(values),)


@operator("SequenceInsert")
def sequence_insert(call: OnnxCall, sequence: Any, value: Tensor, _: Any = None) -> Any:
    made = list(_list(sequence))
    made.insert(_place(call, 2, len(made)), value)
    return (made,)


@operator("SequenceErase")
def sequence_erase(call: OnnxCall, sequence: Any, _: Any = None) -> Any:
    made = list(_list(sequence))
    del made[_place(call, 1, len(made) - 1)]
    return (made,)


@operator("SequenceAt")
def sequence_at(call: OnnxCall, sequence: Any, _: Any) -> Any:
    return _list(sequence)[_place(call, 1, 0)]


@operator("SequenceLength")
def sequence_length(call: OnnxCall, sequence: Any) -> Any:
    with _disable_current_modes():
        return ConstantTensor(torch.tensor(len(_list(sequence)), dtype=torch.int64))


@operator("ConcatFromSequence")
def concat_from_sequence(call: OnnxCall, sequence: Any) -> Tensor:
    values, axis = _list(sequence), call.get("axis")
    return torch.stack(values, axis) if call.get("new_axis", 0) else torch.cat(values, axis)


@operator("SplitToSequence")
def split_to_sequence(call: OnnxCall, x: Tensor, lengths: Any = None) -> Any:
    axis = axis_of(call.get("axis", 0), x.ndim)
    if lengths is None:
        parts = list(torch.split(x, 1, axis))
        return ([p.squeeze(axis) for p in parts] if not call.get("keepdims", 1) else parts,)
    given = call.numbers(1) or []
    return (list(torch.split(x, given[0] if lengths.ndim == 0 else given, axis)),)


# -- optional values; these get no tensors, so that None and lists pass through


@operator("Optional")
def optional(call: OnnxCall, env: Any) -> Any:
    return (call.value(0),)


@operator("OptionalHasElement")
def optional_has_element(call: OnnxCall, env: Any) -> Any:
    with _disable_current_modes():
        return (ConstantTensor(torch.tensor(call.value(0) is not None)),)


@operator("OptionalGetElement", "Identity")
def optional_get_element(call: OnnxCall, env: Any) -> Any:
    if call.value(0) is None and call.node.op != "Identity":
        raise CompileError("the optional value is empty")
    return (call.value(0),)
