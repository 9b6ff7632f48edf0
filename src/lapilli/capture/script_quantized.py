"""Quantized TorchScript operators, written as PT2E writes them: a quantized tensor is a float tensor dequantized from codes, and
operators with quantized results quantize and dequantize them. `graph/integers.py` then computes in integers what it can.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from lapilli.capture.script_operators import DTYPES, number
from lapilli.errors import CompileError

decomposed = torch.ops.quantized_decomposed

_LIMITS = {torch.quint8: (0, 255), torch.qint8: (-128, 127), torch.qint32: (-(2**31), 2**31 - 1)}
_CODES = {torch.quint8: torch.uint8, torch.qint8: torch.int8}


@dataclass(eq=False)
class _Memory:
    """What views share. whole: what this is a part of; changes: of it in place; in_parts: of parts of it."""

    whole: _Memory | None = None
    changes: int = 0
    in_parts: int = 0

    def seen(self) -> int:
        """The number of changes to anything in it."""
        above = self.whole
        found = self.changes + self.in_parts
        while above is not None:
            found, above = found + above.changes, above.whole
        return found

    def change(self) -> None:
        self.changes += 1
        above = self.whole
        while above is not None:
            above.in_parts, above = above.in_parts + 1, above.whole


@dataclass(eq=False)
class Quantized:
    """A quantized tensor. value: float32, dequantized. Operators that work in place set the fields anew, which views of it do not
    see: so memory and seen say whether one is behind.
    """

    value: torch.Tensor
    scale: Any
    zero_point: Any
    dtype: torch.dtype
    memory: _Memory = field(default_factory=_Memory)
    seen: int = 0

    def like(self, value: torch.Tensor) -> Quantized:
        """A value rounded to this tensor's grid."""
        return quantized(value, self.scale, self.zero_point, self.dtype)


def quantized(value: torch.Tensor, scale: Any, zero_point: Any, dtype: torch.dtype = torch.quint8) -> Quantized:
    """As `torch.quantize_per_tensor`: rounds half to even, and clamps."""
    scale, zero_point = _constant(scale), _constant(zero_point)
    if dtype not in _LIMITS:
        raise CompileError(f"tensors of {dtype} are not supported; quint8, qint8 and qint32 are")
    low, high = _LIMITS[dtype]
    if dtype in _CODES and isinstance(scale, float) and isinstance(zero_point, int):
        grid = scale, zero_point, low, high, _CODES[dtype]
        codes = decomposed.quantize_per_tensor(value, *grid)
        return Quantized(decomposed.dequantize_per_tensor(codes, *grid), scale, zero_point, dtype)
    steps = torch.clamp(torch.round(value / scale) + zero_point, low, high)
    return Quantized((steps - zero_point) * scale, scale, zero_point, dtype)


def _constant(value: Any) -> Any:
    return (
        value.item()
        if isinstance(value, torch.Tensor) and value.numel() == 1 and type(value) is torch.Tensor
        else value
    )


_GENERIC = re.compile(r"\bt\d?(?=[\[( ])")
"""Variables for types, in the schemas of operators on lists, dicts and optional values."""
_SHARES = re.compile(r"-> .*Tensor\(a\)")
"""The results of operators that give views."""


def is_quantized(name: str, schema: str, values: Sequence[Any]) -> bool:
    """Whether an operator is implemented here. Those that take values of any kind leave a quantized tensor as it is."""
    space = name.partition("::")[0]
    if space == "quantized" or name in _RECURRENT or name == "aten::quantize_per_tensor":
        return True
    return any(map(_of_quantized, values)) and not _GENERIC.search(schema)


def call(name: str, schema: str, values: Sequence[Any], plain: Callable[[list[Any]], Any]) -> Any:
    """The result of a quantized operator. plain: computes it on float tensors."""
    if name in _RECURRENT or name.startswith("quantized::quantized_"):
        raise CompileError(
            "quantized recurrent layers (LSTM, GRU and their cells) are not taken. Linear layers and convolutions are: leave "
            "recurrent layers as floats, as quantize_dynamic(model, {torch.nn.Linear}) does, and compile that"
        )
    operands = [v for value in values for v in (value if isinstance(value, list | tuple) else [value]) if _is(v)]
    if any(v.seen != v.memory.seen() for v in operands):
        raise CompileError(
            "another view of this quantized tensor was changed in place before; use an operator that is not in place, such as "
            "relu for relu_"
        )
    if name in _OPERATORS:
        return _OPERATORS[name](*values)
    if name.startswith("quantized::"):
        raise CompileError(
            "this quantized operator is not supported yet; quantize other layers, or compile the float model"
        )
    first = operands[0]
    if name in _IN_PLACE:
        result = _placed(name, first, plain([first.value.clone(), *map(_value, values[1:])]))
        first.value, first.scale, first.zero_point = result.value, result.scale, result.zero_point
        first.memory.change()
        first.seen = first.memory.seen()
        return first
    result = _placed(name, first, plain([_value(v) for v in values]))
    if _SHARES.search(schema) or name == "aten::dropout":
        for view in result if isinstance(result, list | tuple) else [result]:
            if _is(view):
                view.memory = first.memory if view is result else _Memory(first.memory)
                view.seen = view.memory.seen()
    return result


def _placed(name: str, first: Quantized, result: Any) -> Any:
    """The result of an operator of torch's on the grid that torch gives it; first: of the operands."""
    if isinstance(result, list):
        return [_placed(name, first, part) for part in result]
    if isinstance(result, tuple):
        return tuple(_placed(name, first, part) for part in result)
    if not isinstance(result, torch.Tensor) or not result.is_floating_point():
        return result
    base = name.removeprefix("aten::")
    if (grid := _OWN_GRIDS.get(base.removesuffix("_"))) is not None:
        return quantized(result, *grid(first), first.dtype)
    if base not in _SAME_GRID and not name.startswith("prim::"):
        raise CompileError(
            "torch has no such operator on quantized tensors; use one of torch.ao.nn.quantized (FloatFunctional for sums and "
            "products), or put a DeQuantStub before it and a QuantStub after it"
        )
    return first.like(result)


def _from_least(scale: float, steps: int) -> Callable[[Quantized], tuple[float, int]]:
    """A grid whose zero point is so many steps above its least code."""
    return lambda x: (scale, _LIMITS[x.dtype][0] + steps)


_OWN_GRIDS: dict[str, Callable[[Quantized], tuple[Any, Any]]] = {
    "sigmoid": _from_least(1 / 256, 0),
    "hardsigmoid": _from_least(1 / 256, 0),
    "tanh": _from_least(2 / 256, 128),
    "gelu": lambda x: (float(np.float32(x.scale)), x.zero_point),
}
"""Operators whose results do not get the first operand's scale and zero point in torch."""
_IN_PLACE = frozenset(f"aten::{name}_" for name in ("relu", "relu6", "hardtanh", "leaky_relu", "clamp", "hardsigmoid"))
_SAME_GRID = frozenset((
    "relu", "relu_", "relu6", "relu6_", "hardtanh", "hardtanh_", "leaky_relu", "leaky_relu_", "clamp", "clamp_", "clip",
    "threshold", "dropout", "dropout_", "feature_dropout", "feature_dropout_", "alpha_dropout", "feature_alpha_dropout",
    "masked_fill", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "adaptive_avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d", "mean", "std", "max", "min", "sort", "msort", "topk",
    "grid_sampler", "grid_sampler_2d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "upsample_bilinear2d", "__interpolate", "__upsample", "__upsample_bilinear",
    "__upsample_nearest", "pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "cat", "concat", "concatenate",
    "stack", "hstack", "vstack", "dstack", "chunk", "split", "split_with_sizes", "tensor_split", "unsafe_chunk",
    "unsafe_split", "unsafe_split_with_sizes", "unbind", "hsplit", "vsplit", "dsplit", "view", "view_as", "reshape",
    "reshape_as", "flatten", "unflatten", "ravel", "permute", "transpose", "t", "numpy_T", "movedim", "moveaxis", "swapaxes",
    "swapdims", "squeeze", "unsqueeze", "atleast_1d", "atleast_2d", "atleast_3d", "slice", "select", "narrow", "diagonal",
    "unfold", "as_strided", "expand", "expand_as", "repeat", "repeat_interleave", "tile", "flip", "rot90", "index",
    "index_select", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "clone", "contiguous", "detach", "alias", "to",
    "type_as", "cpu", "cuda", "requires_grad_",
))  # fmt: skip
"""Operators whose results do. Others of ATen's that give numbers are none of quantized tensors."""
_RECURRENT = frozenset(f"aten::{name}" for name in ("quantized_lstm", "quantized_gru"))


def _is(value: Any) -> bool:
    return isinstance(value, Quantized)


def _of_quantized(value: Any) -> bool:
    return _is(value) or (isinstance(value, list | tuple) and any(map(_is, value)))


def _value(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_value(v) for v in value]
    return value.value if isinstance(value, Quantized) else value


@dataclass(frozen=True, eq=False)
class _Packed:
    """Prepacked weights, their codes with scales and zero points for all or for channels, and the geometry of a convolution."""

    codes: torch.Tensor
    scale: Any
    zero_point: Any
    axis: int | None
    bias: torch.Tensor | None
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    output_padding: list[int]
    groups: int
    transposed: bool

    def weight(self) -> torch.Tensor:
        limits = (-128, 127, torch.int8)
        if self.axis is None:
            result = decomposed.dequantize_per_tensor(self.codes, self.scale, self.zero_point, *limits)
        else:
            result = decomposed.dequantize_per_channel(self.codes, self.scale, self.zero_point, self.axis, *limits)
        assert isinstance(result, torch.Tensor)
        return result


def _unpacked(packed: Any, dims: int = 0) -> _Packed:
    """dims: of a convolution."""
    with _disable_current_modes():  # real weights, also while torch.export traces
        weight, bias = packed.unpack()
        bias = None if bias is None else bias.detach()
        if weight.dtype is not torch.qint8:
            raise CompileError(
                f"weights of {weight.dtype} are not taken; convert the model with weights of torch.qint8"
            )
        scale: Any
        zero_point: Any
        if weight.qscheme() in (torch.per_channel_affine, torch.per_channel_symmetric):
            scale, zero_point = weight.q_per_channel_scales().float(), weight.q_per_channel_zero_points().long()
            axis = weight.q_per_channel_axis()
        else:
            scale, zero_point, axis = weight.q_scale(), weight.q_zero_point(), None
        codes = weight.int_repr()
        if dims == 1 and codes.dim() == 4:  # conv1d is packed as conv2d
            codes = codes.squeeze(2)
        grid = codes, scale, zero_point, axis, bias
        if not packed._has_method("stride"):
            return _Packed(*grid, [], [], [], [], 1, False)
        stride, padding, dilation, more = (
            [int(n) for n in getattr(packed, name)()] for name in ("stride", "padding", "dilation", "output_padding")
        )
        return _Packed(*grid, stride, padding, dilation, more, int(packed.groups()), bool(packed.transpose()))


def _convolution(dims: int, relu: bool) -> Callable[..., Quantized]:
    def apply(x: Quantized, packed: Any, *rest: Any) -> Quantized:
        scale, zero_point = rest[-2:]  # an older overload repeats the geometry before them
        p = _unpacked(packed, dims)
        stride, padding, dilation = (g[-dims:] for g in (p.stride, p.padding, p.dilation))
        if p.transposed:
            more = p.output_padding[-dims:]
            y = torch.convolution(x.value, p.weight(), p.bias, stride, padding, dilation, True, more, p.groups)
        else:
            convolve: Any = (functional.conv1d, functional.conv2d, functional.conv3d)[dims - 1]
            y = convolve(x.value, p.weight(), p.bias, stride, padding, dilation, p.groups)
        return quantized(torch.relu(y) if relu else y, scale, zero_point, x.dtype)

    return apply


def _linear(relu: bool) -> Callable[..., Quantized]:
    def apply(x: Quantized, packed: Any, scale: Any, zero_point: Any) -> Quantized:
        p = _unpacked(packed)
        y = functional.linear(x.value, p.weight(), p.bias)
        return quantized(torch.relu(y) if relu else y, scale, zero_point, x.dtype)

    return apply


_LEAST_SCALE = 6.1e-5
"""Of what torch quantizes while a model runs."""


def _dynamic_linear(relu: bool) -> Callable[..., torch.Tensor]:
    def apply(x: torch.Tensor, packed: Any, reduce_range: bool = False) -> torch.Tensor:
        p = _unpacked(packed)
        scale, zero = decomposed.choose_qparams.tensor(x, 0, 127 if reduce_range else 255, _LEAST_SCALE, torch.uint8)
        codes = decomposed.quantize_per_tensor.tensor(x, scale, zero, 0, 255, torch.uint8)
        x = decomposed.dequantize_per_tensor.tensor(codes, scale, zero, 0, 255, torch.uint8)
        y = functional.linear(x, p.weight(), p.bias)
        return torch.relu(y) if relu else y

    return apply


def _half_linear(relu: bool) -> Callable[..., torch.Tensor]:
    """Of weights that were rounded to float16, with sums in float32."""

    def apply(x: torch.Tensor, packed: Any) -> torch.Tensor:
        with _disable_current_modes():
            weight, bias = packed.unpack()
        y = functional.linear(x, weight.detach(), None if bias is None else bias.detach())
        return torch.relu(y) if relu else y

    return apply


def _binary(function: Callable[..., torch.Tensor], relu: bool = False) -> Callable[..., Quantized]:
    with_number = _plus_number(relu) if function is torch.add else _times_number(relu)

    def apply(a: Any, b: Any, scale: Any = None, zero_point: Any = None) -> Quantized:
        if scale is None:
            return with_number(a, b) if _is(a) else with_number(b, a)
        if zero_point is None:
            raise CompileError("results in tensors that are given (out=) are not taken; use the operator's own result")
        y = function(a.value, b.value)
        return quantized(torch.relu(y) if relu else y, scale, zero_point, a.dtype)

    return apply


def _matmul(a: Quantized, b: Quantized, scale: Any, zero_point: Any) -> Quantized:
    return quantized(torch.matmul(a.value, b.value), scale, zero_point, a.dtype)


def _known(given: Any, what: str) -> float:
    """A number that is known while a model is captured."""
    found = number(_constant(given))
    if not isinstance(found, int | float):
        raise CompileError(
            f"{what} is computed by the model; with a quantized tensor only numbers that are known beforehand can be added and "
            "multiplied: write it as a number, or use FloatFunctional.add or mul of two quantized tensors"
        )
    return float(found)


def _times_number(relu: bool) -> Callable[[Quantized, Any], Quantized]:
    """torch leaves the codes, or mirrors them for a negative number, and moves the scale and zero point."""

    def apply(x: Quantized, factor: Any) -> Quantized:
        factor, low, high = _known(factor, "a factor"), *_LIMITS[x.dtype]
        y = x.value * factor
        y = torch.relu(y) if relu else y
        if factor == 0:
            return quantized(y, 1.0, 0, x.dtype)
        return quantized(y, abs(factor) * x.scale, x.zero_point if factor > 0 else high + low - x.zero_point, x.dtype)

    return apply


def _plus_number(relu: bool) -> Callable[[Quantized, Any], Quantized]:
    """torch moves the zero point by the number, rounded to steps. Where no code is left for that the scale grows, so that both ends
    of the range still have one.
    """

    def apply(x: Quantized, term: Any) -> Quantized:
        scale, zero, low, high = (
            _known(x.scale, "a scale"),
            int(_known(x.zero_point, "a zero point")),
            *_LIMITS[x.dtype],
        )
        steps = round(_known(term, "a term") / scale)
        moved = zero - steps
        if low <= moved <= high:
            y = x.value + steps * scale
            return quantized(torch.relu(y) if relu else y, scale, moved, x.dtype)
        wider = (high - moved if moved < low else moved - low) / (high - low) * scale
        least = low if moved < low else high
        # In steps, whose product with this number is rounded once, as torch does it: ties are frequent here.
        ratio = np.float32(scale) * (np.float32(1) / np.float32(wider))
        y = (torch.round(x.value / scale) + steps) * float(ratio)
        y = torch.clamp(torch.round(torch.relu(y) if relu else y), low - least, high - least)
        return quantized(y * float(np.float32(wider)), wider, least, x.dtype)

    return apply


def _cat(relu: bool) -> Callable[..., Quantized]:
    def apply(parts: Sequence[Quantized], dim: int, scale: Any = None, zero_point: Any = None) -> Quantized:
        y = torch.cat([p.value for p in parts], dim)
        y = torch.relu(y) if relu else y
        return parts[0].like(y) if scale is None else quantized(y, scale, zero_point, parts[0].dtype)

    return apply


def _unary(function: Callable[..., torch.Tensor]) -> Callable[..., Quantized]:
    def apply(x: Quantized, *rest: Any) -> Quantized:
        *options, scale, zero_point = rest
        return quantized(function(x.value, *options), scale, zero_point, x.dtype)

    return apply


def _codes(x: Quantized) -> torch.Tensor:
    steps: torch.Tensor = torch.round(x.value / x.scale) + x.zero_point
    return steps.to(_CODES.get(x.dtype, torch.int32))


_OPERATORS: dict[str, Callable[..., Any]] = {
    "aten::quantize_per_tensor": lambda x, scale, zero_point, dtype: quantized(x, scale, zero_point, DTYPES[dtype]),
    "aten::dequantize": _value, "aten::int_repr": _codes,
    "aten::q_scale": lambda x: x.scale, "aten::q_zero_point": lambda x: x.zero_point,
    "prim::dtype": lambda x: DTYPES.index(x.dtype), "prim::is_quantized": lambda x: True,
    "prim::device": lambda x: x.value.device, "aten::is_floating_point": lambda x: False,
    **{f"quantized::conv{d}d": _convolution(d, False) for d in (1, 2, 3)},
    **{f"quantized::conv{d}d_relu": _convolution(d, True) for d in (1, 2, 3)},
    **{f"quantized::conv_transpose{d}d": _convolution(d, False) for d in (1, 2, 3)},
    "quantized::linear": _linear(False), "quantized::linear_relu": _linear(True),
    "quantized::linear_dynamic": _dynamic_linear(False), "quantized::linear_relu_dynamic": _dynamic_linear(True),
    "quantized::linear_dynamic_fp16": _half_linear(False), "quantized::linear_relu_dynamic_fp16": _half_linear(True),
    "quantized::add": _binary(torch.add), "quantized::add_relu": _binary(torch.add, True),
    "quantized::mul": _binary(torch.mul), "quantized::mul_relu": _binary(torch.mul, True),
    "quantized::add_scalar": _plus_number(False), "quantized::add_scalar_relu": _plus_number(True),
    "quantized::mul_scalar": _times_number(False), "quantized::mul_scalar_relu": _times_number(True),
    "quantized::matmul": _matmul,
    "quantized::cat": _cat(False), "quantized::cat_relu": _cat(True),
    "quantized::hardswish": _unary(functional.hardswish),
    "quantized::leaky_relu": _unary(lambda x, slope, *_: functional.leaky_relu(x, slope)),
    "quantized::elu": lambda x, scale, zero_point, *options: quantized(
        torch.ops.aten.elu(x.value, *options), scale, zero_point, x.dtype),
    "quantized::sigmoid": _unary(torch.sigmoid),
    "quantized::relu6": lambda x, *_: x.like(torch.clamp(x.value, 0, 6)),
    "quantized::dropout": lambda x, *_: x,
}  # fmt: skip
