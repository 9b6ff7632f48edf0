"""Tensors of the device and their memory, and transfers between the host and the devices.

A tensor is torch's own. Its ``UntypedStorage`` holds no address that the host could use. The memory is a `Buffer` of the
device's stream, an attribute of the storage, which PyTorch keeps alive as long as any tensor uses it. Views, aliases and
lifetimes are therefore PyTorch's, and the buffer returns to the stream with the last of them.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import mul
from types import ModuleType
from typing import TYPE_CHECKING, Any

import cffi
import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._C._dynamo.guards import _reinterpret_tensor  # type: ignore[attr-defined]
from torch._prims_common import is_non_overlapping_and_dense_or_false, make_contiguous_strides_for

from lapilli.eager.device_state import check_fork as check_fork
from lapilli.eager.device_state import place
from lapilli.eager.device_state import stream_of as stream_of
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
    """An uninitialized tensor on ``vulkan:<device_index>``.

    stride: in elements; None: contiguous. Strides of zero, and others with which elements overlap, are allowed.

    Raises torch.OutOfMemoryError if there is not enough memory, even after cached memory was freed.
    """
    return around(allocate(bytes_of(shape, dtype, stride), device_index), shape, dtype, device_index, stride)


def bytes_of(shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> int:
    """The size of a tensor with these sizes and strides."""
    if stride is None:
        return math.prod(shape) * dtype.itemsize
    return 0 if 0 in shape else (1 + sum(map(mul, shape, stride)) - sum(stride)) * dtype.itemsize


def around(
    buffer: Buffer, shape: Sequence[int], dtype: torch.dtype, device_index: int = 0, stride: Sequence[int] | None = None
) -> torch.Tensor:
    """A tensor whose memory is a buffer of matching size; other arguments as for `empty`."""
    if device_index:
        return _around_elsewhere(shape, dtype, device_index, stride, buffer)
    tensor = create(shape, dtype)
    tensor.untyped_storage()._lapilli = buffer
    return tensor if stride is None else _reinterpret_tensor(tensor, shape, stride, 0)  # type: ignore[no-any-return]


def allocate(size: int, device_index: int) -> Buffer:
    """Allocates memory on a device. Raises torch.OutOfMemoryError."""
    return stream_of(device_index).allocate(size)


def over(
    untyped: torch.UntypedStorage, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """A tensor over an existing storage."""
    index = untyped.device.index
    tensor = _reinterpret_tensor(_seed(index, dtype), (0,), (1,), 0) if index else create((0,), dtype)
    _set_storage.redispatch(on_host, tensor, untyped, 0, (0,), (1,))  # PyTorch gets a storage's size by its address
    return _reinterpret_tensor(tensor, shape, stride, offset)  # type: ignore[no-any-return]


# --- devices other than the first: PyTorch's constructor only supports vulkan:0, DLPack supports them all


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
    """An empty tensor on a device, from which others are created."""
    if (device_index, dtype) not in _seeds:
        shape = (ctypes.c_int64 * 1)(0)
        extension, unsigned = 12, 1
        managed = _DLTensor(None, extension, device_index, 1, unsigned, 8, 1, shape)
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        with _named_module():
            tensor = torch._C._from_dlpack(capsule(ctypes.addressof(managed), b"dltensor", None))
        _managed.append(managed)  # kept alive, because the tensor has no deleter
        _seeds[device_index, dtype] = tensor.view(dtype)
    return _seeds[device_index, dtype]


@contextmanager
def _named_module() -> Iterator[None]:
    """PyTorch imports `torch.<name of the device>` before it takes the first tensor of a device. Where the device has not been
    announced (beside CUDA) there is no such module: an empty one does, after which PyTorch still takes the device for unused.
    """
    name = f"torch.{torch._C._get_privateuse1_backend_name()}"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        del sys.modules[name]


def _around_elsewhere(
    shape: Sequence[int], dtype: torch.dtype, device_index: int, stride: Sequence[int] | None, buffer: Buffer
) -> torch.Tensor:
    if stride is None:
        stride = make_contiguous_strides_for(tuple(shape))
    untyped: Any = torch._C._construct_storage_from_data_pointer(0, place(device_index), 0)
    untyped._lapilli = buffer
    return over(untyped, dtype, shape, stride, 0)


# --- copies


def span(tensor: torch.Tensor) -> int:
    """The number of elements from a tensor's first to its last, inclusive."""
    if not tensor.numel():
        return 0
    stride = tensor.stride()
    return int(1 + sum(map(mul, tensor.shape, stride)) - sum(stride))


def _bytes_of(host: torch.Tensor, elements: int) -> Any:
    """The bytes of a CPU tensor from its first element on, without a copy; valid as long as the tensor."""
    return _ffi.buffer(_ffi.cast("char *", host.data_ptr()), elements * host.itemsize)


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU with the same shape, strides and dtype; waits for the values. Elements that share memory share it
    in the copy, too. Not recorded by autograd.
    """
    elements = span(tensor)
    data = torch.empty(elements, dtype=tensor.dtype, device="cpu")
    if elements:
        read(tensor, data)
    host = data.as_strided(tensor.shape, tensor.stride())
    if tensor.is_conj():
        host = host.conj()
    return torch._neg_view(host) if tensor.is_neg() else host


def from_cpu(tensor: torch.Tensor, device_index: int = 0) -> torch.Tensor:
    """A copy of a CPU tensor on a device: with the same strides if it is dense, otherwise contiguous."""
    tensor = tensor.resolve_conj().resolve_neg()
    if not is_dense(tensor):
        tensor = tensor.contiguous()
    copy = empty(tensor.shape, tensor.dtype, device_index, None if tensor.is_contiguous() else tensor.stride())
    write(copy, tensor)
    return copy


def exceeds_int32(tensor: torch.Tensor) -> bool:
    """Whether a tensor may have integers beyond 32 bits, with which kernels cannot compute, because some came from the
    host.
    """
    return hasattr(tensor.untyped_storage(), "_lapilli_wide")


def nearly_exceeds_int32(tensor: torch.Tensor) -> bool:
    """The same for integers so close to the limits of 32 bits that adding a small number may exceed them."""
    return hasattr(tensor.untyped_storage(), "_lapilli_nearly_wide")


def _note_wide(tensor: torch.Tensor, host: torch.Tensor) -> None:
    if host.dtype is torch.int64 and host.numel():
        low, high = host.aminmax()
        if max(-int(low), int(high)) > NEARLY_32_BITS:
            tensor.untyped_storage()._lapilli_nearly_wide = True  # type: ignore[attr-defined]
        if int(low) < -(2**31) or int(high) >= 2**31:
            tensor.untyped_storage()._lapilli_wide = True  # type: ignore[attr-defined]


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill a range of memory, each once, in any order of its dimensions."""
    return tensor.is_contiguous() or is_non_overlapping_and_dense_or_false(tensor)


def _start(tensor: torch.Tensor) -> int:
    """The offset of a tensor in its buffer, in bytes."""
    return int(tensor.storage_offset()) * tensor.itemsize


def read(tensor: torch.Tensor, host: torch.Tensor) -> None:
    """Fills a dense host tensor from a tensor's memory, beginning at its first element."""
    check_fork()
    buffer_of(tensor).read(_start(tensor), _bytes_of(host, host.numel()))


def write(tensor: torch.Tensor, host: torch.Tensor) -> None:
    """Writes a dense host tensor with the same strides and dtype."""
    if host.numel():
        check_fork()
        _note_wide(tensor, host)
        buffer_of(tensor).write(_start(tensor), _bytes_of(host, host.numel()))
