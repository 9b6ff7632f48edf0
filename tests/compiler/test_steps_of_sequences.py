"""Which kernels do a step of 1 to 32 sequences of a language model, on devices that need not be there: nothing may turn over to
something else where one sequence more is written.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from quantized_tokens import weights

from lapilli.capture import capture
from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.select import schedule_of, write_all
from lapilli.legalize.passes import prepare
from lapilli.llm.blocks import BlockedMatrix, Parameter
from lapilli.llm.decoder import Decoder, Shape, Weight
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
        return self.model.step(tokens, positions, torch.arange(len(tokens)))


def scheduled(target: Target, rows: int) -> tuple[Schedule, list[KernelSource]]:
    """The schedule of a step, and its kernels."""
    with torch.no_grad():
        given = torch.zeros(rows, dtype=torch.int64)
        module = prepare(capture(Step(target.half).eval(), (given, given)))
    s = schedule_of(lower(module, "fp16" if target.half else "fp32", target.half), target)
    kernels = write_all(s)
    return s, [kernels[t.out.id] for t in s.order.run]


def cache_sized(s: Schedule, rows: int) -> int:
    """How many values of a run are as large as the part of a cache that the rows read."""
    bound = rows * SHAPE.groups * CONTEXT * SHAPE.size
    stored = set(s.stored)
    return sum(
        t.out.id not in stored and all(n.value is not None for n in t.out.shape)
        and torch.Size(n.value or 0 for n in t.out.shape).numel() >= bound
        for t in s.order.run
    )  # fmt: skip


@pytest.mark.part(8)
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("device", sorted(KNOWN.keys() - {METAL}))  # it gets the kernels of apple-m
def test_products_read_a_matrix_once_for_all_rows(device: str, half: bool) -> None:
    target = replace(of_device(KNOWN[device], half=half, matrix=True), records=Records())
    counts = {}
    for rows in (1, 2, 4, 8, 16, 32):
        s, kernels = scheduled(target, rows)
        names = [k.name for k in kernels]
        # The plainest kernels have no attention of their own; their products read keys and values that are gathered from pages.
        gathered = 2 if target.kind != "gpu" and not target.texel else 0
        assert cache_sized(s, rows) == gathered, (rows, names)
        counts[rows] = len(names)
        products = [n for n in names if n in ("few_rows", "matvec", "matmul", "matmul_matrix", "lying")]
        if target.kind != "gpu" and not target.texel:
            # q, k, v, scores, their weights with values, out, gate, up, down, and the head
            assert len(products) == 10, names
            continue
        attention = "attention_few" if target.kind == "gpu" else "attention"
        assert names.count(attention) == 1, names
        source = next(k.source for k in kernels if k.name == attention)
        assert (
            "SPANS = 1" in source and "SEARCH = 0" in source
        )  # which keys there are follows from a position, without a search
        if target.kind != "gpu":
            assert len(products) >= 7
            continue
        few = [n for n in products if n in ("few_rows", "matvec")]
        # q, k, v, out, gate with up, down, and the head
        most = 6 if target.cooperative_matrix else 8
        assert len(few) == (7 if rows <= most else 0), (rows, names)
        if rows > most:
            assert len(products) == 8
    assert max(counts.values()) <= counts[1] + 12


class Wide(torch.nn.Module):
    """A product of halves with a matrix of codes, as large models have them."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(256, 256)
        codes = torch.randint(0, 256, (columns, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        self.weight = Weight.of(
            BlockedMatrix(256, 64, codes.numpy(), Parameter(np.ones((columns, 4), np.float16)), bits=4, low=-8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(torch.relu(self.first(x)), self.weight())


@pytest.mark.parametrize("columns", [192, 4096])
@pytest.mark.parametrize("matrix", [False, True], ids=["tiles", "matrix"])
def test_a_matrix_is_decoded_once_for_eight_rows(columns: int, matrix: bool) -> None:
    """On matrix units, where decoding for each row would take longer than a step of sixteen."""
    target = replace(of_device(KNOWN["h100"], half=True, matrix=matrix), records=Records())
    for rows in (2, 6, 7, 8, 16):
        with torch.no_grad():
            module = prepare(capture(Wide(columns).eval(), (torch.zeros(rows, 256),)))
        s = schedule_of(lower(module, "fp16", True), target)
        kernels = write_all(s)
        name = [kernels[t.out.id].name for t in s.order.run][-1]
        few = rows <= (6 if matrix else 8)
        assert name == ("few_rows" if few else "matmul_matrix" if matrix else "matmul"), rows


def test_plans_for_any_cpu_read_caches_where_they_lie() -> None:
    for rows in (1, 2, 8, 32):
        s, kernels = scheduled(replace(TARGETS["cpu-fp32"], records=Records()), rows)
        names = [k.name for k in kernels]
        assert names.count("attention") == 1 and "lying" not in names and cache_sized(s, rows) == 0, (rows, names)
