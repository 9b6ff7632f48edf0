"""Reductions, softmax and what is like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lapilli.capture.onnx.onnx_registry import OnnxCall, axis_of, operator

Tensor = torch.Tensor
Reduction = Callable[[Tensor, list[int], bool], Tensor]


def _wide(x: Tensor) -> Tensor:
    return x


def _prod(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keepdim=keep, dtype=x.dtype)
    return x


def _extreme(x: Tensor, axes: list[int], keep: bool, least: bool) -> Tensor:
    if x.dtype == torch.bool:
        return _any(~x, axes, keep).logical_not() if least else _any(x, axes, keep)
    if any(isinstance(x.shape[a], int) and x.shape[a] == 0 for a in axes):
        shape = [1 if k in axes else n for k, n in enumerate(x.shape) if keep or k not in axes]
        if x.is_floating_point():
            value: float = torch.inf if least else -torch.inf
        else:
            info = torch.iinfo(x.dtype)
            value = info.max if least else info.min
        return torch.full(shape, value, dtype=x.dtype)
    return torch.amin(x, axes, keep) if least else torch.amax(x, axes, keep)


def _any(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.any(x, axis, keepdim=keep)
    return x


def _sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return torch.sum(x, axes, keepdim=keep, dtype=x.dtype)


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if x.is_floating_point():
        return torch.mean(x, axes, keepdim=keep)
    return torch.mean(x.to(torch.float64), axes, keepdim=keep).to(x.dtype)


def _log_sum_exp(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return torch.logsumexp(x if x.is_floating_point() else x.to(torch.float64), axes, keepdim=keep).to(x.dtype)


_REDUCTIONS: dict[str, Reduction] = {
    "ReduceSum": _sum,
    "ReduceMean": _mean,
    "ReduceProd": _prod,
    "ReduceMax": lambda x, axes, keep: _extreme(x, axes, keep, False),
    "ReduceMin": lambda x, axes, keep: _extreme(x, axes, keep, True),
    "ReduceL1": lambda x, axes, keep: _sum(x.abs(), axes, keep),
    "ReduceL2": lambda x, axes, keep: torch.sqrt(_sum(x * x, axes, keep).float()).to(x.dtype) if not x.is_floating_point()
    else torch.sqrt(_sum(x * x, axes, keep)),
    "ReduceSumSquare": lambda x, axes, keep: _sum(x * x, axes, keep),
    "ReduceLogSum": lambda x, axes, keep: torch.log(_sum(x, axes, keep)),
    "ReduceLogSumExp": _log_sum_exp,
}  # fmt: skip

_BEFORE: dict[str, Callable[[Tensor], Tensor]] = {
    "ReduceL1": torch.abs,
    "ReduceL2": torch.abs,
    "ReduceSumSquare": torch.square,
}
"""What is left of a reduction over no axes."""


def _reduction(name: str, function: Reduction) -> Callable[..., Tensor]:
    def rule(call: OnnxCall, x: Tensor, _: Any = None) -> Tensor:
        axes = call.get("axes")
        if axes is None and call.has(1):
            axes = call.numbers(1)
        keep = bool(call.get("keepdims", 1))
        if not axes and call.get("noop_with_empty_axes", 0):
            if name == "ReduceLogSum":
                return torch.log(x)
            return _BEFORE.get(name, _same)(x)
        axes = [axis_of(a, x.ndim) for a in axes] if axes else list(range(x.ndim))
        if not axes:  # a scalar
            x, axes, keep = x.reshape(1), [0], False
        return function(x, axes, keep)

    return rule


def _same(x: Tensor) -> Tensor:
    return x


for _name, _function in _REDUCTIONS.items():
    operator(_name)(_reduction(_name, _function))


def _arg(call: OnnxCall, x: Tensor, function: Callable[..., Tensor]) -> Tensor:
    axis, keep = axis_of(call.get("axis", 0), x.ndim), bool(call.get("keepdims", 1))
    if not call.get("select_last_index", 0):
        return function(x, axis, keepdim=keep)
    last: Any = x.shape[axis] - 1
    return last - function(x.flip(axis), axis, keepdim=keep)


@operator("ArgMax")
def arg_max(call: OnnxCall, x: Tensor) -> Tensor:
    return _arg(call, x, torch.argmax)


@operator("ArgMin")
def arg_min(call: OnnxCall, x: Tensor) -> Tensor:
    return _arg(call, x, torch.argmin)


def _along(call: OnnxCall, x: Tensor, function: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Along an axis; before version 13, along all axes from one on."""
    if call.version >= 13:
        return function(x, call.get("axis", -1)) if x.ndim else function(x.reshape(1), 0).reshape(())
    axis = axis_of(call.get("axis", 1), x.ndim)
    if axis == x.ndim - 1:
        return function(x, -1)
    return function(x.flatten(axis), -1).reshape(x.shape)


@operator("Softmax")
def softmax(call: OnnxCall, x: Tensor) -> Tensor:
    return _along(call, x, torch.softmax)


@operator("LogSoftmax")
def log_softmax(call: OnnxCall, x: Tensor) -> Tensor:
    return _along(call, x, torch.log_softmax)


@operator("Hardmax")
def hardmax(call: OnnxCall, x: Tensor) -> Tensor:
    return _along(call, x, _hardmax)


def _hardmax(x: Tensor, axis: int) -> Tensor:
    axis = axis % x.ndim
    shape = [1] * x.ndim
    shape[axis] = -1
    return (torch.arange(x.shape[axis]).reshape(shape) == torch.argmax(x, axis, keepdim=True)).to(x.dtype)
