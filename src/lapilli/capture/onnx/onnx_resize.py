"""Resize, Upsample and GridSample's kin: what samples an axis between its elements."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from lapilli.capture.onnx.onnx_registry import OnnxCall, axis_of, operator
from lapilli.capture.onnx.onnx_values import ConstantTensor
from lapilli.errors import CompileError

Tensor = torch.Tensor
_SYM_INT: Any = torch.sym_int  # which has no types


@operator("Upsample")
def upsample(call: OnnxCall, x: Tensor, _: Tensor | None = None) -> Tensor:
    scales = call.get("scales") if call.version < 9 else call.numbers(1) or []
    sizes = [_floor(n * s) for n, s in zip(x.shape, scales, strict=True)]
    how = _How(call.get("mode", "nearest"), "asymmetric", "floor")
    return _resized(call, x, list(range(x.ndim)), scales, sizes, how, None)


@operator("Resize")
def resize(call: OnnxCall, x: Tensor, *_: Any) -> Tensor:
    axes = call.get("axes")
    axes = list(range(x.ndim)) if axes is None else [axis_of(a, x.ndim) for a in axes]
    mode = call.get("mode", "nearest")
    if call.version < 11:
        roi, scales, wanted = None, call.numbers(1), None
        how = _How(mode, "asymmetric", "floor")
    else:
        roi, scales, wanted = call.numbers(1), call.numbers(2), call.numbers(3)
        how = _How(
            mode, call.get("coordinate_transformation_mode", "half_pixel"), call.get("nearest_mode", "round_prefer_floor"),
            call.get("cubic_coeff_a", -0.75), bool(call.get("exclude_outside", 0)), bool(call.get("antialias", 0)),
            call.get("extrapolation_value", 0.0),
        )  # fmt: skip
    old = [x.shape[a] for a in axes]
    if wanted:
        policy = call.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            each = [w / n for w, n in zip(wanted, old, strict=True)]
            scale = min(each) if policy == "not_larger" else max(each)
            wanted = [math.floor(scale * n + 0.5) for n in old]
            scales = [scale] * len(axes)
        else:
            scales = [_quotient(w, n) for w, n in zip(wanted, old, strict=True)]
        sizes = wanted
    elif scales:
        sizes = [_floor(n * s) for n, s in zip(old, scales, strict=True)]
    else:
        raise CompileError("it has neither scales nor sizes")
    return _resized(call, x, axes, scales, sizes, how, roi)


def _floor(x: Any) -> Any:
    """The size for a product; a scale that is a whole number keeps symbols whole."""
    if isinstance(x, torch.SymFloat):
        return _SYM_INT(math.floor(x))
    return x if isinstance(x, int | torch.SymInt) else math.floor(x)


def _quotient(new: Any, old: Any) -> Any:
    if isinstance(new, torch.SymInt) and isinstance(old, torch.SymInt):
        ratio = new.node.expr / old.node.expr
        if ratio.is_number:
            return float(ratio)
    return new / old


class _How:
    """The attributes of a Resize."""

    def __init__(
        self, mode: str, coordinates: str, nearest: str, cubic: float = -0.75, exclude: bool = False, antialias: bool = False,
        outside: float = 0.0,
    ) -> None:  # fmt: skip
        self.mode, self.coordinates, self.nearest = mode, coordinates, nearest
        self.cubic, self.exclude, self.antialias, self.outside = cubic, exclude, antialias, outside


def _resized(
    call: OnnxCall, x: Tensor, axes: list[int], scales: list[Any], sizes: list[Any], how: _How, roi: list[Any] | None
) -> Tensor:
    kept = _kept_whole(scales)
    scales = kept
    changed = [
        k for k in range(len(axes))
        if how.coordinates == "tf_crop_and_resize" or not _unchanged(x.shape[axes[k]], sizes[k], scales[k])
    ]  # fmt: skip
    if not changed:
        return x
    direct = _by_torch(x, axes, scales, sizes, how, changed)
    if direct is not None:
        return direct
    dtype = x.dtype
    x = x if x.is_floating_point() or how.mode == "nearest" else x.float()
    outside: Any = None
    for k in changed:
        axis, size, scale = axes[k], sizes[k], scales[k]
        span = (roi[k], roi[k + len(axes)]) if roi and how.coordinates == "tf_crop_and_resize" else None
        x, beyond = _along(call, x, axis, size, scale, how, span)
        if beyond is not None:
            shape = [1] * x.ndim
            shape[axis] = -1
            beyond = beyond.reshape(shape)
            outside = beyond if outside is None else outside | beyond
    if outside is not None:
        x = torch.where(outside, how.outside, x)
    if x.dtype != dtype and dtype in (torch.uint8, torch.int8):
        info = torch.iinfo(dtype)
        return torch.clamp(torch.trunc(x), info.min, info.max).to(dtype)
    return x.to(dtype)


def _kept_whole(scales: list[Any]) -> list[Any]:
    return [float(s) if isinstance(s, int | float) else s for s in scales]


def _unchanged(old: Any, new: Any, scale: Any) -> bool:
    if isinstance(scale, float):
        return scale == 1.0
    return isinstance(old, int) and isinstance(new, int) and old == new


def _by_torch(
    x: Tensor, axes: list[int], scales: list[Any], sizes: list[Any], how: _How, changed: list[int]
) -> Tensor | None:
    """The result by torch's interpolation, where it means the same: the last one to three axes, of whole scales."""
    which = sorted(axes[k] for k in changed)
    rank = x.ndim - 2
    if rank not in (1, 2, 3) or which[0] < 2 or not x.is_floating_point() or how.antialias or how.exclude:
        return None
    places = dict(zip(axes, range(len(axes)), strict=True))
    new = [sizes[places[a]] if a in places else x.shape[a] for a in range(2, x.ndim)]
    exact = all(
        isinstance(scales[k], float)
        and (_integer(scales[k]) or (isinstance(x.shape[axes[k]], int) and x.shape[axes[k]] * scales[k] == sizes[k]))
        for k in changed
    )
    if not exact:
        return None
    if how.mode == "nearest":
        if how.coordinates == "asymmetric" and how.nearest == "floor":
            return F.interpolate(x, size=new, mode="nearest")
        whole = all(_integer(scales[k]) for k in changed)
        if whole and how.coordinates == "half_pixel" and how.nearest in ("round_prefer_floor", "round_prefer_ceil"):
            return F.interpolate(x, size=new, mode="nearest") if all(int(scales[k]) % 2 == 0 for k in changed) else None
        return None
    if how.coordinates not in ("half_pixel", "align_corners"):
        return None
    corners = how.coordinates == "align_corners"
    if how.mode == "linear":
        return F.interpolate(x, size=new, mode=("linear", "bilinear", "trilinear")[rank - 1], align_corners=corners)
    if how.mode == "cubic" and rank == 2 and how.cubic == -0.75:
        return F.interpolate(x, size=new, mode="bicubic", align_corners=corners)
    return None


def _integer(scale: Any) -> bool:
    return isinstance(scale, float) and scale >= 1 and scale == int(scale)


def _along(
    call: OnnxCall, x: Tensor, axis: int, size: Any, scale: Any, how: _How, span: tuple[Any, Any] | None
) -> tuple[Tensor, Tensor | None]:
    """An axis sampled anew, and where its samples lie outside."""
    old = x.shape[axis]
    known = all(isinstance(n, int | float) for n in (old, size, scale, *(span or ())))
    if known:
        with _disable_current_modes():
            taps, beyond = _taps(old, size, scale, how, span, torch.float64)
        place = call.interpreter.tensor
        taps = [
            (place(ConstantTensor(p)), None if w is None else place(ConstantTensor(w.to(_kind(x))))) for p, w in taps
        ]
        beyond = None if beyond is None else place(ConstantTensor(beyond))
    else:
        taps, beyond = _taps(old, size, scale, how, span, torch.float32)
    if len(taps) == 1:
        return x.index_select(axis, taps[0][0]), beyond
    shape = [1] * x.ndim
    shape[axis] = -1
    result: Any = None
    for places, weights in taps:
        part = x.index_select(axis, places) * weights.reshape(shape).to(_kind(x))
        result = part if result is None else result + part
    return result, beyond


def _kind(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.float32


def _taps(
    old: Any, new: Any, scale: Any, how: _How, span: tuple[Any, Any] | None, dtype: torch.dtype
) -> tuple[list[tuple[Tensor, Any]], Tensor | None]:
    """For each element that a sample reads: its place, and its weight (None: the only one)."""
    at = _coordinates(torch.arange(new, dtype=torch.float64).to(dtype), old, new, scale, how, span)
    beyond = (at < 0) | (at > old - 1) if span is not None else None
    if how.mode == "nearest":
        nearest: dict[str, Any] = {
            "round_prefer_floor": lambda t: torch.ceil(t - 0.5), "round_prefer_ceil": lambda t: torch.floor(t + 0.5),
            "floor": torch.floor, "ceil": torch.ceil,
        }  # fmt: skip
        if how.nearest not in nearest:
            raise CompileError(f"nearest_mode is {how.nearest!r}")
        places = nearest[how.nearest](at)
        return [(torch.clamp(places, 0, old - 1).to(torch.int64), None)], beyond
    base = torch.ceil(at) - 1  # so that the share of the right one is never 0
    ratio = at - base
    narrow = min(scale, 1.0) if how.antialias and isinstance(scale, float) else 1.0
    if how.antialias and not isinstance(scale, float):
        raise CompileError("antialias needs a scale that is known when the model is compiled")
    reach = {"linear": 1, "cubic": 2}.get(how.mode)
    if reach is None:
        raise CompileError(f"mode is {how.mode!r}: nearest, linear and cubic are supported")
    first = math.floor(-reach / narrow) + 1
    offsets = range(first, 2 - first)
    weights, places_of = [], []
    for offset in offsets:
        distance = (offset - ratio).abs() * narrow
        weight = torch.clamp(1 - distance, 0, 1) if how.mode == "linear" else _cubic(distance, how.cubic)
        place = base + offset
        if how.exclude:
            weight = torch.where((place < 0) | (place > old - 1), 0, weight)
        weights.append(weight)
        places_of.append(torch.clamp(place, 0, old - 1).to(torch.int64))
    if how.exclude or how.antialias:
        total = torch.stack(weights).sum(0)
        weights = [w / total for w in weights]
    return list(zip(places_of, weights, strict=True)), beyond


def _cubic(x: Tensor, a: float) -> Tensor:
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, 0))


def _coordinates(x: Any, old: Any, new: Any, scale: Any, how: _How, span: tuple[Any, Any] | None) -> Any:
    """Where a sample lies among the old elements. new: of elements; the width of the result as a real number is old * scale."""
    mode, width = how.coordinates, old * scale
    if mode == "half_pixel":
        return (x + 0.5) / scale - 0.5
    if mode == "asymmetric":
        return x / scale
    if mode == "align_corners":
        if width == 1:
            return x * 0.0
        return x * ((old - 1) / (width - 1))
    if mode == "pytorch_half_pixel":
        return x * 0.0 if new == 1 else (x + 0.5) / scale - 0.5
    if mode == "half_pixel_symmetric":
        adjustment = new / width
        return old / 2 * (1 - adjustment) + (x + 0.5) / scale - 0.5
    if mode == "tf_crop_and_resize" and span is not None:
        begin, end = span
        if width == 1:
            return x * 0.0 + (end - begin) * (old - 1) / 2
        return x * ((end - begin) * (old - 1) / (width - 1)) + begin * (old - 1)
    raise CompileError(f"coordinate_transformation_mode is {mode!r}")
