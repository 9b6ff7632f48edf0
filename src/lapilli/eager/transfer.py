"""Copies of any tensors: on one device, between devices, to and from the host, with any strides, types and layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

from lapilli.eager import device_copy, fallback, storage
from lapilli.eager.call_signature import CannotRun
from lapilli.eager.device_state import is_ours, place
from lapilli.eager.operator_schema import schema_of

aten = torch.ops.aten

_INDICES = {
    torch.sparse_csr: ("crow_indices", "col_indices"), torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"), torch.sparse_bsc: ("ccol_indices", "row_indices"),
}  # fmt: skip


def copy_(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """``target.copy_(source)`` between the host and devices, with any strides; the source is expanded and converted.

    Work on one device is queued; a copy to the CPU waits.
    """
    if source is target:  # as AOTAutograd does with what was changed in place
        return target
    if source.shape != target.shape:
        source = source.expand(target.shape)
    if not target.numel():
        return target
    if target.is_conj() or target.is_neg():
        copy_(
            target.conj() if target.is_conj() else torch._neg_view(target),
            source.conj() if target.is_conj() else -source,
        )
        return target
    if target.device == source.device:
        copy(target, source)
    elif target.is_cpu:
        if storage.is_dense(target) and _same_layout(source, target):
            storage.read(source, target)
        else:
            target.copy_(storage.to_cpu(source))
    else:
        host = storage.to_cpu(source) if not source.is_cpu else source
        if storage.is_dense(target):
            dense = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device="cpu")
            storage.write(target, host if _same_layout(host, target) else dense.copy_(host))
        else:
            copy(target, storage.from_cpu(host, target.get_device()))
    return target


def _same_layout(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether both have the same bytes in the same order."""
    same = source.dtype == target.dtype and source.stride() == target.stride()
    return same and not (source.is_conj() or source.is_neg())


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """`device_copy.copy` on one device; conversions that the device does not support run on the CPU, with a warning."""
    try:
        device_copy.copy(target, source)
    except CannotRun as error:
        described, leaves = schema_of(aten.copy_.default), [target, source, False]
        fallback.check_strict(described, leaves, str(error))
        _copy_on_cpu(target, source)
        fallback.note(described, leaves, str(error))


def _copy_on_cpu(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies the bytes from the target's first element to its last, because there may be no kernel that writes such
    elements.
    """
    host = storage.to_cpu(target)
    host.copy_(storage.to_cpu(source))
    data = torch.empty(0, dtype=target.dtype).set_(host.untyped_storage())
    storage.write(target, data)


def on_device(tensor: torch.Tensor, order: Sequence[int] | None, index: int) -> torch.Tensor:
    """The tensor on the device, dense and permuted by `order`; returned as is if it already is. Not recorded by
    autograd.
    """
    if not is_ours(tensor):
        tensor = storage.from_cpu(tensor.detach().resolve_neg(), index)
    elif tensor.get_device() != index:
        tensor = tensor.detach().to(place(index))
    seen = tensor if order is None else tensor.permute(*order)
    return seen if seen.is_contiguous() else device_copy.gather(seen)


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, with the same layout (strided or sparse)."""
    return rebuilt(tensor, storage.to_cpu, "cpu")


def from_cpu(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """A copy on a device, with the same layout (strided or sparse). Raises NotImplementedError for other kinds of tensors."""
    if tensor.is_quantized:
        raise NotImplementedError(
            "Quantized tensors are not possible on vulkan devices: compute with dense ones, or compile the quantized model."
        )
    return rebuilt(tensor, lambda part: storage.from_cpu(part, index), place(index))


def set_sparse(target: torch.Tensor, source: torch.Tensor) -> None:
    """Gives a sparse tensor the content of another of the same layout on the CPU. Its values stay where they are if their number
    does, so that tensors that share them see the change.
    """
    fits = target.shape == source.shape and all(
        a.shape == b.shape for a, b in zip(parts(target), parts(source), strict=True)
    )
    if not fits and target.layout is torch.sparse_coo:
        target.data = from_cpu(source, target.get_device())
        return
    if not fits:  # of these, `data` cannot be set
        made = from_cpu(source, target.get_device())
        aten.resize_as_sparse_.default.redispatch(DispatchKeySet(DispatchKey.SparseCsrCPU), target, made)
    for mine, theirs in zip(parts(target), parts(source), strict=True):
        mine.copy_(theirs)
    if target.layout is torch.sparse_coo:
        target._coalesced_(source.is_coalesced())


def parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The indices and the values of a sparse tensor."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    outer, inner = (getattr(tensor, name)() for name in _INDICES[tensor.layout])
    return outer, inner, tensor.values()


def rebuilt(tensor: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor], device: Any) -> torch.Tensor:
    """A tensor with the same layout on a device, of parts that `move` makes of those of another."""
    options: Any = {"dtype": tensor.dtype, "device": device}
    if tensor.layout is torch.strided:
        return move(tensor)
    moved = [move(part) for part in parts(tensor)]
    if tensor.layout is torch.sparse_coo:
        made: torch.Tensor = aten._sparse_coo_tensor_unsafe(
            *moved, tensor.shape, **options, is_coalesced=tensor.is_coalesced()
        )
        return made
    compressed: torch.Tensor = aten._sparse_compressed_tensor_unsafe(
        *moved, tensor.shape, layout=tensor.layout, **options
    )
    return compressed
