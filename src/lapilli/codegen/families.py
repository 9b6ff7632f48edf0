"""The families of hand-written kernels: the targets and the operations each supports. Those that accept a task are its
candidates, each with the variants of its template; without records (`choices.py`) it gets the first. A task that none accepts
gets the generic loop kernel (`generic.py`).

A family is a file with a template, which names the operands that it reads and writes the kernel, and a function that checks
whether it fits an operation and packs operands as it needs them. To add one, write that file, and list it here before the
families that it beats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lapilli.codegen import choices, cpu, gpu, gpu_dot, gpu_matvec, gpu_turned
from lapilli.codegen.template import Context, KernelTemplate
from lapilli.ir.node import Convolution, Matmul
from lapilli.schedule.task import Task
from lapilli.target import Target
from lapilli.target.records import Question


@dataclass(frozen=True)
class Family:
    """name: as users see it, and in records. serves: whether a target has the features its kernels need. match: the template for
    an operation with resolved operands, or None.
    """

    name: str
    serves: Callable[[Target], bool]
    match: Callable[[Any, Task, Context], KernelTemplate | None]


def _gpu(target: Target) -> bool:
    return target.kind == "gpu"


def _matrix(target: Target) -> bool:
    return target.cooperative_matrix


def _dot(target: Target) -> bool:
    """Matrix units are faster than dot products, those of halves too."""
    return target.dot and not target.cooperative_matrix


def _bytes(target: Target) -> bool:
    return target.int8_matrix


def _any(target: Target) -> bool:
    return target.kind == "any"


FAMILIES: Mapping[type, Sequence[Family]] = {
    Matmul: (
        Family("a few rows of codes", _gpu, gpu_matvec.few_rows_of_codes),
        Family("one row by subgroups", _matrix, gpu_matvec.matvec),
        Family("bytes on matrix units", _bytes, gpu_dot.product_on_units),
        Family("tiles on matrix units, by fragments", _matrix, gpu.fragment_product),
        Family("tiles on matrix units", _matrix, gpu.matrix_product),
        Family("a few more rows of codes", _gpu, gpu_matvec.many_rows_of_codes),
        Family("tiles on matrix units, weights as they lie", _matrix, gpu.lying_product),
        Family("dot products", _dot, gpu_dot.product),
        Family("a few rows", _gpu, gpu_matvec.few_rows),
        Family("tiles", _gpu, gpu.product),
        Family("a few rows against an argument or a state", _any, cpu.lying),
        Family("register tiles", _any, cpu.product),
    ),
    Convolution: (
        Family("tiles of turned windows", _gpu, gpu_turned.turned),
        Family("depthwise", _gpu, lambda v, task, ctx: gpu.depthwise(v, ctx)),
        Family("patches on matrix units", _matrix, lambda v, task, ctx: gpu.patches(v, ctx)),
        Family("few channels on matrix units", _matrix, lambda v, task, ctx: gpu.first_layer(v, ctx)),
        Family("bytes of windows on matrix units", _bytes, lambda v, task, ctx: gpu_dot.convolution_on_units(v, ctx)),
        Family("dot products of windows", _dot, lambda v, task, ctx: gpu_dot.convolution(v, ctx)),
        Family("few channels", _gpu, lambda v, task, ctx: gpu.direct(v, ctx)),
        Family("tiles of windows", _gpu, lambda v, task, ctx: gpu.convolution(v, ctx)),
        Family("register tiles of small groups", _gpu, cpu.small_groups),
        Family("depthwise strips", _any, cpu.depthwise),
        Family("register tiles of pixels", _any, cpu.pointwise),
        Family("Winograd", _any, cpu.winograd),
        Family("register tiles of windows", _any, cpu.direct),
    ),
}

_OPERANDS: Mapping[tuple[type, str], Callable[[Task, Context], Any]] = {
    (Matmul, "gpu"): gpu.matmul_operands, (Matmul, "any"): cpu.matmul_operands,
    (Convolution, "gpu"): gpu.convolution_operands, (Convolution, "any"): cpu.convolution_operands,
}  # fmt: skip


_QUESTIONS: Mapping[type, Callable[[Any, Task, Context], Question]] = {
    Matmul: choices.of_product,
    Convolution: choices.of_convolution,
}


def template(task: Task, ctx: Context) -> KernelTemplate | None:
    """The template of a contraction: the one that was measured to be the fastest, or that of the first family that accepts it; None
    if there is none.
    """
    assert task.reduction is not None
    contraction = task.reduction.contraction
    kind = next((k for k in FAMILIES if isinstance(contraction, k)), None)  # attention ends with a product
    if kind is None:
        return None
    operands = _OPERANDS[kind, ctx.target.kind](task, ctx)
    if operands is None:
        return None
    question = _QUESTIONS[kind](operands, task, ctx)
    found = choices.choose(task, question, _candidates(kind, operands, task, ctx), ctx)
    if found is None or kind is not Matmul or ctx.target.kind != "gpu":
        return found
    return gpu_matvec.beside_tiles(found, operands, task, ctx)


def _candidates(kind: type, operands: Any, task: Task, ctx: Context) -> Iterator[choices.Candidate[KernelTemplate]]:
    def of(family: Family) -> Iterator[choices.Candidate[KernelTemplate]]:
        found = family.match(operands, task, ctx) if family.serves(ctx.target) else None
        if found is not None:
            yield from choices.named(family.name, found.variants(task, ctx))

    return choices.in_turn(map(of, FAMILIES[kind]))
