"""Adds operators to `torch.ops.lapilli`, without what torch.library.custom_op does at import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

library: Any = torch.library.Library("lapilli", "FRAGMENT")  # type: ignore[no-untyped-call]


def define(schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    """Adds an operator. run: computes it; shapes: makes its result on fake tensors."""
    name = schema[: schema.index("(")]
    library.define(schema)
    library.impl(name, run, "CompositeExplicitAutograd")
    # As torch.library.register_fake does, without searching all modules for the function's location.
    entry: Any = torch._library.simple_registry.singleton.find(f"lapilli::{name}")
    entry.fake_impl.register(shapes, __name__, library)
