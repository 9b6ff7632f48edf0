"""Which products of the same rows one kernel computes together, and which not; decisions for devices that need not be there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from linear_chains import coded, of_bits
from torch import Tensor, nn
from torch.nn import functional as F

from lapilli.capture import capture
from lapilli.code_operators import DEQUANTIZE, UNPACK
from lapilli.codegen.coded import Coded
from lapilli.codegen.gpu_tiles import Tiles
from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.select import schedule_of, write_all
from lapilli.ir.expr import loads
from lapilli.ir.node import Node
from lapilli.legalize.passes import prepare
from lapilli.llm.decoder import Weight
from lapilli.lower import lower
from lapilli.schedule.plan import Schedule
from lapilli.schedule.task import Task
from lapilli.target import KNOWN, Target, of_device
from lapilli.target.records import Records

H100 = replace(of_device(KNOWN["h100"], half=True, matrix=True), records=Records())
Forward = Callable[[nn.Module, Tensor], object]


class Products(nn.Module):
    """Products of matrices of so many rows, and what a function makes of them."""

    def __init__(self, columns: tuple[int, ...], terms: int, forward: Forward, block: int = 64) -> None:
        super().__init__()
        r = np.random.default_rng(0)
        self.weights = nn.ModuleList(Weight.of(coded(n, terms, block, False, r)) for n in columns)
        self.bias = nn.Buffer(torch.ones(columns[0]))
        self.made = forward

    def __call__(self, x: Tensor) -> object:
        return super().__call__(x)

    def forward(self, x: Tensor) -> object:
        return self.made(self, x)

    def products(self, x: Tensor) -> list[Tensor]:
        return [F.linear(x, w().to(x.dtype)) for w in self.weights]


def turned(y: Tensor) -> Tensor:
    """Reads two columns for each result: no epilogue of a product does that."""
    return y[..., ::2] - y[..., 1::2]


def rotated(model: nn.Module, x: Tensor) -> list[Tensor]:
    assert isinstance(model, Products)
    return [turned(y) for y in model.products(x)]


def scheduled(
    model: nn.Module, rows: int, terms: int, target: Target = H100, dtype: torch.dtype = torch.float32
) -> tuple[Schedule, list[KernelSource]]:
    with torch.no_grad():
        module = prepare(capture(model.eval(), (torch.randn(rows, terms, dtype=dtype),)))
    s = schedule_of(lower(module, "fp16", True), target)
    kernels = write_all(s)
    return s, [kernels[t.out.id] for t in s.order.run]


def products(s: Schedule) -> list[Tiles]:
    """The templates of tiles, in order."""
    return [t.template for t in s.order.run if isinstance(t.template, Tiles)]


def matrices(s: Schedule) -> list[int]:
    """How many matrices each kernel of tiles multiplies."""
    return [len(t.matrices) for t in products(s)]


def test_products_of_the_same_rows_are_one() -> None:
    s, _ = scheduled(Products((4096, 1024, 1024), 4096, rotated), 32, 4096)
    (t,) = products(s)
    assert t.n == 6144 and len(t.matrices) == 3 and not t.paired
    assert str(t.tile) == "32x128x256 of 32x32 by 2, straight, sum in 4 parts"


def test_a_gate_and_what_it_lets_through_are_a_pair() -> None:
    def gated(model: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(model, Products)
        gate, up = model.products(x)
        return F.silu(gate) * up

    s, _ = scheduled(Products((14336, 14336), 4096, gated), 32, 4096)
    (t,) = products(s)
    assert t.paired and t.n == 14336
    assert [x.label for x in s.order.run] == ["pack rows", "linear + silu + mul"]


def test_each_row_count_up_to_64_joins_them() -> None:
    """One row more must not be a cliff: kernels for a few rows read what they need at once, too."""
    counts = {}
    for rows in (3, 4, 7, 8, 9, 16, 17, 32, 33, 64):
        s, _ = scheduled(Products((2048, 2048, 2048), 4096, rotated), rows, 4096)
        counts[rows] = matrices(s)
    assert all(found == [3] for found in counts.values()), counts


def test_a_sum_in_parts_has_a_counter_for_each_tile() -> None:
    s, kernels = scheduled(Products((4096, 1024, 1024), 4096, rotated), 32, 4096)
    (zero,) = [t for t in s.order.run if t.label == "zero"]
    (t,) = products(s)
    assert t.tile_count == 48 and zero.out.shape[0].value == 64  # of 256 bytes
    assert kernels[[k.name for k in kernels].index("matmul_matrix")].groups[2] == 4


def apart(
    forward: Forward, columns: tuple[int, ...] = (2048, 2048), target: Target = H100, block: int = 64
) -> list[int]:
    s, _ = scheduled(Products(columns, 2048, forward, block), 16, 2048, target)
    return matrices(s)


def test_results_of_a_model_stay_apart() -> None:
    def results(model: nn.Module, x: Tensor) -> list[Tensor]:
        assert isinstance(model, Products)
        one, other = model.products(x)
        return [one, turned(other)]

    s, _ = scheduled(Products((2048, 2048), 2048, results), 16, 2048, dtype=torch.float16)
    assert matrices(s) == [1, 1]


def test_what_a_hand_written_kernel_reads_stays_apart() -> None:
    def multiplied(model: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(model, Products)
        one, other = model.products(x)
        return one @ other.mT

    assert apart(multiplied) == [1, 1, 1]


def test_what_is_copied_for_such_a_kernel_stays_apart() -> None:
    """The copy reads the value where it was: columns that no vector divides, and heads that are padded."""

    def odd(model: nn.Module, x: Tensor) -> list[Tensor]:
        assert isinstance(model, Products)
        one, other = model.products(x)
        return [turned(one), x.mT @ other[:, 1:2002]]

    def heads(model: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(model, Products)
        q, k, v = (y.unflatten(-1, (-1, 20)).transpose(-2, -3) for y in model.products(x))
        return F.scaled_dot_product_attention(q, k, v)

    s, _ = scheduled(Products((2048, 2048), 2048, odd), 16, 2048, dtype=torch.float16)
    assert 2 not in matrices(s)
    s, _ = scheduled(Products((2560, 2560, 2560), 2560, heads), 16, 2560, dtype=torch.float16)
    assert set(matrices(s)) == {1}


def test_scales_that_are_computed_stay_apart() -> None:
    """They may be computed of another product of the same rows."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            codes = (torch.randint(-8, 8, (2048, 4, 512), dtype=torch.int8) for _ in range(2))
            self.codes = nn.ParameterList(nn.Parameter(c, requires_grad=False) for c in codes)
            self.scale, self.mixed = nn.Buffer(torch.rand(2048, 4, 1).half()), nn.Buffer(torch.rand(2048, 1024).half())

        def forward(self, x: Tensor) -> list[Tensor]:
            one = F.linear(x, (self.codes[0].to(x.dtype) * self.scale).flatten(1))
            scale = self.mixed @ turned(one)[:4].mT
            other = self.codes[1].to(x.dtype) * scale[..., None]
            return [turned(one), turned(F.linear(x, other.flatten(1)))]

    s, _ = scheduled(Scaled(), 16, 2048, dtype=torch.float16)
    assert len(matrices(s)) >= 2 and set(matrices(s)) == {1}


def test_products_of_other_rows_stay_apart() -> None:
    def one_after_the_other(model: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(model, Products)
        first, second = model.weights
        return turned(F.linear(torch.cat([turned(F.linear(x, first()))] * 2, -1), second()))

    assert apart(one_after_the_other) == [1, 1]


def test_matrices_that_no_tile_divides_stay_apart() -> None:
    assert apart(rotated, (2080, 2048)) == [1, 1]
    assert apart(rotated, (2048, 2080)) == [1, 1], "the last one, too"


def test_matrices_with_tiles_enough_stay_apart() -> None:
    assert apart(rotated, (20480, 20480)) == [1, 1]
    assert apart(rotated, (2048, 20480)) == [1, 1]


def test_codes_that_are_decoded_otherwise_stay_apart() -> None:
    assert apart(rotated, block=16) == [1, 1], "by way of shared memory"


def test_devices_that_bind_few_buffers_get_kernels_apart() -> None:
    """Two products have nine: rows, codes, scales, the result twice, parts of sums and their counters."""
    assert apart(rotated, target=replace(H100, bindings=9)) == [2]
    assert apart(rotated, target=replace(H100, bindings=8)) == [1, 1]


def test_devices_without_matrix_units_do_not_join_them() -> None:
    assert apart(rotated, target=replace(of_device(KNOWN["h100"], half=True, matrix=False), records=Records())) == [
        1,
        1,
    ]


def test_a_bias_of_one_of_them_is_added_to_its_columns() -> None:
    def biased(model: nn.Module, x: Tensor) -> list[Tensor]:
        assert isinstance(model, Products)
        one, other = model.products(x)
        return [turned(one + model.bias), turned(other)]

    s, _ = scheduled(Products((2048, 2048), 2048, biased), 16, 2048)
    assert matrices(s) == [2]


def test_readers_read_the_columns_of_their_product() -> None:
    s, _ = scheduled(Products((2048, 1024, 1024), 2048, rotated), 16, 2048)
    (whole,) = [t.out for t in s.order.run if isinstance(t.template, Tiles)]
    assert [n.value for n in whole.shape] == [16, 4096]
    readers = [t for t in s.order.run if whole in t.reads()]
    assert len(readers) == 3
    assert [last_column(t, whole) for t in readers] == [2047, 3071, 4095]


def last_column(task: Task, node: Node) -> int:
    """The last column of a value that a task reads."""
    found = [ld.index[-1].bounds[1] for ld in loads(task.value) if ld.node is node]
    return max(n for n in found if n is not None)


def test_layers_that_are_alike_have_one_kernel() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Products((2048, 2048), 2048, rotated) for _ in range(2))

        def forward(self, x: Tensor) -> list[Tensor]:
            found = []
            for layer in self.layers:
                y = layer(x)
                assert isinstance(y, list)
                found += y
                x = torch.cat(y, -1)
            return found

    s, kernels = scheduled(Two(), 16, 2048)
    assert matrices(s) == [2, 2]
    sources = [k.source for k in kernels if k.name == "matmul_matrix"]
    assert sources[0] == sources[1]


@pytest.mark.parametrize(
    ("kind", "statement"),
    [
        ("Q4_0", "4<1, 0>"),
        ("Q4_K", "4<0, 0>"),
        ("Q8_0", "8<1, 0>"),
        ("Q6_K", "8<0, 0>"),
        ("IQ4_NL", "4<1, 1>"),
        ("IQ4_XS", "4<0, 1>"),
        ("MXFP4", "4<0, 2>"),
    ],
)
def test_scales_that_are_no_halves_are_floats(kind: str, statement: str) -> None:
    """Those of K-quants are products, which a half would round for all codes of a block alike."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Weight.of(of_bits(2048, 2048, kind, np.random.default_rng(0)))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight().to(x.dtype))

    _, kernels = scheduled(One(), 16, 2048)
    assert f"pairs_of_codes{statement}(word" in kernels[-1].source


@pytest.mark.parametrize("block", [32, 128])
def test_zero_points_that_are_nibbles_are_read_once_for_a_vector(block: int) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Buffer(torch.randint(0, 256, (2048, 1024), dtype=torch.uint8))
            self.zeros = nn.Buffer(torch.randint(0, 256, (2048, 1024 // block), dtype=torch.uint8))
            self.scale = nn.Buffer(torch.rand(2048, 2048 // block))

        def forward(self, x: Tensor) -> Tensor:
            zeros = UNPACK(self.zeros, 0, 2048 // block)
            return F.linear(x, DEQUANTIZE(UNPACK(self.codes, 0, 2048), self.scale, zeros, [1, block], x.dtype))

    _, kernels = scheduled(One(), 16, 2048)
    assert "pairs_of_codes4<2, 0>(word" in kernels[-1].source


@pytest.mark.parametrize(
    ("low", "straight"), [(-1024, True), (-1025, False), (2032, True), (2033, False), (70001, False)]
)
def test_codes_are_numbers_that_halves_hold(low: int, straight: bool) -> None:
    class Far(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Buffer(torch.randint(0, 16, (2048, 32, 64), dtype=torch.uint8))
            self.scale = nn.Buffer(torch.rand(2048, 32, 1).half())

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, ((self.codes.int() + low).to(x.dtype) * self.scale.to(x.dtype)).flatten(1))

    s, kernels = scheduled(Far(), 16, 2048)
    (t,) = products(s)
    if isinstance(t.w, Coded) and t.w.bits == 4:
        assert ("pairs_of_codes" in kernels[-1].source) is straight, t.w.low
        assert t.w.low == low
    else:
        assert not straight, t.w
