"""Imports torchvision's models where its compiled operators do not load (there is no build of them for this torch).

The classifiers need none of those operators, but torchvision describes `nms` at import: it must be known by then.
"""

from __future__ import annotations

import torch

_library: torch.library.Library | None = None


def allow() -> None:
    """Call it before `import torchvision`. Does nothing where the operators are there."""
    global _library
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        import sys

        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        _library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
