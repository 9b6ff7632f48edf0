"""What kernels require of a device: the record that a plan states in the file (`Requirements` in native/schema/program.fbs), and
that the player judges. Whoever asks beforehand whether a device will take a plan asks the same record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from lapilli.ir.dtype import DType
from lapilli.runtime.devices import Device
from lapilli.target.record import MATRIX_SUBGROUP

Size3 = tuple[int, int, int]


@dataclass(frozen=True)
class Requirements:
    """What a kernel, or all kernels of a plan, need.

    features, subgroup_operations: by their names in the file. invocations, workgroup: of a work group, and along its axes.
    shared_memory: bytes of a work group. subgroup_size: exactly so many invocations; 0: any. bindings: of a kernel. texel_elements:
    of a texel buffer. storage_range: bytes of a buffer that are bound at once."""

    features: frozenset[str] = frozenset()
    subgroup_operations: frozenset[str] = frozenset()
    invocations: int = 0
    workgroup: Size3 = (0, 0, 0)
    shared_memory: int = 0
    subgroup_size: int = 0
    bindings: int = 0
    texel_elements: int = 0
    storage_range: int = 0

    def __or__(self, other: Requirements) -> Requirements:
        """What both need. They may ask for different subgroup sizes: each kernel states its own."""
        x, y, z = (max(a, b) for a, b in zip(self.workgroup, other.workgroup, strict=True))
        most = {f.name: max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self) if f.type == "int"}
        return Requirements(
            self.features | other.features, self.subgroup_operations | other.subgroup_operations, workgroup=(x, y, z), **most
        )  # fmt: skip

    def are_met_by(self, device: Device) -> bool:
        """Whether a device has all that is known of it here: its features, memory, invocations and subgroups.

        The player judges the rest, and judges all of it again."""
        limits = device.limits
        return (
            all(device.features.get(name, False) for name in self.features)
            and self.invocations <= limits["max_workgroup_invocations"]
            and self.shared_memory <= limits["shared_memory"]
            and self.texel_elements <= limits["texel_elements"]
            and self.storage_range <= limits["storage_buffer_range"]
            and (self.subgroup_size == 0 or _has_subgroups_of(self.subgroup_size, device))
        )


def _has_subgroups_of(size: int, device: Device) -> bool:
    low, high = device.limits["min_subgroup_size"], device.limits["max_subgroup_size"]
    return low <= size <= high and (low == high or device.features["subgroup_size_control"])


def joined(requirements: Iterable[Requirements]) -> Requirements:
    """What all of them need."""
    total = Requirements()
    for r in requirements:
        total |= r
    return total


NOTHING = Requirements()
HALF = Requirements(frozenset({"storage_16bit", "float16"}))
"""Of kernels that compute with halves and keep them in buffers."""
BFLOATS = Requirements(frozenset({"storage_16bit", "int16"}))
"""Of kernels that keep bfloat16 in buffers."""
MATRIX_UNITS = Requirements(
    frozenset({"cooperative_matrix", "memory_model"}), frozenset({"basic"}), subgroup_size=MATRIX_SUBGROUP
)
"""Of kernels on matrix units, beside the memory of their tiles."""
BFLOAT16_UNITS = MATRIX_UNITS | Requirements(frozenset({"bfloat16_matrix"}))
"""Of those that multiply bfloat16."""
DOT_PRODUCTS = Requirements(frozenset({"integer_dot_product", "packed_dot_product"}))
"""Of kernels that multiply four numbers of 8 bits at once, which pays only where a device is made for it."""
BYTE_UNITS = MATRIX_UNITS | DOT_PRODUCTS | Requirements(frozenset({"int8_matrix", "int8"}))
"""Of those on matrix units that multiply numbers of 8 bits."""
UNITS = {DType.float16: MATRIX_UNITS, DType.bfloat16: BFLOAT16_UNITS}
"""By the type of the operands."""
QUADS = Requirements(subgroup_operations=frozenset({"basic", "quad"}))
"""Of kernels in which four neighbours exchange values."""
VOTES = Requirements(subgroup_operations=frozenset({"basic", "vote"}))
"""Of kernels in which a subgroup decides together."""
SUBGROUP_SUMS = Requirements(subgroup_operations=frozenset({"basic", "arithmetic"}), subgroup_size=MATRIX_SUBGROUP)
"""Of kernels that add up over a subgroup."""
