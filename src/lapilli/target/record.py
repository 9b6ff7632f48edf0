"""What a plan is made for: what a class of devices, or one device, has."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lapilli.ir.dtype import DType
from lapilli.ir.node import MOST_ELEMENTS, Node, nbytes
from lapilli.target.records import Records

MAX_BINDINGS = 32
"""Of a kernel (docs/format.md)."""
PARTS = "-parts"
"""How the names of plans end that bind large values in parts."""
FEW_BINDINGS = "-few"
"""How the names of plans end that bind no more buffers than every device can. The player knows it, too (core/program.cpp)."""
DOT, BYTES = "-dot", "-int8"
"""How the names of plans end, before PARTS, that are for codes: that use dot products of words, or matrix units for bytes."""
FEWEST_BINDINGS = 4
"""Storage buffers that every device lets a kernel bind."""
STORAGE = 1 << 27
"""Bytes of a storage buffer that every device can bind."""
TEXELS = 1 << 24
"""Elements of a texel buffer that a device must offer for plans that read through them."""
WORTH_PACKING = 1 << 24
"""Multiplications of a product from which matrix units pay for a copy of its left operand in packed rows; measured on an H100."""
MATRIX_SUBGROUP = 32
"""Invocations of the subgroups that the kernels for matrix units are written for."""
NONE = Records()


@dataclass(frozen=True)
class Target:
    """A class of devices or one of them, and how kernels for it look.

    name: of the plan. kind: "gpu" (subgroup operations and shared memory) or "any" (no barriers, no subgroup operations: drivers
    of type CPU run these best, and every device can). half: 16-bit storage is there. texel: vectors are read through uniform texel
    buffers, which software drivers do best, and subgroups have quads. cooperative_matrix: fp16 matrix units, 16 x 16 x 16;
    bfloat16_matrix: they multiply bfloat16, too. dot: kernels may use dot products of words, of four numbers of 8 bits each, which
    are fast; int8_matrix: matrix units multiply such numbers, too, 16 x 16 x 32 (with dot alone). compute_units: what tiles are
    chosen for. shared_memory: bytes of a work group. invocations: of a work group, at most. storage: bytes of a storage buffer
    that a kernel binds at once (0: all), a multiple of 256. open_parts: parts in which values are bound whose size has no bound.
    bindings: of a kernel, at most. between_groups: a work group that counts itself the last one of a dispatch sees what the others
    wrote. ranges: whether an open number of rows has several kernels, not one that somebody waits for. records: what was measured;
    where there is none, cost models decide."""

    name: str
    kind: str
    half: bool = False
    texel: bool = False
    cooperative_matrix: bool = False
    bfloat16_matrix: bool = False
    dot: bool = False
    int8_matrix: bool = False
    compute_units: int = 1
    shared_memory: int = 1 << 14
    invocations: int = 128
    storage: int = 0
    open_parts: int = 1
    bindings: int = MAX_BINDINGS
    between_groups: bool = True
    ranges: bool = True
    records: Records = NONE

    @property
    def without_codes(self) -> str:
        """The name of the plan that differs for programs with codes alone."""
        return self.name.replace(DOT, "").replace(BYTES, "")

    def multiplies(self, dtype: DType | None) -> bool:
        """Whether matrix units multiply values that are stored as this type."""
        if dtype is DType.bfloat16:
            return self.half and self.bfloat16_matrix
        return self.half and self.cooperative_matrix and dtype is DType.float16

    def parts(self, node: Node) -> int:
        """In how many parts a kernel binds the memory of a value, unless it reads it through texel buffers. Nothing is bound in
        parts beyond the elements that kernels can count."""
        if not self.storage:
            return 1
        most = nbytes(node).bounds[1]
        wanted = self.open_parts if most is None else -(-most // self.storage)
        return max(1, min(wanted, MOST_ELEMENTS * node.dtype.size // self.storage))


def bound_in_parts(target: Target) -> Target:
    """The same class of devices, with values that are larger than what every device binds at once bound in parts."""
    return replace(target, name=target.name + PARTS, storage=STORAGE)


def for_values(target: Target, nbytes: int) -> Target:
    """The target for values of open size and up to so many bytes: there are few such targets, so that programs serve many sizes."""
    return replace(
        target, open_parts=1 << (-(-nbytes // target.storage) - 1).bit_length() if nbytes > target.storage > 0 else 1
    )
