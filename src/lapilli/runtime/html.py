"""A program as notebooks show it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Protocol

from lapilli.names import printable
from lapilli.player import MemoryInfo
from lapilli.runtime.description import Description
from lapilli.runtime.devices import Device

_DISPATCHES = 200


class ShownMethod(Protocol):
    """What is shown of a method."""

    @property
    def inputs(self) -> Sequence[object]: ...

    @property
    def outputs(self) -> Sequence[object]: ...


class Shown(Protocol):
    """What is shown of a program."""

    @property
    def methods(self) -> Mapping[str, ShownMethod]: ...

    @property
    def device(self) -> Device: ...

    @property
    def plan(self) -> str: ...

    @property
    def description(self) -> Description: ...

    def memory(self) -> MemoryInfo: ...


def summary(program: Shown) -> str:
    """A table of what the program takes and gives and where it runs, and, folded, the kernels of its plan. HTML without scripts or
    styles of its own; names from the file are text.
    """
    rows: list[tuple[str, str]] = []
    for name, method in program.methods.items():
        title = "" if len(program.methods) == 1 else f"{name}: "
        rows.append((f"{title}inputs", _lines(method.inputs)))
        rows.append((f"{title}outputs", _lines(method.outputs)))
    rows.append(("device", program.device.name))
    rows.append(("plan", program.plan))
    memory = program.memory()
    rows.append(("device memory", f"{(memory.constants + memory.states + memory.arena + memory.io) * 1e-6:.1f} MB"))
    if program.description.states:
        rows.append(("states", _lines(program.description.states)))
    if program.description.host_operators:
        rows.append(("computed by torch", ", ".join(program.description.host_operators)))
    first = program.description.methods[0]
    plan = next((p for p in first.plans if p.name == program.plan), first.plans[0])
    shown = [(str(k), d.label, d.kernel) for k, d in enumerate(plan.run[:_DISPATCHES])]
    more = f"<p>{len(plan.run) - _DISPATCHES} more</p>" if len(plan.run) > _DISPATCHES else ""
    kernels = _table(shown, ("#", "operators", "kernel"))
    return (
        f"<div><strong>lapilli.Program</strong>{_table(rows)}"
        f"<details><summary>{len(plan.run)} kernels of a run</summary>{kernels}{more}</details></div>"
    )


def _lines(specs: Iterable[object]) -> str:
    return "\n".join(map(str, specs)) or "none"


def _table(rows: Sequence[Sequence[str]], names: Sequence[str] = ()) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        shown = (escape(printable(cell, keep="\n")).replace("\n", "<br>") for cell in cells)
        return "<tr>" + "".join(f'<{tag} style="text-align: left">{cell}</{tag}>' for cell in shown) + "</tr>"

    head = f"<thead>{line(names, 'th')}</thead>" if names else ""
    return f"<table>{head}<tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>"
