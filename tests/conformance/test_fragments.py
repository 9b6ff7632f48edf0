"""Products whose right operand is packed by fragments (codegen/fragments.py). Random ones: test_split_sums.py."""

from __future__ import annotations

from collections.abc import Callable

import as_gpu
import pytest
import torch
from torch import Tensor, nn

import lapilli
from lapilli.codegen import gpu, tiles
from lapilli.codegen.tiles import fragments_pay, matrix_tiles
from lapilli.target import TARGETS

UNITS = {torch.float16: ("gpu-fp16-matrix", 2**-10), torch.bfloat16: ("gpu-bf16-matrix", 2**-7)}
"""The plan for a type, and the largest error of a result by rounding to it, twice: what a product reads and what it stores."""


@pytest.fixture(autouse=True)
def _by_fragments(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path))
    as_gpu.on_any_device(monkeypatch.setattr)
    monkeypatch.setattr(gpu, "fragments_pay", lambda *_: True)
    monkeypatch.setattr(gpu, "WORTH_PACKING", 0)


class Product(nn.Module):
    """Of the given tensor, or of two."""

    def __init__(self, f: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self.f, self.w = f, nn.Buffer(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x, self.w)


CASES: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "rows along the sum": (lambda x, w: x @ w.t(), (33, 72), (50, 72)),
    "rows across it": (lambda x, w: x @ w, (33, 72), (72, 50)),
    "a part of the columns": (lambda x, w: x @ w[:, 3:43], (33, 72), (72, 50)),
    "every second row": (lambda x, w: x @ w[::2], (20, 36), (72, 50)),
    "batches": (lambda x, w: x @ w, (3, 20, 40), (3, 40, 24)),
    "one matrix for all batches": (lambda x, w: x @ w, (3, 20, 40), (40, 24)),
    "one element, one column": (lambda x, w: x @ w, (20, 1), (1, 1)),
    "primes": (lambda x, w: x @ w, (17, 131), (131, 37)),
    "no whole chunk": (lambda x, w: x @ w, (65, 1000), (1000, 16)),
    "columns first": (lambda x, w: x.t() @ w, (72, 40), (72, 50)),
}


def near(got: Tensor, x: Tensor, model: Product, dtype: torch.dtype) -> None:
    with torch.no_grad():
        wanted = model.f(x.double(), model.w.double())
        size = model.f(x.double().abs(), model.w.double().abs()).max()  # of what is added up
    assert float((got.double() - wanted).abs().max()) <= UNITS[dtype][1] * float(size)


@pytest.mark.parametrize("dtype", UNITS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_operands(name: str, dtype: torch.dtype) -> None:
    f, left, right = CASES[name]
    torch.manual_seed(len(name))
    model, x = Product(f, *right).to(dtype), torch.randn(left).to(dtype)
    with lapilli.compile(model, (x,), target=UNITS[dtype][0], fallback="error") as program:
        (plan,) = program.description.methods[0].plans
        near(program(x), x, model, dtype)
    assert [d.kernel for d in plan.load] == ["pack_fragments"], "once, when the program is loaded"


def test_operands_that_are_computed() -> None:
    """They are packed in each run."""
    torch.manual_seed(0)
    x, model = torch.randn(33, 72).half(), Product(lambda x, w: x @ (w * 2), 72, 50).half()
    with lapilli.compile(model.f, (x, model.w), target="gpu-fp16-matrix", fallback="error") as program:
        (plan,) = program.description.methods[0].plans
        for _ in range(2):
            model.w = nn.Buffer(torch.randn(72, 50).half())
            near(program(x, model.w), x, model, torch.float16)
    assert "pack_fragments" in [d.kernel for d in plan.run]


def of_open_rows(least: int) -> tuple[lapilli.Program, Product, Tensor]:
    """A program for any number of rows from `least` on, its model, and many rows."""
    torch.manual_seed(0)
    model, rows = Product(lambda x, w: x @ w.t(), 48, 72).half(), torch.export.Dim("rows", min=least, max=4096)
    x, shapes = torch.randn(300, 72).half(), ({0: rows},)
    return lapilli.compile(model, (x,), dynamic_shapes=shapes, target="gpu-fp16-matrix", fallback="error"), model, x


def test_an_open_number_of_rows() -> None:
    """Each range of rows has its tile, and all read the same packed operand."""
    program, model, x = of_open_rows(2)
    with program:
        (plan,) = program.description.methods[0].plans
        for count in (2, 3, 16, 17, 64, 129, 300):
            near(program(x[:count]), x[:count], model, torch.float16)
    assert [d.kernel for d in plan.load] == ["pack_fragments"] and len(plan.run) > 1


def test_steps_keep_weights_as_they_lie() -> None:
    """A number of rows that may be 1: kernels for one row read the same weights."""
    program, _, _ = of_open_rows(1)
    with program:
        (plan,) = program.description.methods[0].plans
    assert not plan.load


def test_methods_share_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another method reads is packed by columns, as it may be there: once, for both."""
    monkeypatch.setattr(gpu, "fragments_pay", lambda batch, m, *_: m >= 64)
    model, own = (nn.Linear(72, 48).half() for _ in range(2))
    few, many = torch.randn(16, 72).half(), torch.randn(64, 72).half()
    packed = {}
    for name, second in (("the same weight", model), ("another one", own)):
        with lapilli.compile({"few": (model, (few,)), "many": (second, (many,))}, target="gpu-fp16-matrix") as program:
            for method, of, x in (("few", model, few), ("many", second, many)):
                torch.testing.assert_close(program.methods[method](x), of(x), rtol=2**-9, atol=2**-8)
            packed[name] = [d.kernel for m in program.description.methods for d in m.plans[0].load]
    assert packed == {"the same weight": ["map"] * 2, "another one": ["map", "pack_fragments"]}


def test_the_invocations_of_a_tile_divide_its_loads() -> None:
    """What the kernel requires of tiles (gpu_matmul_coopmat); no tile of the menus is another."""
    found = [*tiles._MENU, *tiles._LARGE, *tiles._OTHERS, tiles._WIDE, tiles._DIVIDED, tiles._DECODING]
    found += [r.tile for r in (*tiles._RATES_OF_LARGE, *tiles._RATES_BY_FRAGMENTS)]
    for t in found:
        count = t.invocations
        assert t.bm * t.bk // 8 % count == t.bk * t.bn // 8 % count == count % (t.bk // 8) == t.bk // 16 % t.sk == 0, t
        assert t.bm % t.wm == t.bn % t.wn == t.wm // 16 % t.ep == 0, t


def test_where_they_pay() -> None:
    """Large products, and those that are worth a packing of their own. What an H100 took, us: 366 for 496; 366 and 44 for 496."""
    target = TARGETS["gpu-fp16-matrix"]
    sizes = {(4096, 4096, 4096): (True, True), (512, 2048, 8192): (True, False), (197, 768, 3072): (False, False)}
    for size, found in sizes.items():
        assert tuple(fragments_pay(1, *size, target, False, packing) for packing in (False, True)) == found
    assert str(matrix_tiles(1, 4096, 4096, 4096, target, False, fragments=True)[0]) == "64x256x64 of 64x64, in bands"
