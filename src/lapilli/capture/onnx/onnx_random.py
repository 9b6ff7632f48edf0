"""Random numbers: the distributions that the standard names, drawn by Lapilli's generator."""

from __future__ import annotations

from typing import Any

import torch

from lapilli.capture.onnx.onnx_registry import OnnxCall, operator

Tensor = torch.Tensor


def _dtype(call: OnnxCall, x: Tensor | None = None) -> torch.dtype:
    kind = call.get("dtype")
    return (torch.float32 if x is None else x.dtype) if kind is None else call.dtype(kind)


def _uniform(call: OnnxCall, shape: Any, dtype: torch.dtype) -> Tensor:
    low, high = call.get("low", 0.0), call.get("high", 1.0)
    return (torch.rand(shape) * (high - low) + low).to(dtype)


def _normal(call: OnnxCall, shape: Any, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape) * call.get("scale", 1.0) + call.get("mean", 0.0)).to(dtype)


@operator("RandomUniform")
def random_uniform(call: OnnxCall) -> Tensor:
    return _uniform(call, call.get("shape"), _dtype(call))


@operator("RandomUniformLike")
def random_uniform_like(call: OnnxCall, x: Tensor) -> Tensor:
    return _uniform(call, x.shape, _dtype(call, x))


@operator("RandomNormal")
def random_normal(call: OnnxCall) -> Tensor:
    return _normal(call, call.get("shape"), _dtype(call))


@operator("RandomNormalLike")
def random_normal_like(call: OnnxCall, x: Tensor) -> Tensor:
    return _normal(call, x.shape, _dtype(call, x))


@operator("Bernoulli")
def bernoulli(call: OnnxCall, x: Tensor) -> Tensor:
    return (torch.rand(x.shape) < x.float()).to(_dtype(call, x))


@operator("Multinomial")
def multinomial(call: OnnxCall, x: Tensor) -> Tensor:
    kind = call.get("dtype", 6)
    chosen = torch.multinomial(torch.softmax(x.float(), -1), call.get("sample_size", 1), replacement=True)
    return chosen.to(call.dtype(kind))
