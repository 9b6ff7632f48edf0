"""Convolutions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from lapilli.capture.onnx.onnx_activations import activation
from lapilli.capture.onnx.onnx_indexing import padded
from lapilli.capture.onnx.onnx_pooling import CONVOLUTIONS, spans
from lapilli.capture.onnx.onnx_registry import MICROSOFT, OnnxCall, operator
from lapilli.errors import CompileError

Tensor = torch.Tensor
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@operator("Conv")
def conv(call: OnnxCall, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return convolution(call, x, weight, bias)


def convolution(call: OnnxCall, x: Tensor, weight: Tensor, bias: Tensor | None = None, fill: Any = 0) -> Tensor:
    """A convolution with the attributes of a node. fill: the value around the input."""
    rank = weight.ndim - 2
    if rank not in CONVOLUTIONS:
        raise CompileError(f"convolutions over {rank} axes are not supported; those over 1 to 3 are")
    strides, dilations = call.get("strides") or [1] * rank, call.get("dilations") or [1] * rank
    pads = spans(call, list(x.shape[2:]), list(weight.shape[2:]), strides, dilations)
    even = all(isinstance(b, int) and isinstance(a, int) and b == a >= 0 for b, a in pads)
    if not even or fill != 0:
        x = padded(x, {k + 2: span for k, span in enumerate(pads)}, value=fill)
    inner = [b for b, _ in pads] if even and fill == 0 else [0] * rank
    return CONVOLUTIONS[rank](x, weight, bias, strides, inner, dilations, call.get("group", 1))


@operator("FusedConv", domain=MICROSOFT)
def fused_conv(
    call: OnnxCall, x: Tensor, weight: Tensor, bias: Tensor | None = None, other: Tensor | None = None
) -> Tensor:
    parameters = [*(call.get("activation_params") or []), None, None]
    result = convolution(call, x, weight, bias)
    result = result if other is None else result + other
    return activation(call.get("activation"), parameters[0], parameters[1])(result)


@operator("ConvTranspose")
def conv_transpose(call: OnnxCall, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rank = weight.ndim - 2
    if rank not in _TRANSPOSED:
        raise CompileError(f"convolutions over {rank} axes are not supported; those over 1 to 3 are")
    kernel = list(weight.shape[2:])
    strides, dilations = call.get("strides") or [1] * rank, call.get("dilations") or [1] * rank
    extra = call.get("output_padding") or [0] * rank
    how, wanted = call.get("auto_pad", "NOTSET"), call.get("output_shape")
    full = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(x.shape[2:], strides, kernel, dilations, strict=True)]
    if wanted is None and how in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [n * s for n, s in zip(x.shape[2:], strides, strict=True)]
    if wanted is not None:
        wanted = wanted[-rank:]
        pads: list[tuple[Any, Any]] = []
        for n, e, w in zip(full, extra, wanted, strict=True):
            total = n + e - w
            small = total // 2
            pads.append((small, total - small) if how == "SAME_UPPER" else (total - small, small))
    elif how == "VALID":
        pads = [(0, 0)] * rank
    else:
        given = call.get("pads") or [0] * (2 * rank)
        pads = [(given[k], given[k + rank]) for k in range(rank)]
    even = all(isinstance(b, int) and isinstance(a, int) and b == a >= 0 for b, a in pads)
    simple = even and all(e < max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True))
    group = call.get("group", 1)
    if simple:
        return _TRANSPOSED[rank](x, weight, bias, strides, [b for b, _ in pads], extra, group, dilations)
    result = _TRANSPOSED[rank](x, weight, None, strides, 0, 0, group, dilations)
    result = padded(result, {k + 2: (-b, e - a) for k, ((b, a), e) in enumerate(zip(pads, extra, strict=True))})
    return result if bias is None else result + bias.reshape([-1] + [1] * rank)


@operator("Col2Im")
def col2im(call: OnnxCall, x: Tensor, *_: Tensor) -> Tensor:
    image, block = call.numbers(1) or [], call.numbers(2) or []
    rank = len(image)
    strides, dilations = call.get("strides") or [1] * rank, call.get("dilations") or [1] * rank
    pads = call.get("pads") or [0] * (2 * rank)
    size: Any = 1
    for n in block:
        size = size * n
    channels = x.shape[1] // size
    whole = [n + pads[k] + pads[k + rank] for k, n in enumerate(image)]
    # A transposed convolution whose kernel has a one for each place of the block.
    weight = torch.eye(size, dtype=x.dtype).reshape([size, 1, *block])
    counts = [(n - (b - 1) * d - 1) // s + 1 for n, b, d, s in zip(whole, block, dilations, strides, strict=True)]
    columns = x.reshape([x.shape[0] * channels, size, *counts])
    image_of = _TRANSPOSED[rank](columns, weight, None, strides, 0, 0, 1, dilations)
    result = image_of.reshape([x.shape[0], channels, *image_of.shape[2:]])
    return padded(result, {k + 2: (-pads[k], image[k] + pads[k] - image_of.shape[k + 2]) for k in range(rank)})


@operator("DeformConv")
def deform_conv(
    call: OnnxCall, x: Tensor, weight: Tensor, offset: Tensor, bias: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Samples at displaced places between pixels, as products with the weights of the four around each."""
    if weight.ndim != 4:
        raise CompileError("only deformable convolutions over two axes are supported")
    strides, dilations = call.get("strides") or [1, 1], call.get("dilations") or [1, 1]
    pads, groups, group = call.get("pads") or [0] * 4, call.get("offset_group", 1), call.get("group", 1)
    n, c, h, w = x.shape
    kh, kw = weight.shape[2:]
    oh, ow = offset.shape[2:]
    moved = offset.reshape(n, groups, kh * kw, 2, oh, ow)
    ys = torch.arange(oh) * strides[0] - pads[0]
    xs = torch.arange(ow) * strides[1] - pads[1]
    ky = (torch.arange(kh) * dilations[0]).reshape(kh, 1).expand(kh, kw).reshape(-1, 1, 1)
    kx = (torch.arange(kw) * dilations[1]).reshape(1, kw).expand(kh, kw).reshape(-1, 1, 1)
    y = moved[:, :, :, 0] + (ky + ys.reshape(-1, 1)).to(x.dtype)
    z = moved[:, :, :, 1] + (kx + xs).to(x.dtype)
    flat = x.reshape(n, groups, c // groups, h * w)
    y0, z0 = torch.floor(y), torch.floor(z)
    samples: Any = 0
    for dy in (0, 1):
        for dz in (0, 1):
            yy, zz = y0 + dy, z0 + dz
            share = (1 - (y - yy).abs()) * (1 - (z - zz).abs())
            inside = (yy >= 0) & (yy < h) & (zz >= 0) & (zz < w)
            place = (torch.clamp(yy, 0, h - 1) * w + torch.clamp(zz, 0, w - 1)).to(torch.int64)
            index = place.reshape(n, groups, 1, -1).expand(n, groups, c // groups, kh * kw * oh * ow)
            found = flat.gather(3, index).reshape(n, groups, c // groups, kh * kw, oh, ow)
            samples = samples + found * torch.where(inside, share, 0).unsqueeze(2)
    if mask is not None:
        samples = samples * mask.reshape(n, groups, 1, kh * kw, oh, ow)
    columns = samples.reshape(n, group, c // group * kh * kw, oh * ow)
    kernel = weight.reshape(group, weight.shape[0] // group, -1)
    result = torch.matmul(kernel, columns).reshape(n, weight.shape[0], oh, ow)
    return result if bias is None else result + bias.reshape(-1, 1, 1)
