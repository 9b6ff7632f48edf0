"""Operators of onnxruntime that belong to no other family."""

from __future__ import annotations

from typing import Any

import torch

from lapilli.capture.onnx.onnx_registry import MICROSOFT, OPERATORS, OnnxCall, operator

Tensor = torch.Tensor

for _name in ("Trilu", "Inverse"):
    if ("", _name) in OPERATORS:
        operator(_name, domain=MICROSOFT)(OPERATORS["", _name])


@operator("Inverse", domain=MICROSOFT)
def inverse(call: OnnxCall, x: Tensor) -> Tensor:
    return torch.linalg.inv(x)


@operator("ExpandDims", domain=MICROSOFT)
def expand_dims(call: OnnxCall, x: Tensor, _: Any) -> Tensor:
    return x.unsqueeze(int(call.number(1)))


@operator("Range", domain=MICROSOFT)
def range_(call: OnnxCall, start: Tensor, *_: Tensor) -> Tensor:
    return torch.arange(call.number(0), call.number(1), call.number(2, 1), dtype=start.dtype)
