"""The operators of the device that create tensors, views and copies, without computing anything.

A view is another tensor over the same storage. Most of PyTorch's view operators are based on ``as_strided``. The others
only compute with sizes and strides, for which PyTorch's CPU kernels work.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Sequence
from operator import mul
from typing import Any

import torch
from torch._C._dynamo.guards import _reinterpret_tensor  # type: ignore[attr-defined]
from torch._prims_common import make_contiguous_strides_for

from lapilli.eager import storage, transfer
from lapilli.eager.device_state import current_device, index_of, streams
from lapilli.eager.jit_trace import untraced

_KERNELS: dict[str, Callable[..., Any]] = {}


def _kernel(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _KERNELS.update(dict.fromkeys(names, function))
        return function

    return register


_UNRECORDED = {"copy_", "_copy_from", "_copy_from_and_resize", "_local_scalar_dense", "resize_"}
"""Operators that torch.jit.trace does not record, or records itself and then runs unchanged."""


def register(library: Any, but: Collection[str] = ()) -> None:
    """Registers all of them except those that are already registered."""
    for name, kernel in _KERNELS.items():
        if name in but:
            continue
        library.impl(name, untraced(kernel) if name in _UNRECORDED else kernel, "PrivateUse1")
    overload: Any
    for overload in (aten._reshape_alias.default, aten.unfold.default, aten.view_as_real.default,
                     aten.view_as_complex.default):  # fmt: skip
        library.impl(overload.name().removeprefix("aten::"), _as_on_the_host(overload), "PrivateUse1")


aten = torch.ops.aten


def _as_on_the_host(overload: Any) -> Callable[..., Any]:
    """A kernel that calls PyTorch's CPU kernel, which only reads sizes and strides."""
    redispatch, host = overload.redispatch, storage.on_host
    return lambda *args: redispatch(host, *args)


def alias(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """Another tensor over the same storage. size, stride and offset are in elements; the offset is relative to the
    storage's first element.
    """
    step = offset - int(tensor.storage_offset())
    if _is_inference_mode() and not tensor.is_inference():
        with torch.inference_mode(False):  # a view of a normal tensor is a normal tensor in inference mode, too
            return _reinterpret_tensor(tensor, size, stride, step)  # type: ignore[no-any-return]
    return _reinterpret_tensor(tensor, size, stride, step)  # type: ignore[no-any-return]


_is_inference_mode = torch.is_inference_mode_enabled


@_kernel("as_strided")
def as_strided(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """`aten.as_strided`. Raises RuntimeError if the view would exceed the storage."""
    start = tensor.storage_offset()
    offset = start if storage_offset is None else storage_offset
    if len(size) != len(stride):
        raise RuntimeError("mismatch in length of strides and shape")
    if min(stride, default=0) < 0:
        raise RuntimeError(f"as_strided: Negative strides are not supported at the moment, got strides: {list(stride)}")
    if offset < 0:
        raise RuntimeError(f"Tensor: invalid storage offset {offset}")
    end = offset + sum(map(mul, size, stride)) - sum(stride) + 1  # one past the last element
    if end * tensor.itemsize > tensor.untyped_storage()._lapilli.bytes and 0 not in size:  # type: ignore[attr-defined]
        raise RuntimeError(
            f"as_strided: sizes {list(size)}, strides {list(stride)} and storage offset {offset} need "
            f"{end * tensor.itemsize} bytes, but the storage has {storage.buffer_of(tensor).bytes}."
        )
    if _is_inference_mode():
        return alias(tensor, size, stride, int(offset))
    return _reinterpret_tensor(tensor, size, stride, offset - start)  # type: ignore[no-any-return]


@_kernel("view")
def view(tensor: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """`aten.view`, with a short path for contiguous tensors; others, and errors, are left to PyTorch."""
    if tensor.is_contiguous() and -1 not in size and not _is_inference_mode():
        stride, step = [], 1
        for n in reversed(size):
            stride.append(step)
            step *= n
        if step == tensor.numel() != 0:
            stride.reverse()
            return _reinterpret_tensor(tensor, size, stride, 0)  # type: ignore[no-any-return]
    return aten.view.default.redispatch(storage.on_host, tensor, size)  # type: ignore[no-any-return]


@_kernel("as_strided_")
def as_strided_(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    if not hasattr(tensor.untyped_storage(), "_lapilli"):  # a traced tensor has sizes and strides, but no memory
        return aten.as_strided_.default.redispatch(storage.on_host, tensor, size, stride, storage_offset)  # type: ignore[no-any-return]
    tensor.data = as_strided(tensor, size, stride, storage_offset)
    return tensor


@_kernel("empty.memory_format")
def empty(
    size: Sequence[int], *, dtype: torch.dtype | None = None, layout: torch.layout | None = None,
    device: torch.device | None = None, pin_memory: bool | None = None, memory_format: torch.memory_format | None = None,
) -> torch.Tensor:  # fmt: skip
    stride = None
    if memory_format is torch.channels_last or memory_format is torch.channels_last_3d:
        rank = 4 if memory_format is torch.channels_last else 5
        if len(size) != rank:
            raise RuntimeError(f"required rank {rank} tensor to use {str(memory_format).removeprefix('torch.')} format")
        order = (0, *range(2, rank), 1)
        dense = make_contiguous_strides_for([size[dim] for dim in order])
        stride = [dense[order.index(dim)] for dim in range(rank)]
    _check_sizes(size)
    return storage.empty(size, dtype or torch.get_default_dtype(), _index(device), stride)


@_kernel("empty_strided")
def empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, layout: torch.layout | None = None,
    device: torch.device | None = None, pin_memory: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    _check_sizes(size)
    if min(stride, default=0) < 0:
        raise RuntimeError(f"Storage size calculation overflowed with sizes={list(size)} and strides={list(stride)}")
    return storage.empty(size, dtype or torch.get_default_dtype(), _index(device), stride)


def _check_sizes(size: Sequence[int]) -> None:
    if min(size, default=0) < 0:
        least = next(n for n in size if n < 0)
        raise RuntimeError(f"Trying to create tensor with negative dimension {least}: {list(size)}")


def _index(device: torch.device | None) -> int:
    if device is None or device.index is None:
        return current_device()
    return device.index if device.index in streams else index_of(device)


def refuse_layout(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The kernel of all operators for layouts that the device does not support."""
    raise NotImplementedError(
        f"{op}: quantized tensors, and nested ones in the layout torch.strided, are not possible on vulkan devices; "
        "use dense ones, or nested ones with layout=torch.jagged."
    )


@_kernel(
    "_nested_tensor_from_tensor_list", "_nested_tensor_from_mask", "_nested_from_padded", "_nested_view_from_buffer"
)
def refuse_nested(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        "Nested tensors in the layout torch.strided are not possible on vulkan devices; give layout=torch.jagged, or pad to a "
        "dense one."
    )


@_kernel("copy_")
def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return transfer.copy_(target, source)


@_kernel("_copy_from")
def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return transfer.copy_(target, source)


@_kernel("_copy_from_and_resize")
def _copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return transfer.copy_(target.resize_(source.shape), source)


@_kernel("_to_copy")
def _to_copy(
    tensor: torch.Tensor, *, dtype: torch.dtype | None = None, layout: torch.layout | None = None,
    device: torch.device | None = None, pin_memory: bool | None = None, non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:  # fmt: skip
    """`aten._to_copy`, with a short path for contiguous tensors that only change their dtype; others are left to PyTorch.
    Gradients of conversions name the layout and the device that their tensor has.
    """
    if (
        dtype is not None
        and (layout is None or layout is torch.strided)
        and (device is None or device == tensor.device)
        and not pin_memory
        and memory_format is None
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    ):
        return transfer.copy_(storage.empty(tensor.shape, dtype, tensor.get_device(), tensor.stride()), tensor)
    to_copy = aten._to_copy.default.redispatch
    return to_copy(  # type: ignore[no-any-return]
        storage.on_host, tensor, dtype=dtype, layout=layout, device=device, pin_memory=pin_memory, non_blocking=non_blocking,
        memory_format=memory_format,
    )  # fmt: skip


_UNPACK: dict[torch.dtype, Callable[[bytes], tuple[Any]]] = {
    dtype: struct.Struct(code).unpack
    for dtype, code in {
        torch.float32: "f", torch.float64: "d", torch.float16: "e", torch.int64: "q", torch.int32: "i",
        torch.int16: "h", torch.int8: "b", torch.uint8: "B", torch.bool: "?",
    }.items()
}  # fmt: skip


@_kernel("_local_scalar_dense")
def _local_scalar_dense(tensor: torch.Tensor) -> bool | int | float | complex:
    """The single element of a tensor; waits for it."""
    unpack = _UNPACK.get(tensor.dtype)
    if unpack is None or tensor.is_neg():
        return storage.to_cpu(tensor).item()
    storage.check_fork()
    data = storage.buffer_of(tensor).read(int(tensor.storage_offset()) * tensor.itemsize, tensor.itemsize)
    return unpack(data)[0]  # type: ignore[no-any-return]


@_kernel("resize_")
def resize_(
    tensor: torch.Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    """Resizes a tensor; the storage grows if necessary, and keeps its content."""
    if list(tensor.shape) == list(size) and memory_format is None:
        return tensor
    if memory_format is torch.preserve_format:
        raise RuntimeError("Unsupported memory format preserve_format")
    stride: Sequence[int] = make_contiguous_strides_for(tuple(size))
    if memory_format is not None and memory_format is not torch.contiguous_format:
        stride = torch.empty(size, device="meta", memory_format=memory_format).stride()
    start = int(tensor.storage_offset())
    grow(tensor.untyped_storage(), (start + math.prod(size)) * tensor.itemsize)
    tensor.data = alias(tensor, size, stride, start)
    return tensor


def grow(untyped: torch.UntypedStorage, size: int) -> None:
    """Makes a storage at least `size` bytes large."""
    old = untyped._lapilli  # type: ignore[attr-defined]
    if old.bytes < size:
        resize_storage(untyped, size)


def resize_storage(untyped: torch.UntypedStorage, size: int) -> None:
    """Gives a storage new memory of `size` bytes, with the same content as far as it fits."""
    old = untyped._lapilli  # type: ignore[attr-defined]
    new = storage.allocate(size, untyped.device.index)
    if old.bytes and size:
        new.stream.copy((old, 0), (new, 0), min(old.bytes, size))
    untyped._lapilli = new  # type: ignore[attr-defined]


@_kernel("set_.source_Storage_storage_offset")
def set_storage_offset(
    tensor: torch.Tensor, source: torch.UntypedStorage, offset: int, size: Sequence[int], stride: Sequence[int] = ()
) -> torch.Tensor:
    if source.device != tensor.device:
        raise RuntimeError(
            f"The storage is on {source.device}, but the tensor on {tensor.device}; they must be the same."
        )
    stride = stride or make_contiguous_strides_for(tuple(size))
    if 0 not in size:
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        grow(source, (last + 1) * tensor.itemsize)
    tensor.data = storage.over(source, tensor.dtype, size, stride, offset)
    return tensor


@_kernel("set_.source_Storage")
def set_storage(tensor: torch.Tensor, source: torch.UntypedStorage) -> Any:
    return set_storage_offset(tensor, source, 0, (source.nbytes() // tensor.itemsize,))


@_kernel("set_.source_Tensor")
def set_tensor(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    tensor.data = alias(source, source.shape, source.stride(), int(source.storage_offset()))
    return tensor


@_kernel("set_")
def set_empty(tensor: torch.Tensor) -> torch.Tensor:
    tensor.data = storage.empty((0,), tensor.dtype, tensor.get_device())
    return tensor


@_kernel("_new_zeros_with_same_feature_meta")
def zeros_like_storage(source: torch.Tensor, like: torch.Tensor, *, self_num_batch_dims: int = 0) -> torch.Tensor:
    """A zero tangent with as much memory as its primal, so that views of one correspond to views of the other. PyTorch's
    own kernel takes a storage with its memory elsewhere for empty.
    """
    batch = source.shape[:self_num_batch_dims]
    each = storage.buffer_of(like).bytes // like.itemsize
    whole = torch.zeros(math.prod(batch) * each, dtype=source.dtype, device=source.device)
    steps = [each * n for n in make_contiguous_strides_for(batch)]
    return whole.as_strided((*batch, *like.shape), (*steps, *like.stride()), int(like.storage_offset()))


@_kernel("_has_same_storage_numel")
def has_same_storage_numel(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    mine, theirs = storage.buffer_of(tensor).bytes, storage.buffer_of(other).bytes
    return mine // tensor.itemsize == theirs // other.itemsize


@_kernel("is_set_to")
def is_set_to(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
        and tensor.storage_offset() == other.storage_offset()
        and tensor.shape == other.shape
        and tensor.stride() == other.stride()
    )
