"""Times of a run as a picture in the terminal, like a flame graph on its head: the run, its kernels, and what each kernel computes.

A row is as wide as the run is long. Below a kernel lie its dispatches, those that take longest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lapilli.names import printable

if TYPE_CHECKING:
    from rich.text import Text

    from lapilli.runtime.program import KernelTime

_COLORS = ("#7a3b1d", "#2f5d7c", "#5a6b2a", "#6a3d6e", "#8a6a1f", "#2f6f62")


def bars(kernels: Sequence[KernelTime], title: str, width: int) -> list[Text]:
    """Three rows of `width` columns; none if nothing took time. Boxes begin with a line, so that they show without colors, too."""
    total = sum(kernel.seconds for kernel in kernels)
    if not total > 0 or width < 1:
        return []
    by_kernel: dict[str, list[KernelTime]] = {}
    for kernel in kernels:
        by_kernel.setdefault(kernel.kernel, []).append(kernel)
    sums = {name: sum(k.seconds for k in of) for name, of in by_kernel.items()}
    names = sorted(by_kernel, key=lambda name: -sums[name])
    colors = {name: _COLORS[k % len(_COLORS)] for k, name in enumerate(names)}
    inner = [
        (kernel.label, kernel.seconds, colors[name])
        for name in names
        for kernel in sorted(by_kernel[name], key=lambda kernel: -kernel.seconds)
    ]
    rows = ([(title, total, "#444444")], [(name, sums[name], colors[name]) for name in names], inner)
    return [_row(row, total, width) for row in rows]


def _row(boxes: Sequence[tuple[str, float, str]], total: float, width: int) -> Text:
    from rich.text import Text

    made = Text(no_wrap=True, end="")
    for name, (begin, end), color in zip(
        (name for name, _, _ in boxes),
        _columns([seconds for _, seconds, _ in boxes], total, width),
        (color for _, _, color in boxes),
        strict=True,
    ):
        if end > begin:
            label = printable(name)[: end - begin - 1]
            made.append(("▏" + label).ljust(end - begin), f"white on {color}")
    return made


def _columns(seconds: Sequence[float], total: float, width: int) -> Iterator[tuple[int, int]]:
    """Where each box begins and ends: rounded sums, so that rows agree and none is longer than another."""
    before = 0.0
    for part in seconds:
        yield round(before / total * width), min(width, round((before + part) / total * width))
        before += part
