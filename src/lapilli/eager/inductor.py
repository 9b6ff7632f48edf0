"""Makes inductor, torch.compile's default backend, refuse tensors of the device: it cannot generate code for it."""

from __future__ import annotations

from typing import Any

from lapilli.errors import CompileError


def refuse(common: Any) -> None:
    """Registers, in place of a code generator, a class that raises. common: ``torch._inductor.codegen.common``."""
    common.register_device_op_overrides("vulkan", None)
    common.register_backend_for_device("vulkan", _Refusal, _Refusal)


class _Refusal:
    """Used by inductor as scheduling and wrapper; raises when it is created."""

    supports_caching = False  # read from the class before an instance is created

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise CompileError(
            "torch.compile's backend 'inductor' cannot compile for tensors on the device 'vulkan'. "
            'Give the backend: torch.compile(model, backend="vulkan")'
        )

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> _Refusal:
        return cls()
