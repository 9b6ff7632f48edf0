"""torchao's quantized weights on the device: they stay integers there, and layers read them as they are.

torchao's tensors are subclasses with a table of functions for what is computed of them. On other devices its own are called.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from lapilli.eager.packed_codes import VALUES, PackedCodes, blocks_of, pack, parts, warn_once
from lapilli.graph.coded_layers import CODED_EMBEDDING, CODED_LINEAR, weight_of
from lapilli.torch_compat import replace

aten = torch.ops.aten
_ours: Any = torch.ops.lapilli

_INTX = "torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor"
_INT8 = "torchao.quantization.quantize_.workflows.int8.int8_tensor"


def integers_of_few_bits(module: Any) -> None:
    """Extends torchao's IntxUnpackedToInt8Tensor. module: the one that defines it."""
    kind = module.IntxUnpackedToInt8Tensor
    rounded = module._apply_int8_act_asym_per_token_quant_dequant
    made: Any = kind.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        _pack(self)

    replace(kind, "__init__", init)
    _save_from_cpu(kind)

    def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        if torch.is_autocast_enabled("vulkan"):
            x, bias = _as_autocast(x), _as_autocast(bias)
        elif x.dtype is not weight.dtype:
            raise RuntimeError(
                f"linear got an input of {x.dtype} and a quantized weight of {weight.dtype}: convert the input, or the model by "
                f"model.to({x.dtype})."
            )
        if weight.activation_quantization is not None:
            x = rounded(x)
        return _linear(x, weight, weight.scale, weight.zero_point, bias)

    def embedding(
        ids: torch.Tensor, weight: Any, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        if max_norm is not None:
            raise NotImplementedError("max_norm changes an embedding's weight, which is quantized: use max_norm=None.")
        return _embedding(ids, weight)

    _extend(kind, kind.implements_torch_function, functional.linear, 1, linear)
    _extend(kind, kind.implements, aten.linear.default, 1, linear)
    _extend(kind, kind.implements_torch_function, functional.embedding, 1, embedding)
    _extend(kind, kind.implements, aten.embedding.default, 0, lambda weight, ids, *_: _embedding(ids, weight))
    for implements, function in (
        (kind.implements_torch_function, functional.conv2d),
        (kind.implements, aten.conv2d.default),
    ):
        _extend(kind, implements, function, 1, None)


def integers_of_eight_bits(module: Any) -> None:
    """Extends torchao's Int8Tensor. module: the one that defines it."""
    kind, quantize = module.Int8Tensor, module._choose_quant_func_and_quantize_tensor
    asymmetric = module.MappingType.ASYMMETRIC
    _save_from_cpu(kind)

    def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = x.dtype
        if weight.act_pre_scale is not None:
            x = x * weight.act_pre_scale
        chosen = weight.act_quant_kwargs
        if chosen is None:
            whole = weight.block_size[-1] == weight.qdata.shape[-1]  # torchao has no zero points there
            return _linear(x, weight, weight.scale, None if whole else weight.zero_point, bias).to(out)
        codes = quantize(x, chosen, scale=weight.act_quant_scale, zero_point=weight.act_quant_zero_point)
        scale = codes.scale.reshape(-1, 1)
        scale = scale.float() if scale.dtype is torch.half else scale
        sums = aten._int_mm(codes.qdata.reshape(-1, codes.qdata.shape[-1]), weight.qdata.t())
        y = (sums * scale).to(out)
        if chosen.mapping_type == asymmetric and codes.zero_point is not None:
            rows = weight.qdata.sum(dim=-1).to(scale.dtype)
            y = y - (codes.zero_point.reshape(-1, 1).to(scale.dtype) * scale * rows).to(out)
        y = (y * weight.scale.flatten()).reshape(*x.shape[:-1], weight.shape[0])
        made: torch.Tensor = (y if bias is None else y + bias).to(out)
        return made

    _extend(kind, kind.implements_torch_function, functional.linear, 1, linear)
    _extend(kind, kind.implements, aten.linear.default, 1, linear)
    _extend(kind, kind.implements, aten.embedding.default, 0, lambda weight, ids, *_: _embedding(ids, weight))


EXTENSIONS: dict[str, tuple[Callable[[Any], None], tuple[str, ...]]] = {
    _INTX: (integers_of_few_bits, ("IntxUnpackedToInt8Tensor", "_apply_int8_act_asym_per_token_quant_dequant")),
    _INT8: (integers_of_eight_bits, ("Int8Tensor", "_choose_quant_func_and_quantize_tensor", "MappingType")),
}
"""What is done with a module of torchao's, by its name, and what it needs of it."""


def extend(module: Any) -> None:
    """Extends the tensors of a module of torchao's that is being imported. In a version that lacks what this builds on, warns."""
    extension, needs = EXTENSIONS[module.__name__]
    missing = [name for name in needs if not hasattr(module, name)]
    if not missing:
        return extension(module)
    warnings.warn(
        f"this version of torchao lacks {', '.join(missing)} in {module.__name__}: quantized weights on the device 'vulkan' are "
        "decoded to floats for each call. torchao 0.18 is known to work.",
        RuntimeWarning, stacklevel=2,
    )  # fmt: skip


def _extend(
    kind: Any, implements: Callable[..., Any], function: Any, place: int, ours: Callable[..., Any] | None
) -> None:
    """Makes a function of the weight, which is its argument at `place`, ours on the device. None: torchao's, with a warning."""
    tables = (kind._TORCH_FN_TABLE, kind._ATEN_OP_TABLE)
    theirs = next((table[kind][function] for table in tables if function in table[kind]), None)

    def chosen(func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        weight: Any = args[place] if len(args) > place else kwargs["weight"]
        if weight.device.type != "vulkan" or not isinstance(weight, kind):
            if theirs is None:
                raise NotImplementedError(f"torchao has no {func} of {kind.__name__}.")
            return theirs(func, types, args, kwargs)
        if ours is None:
            _warn_of_floats(str(getattr(func, "__name__", func)), "there is no kernel of it that reads integers")
            return theirs(func, types, args, kwargs)  # type: ignore[misc]
        if "input" in kwargs:  # what torch.nn.functional calls the first argument
            args, kwargs = (kwargs["input"], *args), {name: value for name, value in kwargs.items() if name != "input"}
        return ours(*args, **kwargs)

    implements(function)(chosen)


def _pack(weight: Any) -> None:
    """Packs the codes of a matrix on the device, if they have at most four bits."""
    low = _least(weight.target_dtype)
    codes = weight.qdata
    if (
        low >= -VALUES // 2
        and codes.device.type == "vulkan"
        and codes.dim() == 2
        and not isinstance(codes, PackedCodes)
    ):
        weight.qdata = pack(codes, -VALUES // 2)


def _least(dtype: torch.dtype) -> int:
    return -(1 << int(str(dtype).removeprefix("torch.int")) - 1)


def _save_from_cpu(kind: Any) -> None:
    """Weights on the device are saved as those on the CPU are."""
    reduced, restored = kind.__reduce_ex__, kind.__setstate__

    @functools.wraps(reduced)
    def reduce(self: Any, protocol: Any) -> Any:
        return reduced(self.cpu() if self.device.type == "vulkan" else self, protocol)

    replace(kind, "__reduce_ex__", reduce)

    @functools.wraps(restored)
    def restore(self: Any, state: Any) -> None:
        restored(self, state)
        if hasattr(self, "target_dtype"):
            _pack(self)

    replace(kind, "__setstate__", restore)


def _linear(
    x: torch.Tensor, weight: Any, scale: torch.Tensor, zero: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    block = blocks_of(weight.block_size, weight.shape)
    codes, low, columns = parts(weight.qdata)
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        _warn_of_floats("linear", "gradients are recorded")
        return functional.linear(x, weight_of(codes, scale, zero, block, low, columns, x.dtype), bias)
    made: torch.Tensor = CODED_LINEAR(x, codes, scale, zero, bias, block, low, columns)
    return made


def _as_autocast(x: Any) -> Any:
    return None if x is None else x.to(torch.get_autocast_dtype("vulkan"))


def _embedding(ids: torch.Tensor, weight: Any) -> torch.Tensor:
    codes, low, columns = parts(weight.qdata)
    made: torch.Tensor = CODED_EMBEDDING(
        ids,
        codes,
        weight.scale,
        weight.zero_point,
        blocks_of(weight.block_size, weight.shape),
        low,
        columns,
        weight.dtype,
    )
    return made


def _warn_of_floats(what: str, reason: str) -> None:
    text = f"of a quantized weight decodes it to floats for each call, since {reason}. The weight itself stays in integers."
    warn_once(what, text, 3)
