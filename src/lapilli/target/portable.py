"""The targets of files that run on any device: one plan for each class of devices, of which the player takes the best."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lapilli.ir.dtype import DType
from lapilli.target.record import BYTES, DOT, FEW_BINDINGS, FEWEST_BINDINGS, Target

_UNITS = 132
"""Compute units that tiles are chosen for where the device is not known: what the tiles were measured with. For fewer, larger tiles
would do as well; too large ones leave units idle, which costs more."""

GPU_MATRIX = Target("gpu-fp16-matrix", "gpu", half=True, cooperative_matrix=True,
                    compute_units=_UNITS, shared_memory=49152, invocations=256)  # fmt: skip
GPU_BFLOAT = replace(GPU_MATRIX, name="gpu-bf16-matrix", bfloat16_matrix=True)
GPU_HALF = Target("gpu-fp16", "gpu", half=True, compute_units=_UNITS, shared_memory=32768, invocations=256)
GPU = Target("gpu-fp32", "gpu", compute_units=_UNITS, shared_memory=32768, invocations=256)
GPU_HALF_DOT, GPU_DOT = (replace(t, name=t.name + DOT, dot=True) for t in (GPU_HALF, GPU))
GPU_MATRIX_BYTES, GPU_BYTES = (
    replace(t, name=t.name + BYTES, dot=True, int8_matrix=True, shared_memory=GPU_MATRIX.shared_memory)
    for t in (GPU_MATRIX, GPU)
)
CPU_HALF = Target("cpu-fp16", "any", half=True, texel=True, invocations=256)
CPU = Target("cpu-fp32", "any", texel=True, invocations=256)
ANY = Target("any-fp32", "any")
FEW = replace(ANY, name=ANY.name + FEW_BINDINGS, bindings=FEWEST_BINDINGS)

TARGETS = {
    t.name: t
    for t in (
        GPU_BFLOAT, GPU_MATRIX_BYTES, GPU_MATRIX, GPU_HALF_DOT, GPU_HALF, GPU_BYTES, GPU_DOT, GPU, CPU_HALF, CPU, ANY, FEW
    )
}  # fmt: skip


def portable(name: str) -> Target:
    """What every device of a class has. Raises KeyError for a name that is not in `TARGETS`."""
    return TARGETS[name]


def plans_for(stored: Collection[DType]) -> list[Target]:
    """The targets of a portable program, best first. stored: 16-bit floats of which it has values; it runs without 16-bit storage
    too. Those with dot products and matrix units for bytes are for programs with codes, the last for programs whose kernels bind
    more buffers than every device lets them; others leave them out.
    """
    if not stored:
        return [GPU_BYTES, GPU_DOT, GPU, CPU, ANY, FEW]
    units = {DType.bfloat16: [GPU_BFLOAT], DType.float16: [GPU_MATRIX_BYTES, GPU_MATRIX]}
    return [
        *(t for dtype, found in units.items() if dtype in stored for t in found),
        GPU_HALF_DOT,
        GPU_HALF,
        CPU_HALF,
        GPU,
        ANY,
        FEW,
    ]
