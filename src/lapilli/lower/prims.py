"""torch's primitives, which some of its decompositions consist of, as ATen operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lapilli.lower.registry import decomposition

aten, prims = torch.ops.aten, torch.ops.prims


def normal(shape: Sequence[Any], *, mean: float, std: float, dtype: torch.dtype, device: Any, **_: Any) -> Any:
    """Normally distributed numbers of a shape."""
    return aten.normal.float_float(mean, std, shape, dtype=dtype, device=device)


def convert_element_type(x: torch.Tensor, dtype: torch.dtype) -> Any:
    """x in another dtype."""
    return aten._to_copy(x, dtype=dtype)


def _register() -> None:
    ours: dict[Any, Any] = {
        prims.normal.default: normal,  # torch's own decomposition leads back to the primitive
        prims.convert_element_type.default: convert_element_type,  # torch's own decomposition copies into an empty tensor, in place
    }
    for name in dir(prims):
        overload = getattr(getattr(prims, name), "default", None)
        meaning = ours.get(overload, getattr(overload, "impl_aten", None))
        if isinstance(overload, torch._ops.OpOverload) and meaning is not None:
            decomposition(overload)(meaning)


_register()
