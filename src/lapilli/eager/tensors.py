"""What PyTorch does with a tensor in Python: printing, its address, DLPack."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.utils.dlpack
from torch import _tensor_str


def patch() -> None:
    """Lets tensors of the device be printed from a copy on the CPU, have addresses that tell them apart, and refuses DLPack,
    whose capsules would hold an address that is none."""
    contents: Any = _tensor_str._tensor_str

    def of_copy(tensor: torch.Tensor, indent: int) -> Any:
        return contents(tensor.cpu() if tensor.device.type == "vulkan" else tensor, indent)

    _tensor_str._tensor_str = of_copy

    address = torch.Tensor.data_ptr

    def data_ptr(self: torch.Tensor) -> int:
        if self.device.type != "vulkan" or type(self) not in _PLAIN:
            return address(self)
        start = self.untyped_storage().data_ptr()
        return start + int(self.storage_offset()) * self.itemsize if start and self.numel() else 0

    data_ptr.__doc__ = address.__doc__
    torch.Tensor.data_ptr = data_ptr  # type: ignore[method-assign, assignment]
    to_capsule = torch._C._to_dlpack

    @functools.wraps(to_capsule)
    def to_dlpack(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type == "vulkan":
            raise BufferError(
                f"A tensor on {tensor.device} cannot be given to others by DLPack; use tensor.cpu() to copy it first."
            )
        return to_capsule(tensor, *args, **kwargs)

    torch.utils.dlpack.to_dlpack = torch.to_dlpack = to_dlpack  # type: ignore[attr-defined, assignment]


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
