"""`torch.ao.quantization.fuse_modules` for modules in training mode, as the mobile performance recipe calls it. torch used to
accept them, and refuses them today. The fused modules are in eval mode, as `convert` requires."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch


def in_any_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function, with a warning if torch would refuse modules in training mode."""

    @wraps(original)
    def fuse_modules(
        model: torch.nn.Module, modules_to_fuse: Sequence[Any], inplace: bool = False, *args: Any, **kwargs: Any
    ) -> torch.nn.Module:
        groups = [modules_to_fuse] if all(isinstance(name, str) for name in modules_to_fuse) else modules_to_fuse
        names = [name for group in groups for name in group]
        if any(model.get_submodule(name).training for name in names):
            warnings.warn(
                f"{', '.join(names)} are in training mode and are fused for inference, with the statistics that they have; call "
                "model.eval() before fuse_modules, or fuse_modules_qat to train on.",
                stacklevel=2,
            )
            model = model if inplace else copy.deepcopy(model)
            for name in names:
                model.get_submodule(name).eval()
            inplace = True
        return original(model, modules_to_fuse, inplace, *args, **kwargs)  # type: ignore[no-any-return]

    return fuse_modules
