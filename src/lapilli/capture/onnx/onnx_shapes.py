"""Shapes: what reads and changes them, and arithmetic with numbers that may be symbols."""

from __future__ import annotations

import math
import operator as python
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from lapilli.capture.onnx.onnx_casts import cast
from lapilli.capture.onnx.onnx_graph import BITS, BOOL, DTYPES, kind_of
from lapilli.capture.onnx.onnx_interpreter import simplified, sizes
from lapilli.capture.onnx.onnx_registry import OPERATORS, OnnxCall, axis_of, operator, symbolic
from lapilli.capture.onnx.onnx_values import ConstantTensor, Numbers, array, numbers
from lapilli.errors import CompileError

Tensor = torch.Tensor
_SYM: Any = torch  # functions of symbols have no types


@operator("Shape")
def shape(call: OnnxCall, x: Tensor) -> Any:
    return sizes(list(x.shape)[call.get("start", 0) : call.get("end")])


@operator("Size")
def size(call: OnnxCall, x: Tensor) -> Any:
    return simplified(Numbers(array([x.numel()], ()), torch.int64))


@operator("Reshape")
def reshape(call: OnnxCall, x: Tensor, _: Any) -> Tensor:
    wanted = call.numbers(1) or []
    if not call.get("allowzero", 0):
        wanted = [x.shape[k] if isinstance(n, int) and n == 0 else n for k, n in enumerate(wanted)]
        if isinstance(call.value(1), Tensor) and any(isinstance(n, torch.SymInt) and is_computed(n) for n in wanted):
            raise CompileError(
                "the new shape depends on the values of a tensor, and 0 and -1 have a meaning of their own there. If an input "
                "decides it, give its example as a list of Python's numbers: that compiles it in"
            )
    return x.reshape(_matched(list(x.shape), wanted))


def is_computed(n: torch.SymInt) -> bool:
    """Whether a size is the value of a tensor, not the size of an input."""
    symbols = n.node.expr.free_symbols
    return any(n.node.shape_env.is_unbacked_symint(s) for s in symbols)


def _matched(shape: list[Any], wanted: list[Any]) -> list[Any]:
    """The new shape; a -1 that stands for one of the old sizes is that size, so that it stays the same symbol."""
    if not any(isinstance(n, int) and n == -1 for n in wanted) or all(isinstance(n, int) for n in shape):
        return wanted
    rest = list(shape)
    for n in wanted:
        for k, old in enumerate(rest):
            if not (isinstance(n, int) and n == -1) and _same(old, n):
                del rest[k]
                break
    others = [n for n in wanted if not (isinstance(n, int) and n == -1)]
    if len(rest) == 1 and len(others) == len(shape) - 1:
        return [rest[0] if isinstance(n, int) and n == -1 else n for n in wanted]
    return wanted


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return bool(a.node.expr == b.node.expr)
    return False


@operator("Flatten")
def flatten(call: OnnxCall, x: Tensor) -> Tensor:
    axis = call.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    first: Any = 1
    for n in x.shape[:axis]:
        first = first * n
    second: Any = 1
    for n in x.shape[axis:]:
        second = second * n
    return x.reshape(first, second)


def _axes(call: OnnxCall, index: int = 1) -> list[int] | None:
    """Axes: an attribute in old versions, an input since 13."""
    axes: list[int] | None = call.get("axes")
    return call.numbers(index) if axes is None else axes


@operator("Squeeze")
def squeeze(call: OnnxCall, x: Tensor, _: Any = None) -> Tensor:
    axes = _axes(call)
    if axes is None:
        return x.squeeze()
    wanted = [axis_of(a, x.ndim) for a in axes]
    for a in wanted:
        if isinstance(x.shape[a], int) and x.shape[a] != 1:
            raise CompileError(f"axis {a} has the size {x.shape[a]}, not 1")
    return x.reshape([n for k, n in enumerate(x.shape) if k not in wanted])


@operator("Unsqueeze")
def unsqueeze(call: OnnxCall, x: Tensor, _: Any = None) -> Tensor:
    axes = _axes(call) or []
    rank = x.ndim + len(axes)
    for a in sorted(axis_of(a, rank) for a in axes):
        x = x.unsqueeze(a)
    return x


@operator("Expand")
def expand(call: OnnxCall, x: Tensor, _: Any) -> Tensor:
    wanted = call.numbers(1) or []
    rank = max(len(wanted), x.ndim)
    old = [1] * (rank - x.ndim) + list(x.shape)
    wanted = [1] * (rank - len(wanted)) + wanted
    new = [b if isinstance(a, int) and a == 1 else a for a, b in zip(old, wanted, strict=True)]
    return x.expand(new)


@operator("Tile")
def tile(call: OnnxCall, x: Tensor, _: Any, axis: Any = None) -> Tensor:
    repeats = call.numbers(1) or []
    return x.repeat(repeats) if x.ndim else x


@operator("ConstantOfShape")
def constant_of_shape(call: OnnxCall, _: Tensor) -> Tensor:
    value = call.get("value")
    shape = call.numbers(0)
    if value is None:
        return torch.zeros(shape or [], dtype=torch.float32)
    return torch.full(shape or [], numbers(ConstantTensor(value)).array.reshape(-1)[0], dtype=value.dtype)


@operator("Range")
def range_(call: OnnxCall, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    if start.is_floating_point() and any(isinstance(call.value(k), Tensor) for k in range(3)):
        start, limit, delta = (x.reshape(()) for x in (start, limit, delta))
        length = (
            torch.ceil((limit - start).double() / delta.double()).clamp(min=0).long()
        )  # known when the program runs
        return torch.arange(length.item(), dtype=torch.int32).to(start.dtype) * delta + start
    begin, end, step = (call.number(k) for k in range(3))
    if not start.is_floating_point() or not all(isinstance(n, int | float) for n in (begin, end, step)):
        return torch.arange(begin, end, step, dtype=start.dtype)
    count = max(-int(-((end - begin) / step) // 1), 0)  # as NumPy counts, and no rounding adds an element
    places = torch.arange(count, dtype=torch.float64)
    return (begin + places * step).to(start.dtype)


@operator("EyeLike")
def eye_like(call: OnnxCall, x: Tensor) -> Tensor:
    k = call.get("k", 0)
    dtype = x.dtype if call.get("dtype") is None else call.dtype(call.get("dtype"))
    rows, columns = (torch.arange(n) for n in x.shape)
    return (columns.unsqueeze(0) - rows.unsqueeze(1) == k).to(dtype)


@operator("Constant")
def constant(call: OnnxCall) -> Tensor:
    given = call.node.attributes
    if "value" in given:
        value: Tensor = given["value"]
        return value
    for name, dtype in (
        ("value_int", torch.int64), ("value_ints", torch.int64), ("value_float", torch.float32), ("value_floats", torch.float32),
    ):  # fmt: skip
        if name in given:
            return torch.tensor(given[name], dtype=dtype)
    raise CompileError("only constants of numbers are supported, not of strings or sparse tensors")


@operator("Cast")
def cast_(call: OnnxCall, x: Tensor) -> Tensor:
    return _cast(call, x, call.get("to"))


@operator("CastLike")
def cast_like(call: OnnxCall, x: Tensor, other: Tensor) -> Tensor:
    return _cast(call, x, call.kind(1))


def _cast(call: OnnxCall, x: Tensor, kind: int) -> Tensor:
    call.dtype(kind)
    return cast(x, call.kind(0), kind, bool(call.get("saturate", 1)), call.get("round_mode", "up"))


@operator("BitCast")
def bit_cast(call: OnnxCall, x: Tensor) -> Tensor:
    source, kind = call.kind(0), call.get("to")
    if source in BITS and kind in BITS and BITS[source][0] == BITS[kind][0]:
        bits, signed = BITS[kind]
        wide = x.to(torch.int64)
        if bits < 64:
            low = wide & ((1 << bits) - 1)
            wide = (low ^ (1 << (bits - 1))) - (1 << (bits - 1)) if signed else low
        return wide.to(DTYPES[kind])
    if BOOL in (source, kind):
        return x.to(DTYPES[kind]) if kind != BOOL else x != 0
    for widened, dtype in ((12, torch.int32), (4, torch.int16), (13, torch.int64)):
        if source == widened:
            x = x.to(dtype)
        if kind == widened:
            wide = x.view(dtype).to(torch.int64)
            return (wide & ((1 << BITS[kind][0]) - 1) if kind != 13 else wide).to(DTYPES[kind])
    return x.view(call.dtype(kind))


# -- numbers that may be symbols


def _of(call: OnnxCall, values: Any, index: int = 0) -> Numbers:
    """An array as a result, with the dtype of an input."""
    result = values if isinstance(values, np.ndarray) else array([values], ())
    return Numbers(result, call.value(index).dtype)


def _int(x: Any) -> bool:
    return isinstance(x, bool | int | torch.SymInt)


def _elementwise(function: Callable[..., Any], dtype: torch.dtype | None = None) -> Callable[..., Numbers]:
    def rule(call: OnnxCall, *values: Any) -> Numbers:
        result = np.asarray(np.frompyfunc(function, len(values), 1)(*values), dtype=object)
        return Numbers(result, dtype or call.value(0).dtype)

    return rule


def _divide(a: Any, b: Any) -> Any:
    if not (_int(a) and _int(b)):
        return a / b
    if isinstance(a, int) and isinstance(b, int):
        quotient = abs(a) // abs(b)
        return quotient if (a < 0) == (b < 0) else -quotient
    return a // b if isinstance(b, torch.SymInt) or b > 0 else -(a // -b)  # sizes are not negative


def _maximum(*values: Any) -> Any:
    result = values[0]
    for v in values[1:]:
        result = max(result, v) if isinstance(result, int) and isinstance(v, int) else _SYM.sym_max(result, v)
    return result


def _minimum(*values: Any) -> Any:
    result = values[0]
    for v in values[1:]:
        result = min(result, v) if isinstance(result, int) and isinstance(v, int) else _SYM.sym_min(result, v)
    return result


def _sum(*values: Any) -> Any:
    result = values[0]
    for v in values[1:]:
        result = result + v
    return result


for _name, _function in (
    ("Add", python.add), ("Sub", python.sub), ("Mul", python.mul), ("Div", _divide), ("Neg", python.neg),
    ("Max", _maximum), ("Min", _minimum), ("Sum", _sum), ("Identity", lambda x: x),
):  # fmt: skip
    symbolic(_name)(_elementwise(_function))
for _name, _function in (
    ("Equal", python.eq), ("Less", python.lt), ("Greater", python.gt), ("LessOrEqual", python.le), ("GreaterOrEqual", python.ge),
):  # fmt: skip
    symbolic(_name)(_elementwise(lambda a, b, f=_function: bool(f(a, b)), torch.bool))


@symbolic("Mod")
def mod_numbers(call: OnnxCall, a: Any, b: Any) -> Numbers | None:
    return None if call.get("fmod", 0) else _elementwise(python.mod)(call, a, b)


@symbolic("Sqrt", "Pow")
def power_numbers(call: OnnxCall, a: Any, b: Any = None) -> Numbers:
    if b is None:
        return _elementwise(lambda x: _SYM.sym_sqrt(x))(call, a)
    return _elementwise(lambda x, y: x ** (int(y) if isinstance(y, float) and y == int(y) else y))(call, a, b)


@symbolic("Ceil", "Floor", "Round")
def rounded_numbers(call: OnnxCall, a: Any) -> Numbers:
    functions: dict[str, Any] = {"Ceil": math.ceil, "Floor": math.floor, "Round": round}
    function = functions[call.node.op]
    return _elementwise(lambda x: _SYM.sym_float(function(x)))(call, a)


@symbolic("Cast", "CastLike")
def cast_numbers(call: OnnxCall, a: Any, _: Any = None) -> Numbers | None:
    kind = call.get("to") if call.node.op == "Cast" else call.kind(1)
    dtype = DTYPES[kind]
    if kind == BOOL:
        return Numbers(np.asarray(np.frompyfunc(lambda x: bool(x != 0), 1, 1)(a), dtype=object), dtype)
    if dtype.is_floating_point:
        return Numbers(np.asarray(np.frompyfunc(_SYM.sym_float, 1, 1)(a), dtype=object), dtype)
    frompyfunc: Any = np.frompyfunc
    whole = frompyfunc(lambda x: int(x) if isinstance(x, bool | float) else x if _int(x) else _SYM.sym_int(x), 1, 1)
    return Numbers(np.asarray(whole(a), dtype=object), dtype) if kind == kind_of(dtype) else None


@symbolic("Where")
def where_numbers(call: OnnxCall, condition: Any, a: Any, b: Any) -> Numbers:
    return _elementwise(lambda c, x, y: x if c else y, call.value(1).dtype)(call, condition, a, b)


@symbolic("Not")
def not_numbers(call: OnnxCall, a: Any) -> Numbers:
    return _elementwise(python.not_)(call, a)


@symbolic("And", "Or")
def logical_numbers(call: OnnxCall, a: Any, b: Any) -> Numbers:
    return _elementwise((lambda x, y: x and y) if call.node.op == "And" else (lambda x, y: x or y))(call, a, b)


@symbolic("Concat")
def concat_numbers(call: OnnxCall, *values: Any) -> Numbers:
    return _of(call, np.concatenate(values, call.get("axis", 0)))


@symbolic("Gather")
def gather_numbers(call: OnnxCall, data: Any, places: Any) -> Numbers | None:
    if any(not isinstance(p, int) for p in places.reshape(-1)):
        return None
    return _of(call, np.take(data, places.astype(np.int64), call.get("axis", 0)))


@symbolic("Slice")
def slice_numbers(call: OnnxCall, data: Any, *bounds: Any) -> Numbers | None:
    spans = slices(call, data.ndim)
    if any(n is not None and not isinstance(n, int) for span in spans.values() for n in span):
        return None
    return _of(call, data[tuple(slice(*spans.get(k, (None,))) for k in range(data.ndim))])


@symbolic("Squeeze", "Unsqueeze", "Reshape", "Flatten", "Transpose", "Expand", "Tile")
def moved_numbers(call: OnnxCall, data: Any, *_: Any) -> Numbers | None:
    """What rearranges elements, done on their places."""
    if any(isinstance(v, Numbers) for v in call.values[1:]):
        return None
    with _disable_current_modes():
        places = torch.arange(data.size).reshape(data.shape)
        moved = OPERATORS["", call.node.op](call, places, *(None if v is None else v.tensor for v in call.values[1:]))
        return _of(call, array((data.reshape(-1)[k] for k in moved.reshape(-1).tolist()), tuple(moved.shape)))


@symbolic("Split")
def split_numbers(call: OnnxCall, data: Any, lengths: Any = None) -> Any:
    if call.version < 2 or (lengths is None and call.get("split") is None):
        parts: Any = np.array_split(data, call.get("num_outputs", len(call.node.outputs)), call.get("axis", 0))
    else:
        given = call.get("split") or lengths.tolist()
        parts = np.split(data, np.cumsum(np.asarray(given, dtype=np.int64))[:-1], call.get("axis", 0))
    return tuple(_of(call, p) for p in parts)


@symbolic("ReduceProd", "ReduceSum", "ReduceMax", "ReduceMin")
def reduced_numbers(call: OnnxCall, data: Any, axes: Any = None) -> Numbers | None:
    if data.ndim != 1 or call.get("noop_with_empty_axes", 0):
        return None
    function = {"ReduceProd": python.mul, "ReduceSum": python.add, "ReduceMax": _maximum, "ReduceMin": _minimum}[
        call.node.op
    ]
    result = data[0]
    for x in data[1:]:
        result = function(result, x)
    return _of(call, array([result], (1,) if call.get("keepdims", 1) else ()))


@symbolic("Range")
def range_numbers(call: OnnxCall, start: Any, end: Any, step: Any) -> Numbers | None:
    return None  # a tensor: its length is a symbol


def slices(call: OnnxCall, rank: int) -> dict[int, Sequence[Any]]:
    """The begin, end and step of each axis that a Slice names."""
    if call.version < 10:
        starts, ends, axes, steps = call.get("starts"), call.get("ends"), call.get("axes"), None
    else:
        starts, ends, axes, steps = (call.numbers(k) for k in range(1, 5))
    axes = list(range(len(starts))) if axes is None else [axis_of(a, rank) for a in axes]
    steps = [1] * len(starts) if steps is None else steps
    return {a: (s, e, n) for a, s, e, n in zip(axes, starts, ends, steps, strict=True)}
