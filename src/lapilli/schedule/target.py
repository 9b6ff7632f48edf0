"""What a plan is made for: a class of devices, not one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lapilli.ir.node import MOST_ELEMENTS, Node, nbytes

MAX_BINDINGS = 32
"""Of a kernel (docs/format.md)."""
PARTS = "-parts"
"""How the names of plans end that bind large values in parts."""
STORAGE = 1 << 27
"""Bytes of a storage buffer that every device can bind."""
TEXELS = 1 << 24
"""Elements of a texel buffer that a device must offer for plans that read through them."""


@dataclass(frozen=True)
class Target:
    """A class of devices, and how kernels for it look.

    kind: "gpu" (subgroup operations and shared memory) or "any" (no barriers, no subgroup operations: drivers of type CPU
    run these best, and every device can). half: 16-bit storage is there. cooperative_matrix: fp16 matrix units."""

    name: str
    kind: str
    half: bool = False
    texel: bool = False  # vectors are read through uniform texel buffers, which software drivers do best
    cooperative_matrix: bool = False
    multiprocessors: int = 132  # what tiles are chosen for
    storage: int = 0  # bytes of a storage buffer that a kernel binds at once (0: all), a multiple of 256
    open_parts: int = 1  # parts in which values are bound whose size has no bound

    def parts(self, node: Node) -> int:
        """In how many parts a kernel binds the memory of a value, unless it reads it through texel buffers. Nothing is bound in
        parts beyond the elements that kernels can count."""
        if not self.storage:
            return 1
        most = nbytes(node).bounds[1]
        wanted = self.open_parts if most is None else -(-most // self.storage)
        return max(1, min(wanted, MOST_ELEMENTS * node.dtype.size // self.storage))


GPU_MATRIX = Target("gpu-fp16-matrix", "gpu", half=True, cooperative_matrix=True)
GPU_HALF = Target("gpu-fp16", "gpu", half=True)
GPU = Target("gpu-fp32", "gpu")
CPU_HALF = Target("cpu-fp16", "any", half=True, texel=True)
CPU = Target("cpu-fp32", "any", texel=True)
ANY = Target("any-fp32", "any")


def in_parts(target: Target) -> Target:
    """The same class of devices, with values that are larger than what every device binds at once bound in parts."""
    return replace(target, name=target.name + PARTS, storage=STORAGE)


def on_device(target: Target, limits: Mapping[str, Any]) -> Target:
    """The target for one device, by its limits: values are bound in parts where it must be."""
    return replace(target, storage=limits["storage_buffer_range"] // 256 * 256)


def of_device(
    type: str, features: Mapping[str, bool], limits: Mapping[str, Any], *, half: bool, matrix: bool
) -> Target:
    """The target for one device, as `player.devices()` describes it: the one way from a device to its kernels.

    half: 16-bit storage is wanted; matrix: matrix units too. Where the device lacks them, the target does without."""
    half = half and features["float16"] and features["storage_16bit"]
    kind = kernels_for(type, limits)
    if kind == "gpu":
        target = (GPU_MATRIX if matrix and features["cooperative_matrix"] else GPU_HALF) if half else GPU
    elif kind == "cpu":
        target = CPU_HALF if half else CPU
    else:
        target = ANY
    return on_device(target, limits)


def kernels_for(type: str, limits: Mapping[str, Any]) -> str:
    """Which kernels suit a device of a type: "gpu", "cpu" (through texel buffers) or "any"."""
    if type != "cpu":
        return "gpu"
    return "cpu" if limits["texel_elements"] >= TEXELS else "any"


def for_values(target: Target, nbytes: int) -> Target:
    """The target for values of open size and up to so many bytes: there are few such targets, so that programs serve many sizes."""
    return replace(
        target, open_parts=1 << (-(-nbytes // target.storage) - 1).bit_length() if nbytes > target.storage > 0 else 1
    )


TARGETS = {t.name: t for t in (GPU_MATRIX, GPU_HALF, GPU, CPU_HALF, CPU, ANY)}


def plans_for(precision: str) -> list[Target]:
    """The targets of a portable program, best first. A half-precision program runs without 16-bit storage too."""
    return [GPU_MATRIX, GPU_HALF, CPU_HALF, GPU, ANY] if precision == "fp16" else [GPU, CPU, ANY]
