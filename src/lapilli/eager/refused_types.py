"""Calls that torch refuses for the types of their operands, or for numbers that belong to the call's form. They go to the CPU,
where torch says what is wrong: a lowering would take them, since kernels convert what they read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_MATRICES = {
    "mm": ("self", "mat2", "out"), "bmm": ("self", "mat2", "out"), "mv": ("self", "vec", "out"), "dot": ("self", "tensor", "out"),
    "matmul": ("self", "other"), "addmm": ("self", "mat1", "mat2", "out"), "addmv": ("self", "mat", "vec", "out"),
    "baddbmm": ("self", "batch1", "batch2", "out"), "addbmm": ("self", "batch1", "batch2", "out"),
}  # fmt: skip
_LAYERS = ("linear", "convolution", "conv1d", "conv2d", "conv3d")
_ALIKE: Mapping[str, tuple[str, ...]] = {
    **_MATRICES,
    **dict.fromkeys(_LAYERS, ("input", "weight", "bias")),
    "index_add": ("self", "source"),
    "index_copy": ("self", "source"),
    "index_reduce": ("self", "source"),
    "index_put": ("self", "values"),
    "binary_cross_entropy": ("self", "target", "weight"),
    "grid_sampler_2d": ("input", "grid"),
    "grid_sampler_3d": ("input", "grid"),
}
"""Operands of one type."""
_OF_FLOATS = {
    "_softmax", "_log_softmax", "softmax", "log_softmax", "var", "std", "var_mean", "std_mean", "gelu", "silu", "softplus",
    "hardsigmoid", "hardswish", "mish", "logcumsumexp", "lerp", "frac", "log_sigmoid", "log_sigmoid_forward", "hardshrink",
    "leaky_relu", "rrelu_with_noise", "glu", "_prelu_kernel", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d",
    "adaptive_max_pool3d", "huber_loss", "multilabel_margin_loss_forward", "multinomial", "bernoulli", "linalg_cholesky_ex",
    "cholesky", "rand", "rand_like",
}  # fmt: skip
"""Functions whose first operand is no integer, unless they are told the type in which to compute."""
_OF_FLOATS_TOGETHER = {"hypot", "logaddexp", "logaddexp2", "smooth_l1_loss"}
"""The same of the type to which both operands are promoted."""
_NOT_OF_BOOLS = {
    "abs", "relu", "floor", "ceil", "round", "trunc", "argmax", "argmin", "median", "nanmedian", "topk", "kthvalue", "trace",
    "threshold", "max_pool2d_with_indices", "max_pool3d_with_indices", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
}  # fmt: skip
_NOT_OF_BOOLS_TOGETHER = {"fmod", "remainder", "pow", "gcd"}
_NORMS = {
    "native_layer_norm": ("weight", "bias"), "layer_norm": ("weight", "bias"), "native_group_norm": ("weight", "bias"),
    "native_batch_norm": ("weight", "bias", "running_mean", "running_var"),
}  # fmt: skip
"""Parameters of the input's type, or float32 where that is one of 16 bits."""
_OF_FLOATS_AND = {
    **dict.fromkeys(("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"), torch.uint8),
    **dict.fromkeys(("avg_pool2d", "avg_pool3d"), torch.int64),
}
"""Functions of floats and one type of integers."""
_INDICES = {"index_select": (torch.int64, torch.int32), "index_fill": (torch.int64,)}


def refused_types(op: torch._ops.OpOverload, leaves: Sequence[Any]) -> str | None:
    """Why torch refuses a call; None if it does not, or for a reason that is not known here. leaves: all arguments, in the
    schema's order.
    """
    name = op._schema.name.split("::")[1].removesuffix("_")
    check = _CHECKS.get(name)
    if check is None:
        return None
    return check(name, leaves, dict(zip([a.name for a in op._schema.arguments], leaves, strict=True)))


_Check = Callable[[str, Sequence[Any], Mapping[str, Any]], str | None]


def _alike(name: str, leaves: Sequence[Any], given: Mapping[str, Any]) -> str | None:
    kinds = {x.dtype for operand in _ALIKE[name] if isinstance(x := given.get(operand), torch.Tensor)}
    if len(kinds) > 1:
        words = " and ".join(sorted(map(_word, kinds)))
        return f"torch takes operands of one type alone, not of {words}"
    if name == "binary_cross_entropy":
        return _of_floats(name, leaves, given)
    if min(given.get("stride", ()), default=1) < 1:
        return "torch takes no stride below 1"
    return None


def _of_floats(name: str, leaves: Sequence[Any], given: Mapping[str, Any]) -> str | None:
    kind = given.get("dtype") or (leaves[0].dtype if isinstance(leaves[0], torch.Tensor) else torch.get_default_dtype())
    if name == "multinomial" and given["num_samples"] < 1:
        return "torch draws at least one sample"
    if name == "bernoulli" and "p" in given:  # whose operand is only overwritten
        return None
    return None if _is_of_floats(kind) else _unknown(name, kind)


def _of_floats_together(name: str, leaves: Sequence[Any], given: Mapping[str, Any]) -> str | None:
    kind = torch.result_type(leaves[0], leaves[1])
    return None if _is_of_floats(kind) else _unknown(name, kind)


def _not_of_bools(name: str, leaves: Sequence[Any], given: Mapping[str, Any]) -> str | None:
    return _unknown(name, torch.bool) if leaves[0].dtype is torch.bool else None


def _not_of_bools_together(name: str, leaves: Sequence[Any], given: Mapping[str, Any]) -> str | None:
    kind = torch.result_type(leaves[0], leaves[1])
    if name == "pow" and type(leaves[1]) is bool:
        return None
    if (name == "gcd" and _is_of_floats(kind)) or kind is torch.bool:
        return _unknown(name, kind)
    return _by_zero(name, leaves, given)


def _of_integers_together(name: str, leaves: Sequence[Any], given: Mapping[str, Any]) -> str | None:
    kind = torch.result_type(leaves[0], leaves[1])
    return _unknown(name, kind) if _is_of_floats(kind) else None


def _by_zero(name: str, leaves: Sequence[Any], given: Mapping[str, Any]) -> str | None:
    """Of an integer by the number 0; where a tensor has zeros is not looked up."""
    if name == "pow" or type(leaves[1]) not in (int, bool) or leaves[1] or _is_of_floats(leaves[0].dtype):
        return None
    return None if name == "div" and given.get("rounding_mode") is None else "torch divides no integers by 0"


def _sum(name: str, leaves: Sequence[Any], given: Mapping[str, Any]) -> str | None:
    """Sums and differences with a factor."""
    bools = [x for x in leaves[:2] if type(x) is bool or (isinstance(x, torch.Tensor) and x.dtype is torch.bool)]
    if name != "add" and bools:
        return "torch subtracts no bools"
    factor = given.get("alpha", 1)
    if type(factor) is int:
        return None
    kind = torch.result_type(leaves[0], leaves[1])
    if (type(factor) is bool and kind is not torch.bool) or (type(factor) is float and not _is_of_floats(kind)):
        return f"torch multiplies no {_word(kind)} by a factor that is a {type(factor).__name__}"
    return None


def _norm(name: str, leaves: Sequence[Any], given: Mapping[str, Any]) -> str | None:
    kind = leaves[0].dtype
    taken = {kind, torch.float32} if kind in (torch.float16, torch.bfloat16) else {kind}
    for parameter in _NORMS[name]:
        x = given.get(parameter)
        if isinstance(x, torch.Tensor) and x.dtype not in taken:
            return f"torch takes no parameters of {_word(x.dtype)} with inputs of {_word(kind)}"
    return None


def _index(name: str, leaves: Sequence[Any], given: Mapping[str, Any]) -> str | None:
    kind = given["index"].dtype
    return None if kind in _INDICES[name] else f"torch takes no indices of {_word(kind)} here"


def _of_floats_and(name: str, leaves: Sequence[Any], given: Mapping[str, Any]) -> str | None:
    kind = leaves[0].dtype
    return None if _is_of_floats(kind) or kind is _OF_FLOATS_AND[name] else _unknown(name, kind)


def _is_of_floats(kind: torch.dtype) -> bool:
    return kind.is_floating_point or kind.is_complex


def _unknown(name: str, kind: torch.dtype) -> str:
    return f"torch has no {name.removeprefix('_')} of {_word(kind)}"


def _word(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


_CHECKS: dict[str, _Check] = {
    **dict.fromkeys(_ALIKE, _alike),
    **dict.fromkeys(_OF_FLOATS, _of_floats),
    **dict.fromkeys(_OF_FLOATS_TOGETHER, _of_floats_together),
    **dict.fromkeys(_NOT_OF_BOOLS, _not_of_bools),
    **dict.fromkeys(_NOT_OF_BOOLS_TOGETHER, _not_of_bools_together),
    **dict.fromkeys(("floor_divide", "div"), _by_zero),
    **dict.fromkeys(("add", "sub", "rsub"), _sum),
    **dict.fromkeys(_NORMS, _norm),
    **dict.fromkeys(_INDICES, _index),
    **dict.fromkeys(_OF_FLOATS_AND, _of_floats_and),
    "lcm": _of_integers_together,
}
