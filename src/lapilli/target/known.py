"""Devices that are known without being there: what their drivers report, as far as kernels depend on it.

Golden tests say what is compiled for each, `lapilli.compile(target="rtx-4090")` compiles for one, and the number of compute units
is looked up here where a driver does not say it. H100, lavapipe and SwiftShader were measured; the others are from makers' tables
and from public reports of drivers, and may differ by driver and version."""

from __future__ import annotations

from typing import Literal

from lapilli.runtime.devices import Device
from lapilli.target.record import MAX_BINDINGS

_ALL = 0xFFFFFFFF
_NVIDIA, _AMD, _INTEL, _QUALCOMM, _ARM, _APPLE, _MESA, _GOOGLE = (
    0x10DE, 0x1002, 0x8086, 0x5143, 0x13B5, 0x106B, 0x10005, 0x1AE0,
)  # fmt: skip


def _device(
    name: str, type: str, vendor: int, units: int, subgroup: tuple[int, int], *, shared: int = 32768, invocations: int = 1024,
    storage: int = _ALL, texels: int = 1 << 27, buffers: int = MAX_BINDINGS, half: bool = True, matrix: bool = False,
    bfloat: bool = False, bytes: bool = False, dot: bool = True, size_control: bool = True,
) -> Device:  # fmt: skip
    limits = {
        "max_workgroup_invocations": invocations, "shared_memory": shared, "storage_buffer_range": storage,
        "storage_buffers": buffers, "texel_elements": texels, "min_subgroup_size": subgroup[0],
        "max_subgroup_size": subgroup[1], "compute_units": units,
    }  # fmt: skip
    features = {
        "float16": half, "storage_16bit": half, "int16": half, "cooperative_matrix": matrix, "bfloat16_matrix": bfloat,
        "int8_matrix": bytes, "int8": True,
        "memory_model": matrix, "integer_dot_product": True, "packed_dot_product": dot, "subgroup_size_control": size_control,
    }  # fmt: skip
    return Device(0, name, type, "", "1.3.0", 0, vendor, 0, limits, features)


METAL = "metal"
"""What MoltenVK (1.4.2) says of Apple's GPUs, and of a value that differs among them, from A11 and M1 on, the least. A kernel of
Metal has 31 buffers, of which push constants and the sizes of buffers take one each. Subgroups have 32 invocations, but no kernel
may ask for that; there are no matrix units, and dot products of words are no faster."""
UNORDERED = {_APPLE}
"""Makers of GPUs on which work groups of a dispatch need not see each other's writes in order: Metal's atomics order nothing but
themselves."""

KNOWN: dict[str, Device] = {
    "h100": _device("NVIDIA H100", "discrete", _NVIDIA, 132, (32, 32), shared=49152, matrix=True, bfloat=True, bytes=True),
    "a100": _device("NVIDIA A100", "discrete", _NVIDIA, 108, (32, 32), shared=49152, matrix=True, bfloat=True, bytes=True),
    "rtx-4090": _device(
        "NVIDIA GeForce RTX 4090", "discrete", _NVIDIA, 128, (32, 32), shared=49152, matrix=True, bfloat=True, bytes=True
    ),
    "rdna2": _device("AMD Radeon RX 6800 XT", "discrete", _AMD, 72, (32, 64), shared=65536),
    "rdna3": _device("AMD Radeon RX 7900 XTX", "discrete", _AMD, 96, (32, 64), shared=65536, matrix=True),
    "arc": _device("Intel(R) Arc(TM) A770", "discrete", _INTEL, 32, (8, 32), shared=65536),
    "xe": _device("Intel(R) Iris(R) Xe Graphics", "integrated", _INTEL, 12, (8, 32), shared=65536),
    "adreno-6xx": _device(
        "Adreno (TM) 640", "integrated", _QUALCOMM, 2, (64, 128), storage=1 << 27, texels=1 << 16, buffers=24, half=False,
        dot=False,
    ),
    "adreno-7xx": _device("Adreno (TM) 740", "integrated", _QUALCOMM, 3, (64, 128), storage=1 << 27),
    "adreno-8xx": _device("Adreno (TM) 830", "integrated", _QUALCOMM, 3, (64, 128), storage=1 << 27),
    "mali-g7x": _device("Mali-G78", "integrated", _ARM, 20, (16, 16), invocations=512, texels=1 << 16),
    "apple-m": _device(
        "Apple M1", "integrated", _APPLE, 8, (32, 32), texels=1 << 26, buffers=29, dot=False, size_control=False
    ),
    METAL: _device(
        "Apple GPU", "integrated", _APPLE, 4, (32, 32), storage=1 << 28, texels=1 << 26, buffers=29, dot=False,
        size_control=False,
    ),
    "lavapipe": _device("llvmpipe", "cpu", _MESA, 1, (8, 8), storage=1 << 27, dot=False),
    "swiftshader": _device(
        "SwiftShader Device",
        "cpu",
        _GOOGLE,
        1,
        (4, 4),
        invocations=256,
        storage=1 << 30,
        texels=1 << 16,
        half=False,
        dot=False,
    ),
}  # fmt: skip
"""By the names that `lapilli.compile(target=…)` takes."""


def usual_precision(target: str | None) -> Literal["fp32", "fp16"]:
    """That of programs for a target where the caller asks for none: half for Apple's GPUs, as PyTorch's Metal backend computes."""
    return "fp16" if target == METAL else "fp32"


def units_of(name: str) -> int:
    """Compute units of a device by the name that its driver reports; 0 where it is not known."""
    return next((d.limits["compute_units"] for d in KNOWN.values() if d.name.lower() in name.lower()), 0)
