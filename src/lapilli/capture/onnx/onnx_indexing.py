"""Operators that move elements: slices, gathers, scatters, padding, sorting."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F

from lapilli.capture.onnx.onnx_graph import UINT64
from lapilli.capture.onnx.onnx_registry import OnnxCall, axis_of, operator
from lapilli.capture.onnx.onnx_shapes import is_computed, slices
from lapilli.errors import CompileError

Tensor = torch.Tensor
_SIGN = -(2**63)


@operator("Transpose")
def transpose(call: OnnxCall, x: Tensor) -> Tensor:
    return x.permute(call.get("perm") or list(range(x.ndim))[::-1])


@operator("Concat")
def concat(call: OnnxCall, *values: Tensor) -> Tensor:
    return torch.cat(values, call.get("axis", 1))


@operator("Split")
def split(call: OnnxCall, x: Tensor, lengths: Any = None) -> tuple[Tensor, ...]:
    axis = axis_of(call.get("axis", 0), x.ndim)
    given = call.get("split") or call.numbers(1)
    if given is None:
        count = call.get("num_outputs", len(call.node.outputs))
        size = x.shape[axis]
        each = (size + count - 1) // count
        given = [each] * (count - 1)
        given.append(size - each * (count - 1))
    return tuple(torch.split(x, given, axis))


@operator("Slice")
def slice_(call: OnnxCall, x: Tensor, *_: Tensor) -> Tensor:
    for axis, (begin, end, step) in slices(call, x.ndim).items():
        size = x.shape[axis]
        if step < 0:  # of the axis in reverse
            x = x.flip(axis)
            begin = _mirrored(begin, size, 0)
            end = _mirrored(end, size, -1)
            step = -step
        begin, end = _from_the_beginning(begin, size), _from_the_beginning(end, size)
        x = torch.ops.aten.slice.Tensor(x, axis, begin, end, step)
    return x


def _from_the_beginning(place: Any, size: Any) -> Any:
    """A bound of a slice, not negative; beyond any axis it is the end."""
    if isinstance(place, int) and abs(place) > 2**31 - 2:
        return 0 if place < 0 else sys.maxsize
    if isinstance(place, torch.SymInt) and is_computed(place):
        return place
    if place < 0:
        place = place + size
        return max(place, 0) if isinstance(place, int) else place
    return place


def _mirrored(place: Any, size: Any, least: int) -> Any:
    """A bound of a slice of negative step, for the axis in reverse. least: 0 for the begin, -1 for the end, which is left out."""
    if isinstance(place, int) and place > 2**31 - 2:
        return 0
    if isinstance(place, int) and place < -(2**31) + 2:
        return sys.maxsize if least < 0 else size - 1
    if not (isinstance(place, torch.SymInt) and is_computed(place)) and place < 0:
        place = place + size
    if isinstance(place, int) and isinstance(size, int):
        return size - 1 - min(max(place, least), size - 1)
    return size - 1 - place


def wrapped_places(places: Tensor, size: Any) -> Tensor:
    """Places counted from the beginning."""
    return torch.where(places < 0, places + size, places)


@operator("Gather")
def gather(call: OnnxCall, data: Tensor, places: Tensor) -> Tensor:
    axis = axis_of(call.get("axis", 0), data.ndim)
    places = wrapped_places(places, data.shape[axis])
    if axis == 0 and data.ndim == 2 and places.ndim and data.is_floating_point():
        return F.embedding(places, data)
    if places.ndim == 1:
        return data.index_select(axis, places)
    found = data.index_select(axis, places.reshape(-1))
    return found.reshape([*data.shape[:axis], *places.shape, *data.shape[axis + 1 :]])


@operator("GatherElements")
def gather_elements(call: OnnxCall, data: Tensor, places: Tensor) -> Tensor:
    axis = axis_of(call.get("axis", 0), data.ndim)
    return data.gather(axis, wrapped_places(places.to(torch.int64), data.shape[axis]))


@operator("GatherND")
def gather_nd(call: OnnxCall, data: Tensor, places: Tensor) -> Tensor:
    batch = call.get("batch_dims", 0)
    last = places.shape[-1]
    index: list[Tensor] = []
    for k in range(batch):
        shape = [1] * (places.ndim - 1)
        shape[k] = data.shape[k]
        index.append(torch.arange(data.shape[k]).reshape(shape))
    index += [wrapped_places(places[..., k], data.shape[batch + k]) for k in range(last)]
    result: Tensor = data[tuple(index)]
    return result


@operator("Scatter", "ScatterElements")
def scatter_elements(call: OnnxCall, data: Tensor, places: Tensor, updates: Tensor) -> Tensor:
    axis = axis_of(call.get("axis", 0), data.ndim)
    places = wrapped_places(places.to(torch.int64), data.shape[axis])
    how = call.get("reduction", "none")
    if how == "none":
        return data.scatter(axis, places, updates)
    return data.scatter_reduce(axis, places, updates, _REDUCTIONS[how])


_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@operator("ScatterND")
def scatter_nd(call: OnnxCall, data: Tensor, places: Tensor, updates: Tensor) -> Tensor:
    how = call.get("reduction", "none")
    last = places.shape[-1]
    index = [wrapped_places(places[..., k], data.shape[k]) for k in range(last)]
    if how in ("none", "add"):
        return data.index_put(tuple(index), updates, accumulate=how == "add")
    flat: Any = torch.zeros_like(index[0])
    for k in range(last):
        flat = flat * data.shape[k] + index[k]
    inner = list(data.shape[last:])
    rows = data.reshape([-1, *inner])
    flat = flat.reshape([-1] + [1] * len(inner)).expand([-1, *inner])
    return rows.scatter_reduce(0, flat, updates.reshape([-1, *inner]), _REDUCTIONS[how]).reshape(data.shape)


@operator("TensorScatter")
def tensor_scatter(call: OnnxCall, past: Tensor, update: Tensor, begin: Tensor | None = None) -> Tensor:
    axis = axis_of(call.get("axis", -2), past.ndim)
    steps = torch.arange(update.shape[axis])
    first = steps.unsqueeze(0) if begin is None else begin.unsqueeze(1) + steps
    if call.get("mode", "linear") == "circular":
        first = torch.remainder(first, past.shape[axis])
    shape = [1] * past.ndim
    shape[0], shape[axis] = first.shape[0], first.shape[1]
    return past.scatter(axis, first.reshape(shape).expand(update.shape), update)


@operator("Pad")
def pad(call: OnnxCall, x: Tensor, *_: Tensor) -> Tensor:
    mode = call.get("mode", "constant")
    if call.version < 11:
        pads, value, axes = list(call.get("pads")), call.get("value", 0.0), None
    else:
        pads, value, axes = call.numbers(1) or [], call.number(2, 0), call.numbers(3)
    axes = list(range(x.ndim)) if axes is None else [axis_of(a, x.ndim) for a in axes]
    spans = {a: (pads[k], pads[k + len(axes)]) for k, a in enumerate(axes)}
    return padded(x, spans, mode, value)


def padded(x: Tensor, spans: dict[int, tuple[Any, Any]], mode: str = "constant", value: Any = 0) -> Tensor:
    """A tensor with elements before and after those of each axis."""
    spans = {a: s for a, s in spans.items() if not (_is_zero(s[0]) and _is_zero(s[1]))}
    if not spans:
        return x
    if mode == "constant":
        flat: list[Any] = []
        for axis in range(x.ndim - 1, min(spans) - 1, -1):
            flat += spans.get(axis, (0, 0))
        if x.dtype == torch.bool:
            return F.pad(x.to(torch.uint8), flat, value=int(bool(value))).to(torch.bool)
        return F.pad(x, flat, value=value)
    usual = x.is_floating_point() and (
        (x.ndim in (3, 4) and set(spans) <= {x.ndim - 1, x.ndim - 2}) or (x.ndim == 3 and set(spans) == {2})
    )
    if usual and mode in ("reflect", "edge") and all(_fits(s, x.shape[a], mode) for a, s in spans.items()):
        flat = [*spans.get(x.ndim - 1, (0, 0)), *(spans.get(x.ndim - 2, (0, 0)) if x.ndim - 2 in spans else ())]
        return F.pad(x, flat, mode="replicate" if mode == "edge" else mode)
    for axis, (before, after) in spans.items():
        size = x.shape[axis]
        places = torch.arange(-before, size + after)
        if mode == "edge":
            places = torch.clamp(places, 0, size - 1)
        elif mode == "wrap":
            places = torch.remainder(places, size)
        elif mode == "reflect":
            turn = max(size - 1, 1) if isinstance(size, int) else size - 1
            places = turn - (turn - torch.remainder(places, 2 * turn)).abs() if size != 1 else places * 0
        else:
            raise CompileError(f"mode is {mode!r}: constant, reflect, edge and wrap are supported")
        x = x.index_select(axis, places)
    return x


def _is_zero(n: Any) -> bool:
    return isinstance(n, int) and n == 0


def _fits(span: tuple[Any, Any], size: Any, mode: str) -> bool:
    return all(
        isinstance(n, int) and n >= 0 and (mode == "edge" or not isinstance(size, int) or n < size) for n in span
    )


@operator("Trilu")
def trilu(call: OnnxCall, x: Tensor, _: Tensor | None = None) -> Tensor:
    k = call.number(1, 0)
    if isinstance(k, int):
        k = min(max(k, -(2**31)), 2**31 - 1)
    if x.dtype == torch.bool:
        return trilu_of(x.to(torch.uint8), k, call.get("upper", 1)).to(torch.bool)
    return trilu_of(x, k, call.get("upper", 1))


def trilu_of(x: Tensor, k: Any, upper: int) -> Tensor:
    return torch.triu(x, k) if upper else torch.tril(x, k)


@operator("OneHot")
def one_hot(call: OnnxCall, places: Tensor, depth: Tensor, values: Tensor) -> Tensor:
    count = call.number(1)
    count = int(count) if isinstance(count, float) else count
    rank = places.ndim + 1
    axis = axis_of(call.get("axis", -1), rank)
    shape = [1] * rank
    shape[axis] = count
    if places.is_floating_point():
        places = places.to(torch.int64)
    wanted = wrapped_places(places, count).unsqueeze(axis)
    hit = wanted == torch.arange(count).reshape(shape).to(wanted.dtype)
    return torch.where(hit, values[1], values[0])


@operator("DepthToSpace")
def depth_to_space(call: OnnxCall, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    b = call.get("blocksize")
    if call.get("mode", "DCR") == "CRD":
        return x.reshape(n, c // (b * b), b, b, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, c // (b * b), h * b, w * b)
    return x.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // (b * b), h * b, w * b)


@operator("SpaceToDepth")
def space_to_depth(call: OnnxCall, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    b = call.get("blocksize")
    blocks = x.reshape(n, c, h // b, b, w // b, b)
    order = (0, 1, 3, 5, 2, 4) if call.get("mode", "DCR") == "CRD" else (0, 3, 5, 1, 2, 4)
    return blocks.permute(order).reshape(n, c * b * b, h // b, w // b)


@operator("Compress")
def compress(call: OnnxCall, x: Tensor, condition: Tensor) -> Tensor:
    axis = call.get("axis")
    if axis is None:
        x, axis = x.reshape(-1), 0
    axis = axis_of(axis, x.ndim)
    places = torch.nonzero(condition[: x.shape[axis]]).reshape(-1)
    return x.index_select(axis, places)


@operator("NonZero")
def non_zero(call: OnnxCall, x: Tensor) -> Tensor:
    return torch.nonzero(x).transpose(0, 1)


@operator("Unique")
def unique(call: OnnxCall, x: Tensor) -> tuple[Tensor | None, ...]:
    axis = call.get("axis")
    if axis is None:
        x, axis = x.reshape(-1), 0
    if x.ndim == 1:
        values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    else:
        values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True, dim=axis)
    size = x.shape[axis]
    steps = torch.arange(size)
    first = (counts * 0 + size).scatter_reduce(0, inverse, steps, "amin")
    if not call.get("sorted", 1):
        order = torch.argsort(first)
        values, first, counts = values.index_select(axis, order), first[order], counts[order]
        inverse = torch.argsort(order)[inverse]
    return values, first, inverse, counts


@operator("TopK")
def top_k(call: OnnxCall, x: Tensor, _: Tensor | None = None) -> tuple[Tensor, Tensor]:
    k = call.get("k") if call.version < 10 else call.number(1)
    axis = axis_of(call.get("axis", -1), x.ndim)
    flipped = call.has(0) and call.kind(0) == UINT64
    data = x ^ _SIGN if flipped else x
    # The first of equal elements comes first, which torch.topk does not promise.
    values, places = torch.sort(data, dim=axis, descending=bool(call.get("largest", 1)), stable=True)
    values, places = values.narrow(axis, 0, k), places.narrow(axis, 0, k)
    return values ^ _SIGN if flipped else values, places


@operator("ReverseSequence")
def reverse_sequence(call: OnnxCall, x: Tensor, lengths: Tensor) -> Tensor:
    time, batch = call.get("time_axis", 0), call.get("batch_axis", 1)
    steps = torch.arange(x.shape[time])
    ends = lengths.unsqueeze(1)
    places = torch.where(steps < ends, ends - 1 - steps, steps)  # [batch, time]
    if time < batch:
        places = places.transpose(0, 1)
    shape = [1] * x.ndim
    shape[time], shape[batch] = x.shape[time], x.shape[batch]
    return x.gather(time, places.reshape(shape).expand(x.shape))


@operator("CenterCropPad")
def center_crop_pad(call: OnnxCall, x: Tensor, _: Tensor) -> Tensor:
    wanted = call.numbers(1) or []
    axes = call.get("axes")
    axes = list(range(x.ndim)) if axes is None else [axis_of(a, x.ndim) for a in axes]
    for axis, size in zip(axes, wanted, strict=True):
        now = x.shape[axis]
        if now > size:
            x = x.narrow(axis, (now - size) // 2, size)
        elif now < size:
            before = (size - now) // 2
            x = padded(x, {axis: (before, size - now - before)})
    return x


@operator("ArrayFeatureExtractor", domain="ai.onnx.ml")
def array_feature_extractor(call: OnnxCall, x: Tensor, places: Tensor) -> Tensor:
    return x.index_select(-1, places.reshape(-1))
