"""torch's primitives, into which some of its decompositions go: each stands for ATen operators again."""

from __future__ import annotations

import torch

from lapilli.lower.registry import decomposition

prims = torch.ops.prims


def _register() -> None:
    for name in dir(prims):
        overload = getattr(getattr(prims, name), "default", None)
        meaning = getattr(overload, "impl_aten", None)
        if isinstance(overload, torch._ops.OpOverload) and meaning is not None:
            decomposition(overload)(meaning)


_register()
