"""The torch operators that a program may name, and the arguments that they may get.

A file names operators as text. Only `OpOverload`s on a list are allowed: those of ATen, prims and torchvision that compute
new tensors from tensors and numbers, according to their schemas. None of them takes a path, a callable, a storage or a
generator, or changes its arguments; words that are arguments (such as a rounding mode) must be on a list as well. For
operators of other packages the caller must vouch: `lapilli.load(..., allow_host=[...])`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from lapilli.errors import InvalidFileError, InvalidInputError, LapilliError
from lapilli.runtime.arithmetic import INT_MAX, INT_MIN
from lapilli.runtime.host_script import Json

_NAME = re.compile(r"[A-Za-z]\w{0,63}\.[A-Za-z_]\w{0,127}\.\w{1,63}", re.ASCII)

_TORCHVISION = frozenset({"nms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d"})

_PRIVATE = frozenset({
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_addmm_activation", "_aminmax", "_assert_async", "_assert_scalar",
    "_assert_tensor_metadata", "_batch_norm_no_update", "_batch_norm_with_update_functional", "_cast_Byte", "_cast_Char",
    "_cast_Double", "_cast_Float", "_cast_Half", "_cast_Int", "_cast_Long", "_cast_Short", "_cdist_forward",
    "_cholesky_solve_helper", "_conj", "_conj_copy", "_conj_physical", "_conv_depthwise2d", "_convolution",
    "_convolution_mode", "_dirichlet_grad", "_embedding_bag", "_embedding_bag_forward_only", "_euclidean_dist", "_fft_c2c",
    "_fft_c2r", "_fft_r2c", "_functional_assert_async", "_functional_assert_scalar", "_fused_rms_norm", "_grouped_mm",
    "_histogramdd_bin_edges", "_histogramdd_from_bin_cts", "_histogramdd_from_bin_tensors", "_int_mm", "_is_all_true",
    "_is_any_true", "_linalg_check_errors", "_linalg_det", "_linalg_eigh", "_linalg_eigvals", "_linalg_slogdet",
    "_linalg_solve_ex", "_linalg_svd", "_local_scalar_dense", "_log_softmax", "_logcumsumexp", "_lu_with_info",
    "_masked_scale", "_masked_softmax", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training", "_neg_view", "_neg_view_copy", "_pack_padded_sequence", "_pad_circular",
    "_pad_packed_sequence", "_pdist_forward", "_prelu_kernel", "_reshape_copy", "_safe_softmax", "_sample_dirichlet",
    "_scaled_dot_product_attention_math", "_scaled_dot_product_flash_attention_for_cpu", "_shape_as_tensor", "_softmax",
    "_stack", "_standard_gamma", "_standard_gamma_grad", "_to_copy", "_trilinear", "_unique", "_unique2", "_unsafe_index",
    "_unsafe_index_put", "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate", "_unsafe_view",
    "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_lanczos2d_aa", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "_weight_norm", "_weight_norm_interface",
})  # fmt: skip
"""The allowed ones among operators with an underscore, which torch does not promise to be safe with any arguments."""

_SILENT = frozenset(
    {"_assert_async", "_assert_scalar", "_assert_tensor_metadata", "_linalg_check_errors"}
)  # they return nothing

_DENIED = re.compile(
    # other devices and libraries with formats of their own in plain tensors, sparse tensors, the process's settings
    r"cudnn|miopen|mps|mkldnn|fbgemm|quantized|sparse|nested|.*_mps$|.*mkldnn|to_sparse|choose_qparams|set_|manual_seed|cuda$|"
    r"pin_memory|resize|.*overrideable|hspmm|smm$|sspaddmm|(c?col|c?row|crow)?_?indices|values|device_put|empty_quantized|"
    r"coalesce|copy_sparse|get_autocast|is_autocast|grad$|data$|output_nr|"
    # operators that trust numbers or indices: gradients, pivots, labels, segments, sizes in addition to a tensor
    r".*backward|ctc_loss|segment_reduce|lu_solve|linalg_lu_solve|linalg_ldl_solve",
)

_WORDS: dict[str, frozenset[str] | re.Pattern[str]] = {
    "rounding_mode": frozenset({"trunc", "floor"}),
    "reduce": frozenset({"sum", "prod", "mean", "amax", "amin", "max", "min", "add", "multiply"}),
    "approximate": frozenset({"none", "tanh"}),
    "mode": frozenset({"constant", "reflect", "replicate", "circular", "reduced", "complete", "r", "nearest", "linear",
                       "bilinear", "bicubic", "trilinear", "area"}),
    "norm": frozenset({"forward", "backward", "ortho"}),
    "ord": frozenset({"fro", "nuc"}), "p": frozenset({"fro", "nuc"}),
    "interpolation": frozenset({"linear", "lower", "higher", "midpoint", "nearest"}),
    "driver": frozenset({"gels", "gelsy", "gelsd", "gelss"}),
    "UPLO": frozenset("ULul"), "side": frozenset({"left", "right"}), "padding_side": frozenset({"left", "right"}),
    "padding": frozenset({"same", "valid"}), "indexing": frozenset({"ij", "xy"}),
    "pad_mode": frozenset({"constant", "reflect", "replicate", "circular"}),
    "equation": re.compile(r"[A-Za-z0-9.,> -]{1,256}", re.ASCII),
    "api_name": re.compile(r"[A-Za-z0-9_.]{1,64}", re.ASCII),
    "assert_msg": re.compile(r"[^\x00-\x08\x0e-\x1f\x7f-\x9f]{0,4096}", re.DOTALL),
}  # fmt: skip
"""Allowed values of text arguments, by argument name."""

DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
          "float64", "complex32", "complex64", "complex128")  # fmt: skip
TAGS: dict[str, tuple[str, ...]] = {
    "dtype": DTYPES,
    "layout": ("strided",),
    "memory_format": ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d"),
    "device": ("cpu",),
}
"""The constants of torch that a script may name."""

_TAG_OF = {
    "ScalarTypeType": "dtype",
    "LayoutType": "layout",
    "MemoryFormatType": "memory_format",
    "DeviceObjType": "device",
}
_PLAIN = frozenset({"TensorType", "NumberType", "IntType", "SymIntType", "FloatType", "BoolType", "SymBoolType", "ComplexType",
                    "GeneratorType", "StringType", *_TAG_OF})  # fmt: skip

Kind = str | tuple[Any, ...]
"""The kind of a value: "tensor", "number", "any" of these, or a tuple of the kinds of its parts, or of one kind and "…"."""


@dataclass(frozen=True)
class Permission:
    """The operators that a program may name in addition to those on the list.

    names: overloads ("mylib.f.default") or namespaces ("mylib"). everything: for programs that this process compiled
    itself. none: programs that call operators of torch are refused.
    """

    names: frozenset[str] = frozenset()
    everything: bool = False
    none: bool = False

    @staticmethod
    def of(allow_host: bool | Collection[str]) -> Permission:
        """The permission for the argument of `lapilli.load`."""
        if isinstance(allow_host, bool):
            return Permission(none=not allow_host)
        return Permission(frozenset([allow_host] if isinstance(allow_host, str) else allow_host))

    def vouches(self, name: str) -> bool:
        return self.everything or name in self.names or name.split(".")[0] in self.names


LISTED = Permission()
"""For files: the operators on the list."""

OWN = Permission(everything=True)
"""For programs that this process compiled."""


def overload(name: str, torch: Any, permission: Permission) -> Any:
    """The OpOverload of a name such as "aten.nonzero.default". Raises InvalidFileError if no file may name it, and
    LapilliError if this version of torch lacks it.
    """
    if _NAME.fullmatch(name) is None:
        raise InvalidFileError(f"The program calls {name[:200]!r}, which is no name of an operator of torch.")
    namespace, packet, which = name.split(".")
    if namespace == "lapilli":
        import lapilli.runtime.sequences  # noqa: F401  # which registers them
    qualified = f"{namespace}::{packet}" + ("" if which == "default" else f".{which}")
    if not torch._C._dispatch_has_kernel(qualified):
        missing = f"which this torch {torch.__version__} does not have; import the package that brings it first"
        if namespace in ("aten", "prims", "torchvision") or permission.vouches(name):
            raise LapilliError(f"The program calls {name}, {missing}.")
        raise _refused(name)
    found = getattr(getattr(getattr(torch.ops, namespace), packet), which)
    if not isinstance(found, torch._ops.OpOverload):
        raise _refused(name)
    if not permission.vouches(name) and not _is_listed(namespace, packet, found._schema):
        raise _refused(name)
    return found


def unlisted(names: Iterable[str]) -> list[str]:
    """The operators that a file may call only if the caller names them. Needs torch."""
    import torch

    found = []
    for name in names:
        try:
            overload(name, torch, LISTED)
        except LapilliError:
            found.append(name)
    return found


def _refused(name: str) -> InvalidFileError:
    return InvalidFileError(
        f"The program calls {name}, which is not on the list of operators that a file may name. If you trust the file and know "
        f"the operator, load it with allow_host=[{name!r}]."
    )


def _is_listed(namespace: str, packet: str, schema: Any) -> bool:
    """Whether any file may name an operator: it computes new tensors or numbers from tensors, numbers and words on the
    list.
    """
    if namespace == "torchvision":
        if packet not in _TORCHVISION:
            return False
    elif namespace not in ("aten", "prims"):
        return False
    elif packet.startswith("_"):
        if packet not in _PRIVATE:
            return False
    elif _DENIED.match(packet) or (namespace == "prims" and packet.startswith("fft_")):
        return False
    if schema.is_mutable or not (schema.returns or packet in _SILENT):
        return False
    types = [a.real_type for a in schema.arguments]
    if not all(_is_plain(t) for t in types) or not all(_is_result(r.real_type) for r in schema.returns):
        return False
    words = [a.name for a in schema.arguments if _has_text(a.real_type)]
    tensors = any("Tensor" in str(t) for t in (*types, *(r.real_type for r in schema.returns)))
    return tensors and all(name in _WORDS for name in words)


def _is_plain(type_: Any) -> bool:
    if type_.kind() in ("OptionalType", "ListType"):
        return _is_plain(type_.getElementType())
    return type_.kind() in _PLAIN


def _is_result(type_: Any) -> bool:
    if type_.kind() == "ListType":
        return bool(type_.getElementType().kind() == "TensorType")
    return type_.kind() in ("TensorType", "NumberType", "IntType", "SymIntType", "FloatType", "BoolType", "SymBoolType")


def _has_text(type_: Any) -> bool:
    if type_.kind() in ("OptionalType", "ListType"):
        return _has_text(type_.getElementType())
    return bool(type_.kind() == "StringType")


def results(schema: Any) -> Kind:
    """The kind of the result of an operator."""
    kinds = tuple(_result_kind(r.real_type) for r in schema.returns)
    return kinds[0] if len(kinds) == 1 else kinds


def _result_kind(type_: Any) -> Kind:
    if type_.kind() == "ListType":
        return (_result_kind(type_.getElementType()), "…")
    return "tensor" if type_.kind() == "TensorType" else "number" if _is_result(type_) else "any"


class Mismatch(Exception):
    """An argument that its operator does not accept, as a clause."""


def check_arguments(schema: Any, args: list[Any], kwargs: dict[str, Any], any_word: bool) -> None:
    """Raises Mismatch if the arguments, given as `Form`s, do not fit the schema. any_word: allow any text, for an operator
    that the caller vouches for.
    """
    given = dict(kwargs)
    positional = [a for a in schema.arguments if not a.kwarg_only]
    if len(args) > len(positional):
        raise Mismatch(f"has {len(args)} arguments and takes {len(positional)}")
    for argument, form in zip(positional, args, strict=False):
        if argument.name in given:
            raise Mismatch(f"has its argument {argument.name} twice")
        given[argument.name] = form
    for argument in schema.arguments:
        if argument.name not in given:
            if not argument.has_default_value():
                raise Mismatch(f"lacks its argument {argument.name}")
        elif not _fits(argument.real_type, given.pop(argument.name), argument.name, any_word):
            raise Mismatch(f"has an argument {argument.name} that is no {argument.real_type}")
    if given:
        raise Mismatch(f"takes no argument {next(iter(given))!r}")


@dataclass(frozen=True)
class Form:
    """What is known of an argument before a run. what: "value" (of a `kind`), "size", "list" (of parts), "none", "literal"
    (a number or text), or the tag of one of torch's constants.
    """

    what: str
    kind: Kind = "any"
    parts: tuple[Form, ...] = ()
    literal: Json = None


def _fits(type_: Any, form: Form, name: str, any_word: bool) -> bool:
    kind = type_.kind()
    if kind == "OptionalType":
        return form.what == "none" or _fits(type_.getElementType(), form, name, any_word)
    if kind == "ListType":
        element = type_.getElementType()
        if form.what == "value" and isinstance(form.kind, tuple):
            return element.kind() == "TensorType" and _all_tensors(form.kind)
        if form.what == "list":
            return all(_fits(element, part, name, any_word) for part in form.parts)
        return element.kind() in ("IntType", "SymIntType", "FloatType") and _fits(element, form, name, any_word)
    if kind == "TensorType":
        return _is_number(form, (bool, int, float, complex)) or (
            form.what == "value" and form.kind in ("tensor", "any")
        )
    if kind == "NumberType":
        return _is_number(form, (bool, int, float, complex)) or (form.what == "value" and form.kind == "tensor")
    if kind in ("IntType", "SymIntType"):
        return _is_number(form, (bool, int))
    if kind == "FloatType":
        return _is_number(form, (int, float))
    if kind in ("BoolType", "SymBoolType"):
        return _is_number(form, (bool,))
    if kind == "ComplexType":
        return _is_number(form, (int, float, complex))
    if kind in _TAG_OF:
        return form.what == _TAG_OF[kind]
    if kind == "StringType" and form.what == "literal" and isinstance(form.literal, str):
        allowed = _WORDS.get(name)
        if any_word or allowed is None:
            return any_word
        return (
            form.literal in allowed if isinstance(allowed, frozenset) else allowed.fullmatch(form.literal) is not None
        )
    return False


def _is_number(form: Form, types: tuple[type, ...]) -> bool:
    if form.what == "size":
        return int in types
    if form.what == "value":
        return form.kind in ("number", "any")
    if form.what != "literal" or type(form.literal) not in types:
        return False
    return not isinstance(form.literal, int) or INT_MIN <= form.literal <= INT_MAX


def _all_tensors(kind: tuple[Any, ...]) -> bool:
    return all(part in ("tensor", "any", "…") for part in kind)


def check_call(overload: Any, args: list[Any], kwargs: dict[str, Any], limit: int | None, torch: Any) -> None:
    """Checks a call with its values before it is made. Raises InvalidInputError if the operator would trust a wrong size,
    or create more bytes than the limit (where that is known without computing it).
    """
    name = overload._schema.name
    if name.startswith("aten::_fft_") or name == "aten::native_group_norm":  # torch's own callers check these
        given = dict(zip([a.name for a in overload._schema.arguments], args, strict=False)) | kwargs
        (_check_group_norm if name.endswith("norm") else _check_fourier)(name, given)
    if limit is None:
        return
    made = _bytes(overload, args, kwargs, torch)
    if made > limit:
        raise InvalidInputError(f"{name} would make {made} bytes; the limit is {limit}.")


def _check_group_norm(name: str, given: dict[str, Any]) -> None:
    x, batch, channels, inner, groups = (given[key] for key in ("input", "N", "C", "HxW", "group"))
    scales = [given[key] for key in ("weight", "bias") if given.get(key) is not None]
    sizes = min(batch, channels, inner) >= 0 and batch * channels * inner == x.numel()
    if not sizes or groups < 1 or channels % groups or any(s.numel() != channels for s in scales):
        raise InvalidInputError(
            f"{name} of {batch}×{channels}×{inner} in {groups} groups does not fit a tensor of shape {list(x.shape)}."
        )


def _check_fourier(name: str, given: dict[str, Any]) -> None:
    shape, axes = given["self"].shape, given["dim"]
    if len(set(axes)) != len(axes) or not axes or not all(0 <= axis < len(shape) for axis in axes):
        raise InvalidInputError(f"{name} has the axes {axes} for a tensor of shape {list(shape)}.")
    if name.endswith("c2r") and (given["last_dim_size"] < 1 or shape[axes[-1]] != given["last_dim_size"] // 2 + 1):
        raise InvalidInputError(
            f"{name} to {given['last_dim_size']} places does not fit a tensor of shape {list(shape)}."
        )


def _bytes(overload: Any, args: list[Any], kwargs: dict[str, Any], torch: Any) -> int:
    """The size of the results of a call, in bytes; 0 if that depends on values."""

    def shadow(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, list):
            return [shadow(v) for v in value]
        return "meta" if value == "cpu" else value

    named = {k: shadow(v) for k, v in kwargs.items()}
    if any(a.name == "device" and a.kwarg_only for a in overload._schema.arguments):
        named["device"] = "meta"
    try:
        results = overload(*map(shadow, args), **named)
    except Exception:  # it depends on values, or fails just like the call itself
        return 0
    parts = results if isinstance(results, list | tuple) else [results]
    return sum(p.numel() * p.element_size() for p in parts if isinstance(p, torch.Tensor))
