"""What PyTorch calls at ``import torch`` (entry point group ``torch.backends``): announces the device "vulkan", and has
``optimize_for_mobile`` at hand.

It takes milliseconds, touches no driver, replaces nothing of PyTorch's, and never lets ``import torch`` fail.
"""

from __future__ import annotations

import os
import warnings


def register() -> None:
    """Announces the device where it has no neighbours, or where LAPILLI_EAGER=1 asks for it; LAPILLI_EAGER=0: never.

    A warning says why where that is not possible.
    """
    wanted = os.environ.get("LAPILLI_EAGER", "")
    if wanted == "0":
        return
    import torch  # noqa: F401  # first: it calls this, which would find the modules below half imported

    from lapilli import torch_compat  # only where it is needed: this is part of every `import torch`

    try:
        from lapilli.eager import neighbours

        if wanted != "1" and (neighbours.possible() is not None or neighbours.other_packages()):
            return
        from lapilli.eager import device_registration

        device_registration.enable()
    except Exception as error:
        if not torch_compat.supported():
            return  # said when somebody uses it, not now
        warnings.warn(
            f"Lapilli cannot offer the device 'vulkan' in this PyTorch: {error}", RuntimeWarning, stacklevel=2
        )
