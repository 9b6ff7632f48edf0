"""Other candidates for PyTorch's accelerator: one that PyTorch was built with, or a device of another package.

PyTorch has one accelerator per process, and a named device from outside is always it: `at::getAccelerator` checks for the
name first. Autograd only knows the streams of the accelerator, so that a backward pass on CUDA fails if a device has a
name, whatever its hooks and guards return. The device is therefore not announced if it would have neighbours.
"""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch

_NODES = {
    "cuda": ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/proc/driver/nvidia", "/dev/nvhost-gpu", "/dev/nvgpu"),
    "hip": ("/dev/kfd", "/dev/dxg"),
}
"""Paths that exist on Linux if the kernel driver is loaded."""

_VISIBLE = {"cuda": ("CUDA_VISIBLE_DEVICES",), "hip": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")}


def built_in() -> torch.device | None:
    """The accelerator that PyTorch was built with, whether or not the machine has one; None once "vulkan" is announced."""
    found = torch._C._accelerator_getAccelerator()
    return None if found is None or found.type == "vulkan" else found


def possible() -> torch.device | None:
    """The accelerator that PyTorch was built with, unless this machine certainly lacks it. Touches no driver: this runs at
    `import torch`, and CUDA's driver would take a second, and could not be used after a fork.
    """
    found = built_in()
    if found is None or found.type != "cuda":
        return found
    kind = "hip" if torch.version.hip else "cuda"
    if any(os.environ.get(name, "all").strip() in ("", "-1") for name in _VISIBLE[kind]):
        return None
    if sys.platform.startswith("linux") and not any(map(os.path.exists, _NODES[kind])):
        return None
    return found


def other_packages() -> list[str]:
    """The names of other packages' devices that `import torch` is about to load; the place is left to them."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_import_device_backends":
        frame = frame.f_back
    found = () if frame is None else frame.f_locals.get("backend_extensions", ())
    return [entry.name for entry in found if not entry.value.startswith("lapilli.")]
