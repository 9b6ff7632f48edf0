"""Which kernels do attention whose keys and values lie in pages of a cache, on devices that need not be there."""

from __future__ import annotations

import pytest
from paged_attention import Paged, arguments
from torch import Tensor

from lapilli.capture import capture
from lapilli.codegen.select import schedule_of, write_all
from lapilli.legalize.passes import prepare
from lapilli.lower import lower
from lapilli.target import KNOWN, TARGETS, Target, of_device

FAST = {"attention", "attention_few", "attention_matrix"}


def kernels(m: Paged, given: tuple[Tensor, ...], target: Target) -> list[str]:
    s = schedule_of(lower(prepare(capture(m.eval(), given)), "fp16" if target.half else "fp32", target.half), target)
    made = write_all(s)
    return [made[t.out.id].name for t in s.order.run]


@pytest.mark.parametrize("lines, queries", [(1, 1), (8, 1), (1, 40), (8, 40)])
def test_nothing_is_copied(lines: int, queries: int) -> None:
    """Besides what keeps the new key and value there is one kernel, whatever the device, and what zeroes its counters."""
    targets = [
        TARGETS["cpu-fp32"],
        TARGETS["gpu-fp32"],
        TARGETS["gpu-fp16"],
        of_device(KNOWN["h100"], half=True, matrix=True),
    ]
    for target in targets:
        m = Paged(12, 3, 64, 64, 64, 9, 4, target.half)
        names = kernels(m, arguments(m, lines, 2, queries), target)
        assert len(FAST & {*names}) == 1 and len(names) <= 4, (target.name, names)
