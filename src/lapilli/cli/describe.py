"""Describes a program as text, for the terminal and for the HTML page."""

from __future__ import annotations

from pathlib import Path

from lapilli.cli.common import size
from lapilli.runtime.description import INTERNAL, Description, Dispatch, MemoryPlan, Plan
from lapilli.runtime.interface import interfaces


def overview(program: Path, description: Description, values: dict[str, int]) -> list[tuple[str, str]]:
    """An overview of the file, as names and values."""
    method = description.methods[0]
    constants = sum(constant.size for constant in description.constants)
    found = [
        ("file", f"{program}, {size(program.stat().st_size)}, by {description.producer}"),
        ("inputs", "\n".join(map(str, method.inputs)) or "none"),
        ("outputs", "\n".join(map(str, method.outputs)) or "none"),
        ("operators", "\n".join(f"{i.name}: {i.report()}" for i in interfaces(description))),
        ("constants", f"{len(description.constants)}, {size(constants)}"),
        ("checked for overflow", ", ".join(c for m in description.methods for c in m.checks) or "nothing"),
        ("states", "\n".join(map(str, description.states)) or "none"),
        ("computed by torch", ", ".join(description.host_operators) or "nothing"),
        ("kernels", f"{len(description.kernels)}, {size(sum(kernel.code_size for kernel in description.kernels))}"),
        (
            "metadata",
            ", ".join(f"{key} ({len(value)} characters)" for key, value in shown_metadata(description).items())
            or "none",
        ),
    ]
    if values:
        found.insert(3, ("sizes shown", ", ".join(f"{name}={value}" for name, value in values.items())))
    return found


def shown_metadata(description: Description) -> dict[str, str]:
    """The metadata without the compiler's own, whose contents are shown otherwise."""
    return {key: value for key, value in description.metadata.items() if not key.startswith(INTERNAL)}


def requirements(plan: Plan) -> str:
    """The requirements of a plan on a device, in one line."""
    parts = []
    for name, value in plan.requirements.items():
        if name == "features":
            parts += value
        elif name == "subgroup_operations":
            parts += [f"subgroup operations: {operation}" for operation in value]
        elif name != "max_workgroup_size" and value and value != "any":
            parts.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(parts) or "any device"


def operators(dispatch: Dispatch) -> str:
    """What a dispatch computes, and whether the host does it instead."""
    return f"{dispatch.label}, by the host while it copies" if dispatch.rounds_input else dispatch.label


def arena(memory: MemoryPlan) -> str:
    """The memory plan in one line."""
    saved = f", {1 - memory.arena / memory.total:.0%} saved by sharing" if memory.total else ""
    return (
        f"arena {size(memory.arena)}; all its tensors {size(memory.total)}{saved}; most alive at once "
        f"{size(memory.lower_bound)}"
    )
