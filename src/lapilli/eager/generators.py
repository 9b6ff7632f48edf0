"""Random number generators of the device.

A generator of PyTorch's CPU gives every random operator a key, from which the operator's kernel computes its numbers. Seeds
and states are therefore PyTorch's, and the numbers depend on the seed and the order of operators, not on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._opaque_base import OpaqueBaseMeta

from lapilli.eager import device_state
from lapilli.torch_compat import replace


class Generator(torch.Generator):
    """``torch.Generator(device="vulkan")``."""

    _device: torch.device

    def __new__(cls, device: torch.device | str = "vulkan") -> Generator:
        made = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        made._device = torch.device("vulkan", device_state.index_of(device))
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
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


_defaults: dict[int, Generator] = {}
_seed: int | None = None


def default_generator(index: int) -> Generator:
    """The generator that random operators of a device use if they are given none."""
    if index not in _defaults:
        _defaults[index] = Generator(torch.device("vulkan", index))
        _defaults[index].manual_seed(torch.initial_seed() if _seed is None else _seed)
    return _defaults[index]


def random_key(index: int, generator: torch.Generator | None = None) -> tuple[int, int]:
    """The 32-bit words from which a call draws its random numbers. generator: None for the device's default."""
    generator = default_generator(index) if generator is None else generator
    drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())
    return drawn & 0xFFFFFFFF, drawn >> 32


def manual_seed_all(seed: int) -> None:
    """Seeds the default generators of all devices, including those not used yet."""
    global _seed
    _seed = int(seed)
    for generator in _defaults.values():
        generator.manual_seed(_seed)


def _new_generator(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if cls is torch.Generator:
        device = args[0] if args else kwargs.get("device")
        if device is not None and torch.device(device).type == "vulkan":
            return Generator(device)
    return type.__call__(cls, *args, **kwargs)


def patch() -> None:
    """Makes ``torch.Generator`` create ours; PyTorch would call a C++ part that the device does not have."""
    replace(OpaqueBaseMeta, "__call__", _new_generator)
