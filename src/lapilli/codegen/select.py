"""Which kernel serves a task."""

from __future__ import annotations

from lapilli.codegen import generic
from lapilli.codegen.kernel import Written
from lapilli.schedule.plan import Schedule


def write_all(s: Schedule) -> dict[int, Written]:
    """The kernel of every task, by the id of its result."""
    return {t.out.id: generic.write(t, s.layouts, s.target) for t in s.tasks}
