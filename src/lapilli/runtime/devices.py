"""The Vulkan devices of this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from lapilli import player
from lapilli.errors import LapilliError, NoDeviceError


@dataclass(frozen=True)
class Device:
    """A Vulkan device. `load` takes its `index` (its position in `devices()`), a part of its name, or its `uuid`."""

    index: int
    name: str
    type: str
    """discrete, integrated, virtual, cpu or other."""
    driver: str
    api_version: str
    memory: int
    """Bytes of device-local memory."""
    vendor_id: int
    """PCI vendor ID."""
    driver_version: int
    """In the driver's own encoding; `driver` has it as text."""
    limits: Mapping[str, int]
    """Vulkan limits by name: bytes, invocations, counts."""
    features: Mapping[str, bool]
    """Features that programs may require: float16, storage_16bit, cooperative_matrix, …"""
    uuid: str = ""
    """The same in every process, and in CUDA and OpenCL: `8-4-4-4-12` hexadecimal digits."""
    known_faults: Sequence[str] = ()
    """Names of faults of its driver that are known (docs/phones.md): features that they concern are said to be missing."""

    @staticmethod
    def from_json(node: Mapping[str, Any]) -> Device:
        """Converts the player's description."""
        return Device(**{field.name: node[field.name] for field in fields(Device)})


def devices() -> list[Device]:
    """The Vulkan devices of this machine, best first: discrete, integrated, virtual, other, CPU.

    Raises:
        NoDriverError: there is no Vulkan loader or driver.
    """
    return [Device.from_json(node) for node in player.devices()]


def every_device() -> list[Device]:
    """The devices of this machine that work is spread over: each once, and those of software only where there is no other.

    Raises:
        NoDriverError: there is no Vulkan loader or driver.
    """
    known = {device.uuid: device for device in reversed(devices())}  # two drivers may offer one device: the first
    found = sorted(known.values(), key=lambda device: device.index)
    return [device for device in found if device.type != "cpu"] or found


def device_named(wanted: str | int | None = None) -> Device:
    """The device that `load` takes. wanted: index, part of a name, or UUID; None: LAPILLI_DEVICE, else the best.

    Raises NoDriverError or NoDeviceError.
    """
    known = devices()
    text = os.environ.get("LAPILLI_DEVICE", "") if wanted is None else str(wanted)
    for device in known:
        named = not text.isdigit() and text.lower() in device.name.lower()
        if named or text.lower() in (str(device.index), device.uuid):
            return device
    names = ", ".join(f"{d.index} ({d.name})" for d in known)
    others = f"choose one by its number, a part of its name, or its UUID: {names}" if known else "there is none at all"
    raise NoDeviceError(f"There is no Vulkan device {text!r}; {others}.")


def is_available() -> bool:
    """Whether there is a device to run on. Raises no LapilliError."""
    try:
        return bool(player.devices())
    except LapilliError:
        return False
