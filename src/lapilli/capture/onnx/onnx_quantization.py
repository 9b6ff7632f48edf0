"""Quantized operators, in exact integer arithmetic: sums are those of integers, and results are rounded once.

`quantized` and `dequantized` are the only places that go from one to the other.
"""

from __future__ import annotations

from typing import Any

import torch

from lapilli.capture.onnx.onnx_casts import cast
from lapilli.capture.onnx.onnx_convolution import convolution
from lapilli.capture.onnx.onnx_graph import BITS, DTYPES, FLOAT, UINT8, limits
from lapilli.capture.onnx.onnx_pooling import average_pool
from lapilli.capture.onnx.onnx_registry import MICROSOFT, OnnxCall, axis_of, operator
from lapilli.errors import CompileError

Tensor = torch.Tensor
_MOST_EXACT = (1 << 24) // (255 * 255)
"""Products of 8-bit numbers whose sum is exact in float32, whatever the order."""


def quantized(x: Tensor, scale: Tensor, zero: Tensor | None, kind: int) -> Tensor:
    """A tensor on the grid of a scale and a zero point, which are broadcast: rounded half to even, and clamped."""
    if kind not in BITS:
        return cast((x / scale).float(), FLOAT, kind)
    low, high = limits(kind)
    steps = torch.round(x / scale)
    if zero is not None:
        steps = steps + zero.to(steps.dtype)
    return torch.clamp(steps, low, high).to(torch.int32).to(_stored(kind))


def _stored(kind: int) -> torch.dtype:
    return DTYPES[kind]


def dequantized(x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """The numbers that a quantized tensor stands for."""
    if x.is_floating_point():
        return x.to(scale.dtype) * scale
    steps = x.to(torch.int32)
    if zero is not None:
        steps = steps - zero.to(torch.int32)
    return steps.to(scale.dtype) * scale


def _spread(parameter: Tensor, x: Tensor, axis: int, block: int) -> Tensor:
    """A scale or zero point with the shape to be broadcast: one, one of each element of an axis, or one of each block."""
    if parameter.ndim == 0 or (parameter.ndim == 1 and parameter.shape[0] == 1 and not block):
        return parameter.reshape(())
    if block:
        return parameter.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    shape = [1] * x.ndim
    shape[axis_of(axis, x.ndim)] = -1
    return parameter.reshape(shape)


def _quantize(call: OnnxCall, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    axis, block = call.get("axis", 1), call.get("block_size", 0)
    kind = call.kind(2) if zero is not None else call.get("output_dtype", 0) or UINT8
    data = x if x.is_floating_point() else x.float()
    precision = call.get("precision", 0)
    if precision:
        data, scale = data.to(call.dtype(precision)), scale.to(call.dtype(precision))
    axis = axis_of(axis, x.ndim) if scale.ndim and x.ndim and -x.ndim <= axis < x.ndim else 0
    spread = _spread(scale, data, axis, block)
    return quantized(data, spread.to(data.dtype), None if zero is None else _spread(zero, data, axis, block), kind)


def _dequantize(call: OnnxCall, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    axis, block = call.get("axis", 1), call.get("block_size", 0)
    axis = axis_of(axis, x.ndim) if scale.ndim and x.ndim and -x.ndim <= axis < x.ndim else 0
    result = dequantized(x, _spread(scale, x, axis, block), None if zero is None else _spread(zero, x, axis, block))
    kind = call.get("output_dtype", 0)
    return result.to(call.dtype(kind)) if kind else result


for _domain in ("", MICROSOFT):
    operator("QuantizeLinear", domain=_domain)(_quantize)
    operator("DequantizeLinear", domain=_domain)(_dequantize)


def dynamic_parameters(x: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and zero point of DynamicQuantizeLinear: all values and 0 fit into 8 bits."""
    high, low = torch.clamp(x.amax(), min=0), torch.clamp(x.amin(), max=0)
    scale = (high - low) / 255
    scale = torch.where(scale == 0, 1.0, scale)
    return scale, torch.clamp(torch.round(-low / scale), 0, 255).to(torch.int32).to(torch.uint8)


@operator("DynamicQuantizeLinear")
def dynamic_quantize_linear(call: OnnxCall, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale, zero = dynamic_parameters(x)
    return quantized(x, scale, zero, UINT8), scale, zero


# -- products


def _less(x: Tensor, zero: Tensor | None, axis: int) -> Tensor:
    """Integers without their zero point, which is one, or one of each element of an axis."""
    steps = x.to(torch.int32)
    if zero is None:
        return steps
    zero = zero.to(torch.int32)
    if zero.ndim == 1 and zero.shape[0] != 1:
        zero = zero.unsqueeze(1) if axis == -2 else zero
    elif zero.ndim == 1:
        zero = zero.reshape(())
    return steps - zero


def integer_product(a: Tensor, b: Tensor, za: Tensor | None, zb: Tensor | None) -> Tensor:
    """The product of matrices of 8-bit integers less their zero points, in int32."""
    return torch.matmul(_less(a, za, -2), _less(b, zb, -1))


@operator("MatMulInteger")
def matmul_integer(call: OnnxCall, a: Tensor, b: Tensor, za: Tensor | None = None, zb: Tensor | None = None) -> Tensor:
    return integer_product(a, b, za, zb)


@operator("MatMulIntegerToFloat", domain=MICROSOFT)
def matmul_integer_to_float(
    call: OnnxCall, a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, za: Tensor | None = None, zb: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    result = integer_product(a, b, za, zb).to(sa.dtype) * (sa * sb)
    return result if bias is None else result + bias


@operator("DynamicQuantizeMatMul", domain=MICROSOFT)
def dynamic_quantize_matmul(
    call: OnnxCall, a: Tensor, b: Tensor, sb: Tensor, zb: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    scale, zero = dynamic_parameters(a)
    result = integer_product(quantized(a, scale, zero, UINT8), b, zero, zb).to(a.dtype) * (scale * sb)
    return result if bias is None else result + bias


@operator("QLinearMatMul")
def qlinear_matmul(
    call: OnnxCall, a: Tensor, sa: Tensor, za: Tensor, b: Tensor, sb: Tensor, zb: Tensor, sy: Tensor, zy: Tensor
) -> Tensor:
    first = sa.unsqueeze(-1) if sa.ndim == 1 and sa.shape[0] != 1 else sa
    zeros = za.unsqueeze(-1) if za.ndim and za.shape[-1] != 1 else za
    steps_a = a.to(torch.int32) - zeros.to(torch.int32)
    steps_b = b.to(torch.int32) - zb.to(torch.int32)
    total = torch.matmul(steps_a, steps_b)
    return quantized(total.float() * (first.float() * sb.float()), sy.float(), zy, call.kind(7))


@operator("QGemm", domain=MICROSOFT)
def qgemm(
    call: OnnxCall, a: Tensor, sa: Tensor, za: Tensor, b: Tensor, sb: Tensor, zb: Tensor, c: Tensor | None = None,
    sy: Tensor | None = None, zy: Tensor | None = None,
) -> Tensor:  # fmt: skip
    steps_a, steps_b = _less(a, za, -1), b.to(torch.int32)
    turned = bool(call.get("transB", 0))
    zero = zb.to(torch.int32)
    steps_b = steps_b - (zero.unsqueeze(1) if turned and zero.ndim == 1 and zero.shape[0] != 1 else zero)
    steps_a = steps_a.transpose(0, 1) if call.get("transA", 0) else steps_a
    total = torch.matmul(steps_a, steps_b.transpose(0, 1) if turned else steps_b)
    alpha = call.get("alpha", 1.0)
    total = total if c is None else total + c
    result = total.float() * (alpha * sa * sb)
    return result if sy is None else quantized(result, sy, zy, call.kind(8))


# -- convolutions


def _integer_convolution(call: OnnxCall, x: Tensor, w: Tensor, zx: Tensor | None, zw: Tensor | None) -> Tensor:
    """A convolution of 8-bit integers less their zero points, in int32.

    There is no convolution of integers in torch. Sums of few products are exact in float32, and those are added as integers.
    """
    steps = _less(x, zx, 0).float()
    weight = w.to(torch.int32)
    if zw is not None:
        zero = zw.to(torch.int32)
        weight = weight - (zero.reshape([-1] + [1] * (w.ndim - 1)) if zero.ndim else zero)
    kernel = weight.float()
    window = 1
    for n in w.shape[2:]:
        window = window * n
    if window > _MOST_EXACT:
        return convolution(call, steps.double(), kernel.double()).to(torch.int32)
    each, channels, group = _MOST_EXACT // window, w.shape[1], call.get("group", 1)
    if channels <= each:
        return convolution(call, steps, kernel).to(torch.int32)
    total: Any = None
    grouped = steps.reshape([steps.shape[0], group, channels, *steps.shape[2:]])
    for first in range(0, channels, each):
        count = min(each, channels - first)
        part = grouped.narrow(2, first, count).reshape([steps.shape[0], group * count, *steps.shape[2:]])
        made = convolution(call, part, kernel.narrow(1, first, count)).to(torch.int32)
        total = made if total is None else total + made
    return total


@operator("ConvInteger")
def conv_integer(call: OnnxCall, x: Tensor, w: Tensor, zx: Tensor | None = None, zw: Tensor | None = None) -> Tensor:
    return _integer_convolution(call, x, w, zx, zw)


@operator("QLinearConv")
def qlinear_conv(
    call: OnnxCall, x: Tensor, sx: Tensor, zx: Tensor, w: Tensor, sw: Tensor, zw: Tensor, sy: Tensor, zy: Tensor,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    total = _integer_convolution(call, x, w, zx, zw)
    across = [-1] + [1] * (x.ndim - 2)
    if bias is not None:
        total = total + bias.reshape(across)
    scale = sx * sw
    if scale.ndim and scale.shape[0] != 1:
        scale = scale.reshape(across)
    return quantized(total.float() * scale, sy, zy, call.kind(7))


# -- of onnxruntime: in floats, and rounded


def _result(call: OnnxCall, value: Tensor, scale: Tensor, zero: Tensor | None, like: int = 0) -> Tensor:
    return quantized(value, scale, zero, call.kind(like))


def _qlinear_binary(function: Any) -> Any:
    def rule(
        call: OnnxCall, a: Tensor, sa: Tensor, za: Tensor | None, b: Tensor, sb: Tensor, zb: Tensor | None, sy: Tensor,
        zy: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return _result(call, function(dequantized(a, sa, za), dequantized(b, sb, zb)), sy, zy)

    return rule


operator("QLinearAdd", domain=MICROSOFT)(_qlinear_binary(torch.add))
operator("QLinearMul", domain=MICROSOFT)(_qlinear_binary(torch.mul))


@operator("QLinearSigmoid", domain=MICROSOFT)
def qlinear_sigmoid(
    call: OnnxCall, x: Tensor, sx: Tensor, zx: Tensor | None, sy: Tensor, zy: Tensor | None = None
) -> Tensor:
    return _result(call, torch.sigmoid(dequantized(x, sx, zx)), sy, zy)


@operator("QLinearLeakyRelu", domain=MICROSOFT)
def qlinear_leaky_relu(
    call: OnnxCall, x: Tensor, sx: Tensor, zx: Tensor | None, sy: Tensor, zy: Tensor | None = None
) -> Tensor:
    value = dequantized(x, sx, zx)
    return _result(call, torch.where(value < 0, call.get("alpha", 0.01) * value, value), sy, zy)


@operator("QLinearSoftmax", domain=MICROSOFT)
def qlinear_softmax(
    call: OnnxCall, x: Tensor, sx: Tensor, zx: Tensor | None, sy: Tensor, zy: Tensor | None = None
) -> Tensor:
    value, axis = dequantized(x, sx, zx), call.get("axis", -1)
    if call.get("opset", 13) < 13:
        axis = axis_of(axis, x.ndim)
        return _result(call, torch.softmax(value.flatten(axis), -1).reshape(x.shape), sy, zy)
    return _result(call, torch.softmax(value, axis), sy, zy)


@operator("QLinearGlobalAveragePool", domain=MICROSOFT)
def qlinear_global_average_pool(
    call: OnnxCall, x: Tensor, sx: Tensor, zx: Tensor | None, sy: Tensor, zy: Tensor | None = None
) -> Tensor:
    axes = list(range(1, x.ndim - 1)) if call.get("channels_last", 0) else list(range(2, x.ndim))
    return _result(call, dequantized(x, sx, zx).mean(axes, keepdim=True), sy, zy)


@operator("QLinearAveragePool", domain=MICROSOFT)
def qlinear_average_pool(
    call: OnnxCall, x: Tensor, sx: Tensor, zx: Tensor | None, sy: Tensor, zy: Tensor | None = None
) -> Tensor:
    if call.get("channels_last", 0):
        raise CompileError("channels_last is not supported")
    return _result(call, average_pool(call, dequantized(x, sx, zx)), sy, zy)


@operator("QLinearConcat", domain=MICROSOFT)
def qlinear_concat(call: OnnxCall, sy: Tensor, zy: Tensor, *values: Tensor) -> Tensor:
    parts = [dequantized(x, s, z) for x, s, z in zip(values[::3], values[1::3], values[2::3], strict=True)]
    return quantized(torch.cat(parts, call.get("axis")), sy, zy, call.kind(1))


# -- weights of a few bits


def unpacked(x: Tensor, bits: int) -> Tensor:
    """Numbers of 2, 4 or 8 bits out of bytes, the lowest first, along the last axis; uint8."""
    if bits == 8:
        return x
    if bits not in (2, 4):
        raise CompileError(f"weights of {bits} bits are not supported; those of 2, 4 and 8 are")
    parts = [(x >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, -1).reshape([*x.shape[:-1], x.shape[-1] * (8 // bits)])


@operator("MatMulNBits", domain=MICROSOFT)
def matmul_nbits(
    call: OnnxCall, a: Tensor, b: Tensor, scales: Tensor, zeros: Tensor | None = None, groups: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """b: [N, blocks, bytes]; scales, and zero points (packed, or floats): of each block."""
    bits, block, rows, columns = call.get("bits", 4), call.get("block_size"), call.get("N"), call.get("K")
    blocks = (columns + block - 1) // block
    steps = unpacked(b.reshape(rows, blocks, -1), bits)[:, :, :block]
    scale = scales.reshape(rows, -1)
    if zeros is None:
        zero: Any = float(1 << (bits - 1))
    elif zeros.is_floating_point():
        zero = zeros.reshape(rows, blocks, 1)
    else:
        zero = unpacked(zeros.reshape(rows, -1), bits)[:, :blocks].to(scale.dtype).unsqueeze(2)
    if groups is not None:  # the block of each column
        flat = steps.reshape(rows, -1)[:, :columns].to(scale.dtype)
        at = groups[:columns].to(torch.int64)
        each = zero if isinstance(zero, float) else zero.squeeze(2)[:, at]
        weight = (flat - each) * scale[:, at]
    else:
        weight = ((steps.to(scale.dtype) - zero) * scale.reshape(rows, blocks, 1)).reshape(rows, -1)[:, :columns]
    return torch.nn.functional.linear(a, weight.to(a.dtype), bias)


@operator("GatherBlockQuantized", domain=MICROSOFT)
def gather_block_quantized(
    call: OnnxCall, data: Tensor, places: Tensor, scales: Tensor, zeros: Tensor | None = None
) -> Tensor:
    bits, block, axis = call.get("bits", 4), call.get("block_size", 128), call.get("gather_axis", 0)
    if axis_of(axis, data.ndim) != 0 or axis_of(call.get("quantize_axis", 1), data.ndim) != data.ndim - 1:
        raise CompileError("only gathers of rows whose last axis is quantized are supported")
    packed = call.kind(0) == UINT8
    rows = data.index_select(0, places.reshape(-1))
    steps = unpacked(rows, bits) if packed else rows
    scale = scales.index_select(0, places.reshape(-1))
    width = steps.shape[-1]
    if zeros is None:
        zero: Any = float(1 << (bits - 1)) if packed else 0.0
    else:
        chosen = zeros.index_select(0, places.reshape(-1))
        chosen = unpacked(chosen, bits)[..., : scale.shape[-1]] if packed else chosen
        zero = chosen.to(scale.dtype).repeat_interleave(block, -1)[..., :width]
    result = (steps.to(scale.dtype) - zero) * scale.repeat_interleave(block, -1)[..., :width]
    return result.reshape([*places.shape, *result.shape[1:]])
