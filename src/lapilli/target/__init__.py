"""What kernels are made for: `record.py` says what a target is, `portable.py` has those of files for any device, `device.py` makes
that of one device, `known.py` has devices that need not be there, `requirements.py` says what kernels need of a device.
No other folder has a number of a device."""

from lapilli.target.device import (
    has_half,
    has_matrix_units,
    kernels_for,
    of_device,
    on_device,
    plans_here,
    with_records,
)
from lapilli.target.known import KNOWN
from lapilli.target.portable import ANY, CPU, CPU_HALF, GPU, GPU_HALF, GPU_MATRIX, TARGETS, plans_for, portable
from lapilli.target.record import (
    MATRIX_SUBGROUP,
    MAX_BINDINGS,
    PARTS,
    STORAGE,
    TEXELS,
    WORTH_PACKING,
    Target,
    bound_in_parts,
    for_values,
)
from lapilli.target.requirements import (
    HALF,
    MATRIX_UNITS,
    NOTHING,
    QUADS,
    SUBGROUP_SUMS,
    VOTES,
    Requirements,
    joined,
)

__all__ = [
    "ANY",
    "CPU",
    "CPU_HALF",
    "GPU",
    "GPU_HALF",
    "GPU_MATRIX",
    "HALF",
    "KNOWN",
    "MATRIX_SUBGROUP",
    "MATRIX_UNITS",
    "MAX_BINDINGS",
    "NOTHING",
    "PARTS",
    "QUADS",
    "STORAGE",
    "SUBGROUP_SUMS",
    "TARGETS",
    "TEXELS",
    "VOTES",
    "WORTH_PACKING",
    "Requirements",
    "Target",
    "bound_in_parts",
    "for_values",
    "has_half",
    "has_matrix_units",
    "joined",
    "kernels_for",
    "of_device",
    "on_device",
    "plans_for",
    "plans_here",
    "portable",
    "with_records",
]  # fmt: skip
