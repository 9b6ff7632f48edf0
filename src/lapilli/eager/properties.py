"""The result of ``torch.vulkan.get_device_properties``. A module of its own, so that `import torch` need not load dataclasses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceProperties:
    """The properties of a device; `lapilli.Device` explains limits and features."""

    name: str
    type: str
    """discrete, integrated, virtual, cpu or other."""
    driver: str
    api_version: str
    total_memory: int
    """Bytes of device-local memory."""
    limits: dict[str, int]
    features: dict[str, bool]
