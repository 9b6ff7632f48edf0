"""The page of `lapilli inspect --html`: one file, which asks for nothing else. Its own script (page.js) alone may run there: what a
program's file says is text.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from lapilli.cli.common import size
from lapilli.cli.describe import arena, operators, overview, requirements
from lapilli.cli.graph import drawn
from lapilli.runtime.description import INTERNAL, Description, MemoryPlan, Plan

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --accent: #3b6ea5; }
body { font: 14px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
h1, p, summary, td { overflow-wrap: anywhere; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
td, th { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { position: sticky; top: 0; background: Canvas; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
@media (min-width: 700px) { td:first-child { white-space: nowrap; } }
@media (max-width: 700px) { body { margin: .5rem auto; padding: 0 .5rem; } td, th { padding: .2rem .3rem; } }
@media (max-width: 700px) { td:not(.n) { min-width: 6rem; } th.n { white-space: normal; } }
tr.barrier td:first-child { box-shadow: inset 3px 0 var(--accent); }
details { margin: .6rem 0; } summary { cursor: pointer; }
svg { width: 100%; height: auto; background: var(--soft); border-radius: 4px; }
rect { stroke: Canvas; stroke-width: .6; } rect:hover { fill-opacity: 1; }
p.note { color: GrayText; }
.viewer { display: none; grid-template-columns: minmax(0, 1fr) 17rem; gap: .6rem; }
.viewer.live { display: grid; }
.viewer .tools { grid-column: 1 / -1; display: flex; flex-wrap: wrap; gap: .4rem; align-items: center; }
.viewer input { font: inherit; padding: .2rem .4rem; flex: 0 1 16rem; }
.viewer button { font: inherit; min-width: 2rem; }
.viewer svg { height: 65vh; touch-action: none; cursor: grab; }
.viewer dl { margin: 0; overflow: auto; max-height: 65vh; }
dt { color: GrayText; } dd { margin: 0 0 .4rem; overflow-wrap: anywhere; }
@media (max-width: 700px) { .viewer.live { grid-template-columns: minmax(0, 1fr); } }
.graph rect { fill: Canvas; stroke: #888; stroke-width: 1; } .graph .tensor rect { stroke-dasharray: 4 3; }
.graph rect.heat { fill: #c4572a; stroke: none; }
.graph text { font-size: 11px; fill: CanvasText; } .graph text.sub { fill: GrayText; }
.graph .edges path { fill: none; stroke: #888; stroke-width: 1.2; }
.graph .edges path:hover { stroke: var(--accent); stroke-width: 3; }
.graph g { cursor: pointer; outline: none; } .graph g:focus-visible rect:first-child { stroke: var(--accent); stroke-width: 3; }
.graph g.selected rect:first-child { stroke: var(--accent); stroke-width: 2.5; } .graph g.other { opacity: .25; }
svg.alive { height: 160px; } svg.alive path { fill: var(--accent); fill-opacity: .55; stroke: var(--accent); }
"""
SCRIPT = Path(__file__).with_name("page.js")


def page(
    program: Path,
    description: Description,
    memory: Sequence[MemoryPlan],
    values: dict[str, int],
    times: Mapping[str, Sequence[float]] | None = None,
) -> str:
    """HTML of a program: overview, then the graph, the memory plan and the dispatches of every plan.

    times: seconds of each dispatch, by the names of plans.
    """
    parts = [f"<h1>{escape(program.name)}</h1>", _table([], overview(program, description, values))]
    for plan, plan_memory in zip(description.methods[0].plans, memory, strict=True):
        parts.append(f"<h2>Plan {escape(plan.name)}</h2><p>Needs {escape(requirements(plan))}.</p>")
        seconds = (times or {}).get(plan.name)
        parts.append(_viewer(plan, plan_memory, description.reasons(plan), seconds))
        parts.append(f"<h3>Memory</h3><p>{escape(arena(plan_memory))}.</p>{_alive(plan, plan_memory)}")
        parts.append(_picture(plan, plan_memory))
        rows = [
            (
                str(i),
                operators(dispatch),
                dispatch.kernel,
                "×".join(map(str, cost.groups)),
                f"{cost.flops * 1e-6:.2f}" if cost.flops else "",
                f"{cost.bytes * 1e-6:.2f}" if cost.bytes else "",
                why,
                *([f"{seconds[i] * 1e6:.1f}"] if seconds is not None else []),
            )
            for i, (dispatch, cost, why) in enumerate(
                zip(plan.run, plan_memory.commands, description.reasons(plan), strict=True)
            )
        ]
        marked = {i for i, dispatch in enumerate(plan.run) if dispatch.barrier}
        parts.append(f"<h3>{len(rows)} dispatches, {len(marked)} barriers (marked at the left)</h3>")
        parts.append(
            _table(
                [
                    "#",
                    "operators",
                    "kernel",
                    "work groups",
                    "MFLOP",
                    "MB",
                    "why realised",
                    *(["µs"] if seconds else []),
                ],
                rows,
                marked,
            )
        )
        if plan.load:
            loads = [(str(i), dispatch.label, dispatch.kernel) for i, dispatch in enumerate(plan.load)]
            table = _table(["#", "operators", "kernel"], loads)
            parts.append(f"<details><summary>{len(loads)} dispatches once at load</summary>{table}</details>")
    kernels = [
        (k.name, "×".join(map(str, k.local)), str(k.subgroup_size or "any"), size(k.shared_size), size(k.code_size))
        for k in description.kernels
    ]
    parts.append("<h2>Kernels</h2>" + _table(["name", "work group", "subgroup", "shared memory", "code"], kernels))
    constants = [(c.name, c.dtype, "×".join(map(str, c.shape)), size(c.size)) for c in description.constants]
    parts.append(f"<h2>Constants</h2><details><summary>{len(constants)} constants</summary>")
    parts.append(_table(["name", "dtype", "shape", "size"], constants) + "</details>")
    metadata = [
        (key, value if len(value) < 400 else value[:400] + " …")
        for key, value in description.metadata.items()
        if not key.startswith(INTERNAL)
    ]
    parts.append("<h2>Metadata</h2>" + _table([], metadata))
    script = SCRIPT.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    head += f"<title>{escape(program.name)}</title><style>{STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}<script>{script}</script></body></html>\n'


def _viewer(plan: Plan, memory: MemoryPlan, reasons: Sequence[str], seconds: Sequence[float] | None) -> str:
    """The graph with what moves it, finds boxes in it, and says what is known of the selected one."""
    if not plan.run:
        return ""
    picture = drawn(plan, memory.commands, reasons, seconds)
    buttons = (
        ("in", "+", "larger"),
        ("out", "\N{MINUS SIGN}", "smaller"),
        ("all", "all", "all of it"),
        ("near", "1:1", "from the top"),
    )
    tools = "".join(f'<button data-does="{does}" title="{what}">{text}</button>' for does, text, what in buttons)
    tools += '<input type="search" placeholder="find: operator, kernel, buffer" aria-label="find"><output></output>'
    bar = "time" if seconds is not None else "bytes; a profile gives times"
    note = (
        "Tab into the graph; arrows go from box to box, with Shift they move the picture; + - 0 change its size, / finds, n is the "
        f"next one found. The bar in a box is its share of {bar}."
    )
    return (
        f'<h3>Graph</h3><div class="viewer"><div class="tools">{tools}</div>{picture}<dl class="facts" aria-live="polite"></dl>'
        f'</div><noscript><p>The graph needs the page\'s script.</p></noscript><p class="note">{note}</p>'
    )


def _alive(plan: Plan, memory: MemoryPlan) -> str:
    """Bytes of the arena that are in use during each dispatch."""
    n = len(plan.run)
    if not memory.arena or not n:
        return ""
    change = [0] * (n + 1)
    for placement in memory.placements:
        buffer = plan.buffers[placement.buffer]
        change[min(buffer.first, n - 1)] += placement.size
        change[min(buffer.last, n - 1) + 1] -= placement.size
    alive = list(itertools.accumulate(change[:-1]))
    width, height, most = 1000.0, 120.0, max(1, *alive)
    steps = "".join(
        f"H{k / n * width:.2f}V{height - a / most * height:.2f}H{(k + 1) / n * width:.2f}" for k, a in enumerate(alive)
    )
    top = alive.index(max(alive))
    title = f"at most {size(max(alive))}, in dispatch {top} ({plan.run[top].label})"
    return (
        f'<svg class="alive" viewBox="0 -4 {width:.0f} {height + 4:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}"><title>{escape(title)}</title><path d="M0 {height}{steps}V{height}Z"/></svg>'
        f'<p class="note">Bytes of tensors that are alive, from dispatch to dispatch: {escape(title)}.</p>'
    )


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], marked: set[int] | None = None) -> str:
    """A table with a header if there are names. Columns of numbers or sizes are aligned right."""
    numeric = [all(cell == "" or cell[0].isdigit() for cell in column) for column in zip(*rows, strict=True)] or [
        False
    ] * len(names)

    def row(cells: Sequence[str], tag: str) -> str:
        attributes = [' class="n"' if numeric[i] else "" for i in range(len(cells))]
        text = [escape(cell).replace("\n", "<br>") for cell in cells]
        return "".join(f"<{tag}{attributes[i]}>{text[i]}</{tag}>" for i in range(len(cells)))

    head = f"<tr>{row(names, 'th')}</tr>" if names else ""
    body = "".join(
        f"<tr{' class=barrier' if marked and i in marked else ''}>{row(cells, 'td')}</tr>"
        for i, cells in enumerate(rows)
    )
    return f'<div class="wide"><table>{head}{body}</table></div>'


def _picture(plan: Plan, memory: MemoryPlan) -> str:
    """The arena: run commands from left to right, addresses from the bottom up, one box per buffer."""
    if not memory.arena or not plan.run:
        return ""
    width, height, n = 1000.0, 280.0, len(plan.run)
    boxes = []
    ends: dict[int, int] = {}
    for placement in memory.placements:
        ends[placement.block] = max(ends.get(placement.block, 0), placement.offset + placement.size)
    bases = {block: sum(ends[other] for other in ends if other < block) for block in ends}
    top = max(1, sum(ends.values()))
    for placement in memory.placements:
        buffer = plan.buffers[placement.buffer]
        x, w = buffer.first / n * width, (buffer.last - buffer.first + 1) / n * width
        h = placement.size / top * height
        y = height - (bases[placement.block] + placement.offset) / top * height - h
        hue = placement.buffer * 137 % 360  # neighbours differ
        name = buffer.name or f"buffer {placement.buffer}"
        title = f"{name}: {size(placement.size)}, commands {buffer.first} to {buffer.last}"
        place = f'x="{x:.2f}" y="{y:.2f}" width="{w:.2f}" height="{h:.2f}"'
        boxes.append(
            f'<rect {place} fill="hsl({hue} 55% 55%)" fill-opacity=".75"><title>{escape(title)}</title></rect>'
        )
    note = '<p class="note">Left to right: dispatches. Bottom to top: addresses. Each box is a tensor during its lifetime.</p>'
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img">{"".join(boxes)}</svg>{note}'
