"""The eager device "vulkan": ordinary PyTorch tensors whose memory is on a Vulkan device.

PyTorch lets one out-of-tree kind of device register under the dispatch key PrivateUse1. This one consists of:

- ``device_registration``: a little at import time, the rest at the first use. ``neighbours``: other accelerators.
- ``storage``: tensors, their memory, and copies between the host and the devices.
- ``memory_ops``: operators that create tensors and views without computing anything.
- ``dispatch`` and the modules beside it: an operator becomes a program, which is queued.
- ``vulkan``: ``torch.vulkan``.
- ``autocast``, ``generators``: mixed precision, and the seeds of random numbers.
- ``backward_passes``: the thread they run in, and what their hooks raise.
- ``tensor_methods``, ``storages``, ``modules``, ``saving``, ``accelerator``: the parts of PyTorch that are patched in Python.
"""

from __future__ import annotations

import torch  # noqa: F401  # before the modules of this package: `import torch` imports them, and would find them half imported


def enable() -> None:
    """Makes "vulkan" a device of PyTorch in this process.

    Only needed beside CUDA or another accelerator; otherwise `import torch` does it. The environment variable LAPILLI_EAGER=1
    does it at `import torch` in any case. Further calls do nothing.

    PyTorch supports one accelerator per process. If there is another, a RuntimeWarning says what no longer works.

    Raises:
        RuntimeError: another package has already registered a PrivateUse1 device.
    """
    from lapilli.eager import device_registration

    device_registration.enable()
