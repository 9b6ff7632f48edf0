"""Gradients of interpolation: it is linear, dimension by dimension, so they are products with the matrices of its weights.

A matrix is what the operator itself makes of the unit vectors of one dimension, where all others have one element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lapilli.lower.registry import decomposition

aten = torch.ops.aten


def _weights(
    forward: Any, rank: int, source: Any, target: Any, options: Sequence[Any], scale: float | None, like: Tensor
) -> Tensor:
    """[source, target]"""
    units = torch.eye(source, dtype=like.dtype, device=like.device).reshape(1, source, source, *[1] * (rank - 1))
    scales = [scale, *[None] * (rank - 1)]
    found: Tensor = forward(units, [target, *[1] * (rank - 1)], *options, *scales)
    return found.reshape(source, target)


def _backward(forward: Any, rank: int, options: int) -> Any:
    def build(grad: Tensor, output_size: Any, input_size: Any, *rest: Any) -> Tensor:
        scales = [*rest[options:], *[None] * rank][:rank]
        result = grad
        for d in range(rank):
            weights = _weights(forward, rank, input_size[2 + d], output_size[d], rest[:options], scales[d], grad)
            result = (result.movedim(2 + d, -1) @ weights.t()).movedim(-1, 2 + d)
        return result

    return build


for _name, _rank, _options in (
    ("upsample_nearest1d", 1, 0), ("upsample_nearest2d", 2, 0), ("upsample_nearest3d", 3, 0),
    ("_upsample_nearest_exact1d", 1, 0), ("_upsample_nearest_exact2d", 2, 0), ("_upsample_nearest_exact3d", 3, 0),
    ("upsample_linear1d", 1, 1), ("upsample_bilinear2d", 2, 1), ("upsample_trilinear3d", 3, 1), ("upsample_bicubic2d", 2, 1),
    ("_upsample_bilinear2d_aa", 2, 1), ("_upsample_bicubic2d_aa", 2, 1),
):  # fmt: skip
    decomposition(getattr(aten, f"{_name}_backward").default)(_backward(getattr(aten, _name).default, _rank, _options))
