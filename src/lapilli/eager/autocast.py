"""``torch.autocast("vulkan")``: the operators that compute in float16 or bfloat16, and those that compute in float32.

The lists are those of CUDA (https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior), so that a model
behaves as it does there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from lapilli.eager.device_state import is_ours
from lapilli.torch_compat import replace

_HALF = """
_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention
"""

_FLOAT = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
_upsample_bicubic2d_aa
"""

_FLOAT_RESULT = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
"""

_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add cat stack"

_KEY = "AutocastPrivateUse1"
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
_cache = threading.local()
_Parameter = torch.nn.Parameter


def register(library: Any) -> None:
    """Registers the kernels that convert arguments; without autocast they are not called."""
    for names, make in ((_HALF, _in_half), (_FLOAT, _in_float), (_FLOAT_RESULT, _to_float), (_WIDEST, _in_widest)):
        for name in names.split():
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, functools.partial(_below, make, op), _KEY)
    library.impl("binary_cross_entropy", _refuse, _KEY)


def patch() -> None:
    """Makes ``torch.clear_autocast_cache`` drop the device's converted weights as well."""
    clear = torch.clear_autocast_cache

    @functools.wraps(clear)
    def clear_both() -> None:
        _cache.casts = {}
        clear()

    replace(torch, "clear_autocast_cache", clear_both)


def _below(make: Callable[..., Any], op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return make(op, args, kwargs)


def _in_half(op: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return _with(op, args, kwargs, torch.get_autocast_dtype("vulkan"))


def _in_float(op: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return _with(op, args, kwargs, torch.float32)


def _to_float(op: Any, args: Any, kwargs: Any) -> Any:
    """Sums of 16-bit floats are float32, unless the caller asks for another type."""
    place = [argument.name for argument in op._schema.arguments].index("dtype")
    given = args[place] if place < len(args) else kwargs.get("dtype")
    if given is None and isinstance(args[0], torch.Tensor) and _eligible(args[0]):
        args, kwargs = (*args[:place], *args[place + 1 :]), {**kwargs, "dtype": torch.float32}
    return op(*args, **kwargs)


def _in_widest(op: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    found: list[torch.dtype] = []
    _converted((args, kwargs), lambda tensor: found.append(tensor.dtype) or tensor)  # type: ignore[func-returns-value]
    return _with(op, args, kwargs, torch.float32 if torch.float32 in found else torch.get_autocast_dtype("vulkan"))


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. Many models use a sigmoid "
        "layer right before the binary cross entropy layer; combine the two using "
        "torch.nn.functional.binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss, which are safe to autocast."
    )


def _with(op: Callable[..., Any], args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.dtype is dtype else _cast(tensor, dtype)

    given = []
    for value in args:  # most are tensors, numbers and sizes: without a call for each
        kind = type(value)
        if kind is torch.Tensor or kind is _Parameter:
            given.append(value if value.dtype is dtype or not _eligible(value) else _cast(value, dtype))
        elif value is None or kind is int or kind is bool or kind is float:
            given.append(value)
        else:
            given.append(_converted(value, cast))
    return op(*given, **_converted(kwargs, cast)) if kwargs else _QUICKER.get(op, op)(*given)


_QUICKER: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.conv1d.default: torch.conv1d, torch.ops.aten.conv2d.default: torch.conv2d,
    torch.ops.aten.conv3d.default: torch.conv3d, torch.ops.aten.linear.default: torch.nn.functional.linear,
    torch.ops.aten.matmul.default: torch.matmul, torch.ops.aten.mm.default: torch.mm, torch.ops.aten.bmm.default: torch.bmm,
}  # fmt: skip
"""The same operators by functions whose arguments PyTorch reads in a third of the time."""


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a dtype. Weights, which are used repeatedly, are converted once until autocast ends."""
    if not (tensor.requires_grad and tensor.is_leaf and torch.is_autocast_cache_enabled() and not tensor._is_view()):
        return tensor.to(dtype)
    casts = getattr(_cache, "casts", None)
    if casts is None:
        casts = _cache.casts = {}
    key = (id(tensor), dtype, torch.is_grad_enabled())
    if key not in casts:
        casts[key] = tensor, tensor.to(dtype)  # keeps the tensor alive, so that its id is not reused
    return casts[key][1]  # type: ignore[no-any-return]


def _eligible(tensor: torch.Tensor) -> bool:
    return is_ours(tensor) and tensor.is_floating_point() and tensor.dtype is not torch.float64


def _converted(value: Any, cast: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Arguments, with all floating-point tensors on the device converted."""
    if isinstance(value, torch.Tensor):
        return cast(value) if _eligible(value) else value
    if isinstance(value, (list, tuple)):
        if all(type(element) is int for element in value):  # sizes: many calls have some
            return value
        return type(value)([_converted(element, cast) for element in value])
    if isinstance(value, dict):
        return {name: _converted(element, cast) for name, element in value.items()}
    return value
