"""What else wants to be PyTorch's accelerator: one that PyTorch was built with, or a device of another package.

PyTorch has one accelerator in a process, and a device from outside that has a name is it: `at::getAccelerator` asks for the name
first. Autograd knows the streams of the accelerator only, so a backward pass on CUDA fails beside a device with a name,
whatever its hooks and guards say. Therefore the device is not announced where it would have neighbours.
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
"""What Linux has where the kernel's part of the driver is loaded."""

_VISIBLE = {"cuda": ("CUDA_VISIBLE_DEVICES",), "hip": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")}


def built_in() -> torch.device | None:
    """The accelerator that PyTorch was built with, whether the machine has one or not; None once "vulkan" is announced."""
    found = torch._C._accelerator_getAccelerator()
    return None if found is None or found.type == "vulkan" else found


def possible() -> torch.device | None:
    """The accelerator of this machine that PyTorch was built for, in doubt too. Touches no driver: `import torch` asks, and
    CUDA's would take a second and could not be used after a fork."""
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
    """The names of other packages' devices that `import torch` is about to load: for one of them the place is free."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_import_device_backends":
        frame = frame.f_back
    found = () if frame is None else frame.f_locals.get("backend_extensions", ())
    return [entry.name for entry in found if not entry.value.startswith("lapilli.")]
