"""The device of a graph, and the target for which it is compiled: a single one, unlike for `lapilli.compile`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any

import torch

from lapilli.eager.device_state import is_ours
from lapilli.runtime.devices import device_named, devices
from lapilli.target import Target, of_device
from lapilli.torch_compat import replace


def device_of(given: Sequence[Any], wanted: str | int | None) -> int:
    """The index of the device of the first tensor that is on one. If all are on the CPU, that of the wanted device, as for
    `lapilli.load`. Raises NoDeviceError.
    """
    for value in given:
        if isinstance(value, torch.Tensor) and is_ours(value):
            return value.get_device()
    return _find(os.environ.get("LAPILLI_DEVICE", "") if wanted is None else wanted)


@lru_cache
def _find(wanted: str | int) -> int:
    return device_named(wanted).index


def targets(half: bool, index: int) -> list[Target]:
    """The target that fits the device best. half: the program has values of 16-bit floats."""
    return [of_device(devices()[index], half=half, matrix=True)]


_compiling = threading.local()


@contextmanager
def compiling() -> Iterator[None]:
    """A context for everything the backend does with a graph."""
    before = getattr(_compiling, "now", False)
    _compiling.now = True
    try:
        yield
    finally:
        _compiling.now = before


def _traces_for_us() -> bool:
    """Whether this thread is tracing for the backend "vulkan", or for one that wraps it with `functools.wraps`."""
    if getattr(_compiling, "now", False):
        return True
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        function: Any = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:  # Dynamo is not running
        return False
    while function is not None and not str(getattr(function, "__module__", "")).startswith("lapilli."):
        function = getattr(function, "compiler_fn", None) or getattr(function, "__wrapped__", None)
    return function is not None


@lru_cache(maxsize=1)
def keep_sizes_of_convolutions() -> None:
    """Prevents torch from specializing on the batch size of convolutions.

    When torch traces a convolution on the CPU, it asks which of its own kernels would be used. The answer depends on
    whether the batch is below 16, which adds a guard that contradicts `mark_dynamic(x, 0, max=64)`. The kernel only
    determines the memory format, which does not depend on the batch, so that the guard is not needed.
    """
    select = torch._C._select_conv_backend

    @wraps(select)
    def without_guards(*args: Any, **kwargs: Any) -> Any:
        mode = getattr(args[0] if args else kwargs.get("input"), "fake_mode", None)
        if mode is None or mode.shape_env is None or not _traces_for_us():
            return select(*args, **kwargs)
        with mode.shape_env.suppress_guards():
            return select(*args, **kwargs)

    replace(torch._C, "_select_conv_backend", without_guards)
