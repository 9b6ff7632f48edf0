"""The generated source of a kernel, and how to dispatch it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from lapilli.codegen.emit import BFLOAT, BufferBinding, KernelBuilder, NotVectorizable
from lapilli.errors import CompileError
from lapilli.ir.integer import Int, as_int, ceildiv, minimum
from lapilli.schedule.task import Task
from lapilli.target import BFLOATS, HALF, NOTHING, TEXELS, Requirements, Target

MAX_GROUPS = 65535  # per dimension, on every device
MAX_PARAMS = 32
"""Words of parameters that every device takes: 128 bytes."""


@dataclass
class KernelSource:
    """groups: work groups in x, y, z; params: the 32-bit words of the parameter block, in order; shared: bytes of a work group's
    memory; needs: what it requires beyond that; others: kernels that do the same for other sizes, for which it has no work groups.
    """

    task: Task
    source: str
    bindings: list[BufferBinding]
    params: list[Int]
    groups: tuple[Int, Int, Int]
    local: tuple[int, int, int]
    name: str
    flops: Int = field(default_factory=lambda: as_int(0))
    shared: int = 0
    needs: Requirements = NOTHING
    others: tuple[KernelSource, ...] = ()

    @property
    def every(self) -> tuple[KernelSource, ...]:
        """It and the others."""
        return (self, *self.others)

    def declare_shared(self, kind: str, name: str, size: int) -> None:
        """Declares an array in the memory of a work group, after those declared before. kind: float4, for example."""
        entry = '[shader("compute")]'
        self.source = self.source.replace(entry, f"groupshared {kind} {name}[{size}];\n{entry}", 1)
        element = 4 * (int(kind[-1]) if kind[-1].isdigit() else 1)
        self.shared += -(-element * size // 16) * 16  # each as the player counts it

    def requirements(self, half: bool) -> Requirements:
        """All that it requires of a device. half: 16-bit floats are stored as such."""
        x, y, z = self.local
        own = Requirements(
            invocations=x * y * z, workgroup=self.local, shared_memory=self.shared, bindings=len(self.bindings),
            texel_elements=TEXELS if any(b.texel for b in self.bindings) else 0,
        )  # fmt: skip
        halves = HALF if half and "half" in self.source else NOTHING
        return self.needs | own | halves | (BFLOATS if half and BFLOAT in self.source else NOTHING)


def linear_groups(count: Int, size: int) -> tuple[tuple[Int, Int, Int], str]:
    """The number of work groups for `count` invocations in groups of `size`, folded into two dimensions if necessary, and the
    expression for the linear index of the group.
    """
    groups = ceildiv(count, size)
    hi = groups.bounds[1]
    if hi is not None and hi <= MAX_GROUPS:
        return (groups, as_int(1), as_int(1)), "int(gid.x)"
    return (
        minimum(groups, MAX_GROUPS),
        ceildiv(groups, MAX_GROUPS),
        as_int(1),
    ), f"(int(gid.y) * {MAX_GROUPS} + int(gid.x))"


def finish(
    kernel: KernelBuilder, task: Task, body: str, groups: tuple[Int, Int, Int], local: tuple[int, int, int], name: str
) -> KernelSource:
    entry = kernel.entry(local, body)
    return KernelSource(
        task, kernel.header() + entry, kernel.bindings, [i for _, i in kernel.params], groups, local, name
    )


class KernelWriter(Protocol):
    """Writes the kernel of a task, `lanes` elements an invocation."""

    task: Task
    target: Target
    lanes: int

    def write(self) -> KernelSource: ...


def first_that_fits(writers: Iterable[Callable[[], KernelWriter]]) -> KernelSource:
    """The first kernel that can be written and has no more parameters and bindings than devices take. With one element an
    invocation, bindings are not counted: values that are read by fours and one by one have two."""
    for make in writers:
        try:
            writer = make()
            written = writer.write()
        except NotVectorizable:
            continue
        if len(written.params) <= MAX_PARAMS and (writer.lanes == 1 or len(written.bindings) <= writer.target.bindings):
            return written
    raise CompileError(
        f"{writer.task.out.name}: its kernel needs {len(written.params)} values that are computed of sizes that vary; at most "
        f"{MAX_PARAMS} are possible: fix some sizes"
    )
