"""Decompose composite operators into core ATen, but keep whole what has a kernel of its own."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.export import ExportedProgram, default_decompositions

from lapilli.lower.registry import is_supported

aten = torch.ops.aten

KEPT = (
    aten.linear.default, aten.layer_norm.default, aten.group_norm.default, aten.hardswish.default, aten.hardsigmoid.default,
    aten.silu.default, aten.gelu.default, aten.mish.default, aten.matmul.default, aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default, aten.max_pool1d.default, aten.max_pool2d.default,
    aten.max_pool3d.default, aten.avg_pool1d.default, aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec,
    aten.upsample_nearest3d.vec, aten.upsample_bilinear2d.vec, aten.upsample_linear1d.vec, aten.upsample_trilinear3d.vec,
    aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.softmax.int, aten.log_softmax.int,
)  # fmt: skip


def decompose(program: ExportedProgram) -> ExportedProgram:
    """The same program in core ATen operators and the kept ones."""
    table: dict[Any, Any] = dict(default_decompositions())
    for overload in list(table):
        if overload in KEPT and is_supported(overload):
            del table[overload]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about its tree specs
        decomposed: ExportedProgram = program.run_decompositions(table)
    return decomposed
