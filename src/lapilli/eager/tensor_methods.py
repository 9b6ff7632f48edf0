"""PyTorch's operations on tensors in Python: printing, addresses, DLPack."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.utils.dlpack
from torch import _tensor_str

from lapilli.eager.device_state import is_ours
from lapilli.torch_compat import replace


def patch() -> None:
    """Makes tensors on the device print from a copy on the CPU, have distinct addresses, and refuse DLPack, whose capsules
    would contain an invalid address.
    """
    contents: Any = _tensor_str._tensor_str

    @functools.wraps(contents)
    def of_copy(tensor: torch.Tensor, indent: int) -> Any:
        return contents(tensor.cpu() if is_ours(tensor) else tensor, indent)

    replace(_tensor_str, "_tensor_str", of_copy)

    address = torch.Tensor.data_ptr

    def data_ptr(self: torch.Tensor) -> int:
        if not is_ours(self) or type(self) not in _PLAIN:
            return address(self)
        start = self.untyped_storage().data_ptr()
        return start + int(self.storage_offset()) * self.itemsize if start and self.numel() else 0

    data_ptr.__doc__ = address.__doc__
    replace(torch.Tensor, "data_ptr", data_ptr)
    to_capsule = torch._C._to_dlpack

    @functools.wraps(to_capsule)
    def to_dlpack(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_ours(tensor):
            raise BufferError(
                f"A tensor on {tensor.device} cannot be exported by DLPack; use tensor.cpu() to copy it first."
            )
        return to_capsule(tensor, *args, **kwargs)

    for module in (torch.utils.dlpack, torch):
        replace(module, "to_dlpack", to_dlpack)


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
