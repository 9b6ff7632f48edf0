"""Calls that torch refuses for the types of their operands. They go to the CPU, where torch says what is wrong: a lowering would
take them, since kernels convert what they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_MATRICES = {
    "mm": ("self", "mat2"), "bmm": ("self", "mat2"), "mv": ("self", "vec"), "dot": ("self", "tensor"), "matmul": ("self", "other"),
    "addmm": ("self", "mat1", "mat2"), "addmv": ("self", "mat", "vec"), "baddbmm": ("self", "batch1", "batch2"),
    "addbmm": ("self", "batch1", "batch2"),
}  # fmt: skip
_LAYERS = ("linear", "convolution", "conv1d", "conv2d", "conv3d")
_ALIKE: Mapping[str, tuple[str, ...]] = {
    **_MATRICES,
    **dict.fromkeys(_LAYERS, ("input", "weight", "bias")),
    "index_add": ("self", "source"),
    "index_put": ("self", "values"),
}
"""Operands of one type."""
_OF_FLOATS = {
    "_softmax", "_log_softmax", "softmax", "log_softmax", "var", "std", "var_mean", "std_mean", "gelu", "silu", "softplus",
    "hardsigmoid", "hardswish", "mish", "logcumsumexp", "lerp",
}  # fmt: skip
"""Functions whose first operand is no integer, unless they are told the type in which to compute."""


def refused_types(op: torch._ops.OpOverload, leaves: Sequence[Any]) -> str | None:
    """Why torch refuses a call; None if it does not, or for a reason that is not known here. leaves: all arguments, in the
    schema's order.
    """
    name = op._schema.name.split("::")[1].removesuffix("_")
    if name not in _ALIKE and name not in _OF_FLOATS:
        return None
    given = dict(zip([a.name for a in op._schema.arguments], leaves, strict=True))
    if name in _ALIKE:
        operands = [given.get(operand) for operand in _ALIKE[name]]
        kinds = {x.dtype for x in operands if isinstance(x, torch.Tensor)}
        words = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        return f"torch takes operands of one type alone, not of {words}" if len(kinds) > 1 else None
    kind = leaves[0].dtype
    if kind.is_floating_point or kind.is_complex or given.get("dtype") is not None:
        return None
    return f"torch has no {name.removeprefix('_')} of {str(kind).removeprefix('torch.')}"
