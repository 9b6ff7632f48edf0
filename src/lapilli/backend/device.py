"""Which plan to make for the device at hand: one, where `lapilli.compile` makes one for every kind of device."""

from __future__ import annotations

from functools import lru_cache

from lapilli.runtime.devices import Device, devices
from lapilli.schedule.target import ANY, CPU, CPU_HALF, GPU, GPU_HALF, GPU_MATRIX, Target, plans_for

_TEXELS = 1 << 24


def targets(precision: str, device: str | int | None) -> list[Target]:
    """The target that fits best; all of them where the device cannot be told before a program is loaded."""
    found = find(device)
    return plans_for(precision) if found is None else [_best(precision, found)]


@lru_cache
def find(device: str | int | None) -> Device | None:
    """The device that an index or a part of a name means, as the player finds it."""
    import os

    wanted = os.environ.get("LAPILLI_DEVICE") if device is None else device
    known = devices()
    if wanted is None or wanted == "":
        return known[0] if known else None
    if str(wanted).isdigit():
        return known[int(wanted)] if int(wanted) < len(known) else None
    named = [d for d in known if str(wanted).lower() in d.name.lower()]
    return named[0] if named else None


def _best(precision: str, device: Device) -> Target:
    half = precision == "fp16" and device.features["float16"] and device.features["storage_16bit"]
    if device.type == "cpu":
        if device.limits["texel_elements"] < _TEXELS:
            return ANY
        return CPU_HALF if half else CPU
    if half:
        return GPU_MATRIX if device.features["cooperative_matrix"] else GPU_HALF
    return GPU


