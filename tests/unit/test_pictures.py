"""The drawn graph of a plan, and the bars of a profile."""

from __future__ import annotations

import random
import re

import pytest

from lapilli.cli.flame import bars
from lapilli.cli.graph import HEIGHT, WIDTH, drawn, graph_of
from lapilli.runtime.description import BufferSpec, Cost, Dispatch, Plan
from lapilli.runtime.program import KernelTime


def plan_of(seed: int, dispatches: int) -> Plan:
    """Dispatches that read and write any buffers: inputs, outputs, tensors between them, some of them in part."""
    rng = random.Random(seed)
    kinds = (
        ["input"] * rng.randint(0, 3) + ["output"] * rng.randint(1, 3) + ["arena"] * rng.randint(1, 9) + ["constant"]
    )
    rng.shuffle(kinds)
    buffers = tuple(BufferSpec(kind, f"<{kind}&{k}>", 4, 0, dispatches) for k, kind in enumerate(kinds))
    free = [k for k, kind in enumerate(kinds) if kind in ("output", "arena")]
    run = []
    for k in range(dispatches):
        written = rng.sample(free, rng.randint(1, min(2, len(free))))
        read = rng.choices(range(len(kinds)), k=rng.randint(0, 4))
        run.append(
            Dispatch(
                f"op{k} \"<b>'", f"kernel{rng.randint(0, 3)}", (1, 1, 1), False, (*read, *written),
                (*[False] * len(read), *[True] * len(written)), rng.random() < 0.1,
            )
        )  # fmt: skip
    return Plan(0, "p<", {}, buffers, (), tuple(run))


@pytest.mark.parametrize("seed", range(60))
def test_a_graph_has_everything_once_and_nothing_overlaps(seed: int) -> None:
    plan = plan_of(seed, [0, 1, 2, 7, 40, 300][seed % 6])
    graph = graph_of(plan)
    assert [v.dispatch for v in graph.vertices if v.dispatch is not None] == list(range(len(plan.run)))
    assert len({(v.column, v.row) for v in graph.vertices}) == len(graph.vertices)
    place = {v.dispatch: n for n, v in enumerate(graph.vertices)}
    last: dict[int, int] = {
        number: next(n for n, v in enumerate(graph.vertices) if v.dispatch is None and v.name == buffer.name)
        for number, buffer in enumerate(plan.buffers)
        if buffer.kind == "input"
    }
    wanted = set()
    for k, dispatch in enumerate(plan.run):
        wanted |= {(last[b], place[k], b) for b in dispatch.buffers if b in last}
        last |= {b: place[k] for b, written in zip(dispatch.buffers, dispatch.written, strict=True) if written}
    assert {e for e in graph.edges if graph.vertices[e[1]].dispatch is not None} == wanted
    for source, target, _ in graph.edges:
        assert graph.vertices[source].row < graph.vertices[target].row
    outputs = [k for k, b in enumerate(plan.buffers) if b.kind == "output"]
    assert sum(v.dispatch is None for v in graph.vertices) == len(outputs) + sum(
        b.kind == "input" for b in plan.buffers
    )

    svg = drawn(plan, [Cost((1, 1, 1), 0, 0)] * len(plan.run), [""] * len(plan.run), None)
    width, height = (int(n) for n in re.findall(r'data-(?:width|height)="(\d+)"', svg))
    for x, y in re.findall(r'transform="translate\((\d+) (\d+)\)"', svg):
        assert int(x) + WIDTH <= width and int(y) + HEIGHT <= height
    assert "<b>" not in svg and "<input" not in svg and svg.count("tabindex=") == len(graph.vertices)


def test_a_long_plan_is_drawn_in_proportion() -> None:
    """Twice the plan, about twice the picture: no edge or column for each pair."""
    sizes = [len(drawn(plan_of(1, n), [Cost((1, 1, 1), 1, 1)] * n, [""] * n, [1e-6] * n)) for n in (2000, 4000)]
    assert sizes[1] < 2.2 * sizes[0]


@pytest.mark.parametrize("width", [1, 7, 80, 200])
@pytest.mark.parametrize("times", [[1.0], [0, 0, 1], [1e-6] * 500, [3, 1, 2, 1, 1e-9], [5, 5, 5]])
def test_bars_are_as_wide_as_the_terminal(width: int, times: list[float]) -> None:
    kernels = [KernelTime(f"op{k}\x1b[2J", f"kernel{k % 2}", t, (1, 1, 1), 0, 0) for k, t in enumerate(times)]
    rows = bars(kernels, "a run", width)
    assert [len(row.plain) for row in rows] == [width] * 3 and not any("\x1b" in row.plain for row in rows)
    assert rows[0].plain.startswith("▏a run"[:width])


def test_bars_agree() -> None:
    """A kernel's box is over those of its dispatches, the longest first."""
    kernels = [KernelTime(name, kernel, t, (1, 1, 1), 0, 0) for name, kernel, t in
               (("a", "k", 1), ("b", "l", 6), ("c", "k", 3))]  # fmt: skip
    assert [row.plain for row in bars(kernels, "run", 20)] == [
        "▏run                ",
        "▏l          ▏k      ",
        "▏b          ▏c    ▏a",
    ]
    assert bars([], "run", 20) == [] == bars([KernelTime("a", "k", 0.0, (1, 1, 1), 0, 0)], "run", 20)
