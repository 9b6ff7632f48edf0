"""Finds tasks that only round an input to float16. Whoever gives that input can do so while copying it: half the bytes then
travel to the device, and no kernel runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, Load, narrow
from lapilli.ir.node import Input, Node
from lapilli.schedule.task import Task, readers


def rounded_inputs(tasks: Sequence[Task], elsewhere: set[int]) -> list[Node]:
    """The results of these tasks. elsewhere: results whose memory is no temporary of their own, by id."""
    count = readers(tasks)
    rounded = ((task.out, _rounded(task)) for task in tasks if task.out.id not in elsewhere)
    return [out for out, given in rounded if given is not None and count[given.id] == 1]


def _rounded(task: Task) -> Input | None:
    """The float32 input that a task rounds, each element to the same place."""
    if task.out.dtype is not DType.float16 or task.template is not None or task.row is not None:
        return None
    if task.reduction is not None or task.partial or task.within:
        return None
    read = _read(task.value)
    if read is None or not isinstance(read.node, Input):
        return None
    return read.node if read.index == task.store and read.node.shape == task.out.shape else None


def _read(value: Expr) -> Load | None:
    """The load of float32 that a value rounds to float16. Storing rounds as well."""
    for read in (value, *getattr(value, "args", ())):
        if isinstance(read, Load) and read.node.dtype is DType.float32:
            return read if value in (read, narrow(read, DType.float16)) else None
    return None
