"""Tensors of the device and their memory: where it is, and what moves between the host and the devices.

A tensor is torch's own. Its ``UntypedStorage`` holds no address that the host could use; the memory is a `Buffer` of the
device's stream, kept as an attribute of the storage, which PyTorch keeps as long as any tensor uses the storage. So views,
aliases and lifetimes are PyTorch's, and the buffer goes back to the stream with the last of them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from operator import mul
from typing import TYPE_CHECKING, Any

import cffi
import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._C._dynamo.guards import _reinterpret_tensor  # type: ignore[attr-defined]
from torch._prims_common import is_non_overlapping_and_dense_or_false, make_contiguous_strides_for

from lapilli.eager.devices import check_fork as check_fork
from lapilli.eager.devices import place
from lapilli.eager.devices import stream_of as stream_of
from lapilli.runtime.arithmetic import NEARLY_32_BITS

if TYPE_CHECKING:
    from lapilli.stream import Buffer

create: Any = torch._C._acc.create_empty_tensor
on_host = DispatchKeySet(DispatchKey.CPU)
_set_storage = torch.ops.aten.set_.source_Storage_storage_offset

_ffi = cffi.FFI()


def buffer_of(tensor: torch.Tensor) -> Buffer:
    """The memory of a tensor's storage; the tensor begins at ``storage_offset() * itemsize`` bytes."""
    return tensor.untyped_storage()._lapilli  # type: ignore[attr-defined, no-any-return]


def empty(
    shape: Sequence[int], dtype: torch.dtype, device_index: int = 0, stride: Sequence[int] | None = None
) -> torch.Tensor:
    """A tensor with any contents on ``vulkan:<device_index>``.

    stride: in elements; None: contiguous. A stride of zero, or strides that let elements meet, are possible.

    Raises torch.OutOfMemoryError where there is not enough memory, also after giving back what was cached.
    """
    return around(allocate(bytes_of(shape, dtype, stride), device_index), shape, dtype, device_index, stride)


def bytes_of(shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> int:
    """What a tensor of these sizes and strides takes."""
    if stride is None:
        return math.prod(shape) * dtype.itemsize
    return 0 if 0 in shape else (1 + sum(map(mul, shape, stride)) - sum(stride)) * dtype.itemsize


def around(
    buffer: Buffer, shape: Sequence[int], dtype: torch.dtype, device_index: int = 0, stride: Sequence[int] | None = None
) -> torch.Tensor:
    """A tensor whose memory is a buffer of that size; the rest as in `empty`."""
    if device_index:
        return _around_elsewhere(shape, dtype, device_index, stride, buffer)
    tensor = create(shape, dtype)
    tensor.untyped_storage()._lapilli = buffer
    return tensor if stride is None else _reinterpret_tensor(tensor, shape, stride, 0)  # type: ignore[no-any-return]


def allocate(size: int, device_index: int) -> Buffer:
    """Memory of a device. Raises torch.OutOfMemoryError."""
    return stream_of(device_index).allocate(size)


def over(
    untyped: torch.UntypedStorage, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """A tensor over a storage that there is."""
    index = untyped.device.index
    tensor = _reinterpret_tensor(_seed(index, dtype), (0,), (1,), 0) if index else create((0,), dtype)
    _set_storage.redispatch(on_host, tensor, untyped, 0, (0,), (1,))  # PyTorch takes a storage's size from its address
    return _reinterpret_tensor(tensor, shape, stride, offset)  # type: ignore[no-any-return]


# --- devices other than the first: PyTorch's constructor knows vulkan:0 only, DLPack knows them all


class _DLTensor(ctypes.Structure):
    """`DLManagedTensor` of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_seeds: dict[tuple[int, torch.dtype], torch.Tensor] = {}
_managed: list[_DLTensor] = []


def _seed(device_index: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without elements on a device, from which others are made."""
    if (device_index, dtype) not in _seeds:
        shape = (ctypes.c_int64 * 1)(0)
        extension, unsigned = 12, 1
        managed = _DLTensor(None, extension, device_index, 1, unsigned, 8, 1, shape)
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        tensor = torch._C._from_dlpack(capsule(ctypes.addressof(managed), b"dltensor", None))
        _managed.append(managed)  # the tensor's deleter would free it; there is none
        _seeds[device_index, dtype] = tensor.view(dtype)
    return _seeds[device_index, dtype]


def _around_elsewhere(
    shape: Sequence[int], dtype: torch.dtype, device_index: int, stride: Sequence[int] | None, buffer: Buffer
) -> torch.Tensor:
    if stride is None:
        stride = make_contiguous_strides_for(tuple(shape))
    # PyTorch has backward threads for vulkan:0 only. Without threads of its own, backward runs in the thread that asks.
    torch._C._set_multithreading_enabled(False)
    untyped: Any = torch._C._construct_storage_from_data_pointer(0, place(device_index), 0)
    untyped._lapilli = buffer
    return over(untyped, dtype, shape, stride, 0)


# --- copies


def span(tensor: torch.Tensor) -> int:
    """How many elements lie between a tensor's first and its last, both counted."""
    if not tensor.numel():
        return 0
    stride = tensor.stride()
    return int(1 + sum(map(mul, tensor.shape, stride)) - sum(stride))


def _bytes_of(host: torch.Tensor, elements: int) -> Any:
    """The bytes of a CPU tensor from its first element on, without a copy; valid as long as the tensor."""
    return _ffi.buffer(_ffi.cast("char *", host.data_ptr()), elements * host.itemsize)


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU of the same shape, strides and dtype; waits until the values are there. Elements that share memory
    share it in the copy. Outside of autograd."""
    elements = span(tensor)
    data = torch.empty(elements, dtype=tensor.dtype, device="cpu")
    if elements:
        read(tensor, data)
    host = data.as_strided(tensor.shape, tensor.stride())
    if tensor.is_conj():
        host = host.conj()
    return torch._neg_view(host) if tensor.is_neg() else host


def from_cpu(tensor: torch.Tensor, device_index: int = 0) -> torch.Tensor:
    """A copy of a CPU tensor on a device: of the same strides where its elements lie densely, else contiguous."""
    tensor = tensor.resolve_conj().resolve_neg()
    if not is_dense(tensor):
        tensor = tensor.contiguous()
    copy = empty(tensor.shape, tensor.dtype, device_index, None if tensor.is_contiguous() else tensor.stride())
    write(copy, tensor)
    return copy


def exceeds_int32(tensor: torch.Tensor) -> bool:
    """Whether a tensor may have integers beyond 32 bits, with which kernels cannot compute: some came from the host."""
    return hasattr(tensor.untyped_storage(), "_lapilli_wide")


def nearly_exceeds_int32(tensor: torch.Tensor) -> bool:
    """The same of integers so near the ends of 32 bits that a small number more may not fit."""
    return hasattr(tensor.untyped_storage(), "_lapilli_nearly_wide")


def _note_wide(tensor: torch.Tensor, host: torch.Tensor) -> None:
    if host.dtype is torch.int64 and host.numel():
        low, high = host.aminmax()
        if max(-int(low), int(high)) > NEARLY_32_BITS:
            tensor.untyped_storage()._lapilli_nearly_wide = True  # type: ignore[attr-defined]
        if int(low) < -(2**31) or int(high) >= 2**31:
            tensor.untyped_storage()._lapilli_wide = True  # type: ignore[attr-defined]


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill a stretch of memory, each once, in any order of its dimensions."""
    return tensor.is_contiguous() or is_non_overlapping_and_dense_or_false(tensor)


def _start(tensor: torch.Tensor) -> int:
    """Where a tensor begins in its buffer, in bytes."""
    return int(tensor.storage_offset()) * tensor.itemsize


def read(tensor: torch.Tensor, host: torch.Tensor) -> None:
    """Fills a dense host tensor with what follows a tensor's first element."""
    check_fork()
    buffer_of(tensor).read(_start(tensor), _bytes_of(host, host.numel()))


def write(tensor: torch.Tensor, host: torch.Tensor) -> None:
    """Writes a dense host tensor of the same strides and dtype."""
    if host.numel():
        check_fork()
        _note_wide(tensor, host)
        buffer_of(tensor).write(_start(tensor), _bytes_of(host, host.numel()))
