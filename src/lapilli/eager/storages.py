"""``UntypedStorage`` on the device: the methods that PyTorch calls in Python.

To PyTorch, storages on the device have no bytes and no address: they are in Vulkan memory. Here its methods learn about the
`Buffer`, so that deepcopy, pickling, ``torch.save`` and ``torch.load`` work as for any device: tensors that share a storage
still do so afterwards. They are saved as CPU tensors, and can be loaded anywhere.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import UntypedStorage

from lapilli.eager.device_state import NAMES
from lapilli.torch_compat import replace


def _on_device(untyped: Any) -> bool:
    """Whether a storage has memory on the device; those of PyTorch's tracing wrappers have none."""
    return untyped.device.type in NAMES and hasattr(untyped, "_lapilli")


def _bytes(untyped: UntypedStorage) -> torch.Tensor:
    """The bytes of a storage as a tensor."""
    from lapilli.eager import storage  # not before there is a tensor on the device

    size = untyped.nbytes()
    return storage.over(untyped, torch.uint8, (size,), (1,), 0)


def nbytes(self: UntypedStorage) -> int:
    return self._lapilli.bytes  # type: ignore[attr-defined, no-any-return]


def data_ptr(self: UntypedStorage) -> int:
    """A number that is unique among existing storages; not an address that the host could use."""
    return self._lapilli.address if self._lapilli.bytes else 0  # type: ignore[attr-defined]


def copy_(self: UntypedStorage, source: Any, non_blocking: bool | None = None) -> UntypedStorage:
    source = getattr(source, "_untyped_storage", source)
    if source.nbytes() != self.nbytes():
        raise RuntimeError(f"A storage of {self.nbytes()} bytes cannot take a copy of one of {source.nbytes()} bytes.")
    _as_tensor(self).copy_(_as_tensor(source))
    return self


def _as_tensor(untyped: UntypedStorage) -> torch.Tensor:
    if _on_device(untyped):
        return _bytes(untyped)
    return torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped)


def fill_(self: UntypedStorage, value: int) -> UntypedStorage:
    _bytes(self).fill_(value)
    return self


def resize_(self: UntypedStorage, size: int) -> UntypedStorage:
    from lapilli.eager import memory_ops  # as above

    memory_ops.resize_storage(self, size)
    return self


def getitem(self: Any, index: Any) -> Any:
    return self.cpu()[index]


def setitem(self: UntypedStorage, index: Any, value: Any) -> None:
    _bytes(self)[index] = value


def _write_file(self: Any, *args: Any) -> Any:
    return self.cpu()._write_file(*args)


def share(self: UntypedStorage, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("A vulkan tensor cannot be sent to another process: send tensor.cpu(), and move it there.")


def _new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    """``UntypedStorage(size, device="vulkan")``; PyTorch's own would look for an allocator in C++, and crash."""
    if device is None or torch.device(device).type != "vulkan":
        return _original_new(cls, *args, **({} if device is None else {"device": device}), **kwargs)
    size = args[0] if args else kwargs.get("size", 0)
    if not isinstance(size, int):
        raise TypeError(
            f"UntypedStorage on a vulkan device takes a number of bytes, but {type(size).__name__} was given."
        )
    return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()


_original_new = UntypedStorage.__new__


def _instead(name: str, ours: Any) -> None:
    """Replaces a method for storages on the device; others keep PyTorch's."""
    theirs = getattr(UntypedStorage, name)

    @functools.wraps(theirs)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (ours if _on_device(self) else theirs)(self, *args, **kwargs)

    replace(UntypedStorage, name, method)


def patch() -> None:
    """Patches ``UntypedStorage`` for the device."""
    for name, ours in {
        "nbytes": nbytes, "size": nbytes, "__len__": nbytes, "data_ptr": data_ptr, "copy_": copy_, "fill_": fill_,
        "resize_": resize_, "__getitem__": getitem, "__setitem__": setitem, "_write_file": _write_file,
        "_share_fd_cpu_": share, "_share_filename_cpu_": share,
    }.items():  # fmt: skip
        _instead(name, ours)
    _instead_for_cpu()
    replace(UntypedStorage, "__new__", _new)


def _instead_for_cpu() -> None:
    """Makes ``cpu.copy_(vulkan)`` work, too."""
    theirs = UntypedStorage.copy_

    @functools.wraps(theirs)
    def method(self: Any, source: Any, non_blocking: bool | None = None) -> Any:
        untyped = getattr(source, "_untyped_storage", source)
        return (copy_ if _on_device(untyped) else theirs)(self, source, non_blocking)

    replace(UntypedStorage, "copy_", method)
