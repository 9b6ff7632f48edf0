"""Depthwise convolutions take in the 1x1 convolution that makes what they read, as in the blocks of mobile networks, on matrix
units: what is between them stays in shared memory (kernels/gpu_expanded_depthwise.slang)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lapilli.codegen import gpu, tiles
from lapilli.codegen.alike import Kernels
from lapilli.codegen.emit import NotVectorizable
from lapilli.codegen.fragments import SIDE, Fragments
from lapilli.codegen.gpu_tiles import Rows, Tiles
from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.packing import can_be_stored_as
from lapilli.codegen.template import Context, KernelTemplate
from lapilli.codegen.wrapper import SHORT, Wrapper, batched, on_units, source, source8
from lapilli.ir.axes import index_of
from lapilli.ir.expr import Expr, loads
from lapilli.ir.integer import Int, IntLike, as_int, ceildiv
from lapilli.ir.node import Convolution, Node
from lapilli.schedule.contraction import ConvolutionView
from lapilli.schedule.copies import insert_copies
from lapilli.schedule.layout import estimate
from lapilli.schedule.plan import Draft
from lapilli.schedule.task import Task, readers
from lapilli.target import MATRIX_SUBGROUP, UNITS, Target

_INVOCATIONS = 256
_SUBGROUPS = _INVOCATIONS // MATRIX_SUBGROUP
_MOST_TAPS = 25
"""Of a depthwise convolution whose taps are written out."""
_HELD = 9
"""Taps whose weights are in registers."""
_CHANNELS = (16, 32, 64)
_DEEPEST = 10
"""Fragments of weights of which an invocation has words in registers at once."""
_MOST_SUMS = 12
"""Fragments of a subgroup's sums, in registers too."""
_MOST_STEPS = 20
"""Fragments along the product's sum: all steps are written out, and more than 12 were not measured."""
_START, _OF_TAP, _OF_TERM = 3.5, 0.19, 2.7e-7
"""Microseconds that a depthwise kernel takes on an H200; more for each tap beyond those of 3x3, and for each multiplication."""
_WORTH = 0.97
"""With what part of the time of two kernels one is worth it."""


@dataclass(frozen=True)
class Band:
    """What a work group has: rows of the result, and channels; fragments of 16 pixels that it computes, fragments along the
    product's sum, and how many of these are in shared memory at once.
    """

    rows: int
    channels: int
    fragments: int
    steps: int
    depth: int
    taps: int

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.channels} channels, {self.depth} of {self.steps} steps"

    @property
    def sums(self) -> int:
        """Fragments of sums of a subgroup."""
        return -(-self.fragments // _SUBGROUPS) * (self.channels // SIDE)

    def time(self, width: int) -> float:
        """In microseconds on an H200, as fitted to 60 bands of MobileNetV2's shapes. width: of the result."""
        turns = -(-self.rows * width * (self.channels // 8) // _INVOCATIONS)
        loads = self.fragments * self.steps / _SUBGROUPS
        return 4.3 + 0.4 * self.sums + 0.35 * turns * max(self.taps / _HELD, 1) + 0.08 * loads

    @property
    def shared(self) -> int:
        """Bytes of shared memory, as the kernel counts them."""
        chunk = self.fragments * SIDE * (2 * self.depth + 1)
        right = _SUBGROUPS * (self.channels // SIDE if tiles.OPERANDS_STAY else 1) * MATRIX_SUBGROUP
        kept = self.fragments * SIDE * (self.channels // 8 + 1)
        passing = _SUBGROUPS * SIDE * (self.channels // 4 + 1)
        weights = 1 if self.taps <= _HELD else self.taps * (self.channels // 4)
        return 16 * (max(chunk + right, kept + passing) + weights)


def bands(v: ConvolutionView, channels_read: int, target: Target, most: float) -> list[Band]:
    """Those that take less than `most` microseconds, the one first that should be fastest."""
    n, h, w, out_h, out_w, c = (i.value for i in (v.n, v.h, v.w, v.out_h, v.out_w, v.channels))
    if n is None or h is None or w is None or out_h is None or out_w is None or c is None:
        return []
    steps = -(-channels_read // SIDE)
    if steps > _MOST_STEPS or target.invocations < _INVOCATIONS:
        return []
    found: dict[Band, float] = {}
    for channels in _CHANNELS:
        deepest = min(steps, _DEEPEST * SIDE // channels)
        for rows in sorted({-(-out_h // count) for count in range(1, out_h + 1)}):
            groups = n * (c // channels) * -(-out_h // rows)
            if c % channels != 0 or groups > target.compute_units:
                continue  # those that wait for others cost more than what is saved
            read = min((rows - 1) * v.stride[0] + v.kernel[0], h)
            band = Band(rows, channels, -(-read * w // SIDE), steps, steps, v.kernel[0] * v.kernel[1])
            fitting = (replace(band, depth=d) for d in range(deepest, 0, -1))
            made = next((b for b in fitting if b.shared <= target.shared_memory), None)
            if made is not None and made.sums <= _MOST_SUMS:
                found[made] = made.time(out_w)
    return sorted((b for b in found if found[b] < most), key=lambda b: found[b])


def _time_of_two(v: ConvolutionView, product: Tiles, target: Target) -> float:
    """Microseconds that the kernels of a product and of the depthwise convolution take without this."""
    assert isinstance(product.tile, tiles.MatrixTile)
    batch, m, n, k = (estimate(i) for i in (product.batch, product.m, product.n, product.k))
    taps, results = v.kernel[0] * v.kernel[1], estimate(v.rows * v.out_channels)
    terms = _OF_TERM * results * taps * tiles.MEASURED_UNITS / target.compute_units
    second = _START + _OF_TAP * max(taps - _HELD, 0) + terms
    return tiles.matrix_time(product.tile, batch, m, n, k, target.compute_units, False) + second


@dataclass(frozen=True)
class ExpandedDepthwise(KernelTemplate):
    """before: the product's task; rows: what it reads; w: its weights by fragments."""

    v: ConvolutionView
    before: Task
    rows: Rows
    k: Int
    w: Node
    taps: Node
    band: Band

    @property
    def operands(self) -> list[Node]:
        beside = [ld.node for ld in loads(self.before.value) if ld.node is not self.before.reduction]
        return list({n.id: n for n in (self.rows.node, self.w, self.taps, *beside)}.values())

    @property
    def variant(self) -> str:
        return str(self.band)

    def write(self, task: Task, ctx: Context) -> KernelSource:
        v, band = self.v, self.band
        w = Wrapper(task, ctx, "gpu_expanded_depthwise", sizes_as_params=False)
        w.epilogue(v.out_h * v.out_w, v.out_channels, batched(task), ahead=True, weights=True)
        w.values("B", "IExpanded", self.before, v.h * v.w, v.channels)
        source8(w, "X", self.rows.node, self.w.dtype)
        source8(w, "W", self.w, self.w.dtype)
        source(w, "D", self.taps, vector=True)
        w.params(
            H=v.h, W=v.w, OH=v.out_h, OW=v.out_w, C=v.channels, K8=ceildiv(self.k, 8), pixel8=self.rows.words["lda8"],
            image8=self.rows.words["lda8"] * v.h * v.w, offset8=self.rows.words["offset8"], padH=v.padding[0], padW=v.padding[1],
        )  # fmt: skip
        (kh, kw), (sh, sw) = v.kernel, v.stride
        call = (
            f"expanded_depthwise<{SHORT[self.w.dtype]}, X, W, B, D, E, {kh}, {kw}, {sh}, {sw}, {band.rows}, {band.channels}, "
            f"{band.fragments}, {band.depth}, {band.steps}>(P.t, gid, li);"
        )
        groups = (v.channels // band.channels * ceildiv(v.out_h, band.rows), as_int(1), v.n)
        written = w.finish(call, groups, (_INVOCATIONS, 1, 1), "expanded_depthwise", "ExpandedParams")
        written.flops = v.n * (v.h * v.w * v.channels * self.k * 2 + v.out_h * v.out_w * v.channels * (2 * kh * kw))
        written.shared = band.shared
        written.needs = UNITS[self.w.dtype]
        return written


def expand(tasks: Sequence[Task], made: Draft, ctx: Context, kernels: Kernels) -> list[Task]:
    """The tasks, without those 1x1 convolutions that only a depthwise one reads, which takes them in."""
    if not ctx.target.cooperative_matrix:
        return list(tasks)
    count = readers(insert_copies(tasks))  # kernels' own steps and copies read, too
    left = {t.out.id: t for t in tasks}
    for task in tasks:
        if not isinstance(task.template, gpu.Depthwise) or task.template.v.depths is not None:
            continue
        before = left.get(task.template.x.node.id)
        if before is None or before.out.id in made.kept or count[before.out.id] != 1:
            continue
        taken = _expanded(task, before, ctx, kernels)
        if taken is not None:
            left[task.out.id] = taken
            del left[before.out.id]
            ctx.withdraw(task)
    return list(left.values())


def _expanded(task: Task, before: Task, ctx: Context, kernels: Kernels) -> Task | None:
    """A depthwise convolution that computes what it reads; None if that needs two kernels, or is faster by two."""
    after, reduction, template = task.template, before.reduction, before.template
    assert isinstance(after, gpu.Depthwise)
    v = after.v
    if not isinstance(template, Tiles) or not template.matrix or reduction is None or len(reduction.axes) != 4:
        return None
    if not isinstance(reduction.contraction, Convolution) or before.row is not None or before.members or before.within:
        return None
    dtype = on_units(ctx.target, before.out)
    dilated = v.dilation != (1, 1) or v.kernel[0] * v.kernel[1] > _MOST_TAPS or not v.weight.dtype.is_float
    if dtype is None or dtype is not template.w.dtype or dilated or before.partial or not _is_dense(before, v, ctx):
        return None
    product = gpu.convolution_operands(before, ctx)
    if product is None or not product.is_pointwise or not can_be_stored_as(dtype, product.x.node):
        return None
    windows = gpu.windows(product, ctx, gpu.SHORTS, dtype)
    k = product.channels
    if windows is None or windows.rows.struct != "MatmulParams" or k.value is None:
        return None
    found = bands(v, k.value, ctx.target, _WORTH * _time_of_two(v, template, ctx.target))
    if not found:
        return None
    weight = gpu.window_weights(windows, ctx)

    def body(_: Int, k16: Int, n16: Int, k: Int, n: Int) -> tuple[list[Int], Expr]:
        return weight(as_int(0), k16 * SIDE + k, n16 * SIDE + n)

    sizes: list[IntLike] = [as_int(1), ceildiv(k, SIDE), v.channels // SIDE, SIDE, SIDE]
    w = ctx.packed("fragments", product.weight, sizes, body, dtype)
    w.template = Fragments(None, k, v.channels)
    made = ExpandedDepthwise(v, before, windows.rows, k, w, after.w, found[0])
    taken = replace(task, template=made, origins=[*before.origins, *task.origins])
    nodes = [task.out, *taken.reads()]
    if before.out in nodes:  # what follows the depthwise convolution reads it too
        return None
    if len(nodes) > ctx.target.bindings or any(ctx.target.parts(n) > 1 for n in nodes):
        return None
    try:
        kernels.of(taken)
    except NotVectorizable:
        return None
    return taken


def _is_dense(before: Task, v: ConvolutionView, ctx: Context) -> bool:
    """Whether a 1x1 convolution stores the whole image that the depthwise one reads, channels last, and nothing else."""
    assert before.reduction is not None
    n, c, h, w = map(index_of, before.reduction.axes)
    place = ((n * v.h + h) * v.w + w) * v.channels + c
    sizes = [a.extent for a in before.reduction.axes]
    return sizes == [v.n, v.channels, v.h, v.w] and ctx.layouts[before.out.id].offset(before.store) == place
