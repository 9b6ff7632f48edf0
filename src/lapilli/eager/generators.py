"""``torch.Generator(device="vulkan")``: a generator of PyTorch's CPU, which gives every random operator the key from which
the operator's kernel computes its numbers (`random.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch._opaque_base import OpaqueBaseMeta

from lapilli.eager import devices


class Generator(torch.Generator):
    """``torch.Generator(device="vulkan")``."""

    _device: torch.device

    def __new__(cls, device: torch.device | str = "vulkan") -> Generator:
        made = super().__new__(cls, "cpu")
        made._device = torch.device("vulkan", devices.index_of(device))
        return made

    @property
    def device(self) -> torch.device:
        return self._device

    def clone_state(self) -> Generator:
        copy = Generator(self._device)
        copy.set_state(self.get_state())
        return copy

    def __reduce__(self) -> Any:
        return _rebuild, (str(self._device), self.get_state())


def _rebuild(device: str, state: torch.Tensor) -> Generator:
    generator = Generator(device)
    generator.set_state(state)
    return generator


def _new_generator(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if cls is torch.Generator:
        device = args[0] if args else kwargs.get("device")
        if device is not None and torch.device(device).type == "vulkan":
            return Generator(device)
    return type.__call__(cls, *args, **kwargs)


def patch() -> None:
    """Lets ``torch.Generator`` make ours: PyTorch asks a device's C++ part, which does not exist."""
    OpaqueBaseMeta.__call__ = _new_generator  # type: ignore[method-assign]
