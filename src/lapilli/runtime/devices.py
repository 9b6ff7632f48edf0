"""The devices there are to run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lapilli import player
from lapilli.errors import LapilliError


@dataclass(frozen=True)
class Device:
    """A Vulkan device. Its `index` is the place in `devices()`: it or a part of the name is what `load` takes."""

    index: int
    name: str
    type: str
    """discrete, integrated, virtual, cpu or other."""
    driver: str
    api_version: str
    memory: int
    """Bytes of device-local memory."""
    vendor_id: int
    """PCI vendor."""
    driver_version: int
    """In the driver's own packing; `driver` has it in words."""
    limits: Mapping[str, int]
    """By Vulkan's names: bytes, invocations, counts."""
    features: Mapping[str, bool]
    """What programs may require: float16, storage_16bit, cooperative_matrix, …"""

    @staticmethod
    def from_json(node: Mapping[str, Any]) -> Device:
        """From the player's description."""
        return Device(**{field.name: node[field.name] for field in fields(Device)})


def devices() -> list[Device]:
    """The Vulkan devices of this machine, best first: discrete, integrated, virtual, other, CPU.

    Raises NoDriverError where there is no Vulkan loader or driver.
    """
    return [Device.from_json(node) for node in player.devices()]


def is_available() -> bool:
    """Whether there is a device to run on. Never raises an error of Lapilli's."""
    try:
        return bool(player.devices())
    except LapilliError:
        return False
