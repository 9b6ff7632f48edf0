"""Integers of four bits as a tensor of int8 that takes half a byte for each: what quantized weights hold on the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

from lapilli.code_operators import UNPACK

aten = torch.ops.aten

VALUES = 16
_warned: set[str] = set()


class PackedCodes(torch.Tensor):
    """int8 [*, columns], of sixteen values from `low` on. packed: uint8 [*, ceil(columns / 2)], the first of two codes in the lower
    half of a byte.

    On the way to another device it stays as it is, on the way to the CPU it becomes a plain tensor. Copies, slices of rows, and the
    layers of `lapilli.graph.coded_layers` take the packed bytes; what else reads it gets its values a byte each, with a warning.
    """

    packed: torch.Tensor
    low: int

    @staticmethod
    def __new__(cls, packed: torch.Tensor, low: int, columns: Any) -> PackedCodes:
        made: PackedCodes = torch.Tensor._make_wrapper_subclass(
            cls, (*packed.shape[:-1], columns), dtype=torch.int8, device=packed.device, requires_grad=False
        )
        return made

    def __init__(self, packed: torch.Tensor, low: int, columns: Any) -> None:
        self.packed, self.low = packed, low

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __tensor_flatten__(self) -> tuple[list[str], tuple[int, Any]]:
        return ["packed"], (self.low, self.shape[-1])

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], kept: tuple[int, Any], size: Any, stride: Any
    ) -> PackedCodes:
        return PackedCodes(inner["packed"], *kept)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"PackedCodes(low={self.low}, shape={tuple(self.shape)}, device={self.device})"

    def like(self, packed: torch.Tensor) -> PackedCodes:
        """The same with other bytes."""
        return PackedCodes(packed, self.low, self.shape[-1])

    def unpacked(self) -> torch.Tensor:
        """int8 [*, columns], plain."""
        made: torch.Tensor = UNPACK(self.packed, self.low, self.shape[-1])
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OF_BYTES:
            made = args[0].like(func(args[0].packed, *args[1:], **kwargs))
            return return_and_correct_aliasing(func, args, kwargs, made)  # type: ignore[no-untyped-call]
        known = _KERNELS.get(func)
        found = NotImplemented if known is None else known(*args, **kwargs)
        if found is NotImplemented:
            found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        if func._schema.is_mutable:
            raise NotImplementedError(
                f"{func} cannot change codes of four bits in place; use copy_, or convert them on the CPU."
            )
        warn_once(
            str(func), "does not take packed codes of four bits: they take a byte each for this call. Linear layers and embeddings "
            "read them packed.", 4,
        )  # fmt: skip
        return func(*map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, PackedCodes):
        return value.unpacked()
    return [_plain(v) for v in value] if isinstance(value, list) else value


def warn_once(what: str, text: str, level: int) -> None:
    """Warns of an operator the first time. level: how many calls below the one that is shown."""
    if what not in _warned:
        _warned.add(what)
        warnings.warn(f"{what} {text}", UserWarning, stacklevel=level)


def pack(codes: torch.Tensor, low: int) -> PackedCodes:
    """Packs int8 [*, columns], on the same device.

    Raises ValueError if a code is below `low`, or more than fifteen above it.
    """
    if codes.numel():
        least, most = (int(v) for v in torch.aminmax(codes))
        if least < low or most >= low + VALUES:
            raise ValueError(
                f"codes of four bits lie between {low} and {low + VALUES - 1}; these are between {least} and {most}."
            )
    bytes_ = (codes.to(torch.int32) - low).to(torch.uint8)
    if codes.shape[-1] % 2:
        bytes_ = torch.nn.functional.pad(bytes_, (0, 1))
    return PackedCodes(bytes_[..., ::2] + bytes_[..., 1::2] * VALUES, low, codes.shape[-1])


_OF_BYTES = {aten.detach.default, aten.clone.default, aten.alias.default, aten.lift_fresh.default}
"""Operators whose result is packed as their operand is."""


def _to_copy(
    x: PackedCodes, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    non_blocking: bool = False, memory_format: Any = None,
) -> Any:  # fmt: skip
    moved = x.packed if device is None else x.packed.to(device, non_blocking=non_blocking)
    if moved.is_cpu or dtype not in (None, torch.int8):
        return x.like(moved).unpacked().to(dtype or torch.int8)
    return x.like(moved.clone() if moved is x.packed else moved)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not isinstance(target, PackedCodes):
        return target.copy_(source.unpacked())  # type: ignore[attr-defined]
    if target.shape != source.shape:
        raise RuntimeError(f"codes of shape {tuple(target.shape)} cannot take those of shape {tuple(source.shape)}.")
    if not isinstance(source, PackedCodes) or source.low != target.low:
        source = pack(source.unpacked() if isinstance(source, PackedCodes) else source, target.low)
    target.packed.copy_(source.packed)
    return target


def _slice(x: PackedCodes, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """Rows stay where they are; columns begin within bytes."""
    if dim % x.dim() == x.dim() - 1:
        return NotImplemented
    return x.like(aten.slice.Tensor(x.packed, dim, start, end, step))


_KERNELS: dict[Any, Callable[..., Any]] = {
    aten._to_copy.default: _to_copy, aten.copy_.default: _copy, aten.slice.Tensor: _slice,
}  # fmt: skip


def parts(codes: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """The bytes of codes, the lowest one, and the number of columns, as the operators of `lapilli.graph.coded_layers` take them."""
    if isinstance(codes, PackedCodes):
        return codes.packed, codes.low, codes.shape[-1]
    return codes, 0, codes.shape[-1]


def blocks_of(block: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Sizes of blocks; a whole dimension is -1."""
    return [-1 if b == size and size != 1 else b for b, size in zip(block, shape, strict=True)]
