"""What inductor, torch.compile's default backend, says of tensors of the device: it makes code for other devices."""

from __future__ import annotations

from typing import Any

from lapilli.errors import CompileError


def refuse(common: Any) -> None:
    """Registers what raises in the place of a code generator. common: ``torch._inductor.codegen.common``."""
    common.register_device_op_overrides("vulkan", None)
    common.register_backend_for_device("vulkan", _Refusal, _Refusal)


class _Refusal:
    """What inductor takes for its scheduling and its wrapper."""

    supports_caching = False  # asked of the class before one is made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise CompileError(
            "torch.compile's backend 'inductor' cannot compile for tensors on the device 'vulkan'. "
            'Give the backend: torch.compile(model, backend="vulkan")'
        )

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> _Refusal:
        return cls()
