"""What ``torch.vulkan.get_device_properties`` says; by itself, for `import torch` should not wait for a dataclass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceProperties:
    """What a device is; see `lapilli.Device` for the meaning of limits and features."""

    name: str
    type: str
    """discrete, integrated, virtual, cpu or other."""
    driver: str
    api_version: str
    total_memory: int
    """Bytes of device-local memory."""
    limits: dict[str, int]
    features: dict[str, bool]
