"""From a device, there or known, to its target: the one way to its kernels."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lapilli.errors import LapilliError
from lapilli.ir.dtype import DType
from lapilli.runtime.devices import Device, device_named
from lapilli.target.known import UNORDERED, units_of
from lapilli.target.portable import ANY, CPU, CPU_HALF, GPU, GPU_BFLOAT, GPU_HALF, GPU_MATRIX, plans_for
from lapilli.target.record import BYTES, DOT, TEXELS, Target
from lapilli.target.records import Records
from lapilli.target.requirements import (
    BFLOAT16_UNITS,
    BFLOATS,
    BYTE_UNITS,
    DOT_PRODUCTS,
    HALF,
    MATRIX_UNITS,
    Requirements,
)
from lapilli.target.tuned import has_own, records_of

_TYPICAL_UNITS = {"discrete": 64, "integrated": 8}
"""Compute units of GPUs that do not say how many they have."""
_MATRIX_SHARED = 1 << 15
"""Bytes of work-group memory with which most tiles of the kernels for matrix units can be had."""


def of_device(device: Device, *, half: bool, matrix: bool) -> Target:
    """The target for one device.

    half: 16-bit storage is wanted; matrix: matrix units too. Where the device lacks them, the target does without."""
    limits = device.limits
    half = half and has_half(device)
    kind = kernels_for(device.type, limits)
    if kind == "gpu":
        target = (GPU_MATRIX if matrix and has_matrix_units(device) else GPU_HALF) if half else GPU
        target = replace(
            target,
            compute_units=limits.get("compute_units") or units_of(device.name) or _TYPICAL_UNITS.get(device.type, 16),
            shared_memory=limits["shared_memory"],
            invocations=limits["max_workgroup_invocations"],
            bfloat16_matrix=target.cooperative_matrix and _has_units(BFLOAT16_UNITS, device),
            dot=DOT_PRODUCTS.are_met_by(device),
            int8_matrix=matrix and _has_units(BYTE_UNITS, device),
        )
    elif kind == "cpu":
        target = CPU_HALF if half else CPU
    else:
        target = ANY
    target = replace(on_device(target, limits), between_groups=device.vendor_id not in UNORDERED)
    return replace(target, records=records_of(device))


def plans_here(stored: Collection[DType]) -> list[Target]:
    """The targets of a portable program, best first, the one that this machine's device takes with what was measured of it: `load`
    takes that device. stored: as for `plans_for`.

    Who compiles needs no device, and a process that has looked for one cannot give it to children that it forks: so it is looked
    for only if the user has records. Those that ship decide where the device is in use anyway."""
    if not has_own():
        return plans_for(stored)
    try:
        device = device_named()
    except LapilliError:
        return plans_for(stored)
    return with_records(plans_for(stored), device, records_of(device))


def with_records(targets: Sequence[Target], device: Device, records: Records) -> list[Target]:
    """The targets, the one that the device takes with these records; with dot products and without, which a program without codes
    has.
    """
    taken = taken_by(device, targets)
    name = taken.without_codes if taken is not None else None
    return [replace(t, records=records) if t.without_codes == name else t for t in targets]


def taken_by(device: Device, targets: Sequence[Target]) -> Target | None:
    """Of a portable program's targets, best first, the one that a device takes."""
    own = of_device(device, half=any(t.half for t in targets), matrix=True)
    names = {own.name, *([own.name + DOT] if own.dot else []), *([own.name + BYTES] if own.int8_matrix else [])}
    names |= {GPU_BFLOAT.name} if own.bfloat16_matrix else set()
    return next((t for t in targets if t.name in names), None)


def has_half(device: Device) -> bool:
    """Whether kernels can compute with halves, and keep them and bfloat16 in buffers."""
    return (HALF | BFLOATS).are_met_by(device)


def has_matrix_units(device: Device) -> bool:
    """Whether the kernels for matrix units run."""
    return _has_units(MATRIX_UNITS, device)


def _has_units(needed: Requirements, device: Device) -> bool:
    return (needed | Requirements(shared_memory=_MATRIX_SHARED)).are_met_by(device)


def kernels_for(type: str, limits: Mapping[str, Any]) -> str:
    """Which kernels suit a device of a type: "gpu", "cpu" (through texel buffers) or "any"."""
    if type != "cpu":
        return "gpu"
    return "cpu" if limits["texel_elements"] >= TEXELS else "any"


def on_device(target: Target, limits: Mapping[str, Any]) -> Target:
    """The target for one device, by its limits: values are bound in parts where it must be, and share buffers beyond those that a
    kernel may bind."""
    return replace(
        target,
        storage=limits["storage_buffer_range"] // 256 * 256,
        bindings=min(target.bindings, limits["storage_buffers"]),
    )
