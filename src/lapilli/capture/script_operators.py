"""TorchScript's operators on numbers, lists, dicts, strings and properties of tensors: those that the dispatcher lacks, or that
must not convert a dynamic size to a number.

TorchScript represents dtypes, layouts and memory formats as integers, and so does the interpreter; `argument` converts them to
torch's objects for operators that need these.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128, torch.bool, torch.qint8, torch.quint8, torch.qint32, torch.bfloat16,
)  # fmt: skip
"""dtypes by TorchScript's number (c10::ScalarType)."""
MEMORY_FORMATS = (
    torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d,
)  # fmt: skip
LAYOUTS = {0: torch.strided}

Function = Callable[..., Any]


def argument(kind: str, value: Any) -> Any:
    """A value as an operator accepts it for an argument whose type is `kind` in the schema."""
    optional = kind.removeprefix("Optional[").removesuffix("]")
    if value is None:
        return None
    if optional == "ScalarType" and isinstance(value, int):
        return DTYPES[value]
    if optional == "MemoryFormat" and isinstance(value, int):
        return MEMORY_FORMATS[value]
    if optional == "Layout" and isinstance(value, int):
        return LAYOUTS[value]
    if optional == "Device":
        return torch.device("cpu")  # models are captured on the CPU, wherever they were traced
    if optional == "Tensor" and not isinstance(value, torch.Tensor):
        return tensor_of(value)
    if optional == "List[Tensor]":
        return [v if v is None or isinstance(v, torch.Tensor) else tensor_of(v) for v in value]
    return value


def tensor_of(value: Any, dtype: int | None = None, device: Any = None, requires_grad: bool = False) -> torch.Tensor:
    """`torch.tensor` of a number or a list, which may contain dynamic sizes."""
    del device, requires_grad
    wanted = None if dtype is None else DTYPES[dtype]
    leaves = [value]
    while any(isinstance(leaf, list) for leaf in leaves):
        leaves = [part for leaf in leaves for part in leaf]
    if not any(isinstance(leaf, torch.SymInt | torch.SymFloat) for leaf in leaves):
        return torch.tensor(value, dtype=wanted)
    if isinstance(value, list):
        return torch.stack([tensor_of(part, dtype) for part in value])
    return torch.scalar_tensor(value, dtype=wanted or (torch.int64 if isinstance(value, torch.SymInt) else None))


def number(value: Any) -> Any:
    """The number in a tensor of one element; numbers are returned unchanged."""
    return value.item() if isinstance(value, torch.Tensor) else value


def python_operator(name: str, values: Sequence[Any]) -> Function | None:
    """The Python function of an operator without an overload name, such as `aten::add`, on values that are not tensors; None if
    there is none."""
    space, _, base = name.partition("::")
    if space == "aten" and values and isinstance(values[0], str) and hasattr(str, base):
        return getattr(str, base)  # type: ignore[no-any-return]
    if name in PYTHON:
        return PYTHON[name]
    if space == "aten" and hasattr(math, base):
        return lambda *given: _mathematics(base, given)
    return None


def _mathematics(name: str, values: Sequence[Any]) -> Any:
    """A function of `math`, which also accepts a dynamic size."""
    symbolic = getattr(torch, f"_sym_{name}", None)
    if symbolic is not None and any(isinstance(v, torch.SymInt | torch.SymFloat) for v in values):
        return symbolic(*values)
    return getattr(math, name)(*values)


def _append(items: list[Any], item: Any) -> list[Any]:
    items.append(item)
    return items


def _set_item(container: Any, key: Any, value: Any) -> Any:
    container[key] = value
    return container


def _delete(container: Any, key: Any) -> None:
    del container[key]


def _in_place(method: str) -> Function:
    """A method of lists or dicts that modifies them and returns nothing."""
    return lambda container, *values: getattr(container, method)(*values)


def _slice(items: Any, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    return items[start:end:step]


def _power(a: Any, b: Any) -> Any:
    return a**b


def _format(template: str, *values: Any) -> str:
    return template.format(*values)


def _range_length(low: Any, high: Any, step: Any) -> Any:
    return max(0, (high - low + step - (1 if step > 0 else -1)) // step)


def _round(value: Any, digits: Any = None) -> Any:
    return float(round(value, digits)) if isinstance(value, float) else round(value, digits)


def _join(separator: str, parts: Sequence[str]) -> str:
    return separator.join(parts)


def _reduced(fold: Function) -> Function:
    """min and max of two numbers, or of a list."""

    def apply(first: Any, *others: Any) -> Any:
        values = list(others) if not isinstance(first, list) else []
        if isinstance(first, list):
            first, *values = first
        for value in values:
            first = fold(first, value)
        return first

    return apply


PYTHON: dict[str, Function] = {
    "aten::add": operator.add, "aten::sub": operator.sub, "aten::mul": operator.mul, "aten::div": operator.truediv,
    "aten::floordiv": operator.floordiv, "aten::floor_divide": operator.floordiv, "aten::remainder": operator.mod,
    "aten::fmod": math.fmod, "aten::mod": operator.mod, "aten::pow": _power, "aten::neg": operator.neg,
    "aten::add_": operator.iadd, "aten::mul_": operator.imul, "aten::rsub": lambda a, b, scale=1: b - scale * a,
    "aten::divmod": divmod,
    "aten::eq": operator.eq, "aten::ne": operator.ne, "aten::lt": operator.lt, "aten::le": operator.le,
    "aten::gt": operator.gt, "aten::ge": operator.ge, "aten::__is__": operator.is_, "aten::__isnot__": operator.is_not,
    "aten::__not__": torch.sym_not, "aten::__and__": operator.and_, "aten::__or__": operator.or_,
    "aten::__xor__": operator.xor, "aten::__lshift__": operator.lshift, "aten::__rshift__": operator.rshift,
    "aten::__round_to_zero_floordiv": lambda a, b: int(a / b), "aten::abs": abs, "prim::abs": abs, "aten::round": _round,
    "prim::min": _reduced(torch.sym_min), "prim::max": _reduced(torch.sym_max), "aten::sum": sum,
    "aten::any": any, "aten::all": all,
    "aten::Int": torch.sym_int, "aten::Float": torch.sym_float, "aten::Bool": bool, "aten::Complex": complex,
    "aten::ScalarImplicit": number, "aten::IntImplicit": number, "aten::FloatImplicit": number,
    "aten::str": str, "aten::ord": ord, "aten::chr": chr, "aten::hex": hex, "aten::bin": bin, "aten::oct": oct,
    "aten::format": _format, "aten::percentFormat": lambda template, *values: template % values, "aten::join": _join,
    "aten::tensor": tensor_of, "aten::as_tensor": tensor_of, "prim::NumToTensor": lambda value: value,
    "aten::len": len, "aten::__getitem__": lambda items, key: items[key], "aten::_set_item": _set_item,
    "aten::append": _append, "aten::slice": _slice, "aten::list": list, "aten::copy": lambda items: items.copy(),
    "aten::Delete": _delete, "aten::sorted": sorted, "aten::__contains__": lambda items, item: item in items,
    "aten::keys": lambda items: list(items.keys()), "aten::values": lambda items: list(items.values()),
    "aten::items": lambda items: list(items.items()), "aten::dict": lambda pairs=(): dict(pairs),
    "aten::get": lambda items, key, default=None: items.get(key, default), "aten::index": lambda items, item: items.index(item),
    "aten::count": lambda items, item: items.count(item),
    **{f"aten::{m}": _in_place(m) for m in ("extend", "insert", "remove", "reverse", "sort", "pop", "popitem", "clear")},
    **{f"aten::{m}": _in_place(m) for m in ("setdefault", "update")},
    "aten::__range_length": _range_length, "aten::__derive_index": lambda index, start, step: start + index * step,
    "prim::rangelist": lambda n: list(range(n)),
    "aten::device": torch.device, "prim::unchecked_cast": lambda value: value, "prim::annotate": lambda value: value,
    "prim::unchecked_unwrap_optional": lambda value: value, "prim::id": id,
    "aten::warn": lambda *_: None, "prim::Print": lambda *_: None, "prim::Uninitialized": lambda: None,
    "aten::is_grad_enabled": lambda: False, "aten::set_grad_enabled": lambda _: None, "aten::is_scripting": lambda: True,
    "aten::is_autocast_enabled": lambda: False, "aten::manual_seed": lambda *_: None,
    "prim::is_tracing": lambda: False, "prim::type": lambda device: device.type, "prim::index": lambda device: device.index,
}  # fmt: skip
"""Operators on values that are not tensors, for all overloads."""

_PLACES = ("cuda", "xpu", "mkldnn", "mps", "vulkan", "ipu", "maia", "meta", "hpu", "mtia", "xla", "metal")

TENSOR: dict[str, Function] = {
    "aten::size": lambda t, dim=None: list(t.size()) if dim is None else t.size(dim),
    "aten::sym_size": lambda t, dim=None: list(t.size()) if dim is None else t.size(dim),
    "aten::stride": lambda t, dim=None: list(t.stride()) if dim is None else t.stride(dim),
    "aten::dim": lambda t: t.dim(), "aten::numel": lambda t: t.numel(), "aten::len": lambda t: t.size(0),
    "aten::storage_offset": lambda t: t.storage_offset(), "aten::element_size": lambda t: t.element_size(),
    "aten::is_floating_point": lambda t: t.is_floating_point(), "aten::is_complex": lambda t: t.is_complex(),
    "aten::is_signed": lambda t: t.is_signed(),
    "aten::is_contiguous": lambda t, form=0: t.is_contiguous(memory_format=MEMORY_FORMATS[form]),

    "aten::get_device": lambda t: -1, "aten::item": number, "aten::Int": lambda t: _converted(int, t),
    "aten::Float": lambda t: _converted(float, t), "aten::Bool": lambda t: bool(t), "aten::ScalarImplicit": number,
    "aten::IntImplicit": number, "aten::FloatImplicit": number, "aten::cpu": lambda t: t, "aten::cuda": lambda t: t,
    "aten::tensor": lambda t, *_: t.clone(), "aten::as_tensor": lambda t, dtype=None, device=None:
        t if dtype is None else t.to(DTYPES[dtype]),
    "aten::__is__": operator.is_, "aten::__isnot__": operator.is_not,
    "aten::to": lambda t, *values: _to(t, values), "aten::requires_grad_": lambda t, *_: t, "aten::_unwrap_optional": lambda t: t,
    "aten::__contains__": lambda items, item: any(item is i for i in items),
    "prim::NumToTensor": lambda t: t,
    "prim::shape": lambda t: list(t.size()), "prim::device": lambda t: t.device, "prim::layout": lambda t: 0,
    "prim::dtype": lambda t: DTYPES.index(t.dtype), "prim::data": lambda t: t.detach(), "prim::type": lambda t: t.device.type,
    "prim::requires_grad": lambda t: False, "prim::is_leaf": lambda t: True, "prim::grad": lambda t: None,
    "prim::is_cpu": lambda t: True, "prim::is_quantized": lambda t: False, "prim::is_sparse": lambda t: False,
    "prim::is_nested": lambda t: False, "prim::itemsize": lambda t: t.itemsize, "prim::nbytes": lambda t: t.nbytes,
    "prim::tolist": lambda t, *_: t.tolist(), "prim::ndim": lambda t: t.dim(),
    "prim::T": lambda t: t.T, "prim::mT": lambda t: t.mT, "prim::H": lambda t: t.H, "prim::mH": lambda t: t.mH,
    "prim::real": torch.real, "prim::imag": torch.imag,
    **{f"prim::is_{place}": lambda t: False for place in _PLACES},
}  # fmt: skip
"""Operators on tensors that the dispatcher lacks."""

KEPT = frozenset(f"aten::{name}" for name in ("size", "sym_size", "stride", "numel", "storage_offset", "item", "cpu"))
"""Those of them that precede the dispatcher's, because a dynamic size must stay one."""

NUMBERS: dict[str, Function] = {
    "aten::add": lambda a, b, scale=1: a + b * scale, "aten::sub": lambda a, b, scale=1: a - b * scale,
    "aten::mul": operator.mul, "aten::floor_divide": operator.floordiv, "aten::remainder": operator.mod,
    "aten::div": lambda a, b, rounding_mode=None: a / b if rounding_mode is None else _divided(a, b, rounding_mode),
    "aten::rsub": lambda a, b, scale=1: b - a * scale, "aten::neg": operator.neg, "aten::pow": operator.pow,
    "aten::floor": lambda a: math.floor(a), "aten::ceil": lambda a: math.ceil(a), "aten::to": lambda a, *_: a,
    "aten::detach": lambda a: a, "aten::clone": lambda a, *_: a, "aten::item": number,
    "aten::eq": operator.eq, "aten::ne": operator.ne, "aten::lt": operator.lt, "aten::le": operator.le,
    "aten::gt": operator.gt, "aten::ge": operator.ge,
    "aten::minimum": torch.sym_min, "aten::maximum": torch.sym_max,
}  # fmt: skip
"""Traces record arithmetic on sizes as operators on tensors (`prim::NumToTensor`); these are their functions on numbers."""


def _to(tensor: torch.Tensor, values: Sequence[Any]) -> torch.Tensor:
    """`to`. Its arguments give a dtype, or another tensor with that dtype, or only a device, which has no effect here."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return tensor.to(value.dtype)
        if isinstance(value, int) and not isinstance(value, bool):
            return tensor.to(DTYPES[value])
    return tensor


def _converted(kind: type, tensor: torch.Tensor) -> Any:
    convert: Function = torch.sym_int if kind is int else torch.sym_float
    return convert(tensor.item())


def _divided(a: Any, b: Any, mode: str) -> Any:
    truncate: Function = torch.sym_int
    return a // b if mode == "floor" else truncate(a / b)
