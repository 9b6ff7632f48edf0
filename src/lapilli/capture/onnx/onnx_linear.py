"""Matrix products."""

from __future__ import annotations

from typing import Any

import torch

from lapilli.capture.onnx.onnx_activations import activation
from lapilli.capture.onnx.onnx_registry import MICROSOFT, OnnxCall, operator

Tensor = torch.Tensor


@operator("MatMul")
def matmul(call: OnnxCall, a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)


@operator("Gemm")
def gemm(call: OnnxCall, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    return _gemm(call, a, b, c)


def _gemm(call: OnnxCall, a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    if call.get("transA", 0):
        a = a.transpose(0, 1)
    rows = b if call.get("transB", 0) else b.transpose(0, 1)
    if alpha == 1 and c is not None and beta == 1 and c.ndim == 1:
        return torch.nn.functional.linear(a, rows, c if c.shape[0] == rows.shape[0] else c.expand(rows.shape[0]))
    result = torch.matmul(a, b if not call.get("transB", 0) else b.transpose(0, 1))
    result = result if alpha == 1 else _scaled(result, alpha)
    return result if c is None else result + (c if beta == 1 else _scaled(c, beta))


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x * (factor if x.is_floating_point() else int(factor))


@operator("FusedMatMul", domain=MICROSOFT)
def fused_matmul(call: OnnxCall, a: Tensor, b: Tensor) -> Tensor:
    a = _turned(call, a, "A")
    b = _turned(call, b, "B")
    result = torch.matmul(a, b)
    alpha = call.get("alpha", 1.0)
    return result if alpha == 1 else result * alpha


def _turned(call: OnnxCall, x: Tensor, which: str) -> Tensor:
    if call.get(f"transBatch{which}", 0):  # the first axis goes before the last
        x = x.movedim(0, -2)
    return x.transpose(-1, -2) if call.get(f"trans{which}", 0) and x.ndim > 1 else x


@operator("FusedGemm", domain=MICROSOFT)
def fused_gemm(call: OnnxCall, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    return activation(call.get("activation"), call.get("activation_alpha"), call.get("activation_beta"))(
        _gemm(call, a, b, c)
    )


@operator("Einsum")
def einsum(call: OnnxCall, *values: Tensor) -> Tensor:
    return torch.einsum(call.get("equation"), *values)


@operator("Det")
def det(call: OnnxCall, x: Tensor) -> Tensor:
    return torch.linalg.det(x)


@operator("Einsum", domain=MICROSOFT)
def contrib_einsum(call: OnnxCall, *values: Any) -> Tensor:
    return torch.einsum(call.get("equation"), *values)
