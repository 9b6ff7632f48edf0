"""Quantized TorchScript operators, written as PT2E writes them: a quantized tensor is a float tensor dequantized from codes, and
operators with quantized results quantize and dequantize them. `graph/integers.py` then computes in integers what it can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from lapilli.capture.script_operators import DTYPES
from lapilli.errors import CompileError

decomposed = torch.ops.quantized_decomposed

_LIMITS = {torch.quint8: (0, 255), torch.qint8: (-128, 127), torch.qint32: (-(2**31), 2**31 - 1)}
_CODES = {torch.quint8: torch.uint8, torch.qint8: torch.int8}


@dataclass(frozen=True)
class Quantized:
    """A quantized tensor. value: float32, dequantized."""

    value: torch.Tensor
    scale: Any
    zero_point: Any
    dtype: torch.dtype

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


def is_quantized(name: str, values: Sequence[Any]) -> bool:
    """Whether an operator is implemented here."""
    space = name.partition("::")[0]
    return space == "quantized" or name == "aten::quantize_per_tensor" or any(map(_of_quantized, values))


def call(name: str, values: Sequence[Any], plain: Callable[[list[Any]], Any]) -> Any:
    """The result of a quantized operator. plain: computes it on float tensors."""
    if name in _OPERATORS:
        return _OPERATORS[name](*values)
    if name.startswith("quantized::"):
        raise CompileError(
            "this quantized operator is not supported yet; quantize other layers, or compile the float model"
        )
    result = plain([_value(v) for v in values])
    first = next(v for value in values for v in (value if isinstance(value, list) else [value]) if _is(v))
    if not isinstance(result, torch.Tensor) or not result.is_floating_point():
        return result
    return first.like(result)


def _is(value: Any) -> bool:
    return isinstance(value, Quantized)


def _of_quantized(value: Any) -> bool:
    return _is(value) or (isinstance(value, list) and any(map(_is, value)))


def _value(value: Any) -> Any:
    if isinstance(value, list):
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


def _unpacked(packed: Any) -> _Packed:
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
        grid = weight.int_repr(), scale, zero_point, axis, bias
        if not packed._has_method("stride"):
            return _Packed(*grid, [], [], [], [], 1, False)
        stride, padding, dilation, more = (
            [int(n) for n in getattr(packed, name)()] for name in ("stride", "padding", "dilation", "output_padding")
        )
        return _Packed(*grid, stride, padding, dilation, more, int(packed.groups()), bool(packed.transpose()))


def _convolution(relu: bool) -> Callable[..., Quantized]:
    def apply(x: Quantized, packed: Any, *rest: Any) -> Quantized:
        scale, zero_point = rest[-2:]  # an older overload repeats the geometry before them
        p = _unpacked(packed)
        dims = p.codes.dim() - 2
        stride, padding, dilation = (g[-dims:] for g in (p.stride, p.padding, p.dilation))  # conv1d is packed as conv2d
        if p.transposed:
            more = p.output_padding[-dims:]
            y = torch.convolution(x.value, p.weight(), p.bias, stride, padding, dilation, True, more, p.groups)
        else:
            convolve: Any = (functional.conv1d, functional.conv2d, functional.conv3d)[dims - 1]
            y = convolve(x.value, p.weight(), p.bias, stride, padding, dilation, p.groups)
        return quantized(torch.relu(y) if relu else y, scale, zero_point)

    return apply


def _linear(relu: bool) -> Callable[..., Quantized]:
    def apply(x: Quantized, packed: Any, scale: Any, zero_point: Any) -> Quantized:
        p = _unpacked(packed)
        y = functional.linear(x.value, p.weight(), p.bias)
        return quantized(torch.relu(y) if relu else y, scale, zero_point)

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
    def apply(a: Quantized, b: Any, scale: Any = None, zero_point: Any = None) -> Quantized:
        y = function(a.value, _value(b))
        y = torch.relu(y) if relu else y
        return a.like(y) if scale is None else quantized(y, scale, zero_point)

    return apply


def _cat(relu: bool) -> Callable[..., Quantized]:
    def apply(parts: list[Quantized], dim: int, scale: Any = None, zero_point: Any = None) -> Quantized:
        y = torch.cat([p.value for p in parts], dim)
        y = torch.relu(y) if relu else y
        return parts[0].like(y) if scale is None else quantized(y, scale, zero_point)

    return apply


def _unary(function: Callable[..., torch.Tensor]) -> Callable[..., Quantized]:
    def apply(x: Quantized, *rest: Any) -> Quantized:
        *options, scale, zero_point = rest
        return quantized(function(x.value, *options), scale, zero_point)

    return apply


_OPERATORS: dict[str, Callable[..., Any]] = {
    "aten::quantize_per_tensor": lambda x, scale, zero_point, dtype: quantized(x, scale, zero_point, DTYPES[dtype]),
    "aten::dequantize": _value, "aten::int_repr": lambda x: torch.round(x.value / x.scale) + x.zero_point,
    "aten::q_scale": lambda x: x.scale, "aten::q_zero_point": lambda x: x.zero_point,
    "prim::dtype": lambda x: DTYPES.index(x.dtype), "prim::is_quantized": lambda x: True,
    "prim::device": lambda x: x.value.device,
    **{f"quantized::conv{d}d": _convolution(False) for d in (1, 2, 3)},
    **{f"quantized::conv{d}d_relu": _convolution(True) for d in (1, 2, 3)},
    **{f"quantized::conv_transpose{d}d": _convolution(False) for d in (1, 2, 3)},
    "quantized::linear": _linear(False), "quantized::linear_relu": _linear(True),
    "quantized::linear_dynamic": _dynamic_linear(False), "quantized::linear_relu_dynamic": _dynamic_linear(True),
    "quantized::linear_dynamic_fp16": _half_linear(False), "quantized::linear_relu_dynamic_fp16": _half_linear(True),
    "quantized::add": _binary(torch.add), "quantized::add_relu": _binary(torch.add, True),
    "quantized::mul": _binary(torch.mul), "quantized::mul_relu": _binary(torch.mul, True),
    "quantized::add_scalar": _binary(torch.add), "quantized::mul_scalar": _binary(torch.mul),
    "quantized::matmul": _binary(torch.matmul),
    "quantized::cat": _cat(False), "quantized::cat_relu": _cat(True),
    "quantized::hardswish": _unary(functional.hardswish),
    "quantized::leaky_relu": _unary(lambda x, slope, *_: functional.leaky_relu(x, slope)),
    "quantized::elu": lambda x, scale, zero_point, *options: quantized(torch.ops.aten.elu(x.value, *options), scale, zero_point),
    "quantized::sigmoid": _unary(torch.sigmoid),
    "quantized::relu6": lambda x, *_: x.like(torch.clamp(x.value, 0, 6)),
    "quantized::dropout": lambda x, *_: x,
}  # fmt: skip
