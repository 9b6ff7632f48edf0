"""Quantized operators, in exact integer arithmetic: sums are those of integers, and results are rounded once.

`quantized` and `dequantized` are the only places that go from one to the other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lapilli.capture.onnx.onnx_casts import cast
from lapilli.capture.onnx.onnx_graph import BITS, DTYPES, FLOAT, UINT8, limits
from lapilli.capture.onnx.onnx_pooling import CONVOLUTIONS, average_pool, spans
from lapilli.capture.onnx.onnx_registry import MICROSOFT, OnnxCall, axis_of, operator
from lapilli.capture.onnx.onnx_values import ConstantTensor
from lapilli.code_operators import DEQUANTIZE, INTEGER_CONVOLUTION, INTEGER_PRODUCT, QUANTIZE, UNPACK
from lapilli.errors import CompileError

Tensor = torch.Tensor
_MOST_BITS = 8
"""Of codes that kernels know; wider integers are computed as arithmetic."""


def quantized(x: Tensor, scale: Tensor, zero: Tensor | None, kind: int, block: Sequence[int] | None = None) -> Tensor:
    """A tensor on the grid of a scale and a zero point: rounded half to even, and clamped. block: how many elements share them
    along each axis, -1 for all; None: they are broadcast.
    """
    if kind not in BITS:
        return cast((x / _spread(scale, x, block)).float(), FLOAT, kind)
    low, high = limits(kind)
    if x.dtype is torch.float32 and BITS[kind][0] <= _MOST_BITS:
        if block is None and scale.numel() == 1 and (zero is None or zero.numel() == 1):
            block = [-1] * x.ndim
        if block is not None:
            made: Tensor = QUANTIZE(x, scale.to(x.dtype), zero, block, low, high, _stored(kind), True)
            return made
    steps = torch.round(x / _spread(scale, x, block))
    if zero is not None:
        steps = steps + _spread(zero, x, block).to(steps.dtype)
    return torch.clamp(steps, low, high).to(torch.int32).to(_stored(kind))


def _stored(kind: int) -> torch.dtype:
    return DTYPES[kind]


def dequantized(x: Tensor, scale: Tensor, zero: Tensor | None, block: Sequence[int] | None = None) -> Tensor:
    """The numbers that a quantized tensor stands for. block: as of `quantized`."""
    if x.is_floating_point():
        return x.to(scale.dtype) * _spread(scale, x, block)
    if x.dtype in (torch.int8, torch.uint8, torch.int32):
        if block is None and scale.numel() == 1 and (zero is None or zero.numel() == 1):
            block = [-1] * x.ndim
        if block is not None:
            made: Tensor = DEQUANTIZE(x, scale, zero, block, scale.dtype)
            return made
    steps = x.to(torch.int32)
    if zero is not None:
        steps = steps - _spread(zero, x, block).to(torch.int32)
    return steps.to(scale.dtype) * _spread(scale, x, block)


def _blocks(parameter: Tensor, x: Tensor, axis: int, block: int) -> list[int]:
    """How many elements share a parameter, along each axis: all, those of one place on an axis, or those of each block on it."""
    if parameter.numel() == 1 and (parameter.ndim < x.ndim or not block):
        return [-1] * x.ndim
    axis = axis_of(axis, x.ndim) if -x.ndim <= axis < x.ndim else 0
    if block:
        return [block if d == axis else 1 for d in range(x.ndim)]
    return [1 if d == axis else -1 for d in range(x.ndim)]


def _spread(parameter: Tensor, x: Tensor, block: Sequence[int] | None) -> Tensor:
    """A parameter with the shape to be broadcast to x."""
    if block is None:
        return parameter
    if any(b > 1 for b in block):
        axis = next(d for d, b in enumerate(block) if b > 1)
        return parameter.repeat_interleave(block[axis], axis).narrow(axis, 0, x.shape[axis])
    if parameter.ndim == x.ndim and x.ndim != 1:
        return parameter
    return parameter.reshape([-1 if b == 1 else 1 for b in block])


def _quantize(call: OnnxCall, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    axis, block = call.get("axis", 1), call.get("block_size", 0)
    kind = call.kind(2) if zero is not None else call.get("output_dtype", 0) or UINT8
    data = x if x.is_floating_point() else x.float()
    precision = call.get("precision", 0)
    if precision:
        data, scale = data.to(call.dtype(precision)), scale.to(call.dtype(precision))
    return quantized(data, scale.to(data.dtype), zero, kind, _blocks(scale, data, axis, block))


def _dequantize(call: OnnxCall, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    axis, block = call.get("axis", 1), call.get("block_size", 0)
    result = dequantized(x, scale, zero, _blocks(scale, x, axis, block))
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


def _of_rows(parameter: Tensor) -> Tensor:
    """A parameter, or one of each row, to be broadcast to a matrix."""
    if parameter.ndim != 1:
        return parameter
    return parameter.reshape(()) if parameter.shape[0] == 1 else parameter.unsqueeze(1)


def _of_columns(zero: Tensor | None) -> Tensor | None:
    return zero.reshape(()) if zero is not None and zero.ndim == 1 and zero.shape[0] == 1 else zero


def integer_product(a: Tensor, b: Tensor, za: Tensor | None, zb: Tensor | None) -> Tensor:
    """The product of matrices of 8-bit integers less their zero points, in int32."""
    result: Tensor = INTEGER_PRODUCT(a, None if za is None else _of_rows(za), b, _of_columns(zb))
    return result


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


def _requantized(total: Tensor, scale: Tensor, zero: Tensor | None, kind: int, axis: int = -1) -> Tensor:
    """A sum of integers on the grid of a result, multiplied once, as onnxruntime does. scale: of the operands together,
    divided by that of the result; one, or one of each element of an axis.
    """
    if scale.ndim > 1 or (zero is not None and zero.numel() != 1):  # such as of each row: they are broadcast
        steps = torch.round(total.float() * scale)
        steps = steps if zero is None else steps + zero.float()
        return torch.clamp(steps, *limits(kind)).to(torch.int32).to(_stored(kind))
    block = _blocks(scale, total, axis, 0)
    if zero is not None and scale.numel() != 1:
        zero = zero.reshape(()).expand(scale.shape)
    result: Tensor = QUANTIZE(total.float(), scale, zero, block, *limits(kind), _stored(kind))
    return result


@operator("QLinearMatMul")
def qlinear_matmul(
    call: OnnxCall, a: Tensor, sa: Tensor, za: Tensor, b: Tensor, sb: Tensor, zb: Tensor, sy: Tensor, zy: Tensor
) -> Tensor:
    first, last, zero = (_of_rows(p) for p in (sa, sy, zy))
    return _requantized(integer_product(a, b, za, zb), first.float() * sb.float() / last.float(), zero, call.kind(7))


@operator("QGemm", domain=MICROSOFT)
def qgemm(
    call: OnnxCall, a: Tensor, sa: Tensor, za: Tensor, b: Tensor, sb: Tensor, zb: Tensor, c: Tensor | None = None,
    sy: Tensor | None = None, zy: Tensor | None = None,
) -> Tensor:  # fmt: skip
    a = a.transpose(0, 1) if call.get("transA", 0) else a
    b = b.transpose(0, 1) if call.get("transB", 0) else b
    total = integer_product(a, b, za, zb)
    total = total if c is None else total + c
    scale = call.get("alpha", 1.0) * sa.reshape(()) * sb
    return total.float() * scale if sy is None else _requantized(total, scale / sy.reshape(()), zy, call.kind(8))


# -- convolutions


def _integer_convolution(call: OnnxCall, x: Tensor, w: Tensor, zx: Tensor | None, zw: Tensor | None) -> Tensor:
    """A convolution of 8-bit integers less their zero points, in int32."""
    rank = w.ndim - 2
    if rank not in CONVOLUTIONS:
        raise CompileError(f"convolutions over {rank} axes are not supported; those over 1 to 3 are")
    strides, dilations = call.get("strides") or [1] * rank, call.get("dilations") or [1] * rank
    around = spans(call, list(x.shape[2:]), list(w.shape[2:]), strides, dilations)
    pads = [before for before, _ in around] + [after for _, after in around]
    zx = zx if zx is None else zx.reshape(())
    if zw is not None:
        zw = zw.reshape([-1] + [1] * (rank + 1)) if zw.numel() != 1 else zw.reshape(())
    result: Tensor = INTEGER_CONVOLUTION(x, zx, w, zw, strides, pads, dilations, call.get("group", 1))
    return result


@operator("ConvInteger")
def conv_integer(call: OnnxCall, x: Tensor, w: Tensor, zx: Tensor | None = None, zw: Tensor | None = None) -> Tensor:
    return _integer_convolution(call, x, w, zx, zw)


@operator("QLinearConv")
def qlinear_conv(
    call: OnnxCall, x: Tensor, sx: Tensor, zx: Tensor, w: Tensor, sw: Tensor, zw: Tensor, sy: Tensor, zy: Tensor,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    total = _integer_convolution(call, x, w, zx, zw)
    if bias is not None:
        total = total + bias.reshape([-1] + [1] * (x.ndim - 2))
    return _requantized(total, sx.reshape(()) * sw / sy.reshape(()), zy, call.kind(7), 1)


# -- of onnxruntime: in floats, and rounded


def _result(call: OnnxCall, value: Tensor, scale: Tensor, zero: Tensor | None, like: int = 0) -> Tensor:
    return quantized(value, scale, zero, call.kind(like))


@operator("QLinearAdd", domain=MICROSOFT)
def qlinear_add(
    call: OnnxCall, a: Tensor, sa: Tensor, za: Tensor | None, b: Tensor, sb: Tensor, zb: Tensor | None, sy: Tensor,
    zy: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return _result(call, dequantized(a, sa, za) + dequantized(b, sb, zb), sy, zy)


@operator("QLinearMul", domain=MICROSOFT)
def qlinear_mul(
    call: OnnxCall, a: Tensor, sa: Tensor, za: Tensor | None, b: Tensor, sb: Tensor, zb: Tensor | None, sy: Tensor,
    zy: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A product of integers, multiplied once. onnxruntime adds the zero point before it rounds, which decides ties."""
    factors = [x.to(torch.int32) - (0 if z is None else z.reshape(()).to(torch.int32)) for x, z in ((a, za), (b, zb))]
    steps = (factors[0] * factors[1]).float() * (sa * sb / sy).reshape(())
    steps = torch.round(steps if zy is None else steps + zy.reshape(()).float())
    kind = call.kind(0)
    return torch.clamp(steps, *limits(kind)).to(torch.int32).to(_stored(kind))


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
    """b: [N, blocks, bytes]; scales, and zero points (packed, or floats): of each block. groups: the block of each column."""
    bits, block, rows, columns = call.get("bits", 4), call.get("block_size"), call.get("N"), call.get("K")
    if bits not in (2, 4, 8):
        raise CompileError(f"weights of {bits} bits are not supported; those of 2, 4 and 8 are")
    blocks = (columns + block - 1) // block
    scale, middle = scales.reshape(rows, blocks), 1 << (bits - 1)
    low = -middle if zeros is None else 0  # the zero point is part of the code
    b = b.reshape(rows, -1)
    if groups is not None and (order := _order_of_blocks(call.value(_GROUPS), columns, block)) is not None:
        with _disable_current_modes():
            is_kept = torch.equal(order, torch.arange(columns))
        if is_kept:
            groups = None
        elif isinstance(stored := call.value(_CODES), ConstantTensor):
            groups, b = None, call.interpreter.tensor(_with_columns(stored.tensor, order, bits))
            a = a.index_select(-1, call.interpreter.tensor(ConstantTensor(order)))
    codes = _codes(b, columns, bits, low)
    zero = zeros
    if zeros is not None and not zeros.is_floating_point():
        zero = _codes(zeros.reshape(rows, -1), blocks, bits, 0)
    elif zeros is not None:
        zero = zeros.reshape(rows, blocks)
    if groups is None:
        weight = DEQUANTIZE(codes, scale.to(a.dtype), zero, [1, block], a.dtype)
    else:  # the block of each column
        at = groups[:columns].to(torch.int64)
        steps = codes.to(scale.dtype) if zero is None else codes.to(scale.dtype) - zero.to(scale.dtype)[:, at]
        weight = (steps * scale[:, at]).to(a.dtype)
    return torch.nn.functional.linear(a, weight, bias)


_CODES, _GROUPS = 1, 4
"""Inputs of `MatMulNBits`."""


def _order_of_blocks(groups: Any, columns: int, block: int) -> Tensor | None:
    """The order in which columns of a block are neighbours, as scales are. None if the blocks of columns are not known, or have
    other numbers of them.
    """
    if not isinstance(groups, ConstantTensor):
        return None
    with _disable_current_modes():
        given = groups.tensor[:columns].long()
        order = given.argsort(stable=True)
        return order if torch.equal(given[order], torch.arange(columns) // block) else None


def _with_columns(packed: Tensor, order: Tensor, bits: int) -> ConstantTensor:
    """[N, blocks, bytes] -> [N, bytes], with codes in another order of columns."""
    with _disable_current_modes():
        count = 8 // bits
        codes = torch.nn.functional.pad(unpacked(packed.flatten(1), bits)[:, order], (0, -len(order) % count))
        parts = [codes[:, k::count] << (k * bits) for k in range(count)]
        return ConstantTensor(functools.reduce(torch.bitwise_or, parts))


def _codes(x: Tensor, size: int, bits: int, low: int) -> Tensor:
    """The numbers of a row, beginning with `low`, out of bytes; int8, or uint8 of 8 bits from 0."""
    x = x.narrow(1, 0, (size * bits + 7) // 8)
    if bits != 8:
        made: Tensor = UNPACK(x, low, size, bits)
        return made
    return torch.bitwise_xor(x, -low).view(torch.int8) if low else x


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
