"""The kernels of a plan as a drawn graph: where each is, and what goes from which to which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from lapilli.cli.common import duration, size
from lapilli.runtime.description import Cost, Plan

WIDTH, HEIGHT = 150, 34
_ACROSS, _DOWN = WIDTH + 26, HEIGHT + 30
_LETTERS = 22


@dataclass(frozen=True)
class Vertex:
    """An input, an output, or a dispatch (with its number). column, row: its place."""

    name: str
    dispatch: int | None
    column: int
    row: int


@dataclass(frozen=True)
class Drawing:
    """edges: from vertex to vertex, by their numbers in `vertices`, with the buffer that goes there."""

    vertices: tuple[Vertex, ...]
    edges: tuple[tuple[int, int, int], ...]


def graph_of(plan: Plan) -> Drawing:
    """A vertex for each input, dispatch and output, below all that it reads from; no two in one place. Takes time and memory in
    proportion to the plan.
    """
    names: list[tuple[str, int | None]] = []
    edges: list[tuple[int, int, int]] = []
    rows: list[int] = []
    writer: dict[int, int] = {}  # the vertex that wrote a buffer last

    def add(name: str, dispatch: int | None, reads: Sequence[int]) -> int:
        sources = {buffer: writer[buffer] for buffer in dict.fromkeys(reads) if buffer in writer}
        number = len(names)
        names.append((name, dispatch))
        rows.append(1 + max((rows[source] for source in sources.values()), default=-1))
        edges.extend((source, number, buffer) for buffer, source in sources.items())
        return number

    for number, buffer in enumerate(plan.buffers):
        if buffer.kind == "input":
            writer[number] = add(buffer.name, None, ())
    for k, dispatch in enumerate(plan.run):
        # A buffer that is written may be written in part, so it goes on from who wrote it before.
        vertex = add(dispatch.label or dispatch.kernel, k, dispatch.buffers)
        writer.update(
            (buffer, vertex) for buffer, written in zip(dispatch.buffers, dispatch.written, strict=True) if written
        )
    for number, buffer in enumerate(plan.buffers):
        if buffer.kind == "output":
            add(buffer.name, None, (number,))
    return Drawing(_placed(names, rows, edges), tuple(edges))


def _placed(
    names: Sequence[tuple[str, int | None]], rows: Sequence[int], edges: Sequence[tuple[int, int, int]]
) -> tuple[Vertex, ...]:
    """Each under what it reads first, or in the next column that is free in its row."""
    above: dict[int, int] = {}
    for source, target, _ in edges:
        above.setdefault(target, source)
    columns: list[int] = []
    ends: dict[int, int] = {}  # of a row: the first column that is free, as are all after it
    for number, row in enumerate(rows):
        wanted = columns[above[number]] if number in above else 0
        column = max(wanted, ends.get(row, 0))
        ends[row] = column + 1
        columns.append(column)
    return tuple(
        Vertex(name, dispatch, column, row) for (name, dispatch), column, row in zip(names, columns, rows, strict=True)
    )


def drawn(plan: Plan, costs: Sequence[Cost], reasons: Sequence[str], times: Sequence[float] | None) -> str:
    """The graph as SVG with what is known of each dispatch, for the page's script.

    times: seconds of each dispatch; None: not measured. Then bytes decide how dark a box is.
    """
    graph = graph_of(plan)
    weights = list(times) if times is not None else [float(cost.bytes) for cost in costs]
    most = max(weights, default=0) or 1
    total = sum(times) if times else 0
    lines = []
    for source, target, buffer in graph.edges:
        a, b = graph.vertices[source], graph.vertices[target]
        x, y = a.column * _ACROSS + WIDTH / 2, a.row * _DOWN + HEIGHT
        u, v = b.column * _ACROSS + WIDTH / 2, b.row * _DOWN
        far = b.row - a.row > 1 and x == u  # beside the boxes between them
        bend = x + (WIDTH / 2 + 10) / 0.75 if far else x  # a curve goes three quarters of the way
        path = f"M{x:g} {y}C{bend:g} {y + 30},{bend if far else u:g} {v - 30},{u:g} {v}"
        lines.append(f'<path d="{path}"><title>{escape(_of_buffer(plan, buffer))}</title></path>')
    boxes = []
    for number, vertex in enumerate(graph.vertices):
        x, y = vertex.column * _ACROSS, vertex.row * _DOWN
        if vertex.dispatch is None:
            facts, kind, strength, sub = {"tensor": vertex.name}, "tensor", 0.0, ""
        else:
            k = vertex.dispatch
            facts = _facts(plan, k, costs[k], reasons[k])
            if times is not None:
                facts["time"] = f"{duration(times[k])} ({times[k] / total:.1%})" if total else duration(times[k])
            kind, strength = "kernel", weights[k] / most
            sub = facts.get("time", size(costs[k].bytes))
        text = "".join(f' data-{name.replace(" ", "-")}="{escape(value)}"' for name, value in facts.items())
        boxes.append(
            f'<g class="{kind}" tabindex="{0 if number == 0 else -1}" role="button" aria-label="{escape(vertex.name)}" '
            f'transform="translate({x} {y})"{text}><rect width="{WIDTH}" height="{HEIGHT}" rx="4"/>'
            f'<rect class="heat" width="{WIDTH * strength:.1f}" height="4" rx="2"/>'
            f'<text x="6" y="17">{escape(_short(vertex.name))}</text><text class="sub" x="6" y="29">{escape(sub)}</text></g>'
        )
    across = (max((v.column for v in graph.vertices), default=0) + 1) * _ACROSS
    down = (max((v.row for v in graph.vertices), default=0) + 1) * _DOWN
    return (
        f'<svg class="graph" viewBox="-10 -10 {across} {down}" data-width="{across}" data-height="{down}" role="group" '
        f'style="height: min(65vh, {max(down + 20, 260)}px)" '
        f'aria-label="kernels of plan {escape(plan.name)}"><g class="edges">{"".join(lines)}</g>{"".join(boxes)}</svg>'
    )


def _facts(plan: Plan, number: int, cost: Cost, reason: str) -> dict[str, str]:
    dispatch = plan.run[number]
    pairs = list(zip(dispatch.buffers, dispatch.written, strict=True))
    facts: dict[str, Any] = {
        "dispatch": number,
        "operators": dispatch.label,
        "kernel": dispatch.kernel,
        "work groups": "×".join(map(str, cost.groups)),
        "bytes": size(cost.bytes) if cost.bytes else "",
        "operations": f"{cost.flops * 1e-6:.2f} MFLOP" if cost.flops else "",
        "reads": ", ".join(_of_buffer(plan, b) for b, written in pairs if not written),
        "writes": ", ".join(_of_buffer(plan, b) for b, written in pairs if written),
        "why realised": reason,
    }
    return {name: str(value) for name, value in facts.items() if value != ""}


def _of_buffer(plan: Plan, number: int) -> str:
    buffer = plan.buffers[number]
    return f"{buffer.kind} {buffer.name}" if buffer.name else f"{buffer.kind} {number}"


def _short(name: str) -> str:
    return name if len(name) <= _LETTERS else name[: _LETTERS - 1] + "…"
