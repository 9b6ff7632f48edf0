"""Kernels for GPUs on any device: what a GPU would run, on a software driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import kept_kernels

SHARED = 1 << 15
"""Bytes of shared memory of a work group that software devices have."""


def accept_gpu_plans(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """From now on plans for GPUs are written so that every device takes them. put: as below."""
    from lapilli.program import schema

    put(schema.DeviceKind, "gpu", schema.DeviceKind.any)


def on_any_device(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """From now on every device takes plans for GPUs, and eager and torch.compile make them for it; matrix units are emulated.

    put: what sets an attribute, such as `monkeypatch.setattr`. Programs made so are for this process: give it a cache of its own
    (LAPILLI_CACHE_DIR). Kernels are kept in the user's all the same: what they are called depends on all that they are made of."""
    from lapilli.codegen import (
        attention_gradient,
        expanded,
        flash_attention,
        fragments,
        gpu_dot,
        gpu_matvec,
        gpu_tiles,
        slang,
        tiles,
    )
    from lapilli.program import writer
    from lapilli.target import BYTE_UNITS, KNOWN, SUBGROUP_SUMS, UNITS, device

    accept_gpu_plans(put)
    kept_kernels.keep_kernels(put)
    put(slang, "DEFINES", ("LAPILLI_EMULATE_COOPMAT",))
    put(tiles, "OPERANDS_STAY", 1)
    for module in (gpu_tiles, fragments, expanded, flash_attention, attention_gradient):
        put(module, "UNITS", {dtype: replace(needs, subgroup_size=0) for dtype, needs in UNITS.items()})
    put(gpu_dot, "BYTE_UNITS", replace(BYTE_UNITS, subgroup_size=0))
    put(gpu_matvec, "SUBGROUP_SUMS", replace(SUBGROUP_SUMS, subgroup_size=0))
    put(device, "units_of", lambda name: KNOWN["h100"].limits["compute_units"])
    left_out = ("cooperative_matrix", "bfloat16_matrix", "int8_matrix", "int8", "memory_model", "packed_dot_product")
    put(writer, "_FEATURE", {**writer._FEATURE, **dict.fromkeys(left_out, 0)})
    put(device, "kernels_for", lambda type, limits: "gpu")
