"""What PyTorch calls at ``import torch`` (entry point group ``torch.backends``): announces the device "vulkan".

It takes milliseconds, touches no driver, and never lets ``import torch`` fail.
"""

from __future__ import annotations

import warnings


def register() -> None:
    """Announces the device; a warning says why where that is not possible."""
    try:
        from lapilli.eager import device

        device.announce()
    except Exception as error:
        warnings.warn(
            f"Lapilli cannot offer the device 'vulkan' in this PyTorch: {error}", RuntimeWarning, stacklevel=2
        )
