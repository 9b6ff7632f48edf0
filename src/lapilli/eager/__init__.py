"""The eager device "vulkan": plain tensors of PyTorch whose memory lies on a Vulkan device.

PyTorch lets one more kind of device be added from outside, under the dispatch key PrivateUse1. Ours is made of:

- ``device``: tells PyTorch of it; at import time little, the rest at the first use. ``neighbours``: what stands beside it.
- ``storage``: tensors and their memory, and what moves between the host and the devices.
- ``views``: the operators that make tensors and views, and compute nothing.
- ``dispatch`` and its neighbours: an operator becomes a program, which is queued.
- ``vulkan``: ``torch.vulkan``.
- ``autocast``, ``generators``: mixed precision, and where random numbers begin.
- ``tensors``, ``storages``, ``modules``, ``saving``, ``accelerator``: the places where PyTorch must be told in Python.
"""

from __future__ import annotations


def enable() -> None:
    """Makes "vulkan" a device of PyTorch in this process, where `import torch` has not: beside CUDA or another accelerator.
    The environment variable LAPILLI_EAGER=1 does it at `import torch`. Doing it again does nothing.

    PyTorch has one accelerator. Where there is another, a RuntimeWarning says what no longer works in this process.

    Raises RuntimeError where another package has taken PyTorch's one place for devices from outside.
    """
    from lapilli.eager import device

    device.enable()
