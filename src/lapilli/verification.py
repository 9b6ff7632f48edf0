"""Checks every kernel of a program against its part of the graph, evaluated by NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_leaves

from lapilli.capture import capture
from lapilli.capture.sources import Source
from lapilli.compiler import assemble, short_floats
from lapilli.errors import CompileError
from lapilli.ir.draw import Sampling
from lapilli.ir.dtype import DType
from lapilli.ir.expr import loads
from lapilli.ir.integer import Atom
from lapilli.ir.interpret import evaluate, updated
from lapilli.ir.narrow import as_numbers
from lapilli.ir.node import Constant, Graph, Map, Node, Reduce, State, Update, operands, reading
from lapilli.ir.recurrence import Recurrence
from lapilli.legalize.passes import prepare
from lapilli.player import NativeProgram
from lapilli.runtime.description import Description
from lapilli.schedule.layout import Layout
from lapilli.schedule.order import commands
from lapilli.schedule.plan import Schedule
from lapilli.schedule.task import Task
from lapilli.target import PARTS, TARGETS, plans_for

Array = npt.NDArray[Any]

_IN_MEMORY = {DType.bfloat16: "int16", DType.code: "uint8"}


@dataclass(frozen=True)
class Check:
    """The result for one kernel.

    Attributes:
        label: the operators that the kernel computes.
        kernel: its name.
        error: norm of the difference divided by the norm of the expected result; NaN if the two have NaN or infinity in
            different places.
    """

    label: str
    kernel: str
    error: float


def verify(
    model: Source,
    example_inputs: Any = None,
    precision: str = "fp32",
    target: str | None = None,
    device: str | int | None = None,
    inputs: Sequence[Any] | None = None,
    dynamic_shapes: Any = None,
) -> list[Check]:
    """Runs a model kernel by kernel on a device, and compares each with its IR evaluated by NumPy on the same values.

    A kernel reads what the device computed before it, so errors do not accumulate: the kernel at fault stands out. The steps
    of one algorithm (such as the transforms of Winograd's convolution) are checked together, at the last one. Slow: seconds
    to minutes.

    Args:
        model: as for `lapilli.compile`, but a single method.
        example_inputs: as for `lapilli.compile`.
        precision: as for `lapilli.compile`.
        target: name of the plan to check; None: the plan that the device would run.
        device: as for `lapilli.load`.
        inputs: flat list of tensors to run on; None: those of example_inputs.
        dynamic_shapes: as for `lapilli.compile`.

    Returns:
        a check for every kernel, in the order of the run; kernels that only pack weights come first.

    Raises:
        CompileError: there is no such target, or the model cannot be compiled as a whole.
    """
    exported = capture(model, example_inputs, dynamic_shapes)
    module = prepare(exported)
    given = tree_leaves(inputs if inputs is not None else exported.example_inputs)
    arrays = [_array(a) for a in given]
    if target is None:
        target = _taken(module, precision, device)
    elif target not in TARGETS:
        raise CompileError(f"target is {target!r}: choose one of {', '.join(TARGETS)}")
    data, schedules = assemble(module, precision, [TARGETS[target]])
    native = NativeProgram.load(data, device=device)
    try:
        taken = native.info()["methods"][0]["plan"]  # of large values there is one in parts as well
        return CheckedRun(data, native, next(s for s in schedules if s.target.name == taken), arrays).checks()
    finally:
        native.close()


def _taken(module: Any, precision: str, device: str | int | None) -> str:
    """The name of the plan that a device would run."""
    data, _ = assemble(module, precision, plans_for(short_floats(precision, module)))
    native = NativeProgram.load(data, device=device)
    try:
        return str(native.info()["methods"][0]["plan"]).removesuffix(PARTS)
    finally:
        native.close()


def _array(given: Any) -> Array:
    """A tensor as an array; bfloat16 as its bits."""
    if not isinstance(given, torch.Tensor):
        return np.asarray(given)
    tensor = given.detach().cpu()
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


class CheckedRun:
    """One run on the device. values: the results of its kernels by node id, in the shapes of the nodes."""

    def __init__(self, data: bytes, native: NativeProgram, schedule: Schedule, inputs: Sequence[Array]) -> None:
        self.native, self.schedule, self.inputs = native, schedule, list(inputs)
        plans = Description.of(data, verify=False).methods[0].plans
        self.plan = next(p for p in plans if p.name == schedule.target.name)
        self.sizes = sizes_of(schedule.graph, inputs)
        self.values: dict[int, Array] = {
            n.id: as_numbers(np.asarray(inputs[n.index]), n.dtype) for n in schedule.graph.inputs
        }
        self.values |= {n.id: np.asarray(n.numbers) for n in schedule.graph.nodes() if isinstance(n, State)}

    def checks(self) -> list[Check]:
        """All kernels, in the order in which they run."""
        found: list[Check] = []
        order = self.schedule.order
        for tasks, dispatches, loading in ((order.load, self.plan.load, True), (order.run, self.plan.run, False)):
            assert len(dispatches) == sum(t.commands for t in tasks)
            for task, numbers in zip(tasks, commands(tasks), strict=True):
                k, dispatch = numbers[-1], dispatches[numbers[-1]]
                buffer = dispatch.buffers[dispatch.written.index(True)]
                got = self.read(task.out, buffer, 0 if loading else k)
                self.values[task.out.id] = got
                want = self._meaning(task, dict(self.values))
                if want is not None:
                    found.append(Check(task.label, dispatch.kernel, difference(got, want)))
        return found

    def read(self, node: Node, buffer: int, command: int) -> Array:
        """A value from the device's memory."""
        window = self.schedule.windows.get(node.id)
        if window is not None:
            whole = self.values[window.whole.id] = self.read(window.whole, buffer, command)
            ends = zip(window.first, node.shape, strict=True)
            return whole[tuple(slice(*(int(i.evaluate(self.sizes)) for i in (a, a + n))) for a, n in ends)]
        shape = [int(s.evaluate(self.sizes)) for s in node.shape]
        layout = self.schedule.layouts[node.id]
        dtype = np.dtype(_IN_MEMORY.get(node.dtype, node.dtype.name))
        count = int(np.prod(shape))
        if not count or not self.plan.run:
            return as_numbers(np.zeros(shape, dtype), node.dtype)
        raw = self.native.read_buffer(self.inputs, command, buffer, -(-count * dtype.itemsize // 4) * 4)
        values = as_numbers(raw.view(np.uint8)[: count * dtype.itemsize].view(dtype), node.dtype)
        if node.dtype is DType.code:
            values = values.astype(np.float32) + node.least
        return _ordered(values, shape, layout)

    def _meaning(self, task: Task, values: dict[int, Array]) -> Array | None:
        """The result that a kernel should have stored; None for the inner steps of an algorithm."""
        for member in task.members:
            inside = self._meaning(member, values)
            assert inside is not None
            values[member.out.id] = inside
        out = task.out
        reduction = task.reduction
        if not isinstance(out, Map | Reduce):
            return None
        for read in _leaves(task):
            if isinstance(read, Constant):
                values[read.id] = evaluate(read, {}, {})
            elif isinstance(read, Map) and read.id not in values:  # weights that kernels decode have no memory
                self._seen(read, values)
        if task.partial:
            update = Update(self.schedule.stored[out.id], task.axes, task.store, task.value, task.within)
            return updated(update, values, self.sizes)
        if reduction is not None and isinstance(reduction.contraction, Recurrence | Sampling):
            for read in reduction.contraction.operands():
                self._seen(read, values)
            values[reduction.id] = evaluate(reduction, values, self.sizes)
            if isinstance(reduction.contraction, Recurrence):  # which nothing follows in its kernel
                return values[reduction.id]
        elif reduction is not None:
            assert task.reduction_body is not None
            whole = Reduce(
                reduction.shape, DType.float32 if reduction.dtype.is_float else reduction.dtype,
                axes=reduction.axes, raxes=reduction.raxes, op=reduction.op, body=task.reduction_body,
            )  # fmt: skip
            values[reduction.id] = evaluate(whole, values, self.sizes)
        if task.template is not None and task.template.second is not None:
            self._seen(task.template.second, values)
        over = tuple(a.extent for a in task.axes)
        result = evaluate(Map(over, out.dtype, axes=task.axes, body=task.value), values, self.sizes)
        stored = np.zeros([int(s.evaluate(self.sizes)) for s in out.shape], result.dtype)
        place: dict[Atom, Any] = dict(self.sizes)
        for k, a in enumerate(task.axes):
            place[a] = np.arange(result.shape[k]).reshape([-1 if d == k else 1 for d in range(result.ndim)])
        stored[tuple(np.broadcast_to(i.evaluate(place), result.shape) for i in task.store)] = result
        return stored

    def _seen(self, node: Node, values: dict[int, Array]) -> None:
        """Evaluates a node that was fused into its reader, and so is not in the device's memory."""
        if node.id not in values:
            for read in operands(node):
                self._seen(read, values)
            values[node.id] = evaluate(node, values, self.sizes)


def _leaves(task: Task) -> list[Node]:
    return [ld.node for e in (task.reduction_body, task.value) if e is not None for ld in loads(e)]


def sizes_of(graph: Graph, inputs: Sequence[Array]) -> Mapping[Atom, int]:
    """The values of the dynamic sizes, from the shapes of the inputs."""
    found: dict[Atom, int] = {}
    for symbol in graph.symbols.values():
        place = reading(symbol, graph.inputs)
        if place is not None:
            size = int(inputs[place.input.index].shape[place.axis])
            found[next(iter(symbol.atoms()))] = (size - place.offset) // place.factor
    return found


def _ordered(flat: Array, shape: Sequence[int], layout: Layout) -> Array:
    """Memory in a layout, as an array with the dimensions in their logical order."""
    stored = flat.reshape([shape[d] for d in layout.order])
    return stored.transpose(np.argsort(layout.order).tolist()) if shape else stored.reshape(())


def difference(got: Array, want: Array) -> float:
    """The norm of the difference in that of what is wanted; NaN if not the same elements are finite, or those are not equal."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("nan")
    size = float(np.linalg.norm(b[finite]))
    difference = float(np.linalg.norm(a[finite] - b[finite]))
    return difference / size if size else difference
