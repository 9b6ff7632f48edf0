"""Which kernels do a step of 1 to 32 sequences of a language model, on devices that need not be there: nothing may turn over to
something else where one sequence more is written.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quantized_tokens import weights

from lapilli.capture import capture
from lapilli.codegen.select import schedule_of, write_all
from lapilli.legalize.passes import prepare
from lapilli.llm.decoder import Decoder, Shape
from lapilli.lower import lower
from lapilli.schedule.plan import Schedule
from lapilli.target import KNOWN, METAL, TARGETS, Target, of_device
from lapilli.target.records import Records

CONTEXT, SEQUENCES = 512, 32
SHAPE = Shape(512, 256, 1, 8, 2, 64, 512, 1e-5, 1e5, CONTEXT, 64)


class Step(torch.nn.Module):
    def __init__(self, half: bool) -> None:
        super().__init__()
        cached = torch.float16 if half else torch.float32
        self.model = Decoder(SHAPE, weights(SHAPE, 32, True, 1), CONTEXT, cached, SEQUENCES)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model.step(tokens, positions)


def scheduled(target: Target, rows: int) -> tuple[Schedule, list[str]]:
    """The schedule of a step, and the names of its kernels."""
    with torch.no_grad():
        given = torch.zeros(rows, dtype=torch.int64)
        module = prepare(capture(Step(target.half).eval(), (given, given)))
    s = schedule_of(lower(module, "fp16" if target.half else "fp32", target.half), target)
    kernels = write_all(s)
    return s, [kernels[t.out.id].name for t in s.order.run]


def cache_sized(s: Schedule, rows: int) -> int:
    """How many values of a run are as large as the part of a cache that the rows read."""
    bound = rows * SHAPE.groups * CONTEXT * SHAPE.size
    stored = set(s.stored)
    return sum(
        t.out.id not in stored and all(n.value is not None for n in t.out.shape)
        and torch.Size(n.value or 0 for n in t.out.shape).numel() >= bound
        for t in s.order.run
    )  # fmt: skip


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("device", sorted(KNOWN.keys() - {METAL}))  # it gets the kernels of apple-m
def test_products_read_a_matrix_once_for_all_rows(device: str, half: bool) -> None:
    target = replace(of_device(KNOWN[device], half=half, matrix=True), records=Records())
    counts = {}
    for rows in (1, 2, 4, 8, 16, 32):
        s, names = scheduled(target, rows)
        assert cache_sized(s, rows) == 0, (rows, names)
        counts[rows] = len(names)
        products = [n for n in names if n in ("few_rows", "matvec", "matmul", "matmul_matrix", "lying")]
        if target.kind != "gpu":
            assert "lying" in products and len(products) >= 8
            continue
        assert names.count("attention_few") == 1, names
        few = [n for n in products if n in ("few_rows", "matvec")]
        # q, k, v, out, gate with up, down, and the head
        assert len(few) == (7 if rows <= 8 else 0), (rows, names)
        if rows > 8:
            assert len(products) == 8
    assert max(counts.values()) <= counts[1] + 12


def test_plans_for_any_cpu_read_caches_where_they_lie() -> None:
    for rows in (1, 2, 8, 32):
        s, names = scheduled(replace(TARGETS["cpu-fp32"], records=Records()), rows)
        assert names.count("lying") == 2 and cache_sized(s, rows) == 0, (rows, names)
