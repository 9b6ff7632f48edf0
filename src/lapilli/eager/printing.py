"""Printing of tensors, and their addresses."""

from __future__ import annotations

from typing import Any

import torch
from torch import _tensor_str


def patch() -> None:
    """Lets tensors of the device be printed from a copy on the CPU, and have addresses that tell them apart."""
    contents = _tensor_str._tensor_str

    def of_copy(tensor: torch.Tensor, indent: int) -> Any:
        return contents(tensor.cpu() if tensor.device.type == "vulkan" else tensor, indent)

    _tensor_str._tensor_str = of_copy

    address = torch.Tensor.data_ptr

    def data_ptr(self: torch.Tensor) -> int:
        if self.device.type != "vulkan" or type(self) not in _PLAIN:
            return address(self)
        start = self.untyped_storage().data_ptr()
        return start + self.storage_offset() * self.itemsize if start and self.numel() else 0

    data_ptr.__doc__ = address.__doc__
    torch.Tensor.data_ptr = data_ptr  # type: ignore[method-assign, assignment]


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
