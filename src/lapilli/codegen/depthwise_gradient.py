"""Gradients of depthwise convolutions' weights: a sum over all places of all images for each tap and channel
(kernels/depthwise_gradient.slang). It has few results, so parts of it come first, and a second kernel adds them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lapilli.codegen.cpu import are_countable
from lapilli.codegen.generic import BUSY
from lapilli.codegen.kernel import KernelSource, linear_groups
from lapilli.codegen.packing import dense_images, images
from lapilli.codegen.template import Context, KernelTemplate, simple_task
from lapilli.codegen.wrapper import BatchMapping, Wrapper, source, with_sizes
from lapilli.ir.axes import fresh_axes
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, Load, load, rewrite
from lapilli.ir.integer import Int, as_int, ceildiv, of
from lapilli.ir.node import DepthwiseGradient, Node
from lapilli.lower.registry import LONG
from lapilli.schedule.task import Task

_SIZE = 64  # invocations in a work group
_TAPS = 8  # of an invocation at most
_TOGETHER = 4  # places of a row
_AT_ONCE = 2048  # invocations from which on a software driver is busy


@dataclass(frozen=True)
class _Parts(KernelTemplate):
    """note: with numbers for three dimensions. x, g: dense, channels last. rows: of all results of all images; per: of a part."""

    note: DepthwiseGradient
    x: Node
    g: Node
    sizes: tuple[Int, ...]
    outs: tuple[Int, ...]
    kernel: tuple[int, ...]
    channels: Int
    rows: Int
    per: Int

    @property
    def operands(self) -> list[Node]:
        return [self.x, self.g]

    def write(self, task: Task, ctx: Context) -> KernelSource:
        return with_sizes(ctx, lambda sizes_as_params: self._write(task, ctx, sizes_as_params))

    def _write(self, task: Task, ctx: Context, sizes_as_params: bool) -> KernelSource:
        assert task.reduction is not None
        part, tap, channel = task.reduction.axes
        note, taps = self.note, _taps(self.kernel)
        w = Wrapper(task, ctx, "depthwise_gradient", sizes_as_params)
        vec = w.epilogue(tap.extent, self.channels, BatchMapping([part], [tap], channel))
        source(w, "X", self.x, vector=True)
        source(w, "G", self.g, vector=True)
        count = part.extent * _invocations(self.kernel, self.channels)
        w.params(
            N=self.channels, rows=self.rows, per=self.per, count=count, OD=self.outs[0], OH=self.outs[1], OW=self.outs[2],
            D=self.sizes[0], H=self.sizes[1], W=self.sizes[2], SD=note.stride[0], SH=note.stride[1], PD=note.padding[0],
            PH=note.padding[1], PW=note.padding[2], DD=note.dilation[0], DH=note.dilation[1],
        )  # fmt: skip
        groups, group = linear_groups(count, _SIZE)
        numbers = [
            *self.kernel,
            taps,
            note.stride[2],
            note.dilation[2],
            _TOGETHER,
            int(note.dilation[2] == 1),
            int(vec),
        ]
        call = f"depthwiseGradient<X, G, E, {', '.join(map(str, numbers))}>(P.t, uint({group}) * {_SIZE} + li, gid.x);"
        written = w.finish(call, groups, (_SIZE, 1, 1), "depthwise_gradient", "DepthwiseGradientParams")
        written.flops = self.rows * self.outs[2] * self.channels * (2 * math.prod(self.kernel))
        return written


def _taps(kernel: Sequence[int]) -> int:
    """Taps of a line of the kernel that an invocation computes."""
    blocks = -(-kernel[-1] // _TAPS)
    return -(-kernel[-1] // blocks)


def _invocations(kernel: Sequence[int], channels: Int) -> Int:
    """Of a part."""
    lines = math.prod(kernel[:-1]) * -(-kernel[-1] // _taps(kernel))
    return ceildiv(channels, 4) * lines


def in_parts(task: Task, ctx: Context) -> list[Task] | None:
    """Two tasks for such a gradient: the parts, and their sum with what follows. None for other tasks."""
    old = task.reduction
    if old is None or not isinstance(old.contraction, DepthwiseGradient):
        return None
    note, (c, *taps) = old.contraction, old.axes
    missing = 3 - len(taps)
    kernel = tuple(a.extent.const for a in taps)
    note = replace(
        note, stride=(1,) * missing + note.stride, padding=(0,) * missing + note.padding,
        dilation=(1,) * missing + note.dilation,
    )  # fmt: skip
    whole = (1,) * missing + kernel
    one = (as_int(1),) * missing
    sizes, outs = (*one, *note.wide.shape[2:]), (*one, *note.narrow.shape[2:])
    rows = note.narrow.shape[0] * outs[0] * outs[1]
    per = _rows_of_part(rows, outs[2], whole, c.extent, ctx)
    parts = ceildiv(rows, per)
    if not are_countable([rows, parts * _invocations(whole, as_int(4))], ctx.target):
        return None
    x, g = (dense_images(*images(node, ctx), ctx).node for node in (note.wide, note.narrow))
    out = Node((parts, as_int(math.prod(kernel)), c.extent), DType.float32, f"{old.name}_parts", old.origin)
    ctx.dense(out)
    step = simple_task(out, task.origins[:1], "parts of a long sum")
    step.template = _Parts(note, x, g, sizes, outs, whole, c.extent, rows, per)
    (axis,), (part,) = fresh_axes((parts,), "p")
    tap = as_int(0)
    for a in taps:
        tap = tap * a.extent + of(a)
    body = load(out, [part, tap, of(c)])
    new = replace(old, name=f"{old.name}_sum", raxes=(axis,), body=body, contraction=None)

    def instead(ld: Load) -> Expr | None:
        return load(new, ld.index) if ld.node is old else None

    return [step, replace(task, value=rewrite(task.value, {}, instead), reduction=new, reduction_body=body)]


def _rows_of_part(rows: Int, places: Int, kernel: Sequence[int], channels: Int, ctx: Context) -> Int:
    """So few that the device has enough to do, and that sums of a part are not long; but so many that the parts take no more memory
    than the images.
    """
    busy = ctx.target.compute_units * BUSY if ctx.target.kind == "gpu" else _AT_ONCE
    parts, width = max(1, busy // max(1, _invocations(kernel, channels).const)), max(1, places.const)
    wanted = min(-(-rows.const // parts), LONG // width)
    return as_int(max(1, wanted, -(-math.prod(kernel) // width)))
