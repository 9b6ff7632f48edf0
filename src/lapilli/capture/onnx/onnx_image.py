"""Boxes, regions and grids in images."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from lapilli.capture.onnx.onnx_registry import OnnxCall, operator
from lapilli.errors import CompileError

Tensor = torch.Tensor


@operator("GridSample")
def grid_sample(call: OnnxCall, x: Tensor, grid: Tensor) -> Tensor:
    modes = {
        "linear": "bilinear",
        "bilinear": "bilinear",
        "nearest": "nearest",
        "cubic": "bicubic",
        "bicubic": "bicubic",
    }
    mode = modes[call.get("mode", "linear" if call.version >= 20 else "bilinear")]
    if mode == "bicubic" and x.ndim == 5:
        raise CompileError("cubic sampling of volumes is not supported")
    return F.grid_sample(x, grid, mode, call.get("padding_mode", "zeros"), bool(call.get("align_corners", 0)))


@operator("AffineGrid")
def affine_grid(call: OnnxCall, theta: Tensor, _: Tensor) -> Tensor:
    size = call.numbers(1) or []
    corners = bool(call.get("align_corners", 0))
    axes = []
    for n in size[2:]:
        steps = torch.arange(n).to(theta.dtype)
        axes.append(steps * (2 / (n - 1)) - 1 if corners else (2 * steps + 1) / n - 1)
    points = torch.meshgrid(*axes, indexing="ij")
    base = torch.stack([*reversed(points), torch.ones_like(points[0])], -1)
    flat = base.reshape(1, -1, base.shape[-1])
    return torch.matmul(flat, theta.transpose(1, 2)).reshape([size[0], *size[2:], len(axes)])


@operator("RoiAlign")
def roi_align(call: OnnxCall, x: Tensor, rois: Tensor, batch: Tensor) -> Tensor:
    ratio = call.get("sampling_ratio", 0)
    if ratio <= 0:
        raise CompileError(
            "sampling_ratio is 0, so that the number of samples depends on the values of the regions; give a number"
        )
    height, width = call.get("output_height", 1), call.get("output_width", 1)
    half = (
        call.get("coordinate_transformation_mode", "half_pixel" if call.version >= 16 else "output_half_pixel")
        == "half_pixel"
    )
    boxes = rois * call.get("spatial_scale", 1.0) - (0.5 if half else 0.0)
    x0, y0, x1, y1 = boxes.unbind(1)
    wide, high = x1 - x0, y1 - y0
    if not half:
        wide, high = torch.clamp(wide, min=1.0), torch.clamp(high, min=1.0)

    def samples(begin: Tensor, extent: Tensor, bins: int) -> Tensor:
        at = (torch.arange(bins * ratio).to(x.dtype) + 0.5) / ratio
        return begin.unsqueeze(1) + at * (extent / bins).unsqueeze(1)

    ys, xs = samples(y0, high, height), samples(x0, wide, width)  # [regions, samples]
    planes = x.index_select(0, batch.to(torch.int64))
    rows, row_shares = _neighbours(ys, x.shape[2])
    columns, column_shares = _neighbours(xs, x.shape[3])
    parts: list[Any] = []
    count, channels = planes.shape[0], planes.shape[1]
    for r, rs in zip(rows, row_shares, strict=True):
        line = planes.gather(2, r.reshape(count, 1, -1, 1).expand(count, channels, r.shape[1], x.shape[3]))
        for c, cs in zip(columns, column_shares, strict=True):
            found = line.gather(3, c.reshape(count, 1, 1, -1).expand(count, channels, r.shape[1], c.shape[1]))
            share = rs.reshape(count, 1, -1, 1) * cs.reshape(count, 1, 1, -1)
            parts.append((found, share))
    if call.get("mode", "avg") == "max":  # of the four weighted neighbours, as the standard's reference has it
        weighted = torch.stack([f * s for f, s in parts]).amax(0)
        blocks = weighted.reshape(count, channels, height, ratio, width, ratio)
        return blocks.amax((3, 5))
    total: Any = 0
    for f, s in parts:
        total = total + f * s
    return total.reshape(count, channels, height, ratio, width, ratio).mean((3, 5))


def _neighbours(at: Tensor, size: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The two elements around each place, and their shares: none outside."""
    inside = (at >= -1.0) & (at <= size)
    at = torch.clamp(at, min=0)
    low = torch.clamp(torch.floor(at), max=size - 1)
    high = torch.clamp(low + 1, max=size - 1)
    share = torch.where(low >= size - 1, 0.0, at - low)
    zero = torch.where(inside, 1.0, 0.0)
    return [low.to(torch.int64), high.to(torch.int64)], [(1 - share) * zero, share * zero]


@operator("MaxRoiPool")
def max_roi_pool(call: OnnxCall, x: Tensor, rois: Tensor) -> Tensor:
    """The greatest element of each bin, whose rows and columns are those of a mask."""
    height, width = call.get("pooled_shape")
    scale = call.get("spatial_scale", 1.0)
    batch = rois[:, 0].to(torch.int64)
    corners = torch.floor(rois[:, 1:] * scale + 0.5)
    x0, y0, x1, y1 = corners.unbind(1)
    masks = []
    for begin, end, bins, size in ((y0, y1, height, x.shape[2]), (x0, x1, width, x.shape[3])):
        extent = torch.clamp(end - begin + 1, min=1) / bins
        steps = torch.arange(bins).to(x.dtype)
        first = torch.clamp(torch.floor(steps * extent.unsqueeze(1)) + begin.unsqueeze(1), 0, size)
        last = torch.clamp(torch.ceil((steps + 1) * extent.unsqueeze(1)) + begin.unsqueeze(1), 0, size)
        places = torch.arange(size).to(x.dtype)
        masks.append((places >= first.unsqueeze(2)) & (places < last.unsqueeze(2)))  # [regions, bins, size]
    planes = x.index_select(0, batch)
    rows = torch.where(masks[0].unsqueeze(1).unsqueeze(4), planes.unsqueeze(2), -torch.inf).amax(3)
    found = torch.where(masks[1].unsqueeze(1).unsqueeze(2), rows.unsqueeze(3), -torch.inf).amax(4)
    return torch.where(found == -torch.inf, 0, found)


@operator("NonMaxSuppression")
def non_max_suppression(
    call: OnnxCall, boxes: Tensor, scores: Tensor, _: Any = None, iou: Tensor | None = None, least: Tensor | None = None
) -> Tensor:
    """Box after box of the greatest score, each of which rules out those that it overlaps: [chosen, (batch, class, box)]."""
    most = call.number(2, 0)
    count = boxes.shape[1]
    if isinstance(most, int) and isinstance(count, int):
        most = min(most, count)
    if isinstance(most, int) and most <= 0:
        return torch.zeros([0, 3], dtype=torch.int64)
    if call.get("center_point_box", 0):
        cx, cy, w, h = boxes.unbind(2)
        x0, y0, x1, y1 = cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2
    else:
        a, b, c, d = boxes.unbind(2)
        y0, y1, x0, x1 = torch.minimum(a, c), torch.maximum(a, c), torch.minimum(b, d), torch.maximum(b, d)
    area = (x1 - x0) * (y1 - y0)
    threshold = torch.zeros([1]) if iou is None else iou.reshape(-1)[:1]
    lives = torch.ones_like(scores, dtype=torch.bool) if least is None else scores > least.reshape(-1)[:1]
    batches, classes = scores.shape[0], scores.shape[1]
    chosen = torch.full([batches, classes, most], -1, dtype=torch.int64)
    steps = torch.arange(most)

    def goes_on(turn: Tensor, lives: Tensor, chosen: Tensor, *rest: Tensor) -> Tensor:
        return (turn < chosen.shape[2]) & lives.any()

    def step(turn: Tensor, lives: Tensor, chosen: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        scores, x0, y0, x1, y1, area, threshold, steps = rest
        masked = torch.where(lives, scores, -torch.inf)
        best = masked.argmax(2, keepdim=True)  # [batch, class, 1]
        any_left = lives.any(2, keepdim=True)

        def of(x: Tensor) -> tuple[Tensor, Tensor]:
            rows = x.unsqueeze(1).expand(scores.shape)
            return rows, rows.gather(2, best)

        (ax0, bx0), (ay0, by0), (ax1, bx1), (ay1, by1), (aa, ba) = of(x0), of(y0), of(x1), of(y1), of(area)
        wide = torch.clamp(torch.minimum(ax1, bx1) - torch.maximum(ax0, bx0), min=0)
        high = torch.clamp(torch.minimum(ay1, by1) - torch.maximum(ay0, by0), min=0)
        shared = wide * high
        overlaps = shared > threshold * (aa + ba - shared)
        places = torch.arange(scores.shape[2])
        left = lives & ~overlaps & (places != best)
        entered = torch.where((steps == turn) & any_left, best, chosen)
        return turn + 1, left, entered

    carried = (torch.zeros([], dtype=torch.int64), lives.clone(), chosen)
    made = torch.ops.higher_order.while_loop(goes_on, step, carried, (scores, x0, y0, x1, y1, area, threshold, steps))[
        2
    ]
    where = torch.nonzero(made >= 0)
    return torch.cat([where[:, :2], made.reshape(-1)[
        (where[:, 0] * classes + where[:, 1]) * most + where[:, 2]
    ].unsqueeze(1)], 1)  # fmt: skip
