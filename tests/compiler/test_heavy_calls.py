"""Which products of halves take matrix units on the eager device, and what is compiled for them.

The plans are made for the target by its name, and nothing runs: the emulation of `test_matrix_kernels.py` shows that their
kernels are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lapilli.codegen.gpu_tiles import Tiles
from lapilli.eager import compile_call, heavy_calls
from lapilli.eager.call_signature import CallSignature, Range, TensorOperand, operand, range_of
from lapilli.eager.operator_schema import schema_of
from lapilli.target import CPU_HALF, GPU, GPU_BFLOAT, GPU_HALF, GPU_MATRIX, Target

aten = torch.ops.aten
half = torch.float16


def dense(*shape: int, dtype: torch.dtype = half) -> TensorOperand:
    return TensorOperand(shape, dtype, tuple(range(len(shape))))


def turned(*shape: int) -> TensorOperand:
    """A matrix (or many) that lies by columns."""
    return operand(torch.empty((*shape[:-2], shape[-1], shape[-2]), dtype=half, device="meta").transpose(-1, -2))


def product(op: Any, *leaves: Any) -> CallSignature:
    return CallSignature(schema_of(op), leaves)


def convolution(
    x: TensorOperand, w: TensorOperand, stride: int = 1, padding: int = 0, groups: int = 1, transposed: bool = False
) -> CallSignature:
    twice = (stride, stride), (padding, padding), (1, 1)
    return product(aten.convolution.default, x, w, None, *twice, transposed, (0, 0), groups)


@pytest.fixture
def matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device 0 is one with matrix units."""
    monkeypatch.setattr(heavy_calls, "target_of", lambda device, matrix=False: GPU_MATRIX if matrix else GPU_HALF)


N = 1024  # a square product of this size is heavy, in elements and in work
PLANS: dict[str, tuple[CallSignature, Target]] = {
    "mm": (product(aten.mm.default, dense(N, N), dense(N, N)), GPU_MATRIX),
    "mm of columns": (product(aten.mm.default, turned(N, N), turned(N, N)), GPU_MATRIX),
    "mm written to an argument": (product(aten.mm.out, dense(N, N), dense(N, N), dense(N, N)), GPU_MATRIX),
    "addmm": (product(aten.addmm.default, dense(N), dense(N, N), dense(N, N), 1, 1), GPU_MATRIX),
    "addmm in place": (product(aten.addmm_.default, dense(N, N), dense(N, N), dense(N, N), 1, 1), GPU_MATRIX),
    "bmm": (product(aten.bmm.default, dense(64, 128, 64), dense(64, 64, 128)), GPU_MATRIX),
    "baddbmm": (product(aten.baddbmm.default, dense(1), dense(64, 128, 128), dense(64, 128, 128), 1, 1), GPU_MATRIX),
    "one row, large weights": (product(aten.addmm.default, dense(N), dense(1, N), turned(N, N), 1, 1), GPU_MATRIX),
    "convolution": (convolution(dense(1, 64, 56, 56), dense(64, 64, 3, 3), padding=1), GPU_MATRIX),
    "a large factor that is light": (product(aten.mm.default, dense(N, 64), dense(64, 64)), GPU_HALF),
    "a small product": (product(aten.mm.default, dense(64, 64), dense(64, 64)), GPU_HALF),
    "a small convolution": (convolution(dense(1, 16, 14, 14), dense(16, 16, 3, 3), padding=1), GPU_HALF),
    "a convolution made light by its stride": (convolution(dense(1, 64, 56, 56), dense(64, 64, 3, 3), 4), GPU_HALF),
    "a transposed convolution": (convolution(dense(1, 64, 56, 56), dense(64, 64, 3, 3), transposed=True), GPU_HALF),
    "float32": (product(aten.mm.default, *[dense(N, N, dtype=torch.float32)] * 2), GPU_HALF),
    "bfloat16, of which the units know nothing": (
        product(aten.mm.default, *[dense(N, N, dtype=torch.bfloat16)] * 2), GPU_HALF),
    "mixed types": (product(aten.mm.default, dense(N, N), dense(N, N, dtype=torch.float32)), GPU_HALF),
    "not a product": (product(aten.add.Tensor, dense(N, N), dense(N, N), 1), GPU_HALF),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_plan_of_a_call(matrix_units: None, name: str) -> None:
    signature, expected = PLANS[name]
    choice = heavy_calls.choose(signature, 0)
    assert choice.target == expected
    assert choice.signature.ranges == (expected == GPU_MATRIX) and choice.signature.leaves == signature.leaves


def test_bfloat16_on_units_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heavy_calls, "target_of", lambda device, matrix=False: GPU_BFLOAT if matrix else GPU_HALF)
    for dtype in (half, torch.bfloat16):
        choice = heavy_calls.choose(product(aten.mm.default, *[dense(N, N, dtype=dtype)] * 2), 0)
        assert choice.target == GPU_BFLOAT and choice.signature.ranges


@pytest.mark.parametrize("target", [CPU_HALF, GPU])
@pytest.mark.usefixtures("nothing_seen")
def test_other_devices_keep_their_programs(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    monkeypatch.setattr(heavy_calls, "target_of", lambda device, matrix=False: target)
    assert heavy_calls.choose(PLANS["mm"][0], 0) == heavy_calls.CallTarget(target, PLANS["mm"][0], passing=True)


def gradients(size: int, channels: int = 64, dtype: torch.dtype = half, transposed: bool = False) -> CallSignature:
    """Of a 3x3 convolution."""
    image, weight = dense(1, channels, size, size, dtype=dtype), dense(channels, channels, 3, 3, dtype=dtype)
    twice = (1, 1), (1, 1), (1, 1)
    return product(
        aten.convolution_backward.default,
        image,
        image,
        weight,
        None,
        *twice,
        transposed,
        (0, 0),
        1,
        (True, True, False),
    )


@pytest.fixture
def nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_seen", "_exact"):
        monkeypatch.setattr(heavy_calls, name, set())


@pytest.mark.parametrize(
    "signature",
    [gradients(56), gradients(56, transposed=True), PLANS["a transposed convolution"][0], PLANS["float32"][0]],
    ids=["gradients", "gradients of a transposed one", "transposed", "float32"],
)
def test_what_is_compiled_for_sizes_that_come_again(
    matrix_units: None, nothing_seen: None, signature: CallSignature
) -> None:
    first, second, third = (heavy_calls.choose(signature, 0) for _ in range(3))
    assert first.passing and first.target == GPU_HALF and not first.signature.exact
    assert not second.passing and second.signature.exact
    assert second.target == (GPU_HALF if signature is PLANS["float32"][0] else GPU_MATRIX)
    assert third == second


@pytest.mark.parametrize("rows, exact", [(4096, True), (64, False)])
def test_reductions_of_many_elements(matrix_units: None, nothing_seen: None, rows: int, exact: bool) -> None:
    """Are compiled for sizes that come again, for the same device as before."""
    x = dense(rows, 384)
    for signature in (
        product(aten.sum.dim_IntList, x, (0,), False),
        product(aten._log_softmax_backward_data.default, x, x, 1, half),
    ):
        first, second = (heavy_calls.choose(signature, 0) for _ in range(2))
        assert not first.signature.exact and second.signature.exact is exact
        assert first.target == second.target == GPU_HALF


@pytest.mark.parametrize(
    "rows, terms, columns, exact",
    [(64, 4096, 64, True), (64, 1031, 10, True), (64, 512, 64, False), (2000, 1024, 8, False)],
)
@pytest.mark.parametrize("dtype", [half, torch.float32])
def test_long_sums_of_few_results(
    matrix_units: None, nothing_seen: None, rows: int, terms: int, columns: int, exact: bool, dtype: torch.dtype
) -> None:
    """As of the gradient of a small layer's weight: divided, which takes known sizes, when they come again."""
    signature = product(aten.mm.default, dense(rows, terms, dtype=dtype), dense(terms, columns, dtype=dtype))
    assert not heavy_calls.is_heavy(signature) or not exact
    first, second = (heavy_calls.choose(signature, 0) for _ in range(2))
    assert not first.signature.exact and second.signature.exact is exact


def test_layers_of_few_results_keep_open_sizes(matrix_units: None, nothing_seen: None) -> None:
    """They may have any number of rows."""
    layer = product(aten.mm.default, dense(64, 4096), turned(4096, 64))
    biased = product(aten.addmm.default, dense(64), dense(64, 4096), turned(4096, 64), 1, 1)
    for signature in (layer, biased, product(aten.mm.default, dense(64, 4096), dense(4096))):
        assert not any(heavy_calls.choose(signature, 0).signature.exact for _ in range(3))


def test_sums_of_more_terms_than_a_kernel_adds(matrix_units: None, nothing_seen: None) -> None:
    """Are divided, which takes known sizes: bounds of a size would not do."""
    signature = product(aten.mm.default, dense(2048, 40000), turned(40000, 64))
    first, second = (heavy_calls.choose(signature, 0) for _ in range(2))
    assert not (first.signature.ranges or second.signature.ranges) and second.signature.exact
    assert second.target == GPU_MATRIX


def test_long_sums_on_a_cpu_keep_open_sizes(monkeypatch: pytest.MonkeyPatch, nothing_seen: None) -> None:
    monkeypatch.setattr(heavy_calls, "target_of", lambda device, matrix=False: CPU_HALF)
    signature = product(aten.mm.default, dense(64, 4096), dense(4096, 64))
    assert not any(heavy_calls.choose(signature, 0).signature.exact for _ in range(3))


def test_norms_of_inference_keep_open_sizes(matrix_units: None, nothing_seen: None) -> None:
    """Prompts have any length."""
    signature = product(aten.native_layer_norm.default, dense(4096, 384), (384,), dense(384), dense(384), 1e-5)
    assert not any(heavy_calls.choose(signature, 0).signature.exact for _ in range(3))


def test_sizes_that_vary_share_programs(
    matrix_units: None, nothing_seen: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = [heavy_calls.choose(gradients(size), 0) for size in range(50, 60)]
    assert not any(choice.signature.exact for choice in choices)
    assert len({choice.signature.text() for choice in choices}) <= 2, "multiples of four, and others"
    monkeypatch.setattr(heavy_calls, "_MOST_EXACT", 2)
    choices = [heavy_calls.choose(gradients(size), 0) for size in range(50, 60)]
    assert [choice.signature.exact for choice in choices] == [True] * 2 + [False] * 8
    assert not any(choice.passing for choice in choices), "launches are kept again where no form becomes exact"
    assert heavy_calls.choose(gradients(50), 0).signature.exact


def test_gradients_without_much_work_or_units(matrix_units: None, nothing_seen: None) -> None:
    for _ in range(2):
        assert heavy_calls.choose(gradients(14, 16), 0) == heavy_calls.CallTarget(GPU_HALF, gradients(14, 16))
        single = heavy_calls.choose(gradients(56, dtype=torch.float32), 0)
    assert single.signature.exact and single.target == GPU_HALF


# --- how programs see sizes


def test_ranges_cover_all_sizes_two_to_a_doubling() -> None:
    for n in range(2, 600):
        found = range_of(n)
        assert found.least <= n <= found.most and n % found.unit == 0
        assert found.unit == (8 if n >= 16 and n % 8 == 0 else 1)
        assert all(range_of(k) == found for k in range(found.least, found.most + 1) if k % 8 == n % 8 == 0)
        assert found.least * 1.5 > found.most or n < 8
    assert range_of(4096) == Range(8, 4096, 6136) and range_of(4095) == Range(1, 3072, 4095)


def test_signatures_with_ranges() -> None:
    """Sizes of one range share programs, others do not; without ranges all multiples of four do."""

    def text(m: int, n: int, ranges: bool) -> str:
        return CallSignature(schema_of(aten.mm.default), (dense(m, n), dense(n, n)), ranges=ranges).text()

    assert text(200, 768, True) == text(248, 1016, True)
    different = {text(m, n, True) for m, n in ((200, 768), (197, 768), (256, 768), (200, 1024), (200, 769), (768, 768))}
    assert len(different) == 6
    assert text(200, 768, False) == text(204, 1024, False) != text(768, 768, False)
    assert text(197, 768, False) == text(199, 1024, False) != text(200, 768, False)


# --- what is compiled


def templates(monkeypatch: pytest.MonkeyPatch, signature: CallSignature) -> tuple[compile_call.Compiled, list[Any]]:
    """A program for matrix units, and the templates of its kernels."""
    found: list[Any] = []
    assemble = compile_call.assemble_graph  # type: ignore[attr-defined]

    def spied(*args: Any) -> Any:
        data, schedule = assemble(*args)
        found.extend(t.template for t in schedule.order.run if t.template is not None)
        return data, schedule

    monkeypatch.setattr(compile_call, "assemble_graph", spied)
    return compile_call.compile(signature, (), GPU_MATRIX), found


def eighths(compiled: compile_call.Compiled) -> list[tuple[int, int, int]]:
    """Operand, dimension and divisor of every symbol."""
    return [(k, d, unit) for _, k, d, unit in compiled.symbols]


@pytest.mark.parametrize("left", [dense, turned])
@pytest.mark.parametrize("right", [dense, turned])
def test_operands_are_read_as_they_lie(monkeypatch: pytest.MonkeyPatch, left: Any, right: Any) -> None:
    x, y = left(512, 768), right(768, 1024)
    compiled, (tiles,) = templates(monkeypatch, CallSignature(schema_of(aten.mm.default), (x, y), ranges=True))
    assert isinstance(tiles, Tiles) and tiles.matrix
    assert (tiles.rows.transposed, tiles.transposed_w) == (left is turned, right is turned)
    assert sorted(eighths(compiled)) == [(0, 0, 8), (0, 1, 8), (1, 1, 8)]
    assert [s.value for s in (tiles.m, tiles.k, tiles.n)] == [None] * 3


def test_sizes_that_are_no_eighths_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    signature = CallSignature(schema_of(aten.mm.default), (dense(509, 769), dense(769, 1021)), ranges=True)
    compiled, (tiles,) = templates(monkeypatch, signature)
    assert tiles.matrix and {unit for _, _, unit in eighths(compiled)} == {1}
    assert [node.name.rpartition("_")[2] for node in tiles.operands] == ["rows", "matrix"]
    assert all(node.shape[-1] % 8 == 0 for node in tiles.operands)


def test_channels_of_convolutions_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    x = operand(torch.empty((2, 64, 56, 56), dtype=half, device="meta").to(memory_format=torch.channels_last))
    signature = CallSignature(
        schema_of(aten.convolution.default), convolution(x, dense(96, 64, 3, 3)).leaves, ranges=True
    )
    compiled, (tiles,) = templates(monkeypatch, signature)
    assert tiles.matrix and tiles.rows.struct == "ConvParams"
    assert eighths(compiled) == [(0, 0, 1), (0, 2, 8)] and (tiles.k.value, tiles.n.value) == (576, 96)
