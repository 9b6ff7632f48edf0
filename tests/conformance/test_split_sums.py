"""Products whose sums are divided into parts, because a device would have fewer tiles than compute units (codegen/split_k.py)."""

from __future__ import annotations

from collections.abc import Callable

import as_gpu
import pytest
import torch
from agreement import Function
from torch import Tensor
from torch.nn import functional as F

import lapilli
from lapilli.codegen import tiles
from lapilli.target import TARGETS


@pytest.fixture(autouse=True)
def _on_any_device(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiles, "_LEAST_WORK", 0)
    as_gpu.on_any_device(monkeypatch.setattr)


def test_what_is_divided() -> None:
    """Sums of weights' gradients are; where tiles are many, or a second kernel would cost more than it saves, none is."""
    parts = {
        size: tiles.sum_parts(*size, TARGETS["gpu-fp32"])
        for size in ((24, 40, 4096), (4096, 4096, 4096), (24, 40, 1000))
    }
    assert parts[24, 40, 4096] > 1 and parts[4096, 4096, 4096] == parts[24, 40, 1000] == 1


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
    "both across": (lambda x, y: x.t() @ y.t(), (rows(4096, 24), rows(16, 4096))),
    "result in halves": (lambda x, y: (x.t() @ y).half(), (rows(2048, 24), rows(2048, 40))),
    "two readers": (lambda x, y: (x.t() @ y).cos() + (x.t() @ y).sum(1, keepdim=True), (rows(2048, 24), rows(2048, 40))),
    "whether it is positive": (lambda x, y: x.t() @ y > 0, (rows(2048, 24), rows(2048, 40))),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_sums_in_parts(name: str) -> None:
    f, args = CASES[name]
    with lapilli.compile(Function(f), args, target="gpu-fp32") as program:
        plan = next(p for p in program.description.methods[0].plans if p.name == program.plan)
        found = program(*args)
    products = [d for d in plan.run if d.kernel == "matmul"]
    assert products and all(int(str(d.groups[2])) > 1 for d in products), [(d.kernel, d.groups) for d in plan.run]
    exact = f(*(x.double() for x in args))
    if exact.dtype is torch.bool:
        assert torch.equal(found, exact)
        return
    # Sums of 4,096 products of numbers about 1: each part errs by some units of its root.
    torch.testing.assert_close(
        found.double(), exact.double(), rtol=1e-3 if found.dtype is torch.float16 else 1e-5, atol=1e-3
    )


def test_infinities_and_nan_in_one_part() -> None:
    x, y = rows(2048, 24), rows(2048, 40)
    x[5, 0], x[1500, 1], x[7, 2], x[1900, 2] = torch.inf, torch.nan, torch.inf, -torch.inf
    with lapilli.compile(Function(lambda x, y: x.t() @ y), (x, y), target="gpu-fp32") as program:
        found = program(x, y)
    torch.testing.assert_close(found, (x.double().t() @ y.double()).float(), rtol=1e-5, atol=1e-3, equal_nan=True)
