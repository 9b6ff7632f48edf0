"""Devices as poor as phones, on lavapipe: the words for the layer native/tests/limits_layer.cpp.

Each is like a class of devices, and no exact copy of one: what its drivers are known to say of limits and features, as far as
a program meets it. Subgroups are as large as lavapipe really makes them (LP_NATIVE_VECTOR_WIDTH), since no layer can change that.

`python tests/support/phones.py` prints their names, and with a name its environment, for a shell."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

LAYER = Path(__file__).parents[2] / "build" / "package" / "tests" / "limits"
EXPLICIT_LAYERS = [
    p for p in ("/usr/share/vulkan/explicit_layer.d", "/usr/local/share/vulkan/explicit_layer.d") if Path(p).is_dir()
]

_NO_16BIT = "-storage_16bit -float16 -int16 -VK_KHR_16bit_storage"
_NO_8BIT = "-storage_8bit -int8 -VK_KHR_8bit_storage"
_NO_64BIT = "-int64 -float64"
_OLD = (
    "api=0x401000 -subgroup_size_control -integer_dot_product -memory_model -VK_EXT_subgroup_size_control -VK_KHR_maintenance4 "
    "-VK_KHR_shader_integer_dot_product -VK_KHR_vulkan_memory_model -VK_EXT_pipeline_creation_feedback "
    "-VK_EXT_external_memory_host -VK_EXT_robustness2 -VK_KHR_shader_subgroup_extended_types"
)
"""Vulkan 1.1, with the extensions that came later left out."""


@dataclass(frozen=True)
class Phone:
    limits: str
    subgroup: int = 4
    """Invocations of a subgroup: 4, 8 or 16."""
    plans: frozenset[str] = frozenset({"any-fp32"})
    """The plans that it takes."""
    plainest: str = "any-fp32"
    """The plan for which tests of "any-fp32" are run: it takes every program of that one."""


PHONES = {
    # What Vulkan 1.1 requires of every device, and nothing else.
    "minimum": Phone(
        f"type=1 name=Minimum invocations=128 depth=64 shared_memory=16384 storage_range=0x8000000 push_constants=128 "
        f"storage_buffers=4 texel_buffers=16 texel_elements=65536 alignment=256 allocation=0x40000000 sets=4 "
        f"subgroup_operations=1 {_NO_16BIT} {_NO_8BIT} {_NO_64BIT} {_OLD} -VK_KHR_push_descriptor "
        f"-VK_KHR_shader_float_controls -VK_KHR_shader_float16_int8",
        plainest="any-fp32-few",
    ),
    # Adreno 6xx with drivers of Android 10: many invocations, 128 MiB at once, no bytes in buffers.
    "adreno": Phone(
        f"type=1 name=Like_Adreno invocations=1024 shared_memory=32768 storage_range=0x8000000 push_constants=128 "
        f"storage_buffers=24 texel_elements=65536 alignment=64 allocation=0x40000000 sets=4 {_NO_8BIT} {_NO_64BIT} {_OLD}",
        subgroup=16,
        plans=frozenset({"gpu-fp32", "gpu-fp16", "any-fp32"}),
    ),
    # Mali-G7x: subgroups of 16, halves and bytes, push constants of 128 bytes, work groups of 384.
    "mali": Phone(
        f"type=1 name=Like_Mali invocations=384 shared_memory=32768 storage_range=0x10000000 push_constants=128 "
        f"storage_buffers=35 texel_elements=65536 alignment=64 sets=4 {_NO_64BIT} -VK_EXT_external_memory_host",
        subgroup=16,
        plans=frozenset({"gpu-fp32", "gpu-fp16", "any-fp32"}),
    ),
    # PowerVR: 16 KiB of shared memory, no 16-bit types, no arithmetic across a subgroup.
    "powervr": Phone(
        f"type=1 name=Like_PowerVR invocations=512 shared_memory=16384 storage_range=0x8000000 push_constants=128 "
        f"storage_buffers=16 texel_elements=65536 alignment=32 sets=4 subgroup_operations=1 "
        f"{_NO_16BIT} {_NO_8BIT} {_NO_64BIT} {_OLD}",
        subgroup=8,
    ),
    # Apple's GPUs as MoltenVK describes them: the portability subset, 31 buffers, no size of subgroups to ask for.
    "apple": Phone(
        "type=1 vendor=0x106b name=Like_Apple driver=MoltenVK invocations=1024 shared_memory=32768 storage_range=0x10000000 "
        "push_constants=4096 storage_buffers=31 texel_elements=0x4000000 alignment=16 allocation=0x10000000 sets=8 "
        "required_subgroup_stages=0 -float64 -robust_access2 +VK_KHR_portability_subset",
        subgroup=16,
        plans=frozenset({"gpu-fp32", "gpu-fp16", "any-fp32"}),
    ),
    # Shared memory that is smaller than the standard's least, and few texels.
    "tiny": Phone(
        f"type=1 name=Tiny invocations=128 shared_memory=4096 storage_range=0x1000000 push_constants=128 storage_buffers=8 "
        f"texel_elements=4096 alignment=256 subgroup_operations=1 {_NO_16BIT} {_NO_8BIT} {_NO_64BIT} {_OLD} "
        f"-VK_KHR_push_descriptor",
        plainest="any-fp32-few",
    ),
}


def environment(name: str, more: str = "") -> dict[str, str]:
    """The variables of a process on such a device, under the validation layers, which see its limits. more: further words for
    the layer. The Vulkan driver must be lavapipe."""
    phone = PHONES[name]
    return {
        "LAPILLI_TEST_PHONE": name,
        "LAPILLI_TEST_LIMITS": f"{phone.limits} {more}".strip(),
        "LP_NATIVE_VECTOR_WIDTH": str(phone.subgroup * 32),
        "VK_LAYER_PATH": os.pathsep.join([*EXPLICIT_LAYERS, str(LAYER)]),
        "VK_INSTANCE_LAYERS": "VK_LAYER_KHRONOS_validation:VK_LAYER_LAPILLI_limits",  # the first is next to the application
        "LAPILLI_VALIDATION": "1",
    }


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(*PHONES)
    else:
        for key, value in environment(sys.argv[1]).items():
            print(f"export {key}={shlex.quote(value)}")
