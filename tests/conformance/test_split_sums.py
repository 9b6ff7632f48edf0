"""Products whose sums are divided into parts, because a device would have fewer tiles than compute units (codegen/split_k.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import as_gpu
import pytest
import random_sums
import torch
from agreement import Function
from taken_plan import taken_plan
from torch import Tensor
from torch.nn import functional as F

import lapilli
from lapilli.codegen import tiles
from lapilli.compiler import compile_to_bytes
from lapilli.runtime.description import Dispatch
from lapilli.target import TARGETS


@pytest.fixture(autouse=True)
def _on_any_device(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiles, "_SECOND", 0)
    as_gpu.on_any_device(monkeypatch.setattr)


def commands(program: lapilli.Program) -> tuple[Dispatch, ...]:
    """What a run of the program does on this device."""
    return taken_plan(program).run


def test_what_is_divided() -> None:
    """Sums of weights' gradients are; where tiles are many, or a second kernel would cost more than it saves, none is."""
    parts = {
        size: tiles.sum_parts(*size, TARGETS["gpu-fp32"])
        for size in ((24, 40, 4096), (24, 40, 4099), (4096, 4096, 4096), (24, 40, 1000))
    }
    assert parts[24, 40, 4096] == parts[24, 40, 4099] > 1 and parts[4096, 4096, 4096] == parts[24, 40, 1000] == 1


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "gradient of a weight": (lambda x, y: x.t() @ y, (rows(2048, 24), rows(2048, 40))),
    "linear": (lambda x, w, b: F.linear(x, w, b).relu(), (rows(20, 2048), rows(36, 2048), rows(36))),
    "rows of two axes": (lambda x, w: F.linear(x, w) * 2, (rows(3, 7, 1536), rows(20, 1536))),
    "columns in no whole vectors": (lambda x, w: x @ w, (rows(17, 1024), rows(1024, 13))),
    "one column": (lambda x, w: x @ w, (rows(19, 2048), rows(2048, 1))),
    "rows further apart": (lambda x, w: x[:, 8:] @ w, (rows(33, 2056), rows(2048, 24))),
    "from the second row on": (lambda x, y: x[1:].t() @ y[1:], (rows(2049, 16), rows(2049, 12))),
    "terms left over": (lambda x, y: x.t() @ y, (rows(2053, 24), rows(2053, 40))),
    "many terms left over": (lambda x, w, b: F.linear(x, w, b).tanh(), (rows(20, 4223), rows(36, 4223), rows(36))),
    "many parts, and more terms": (lambda x, y: x.t() @ y, (rows(16891, 8), rows(16891, 5))),
    "halves left over": (lambda x, y: x.t() @ y, (rows(2053, 24).half(), rows(2053, 40).half())),
    "both across": (lambda x, y: x.t() @ y.t(), (rows(4096, 24), rows(16, 4096))),
    "result in halves": (lambda x, y: (x.t() @ y).half(), (rows(2048, 24), rows(2048, 40))),
    "two readers": (lambda x, y: (x.t() @ y).cos() + (x.t() @ y).sum(1, keepdim=True), (rows(2048, 24), rows(2048, 40))),
    "whether it is positive": (lambda x, y: x.t() @ y > 0, (rows(2048, 24), rows(2048, 40))),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_sums_in_parts(name: str) -> None:
    f, args = CASES[name]
    with lapilli.compile(Function(f), args, target="gpu-fp32") as program:
        run, found = commands(program), program(*args)
    products = [d for d in run if d.kernel == "matmul"]
    assert products and all(int(str(d.groups[2])) > 1 for d in products), [(d.kernel, d.groups) for d in run]
    exact = f(*(x.double() for x in args))
    if exact.dtype is torch.bool:
        assert torch.equal(found, exact)
        return
    # Sums of 4,096 products of numbers about 1: each part errs by some units of its root.
    torch.testing.assert_close(
        found.double(), exact.double(), rtol=1e-3 if found.dtype is torch.float16 else 1e-5, atol=1e-3
    )


LONG: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "gradient of a weight": (lambda x, y: x.t() @ y, (rows(40000, 8), rows(40000, 5))),
    "terms left over": (lambda x, y: x.t() @ y, (rows(32771, 8), rows(32771, 12))),
    "linear, rows of two axes": (lambda x, w, b: F.linear(x, w, b).relu(), (rows(2, 3, 33000), rows(7, 33000), rows(7))),
    "batch": (lambda x, y: x @ y, (rows(2, 3, 4, 33001), rows(2, 3, 33001, 4))),
    "added to a matrix": (lambda c, x, y: torch.addmm(c, x, y, beta=2, alpha=0.5), (rows(3, 4), rows(3, 33000), rows(33000, 4))),
    "one number": (lambda x, y: x @ y, (rows(1, 40001), rows(40001, 1))),
    "nothing": (lambda x, y: x @ y, (rows(0, 40000), rows(40000, 3))),
}  # fmt: skip
"""Longer than what one invocation adds."""


@pytest.mark.parametrize("target", ["gpu-fp32", "cpu-fp32", "gpu-fp16"])
@pytest.mark.parametrize("name", LONG)
def test_long_products(name: str, target: str) -> None:
    f, args = LONG[name]
    if "fp16" in target:
        args = tuple(x.half() for x in args)
    with lapilli.compile(Function(f), args, target=target) as program:
        names = {d.kernel for p in program.description.methods[0].plans for d in p.run}
        found = program(*args)
    if found.numel() > 1 and target != "cpu-fp32":  # whose kernels want columns by fours
        assert names - {"map", "reduce_sum", "generic_product"}, "kernels for products compute none of it"
    # Sums of up to 40,003 products of numbers about 1: each part errs by some units of its root, and a half by its rounding.
    rtol, atol = (1e-3, 0.2) if "fp16" in target else (1e-5, 2e-3)
    torch.testing.assert_close(found.double(), f(*(x.double() for x in args)), rtol=rtol, atol=atol)


def test_infinities_and_nan_among_many_terms() -> None:
    x, y = rows(40003, 6), rows(40003, 5)
    x[5, 0], x[35000, 1], x[7, 2], x[39000, 2], x[-1, 3] = torch.inf, torch.nan, torch.inf, -torch.inf, torch.nan
    for target in ("gpu-fp32", "cpu-fp32"):
        with lapilli.compile(Function(lambda x, y: x.t() @ y), (x, y), target=target) as program:
            found = program(x, y)
        torch.testing.assert_close(found, (x.double().t() @ y.double()).float(), rtol=1e-5, atol=2e-3, equal_nan=True)


@pytest.mark.parametrize("length", [2048, 2053])
def test_infinities_and_nan_in_one_part(length: int) -> None:
    x, y = rows(length, 24), rows(length, 40)
    x[5, 0], x[1500, 1], x[7, 2], x[1900, 2] = torch.inf, torch.nan, torch.inf, -torch.inf
    x[-1, 3], x[-2, 4] = torch.nan, torch.inf  # of the terms that are left over
    with lapilli.compile(Function(lambda x, y: x.t() @ y), (x, y), target="gpu-fp32") as program:
        found = program(x, y)
    torch.testing.assert_close(found, (x.double().t() @ y.double()).float(), rtol=1e-5, atol=1e-3, equal_nan=True)


UNITS = tiles.MatrixTile(32, 32, 64, 16, 16, 1, 1)


@pytest.fixture
def _in_parts(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Products on matrix units have tiles of 32 x 32 in so many parts."""
    random_sums.divide(replace(UNITS, parts=request.param), monkeypatch)


ON_UNITS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "linear": (lambda x, w, b: F.linear(x, w, b).relu(), (rows(37, 320), rows(72, 320), rows(72))),
    "with a residual": (lambda x, w, y: F.linear(x, w) + y, (rows(33, 256), rows(40, 256), rows(33, 40))),
    "a chunk for few of the parts": (lambda x, w: F.linear(x, w), (rows(17, 136), rows(24, 136))),
    "a sum of no whole chunks": (lambda x, w: x @ w, (rows(40, 200), rows(200, 48))),
    "both across": (lambda x, y: x.t() @ y, (rows(264, 40), rows(264, 24))),
    "rows of two axes": (lambda x, w: F.linear(x, w) * 2, (rows(3, 15, 192), rows(24, 192))),
    "one after the other": (lambda x, w: F.linear(F.linear(x, w), w), (rows(33, 160), rows(160, 160))),
    "a third and a fourth": (lambda x, w, v: F.linear(x, w) * F.linear(x, v), (rows(40, 256), rows(48, 256), rows(48, 256))),
    "convolution": (lambda x, w, b: F.conv2d(x, w, b, 1, 1).relu(), (rows(1, 24, 9, 7), rows(40, 24, 3, 3), rows(40))),
    "convolution by steps": (lambda x, w: F.conv2d(x, w, None, 2, 0, 2), (rows(1, 64, 14, 13), rows(24, 64, 2, 3))),
    "convolution with a residual": (lambda x, w: F.conv2d(x, w, None, 1, 1) + x, (rows(1, 32, 8, 8), rows(32, 32, 3, 3))),
    "several images": (lambda x, w: F.conv2d(x, w, None, 1, 1), (rows(3, 32, 5, 6), rows(24, 32, 3, 3))),
}  # fmt: skip


@pytest.mark.parametrize("_in_parts", [2, 3, 4], indirect=True)
@pytest.mark.parametrize("name", ON_UNITS)
@pytest.mark.usefixtures("_in_parts")
def test_work_groups_share_a_sum(name: str) -> None:
    """Several runs, for in each the parts are counted from zero on."""
    f, args = ON_UNITS[name]
    halves = tuple((x / x.shape[-1] ** 0.25).half() for x in args)
    with lapilli.compile(Function(f), halves, target="gpu-fp16-matrix") as program:
        run = commands(program)
        products = [d for d in run if d.kernel in ("matmul_matrix", "convolution_matrix")]
        assert products and all(int(str(d.groups[2])) > 1 for d in products), [(d.kernel, d.groups) for d in run]
        assert "zero" in {d.label for d in run}, "the counters"
        found = [program(*halves) for _ in range(3)]
    exact = f(*(x.double() for x in halves))
    # What is stored, and what a second product reads, is rounded to halves.
    torch.testing.assert_close(found[0].double(), exact, rtol=2e-3, atol=2e-3 * float(exact.abs().max()))
    assert all(torch.equal(found[0], x) for x in found), "the parts are added in their order, whoever is last"


APART: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "gradient of a weight": (lambda x, y: x.t() @ y, (rows(8192, 40), rows(8192, 24))),
    "terms left over": (lambda x, y: x.t() @ y, (rows(8195, 40), rows(8195, 24))),
    "linear": (lambda x, w, b: F.linear(x, w, b).relu(), (rows(20, 8200), rows(40, 8200), rows(40))),
    "rows of two axes": (lambda x, w: F.linear(x, w) * 2, (rows(3, 5, 8192), rows(24, 8192))),
    "columns in no whole vectors": (lambda x, w: x @ w, (rows(17, 8192), rows(8192, 13))),
    "both across": (lambda x, y: x.t() @ y.t(), (rows(8192, 24), rows(16, 8192))),
    "two readers": (lambda x, y: (x.t() @ y).cos() + (x.t() @ y).sum(1, keepdim=True), (rows(8192, 24), rows(8192, 40))),
}  # fmt: skip
"""Sums that are too long for the few work groups of their tiles."""


@pytest.mark.parametrize("name", APART)
def test_long_sums_on_matrix_units(name: str) -> None:
    f, args = APART[name]
    halves = tuple((x / x.shape[-1] ** 0.25).half() for x in args)
    with lapilli.compile(Function(f), halves, target="gpu-fp16-matrix") as program:
        run = commands(program)
        products = [d for d in run if d.kernel == "matmul_matrix"]
        assert products and all(int(str(d.groups[2])) > 4 for d in products), [(d.kernel, d.groups) for d in run]
        found = program(*halves)
    exact = f(*(x.double() for x in halves))
    torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=2e-3 * float(exact.abs().max()))


def test_infinities_and_nan_on_matrix_units() -> None:
    x, y = rows(8197, 24).half(), rows(8197, 40).half()
    x[5, 0], x[5000, 1], x[7, 2], x[7900, 2] = torch.inf, torch.nan, torch.inf, -torch.inf
    x[-1, 3], x[-2, 4] = torch.nan, torch.inf  # of the terms that are left over
    with lapilli.compile(Function(lambda x, y: x.t() @ y), (x, y), target="gpu-fp16-matrix") as program:
        found = program(x, y)
    exact = (x.double().t() @ y.double()).half()
    torch.testing.assert_close(found, exact, rtol=2e-3, atol=0.2, equal_nan=True)


def test_no_work_group_has_a_long_sum_where_tiles_are_few() -> None:
    target = TARGETS["gpu-fp16-matrix"]
    for size in (16, 64, 200):
        for terms in (4096, 8192, 8195, 16384, 32768):
            tile = tiles.matrix_tiles(1, size, size, terms, target, False, (True, False), True)[0]
            assert terms // (tile.parts * tile.apart) <= 4096, (size, terms, str(tile))
    assert tiles.matrix_tiles(1, 64, 64, 1024, target, False, (True, False), True)[0].apart == 1, (
        "a second kernel for nothing"
    )
    assert tiles.matrix_tiles(1, 2048, 2048, 8192, target, False, (True, False), True)[0].apart == 1, "many tiles"


def test_infinities_in_a_shared_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "matrix_tiles", lambda *args, **given: [replace(UNITS, parts=3)])
    x, w = rows(40, 384).half(), rows(48, 384).half()
    x[5, 0], x[7, 200], x[9, 3], x[9, 380], x[11, 1] = torch.inf, torch.nan, torch.inf, -torch.inf, -torch.inf
    w[3, 0] = 0.0
    with lapilli.compile(Function(lambda x, w: F.linear(x, w)), (x, w), target="gpu-fp16-matrix") as program:
        found = program(x, w)
    exact = (x.double() @ w.double().t()).half()
    torch.testing.assert_close(found, exact, rtol=2e-3, atol=0.05, equal_nan=True)


@pytest.mark.part(8)
@pytest.mark.parametrize("seed", range(40))
def test_random_sums(seed: int) -> None:
    random_sums.check(seed, "gpu-fp16-matrix")


def test_when_work_groups_share_a_sum() -> None:
    """Where tiles are few and the sum is long: ViT-B/16's last product of a layer, not its first."""
    target = TARGETS["gpu-fp16-matrix"]

    def parts(m: int, n: int, k: int, divisible: bool = True) -> int:
        return tiles.matrix_tiles(1, m, n, k, target, False, (False, False), divisible)[0].parts

    assert parts(197, 768, 3072) > 1 and parts(100, 2048, 8192) > 1
    assert parts(197, 3072, 768) == parts(4096, 4096, 4096) == parts(197, 768, 3072, divisible=False) == 1


def test_when_work_groups_share_the_sum_of_a_window() -> None:
    """Where the weights are many and tiles are few: ResNet50's last convolutions, not its first, and none of many images."""
    target = TARGETS["gpu-fp16-matrix"]

    def parts(m: int, n: int, k: int, joinable: bool = True) -> int:
        return tiles.matrix_tiles(1, m, n, k, target, True, joinable=joinable)[0].parts

    assert parts(196, 256, 2304) > 1 and parts(49, 512, 4608) > 1
    assert parts(3136, 64, 576) == parts(784, 128, 1152) == parts(64 * 49, 512, 4608) == 1
    assert parts(49, 512, 4608, joinable=False) == 1
    assert max(parts(m, n, k) for m in (1, 49) for n in (8, 512) for k in (2304, 9216)) == 4
    assert all(parts(m, n, k) == 1 for m, n, k in ((0, 512, 9216), (49, 0, 9216), (49, 512, 0)))


def test_no_images_have_no_sums_to_share() -> None:
    """A kernel that counts binds counters, and of no tiles there are none."""
    model = torch.nn.Conv2d(1024, 1024, 3, 1, 1).eval()
    assert compile_to_bytes(model, (torch.zeros(0, 1024, 7, 7),), target="gpu-fp16-matrix", precision="fp16")
