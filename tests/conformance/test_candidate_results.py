"""Every candidate that a record may name computes what the others do: of products, convolutions, attention and rows of odd sizes
and layouts, in each family's plan. GPU plans run on a software device, matrix units emulated."""

from __future__ import annotations

import os
from typing import Any

import as_gpu
import pytest
import torch
import torch.nn.functional as F
from agreement import Function
from candidates import programs

from lapilli.codegen import choices


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path))


def attention(causal: bool = False) -> Any:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)


CASES: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "product": (lambda x, y: F.gelu(x @ y), [(37, 24), (24, 41)]),
    "linear": (F.linear, [(50, 64), (48, 64), (48,)]),
    "one row": (F.linear, [(1, 64), (33, 64)]),
    "three rows": (F.linear, [(3, 64), (17, 64)]),
    "batches": (lambda x, y: x @ y.mT, [(3, 17, 32), (3, 24, 32)]),
    "a long sum": (lambda x, y: x.t() @ y, [(2048, 264), (2048, 260)]),
    "convolution": (lambda x, w: F.relu(F.conv2d(x, w, padding=1)), [(2, 32, 9, 7), (40, 32, 3, 3)]),
    "strided convolution": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), [(1, 8, 13, 11), (24, 8, 3, 3)]),
    "pointwise convolution": (F.conv2d, [(1, 32, 7, 5), (24, 32, 1, 1)]),
    "depthwise convolution": (lambda x, w: F.conv2d(x, w, padding=1, groups=24), [(2, 24, 9, 11), (24, 1, 3, 3)]),
    "groups": (lambda x, w: F.conv2d(x, w, groups=2), [(1, 32, 6, 9), (32, 16, 3, 3)]),
    "first convolution": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), [(1, 3, 17, 19), (16, 3, 3, 3)]),
    "attention": (attention(), [(1, 2, 35, 32)] * 3),
    "causal attention": (attention(True), [(1, 2, 40, 16)] * 3),
    "attention of one query": (attention(), [(1, 4, 1, 32), (1, 4, 301, 32), (1, 4, 301, 32)]),
    "softmax": (lambda x: x.softmax(-1), [(37, 300)]),
    "a norm": (lambda x, w: F.layer_norm(x, (96,), w), [(19, 96), (96,)]),
}


class Weighted(torch.nn.Module):
    """A function whose first argument is given, and whose others are weights."""

    def __init__(self, f: Any, *weights: torch.Tensor) -> None:
        super().__init__()
        self.f, self.weights = f, torch.nn.ParameterList([torch.nn.Parameter(w, requires_grad=False) for w in weights])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(x, *self.weights)


@pytest.mark.parametrize("name", CASES)
def test_candidates_agree(name: str) -> None:
    agree(name, "cpu-fp32")


@pytest.mark.part(12)
@pytest.mark.parametrize("plan", ["gpu-fp32", "gpu-fp16-matrix"])
@pytest.mark.parametrize("name", CASES)
def test_candidates_of_gpus_agree(name: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_gpu.on_any_device(monkeypatch.setattr)
    if not os.environ.get("LAPILLI_TEST_ALL"):
        monkeypatch.setattr(choices, "_MOST_VARIANTS", 3)
    agree(name, plan)


def agree(name: str, plan: str) -> None:
    random = torch.Generator().manual_seed(3)
    f, shapes = CASES[name]
    half = "fp16" in plan
    args = [torch.randn(s, generator=random) / s[-1] ** 0.25 for s in shapes]
    if half:
        args = [a.half() for a in args]
    exact = f(*(a.double() for a in args))
    given, *weights = args
    constant = "attention" not in name and "product" not in name and name != "batches"
    model = Weighted(f, *weights) if constant else Function(f)
    called = (given,) if constant else tuple(args)
    bound = 2e-3 if half else 1e-5  # a result is rounded to 2^-11, and inner values of attention are; sums of float32
    count = 0
    for candidate, program in programs(model, called, plan, "fp16" if half else "fp32"):
        got = program(*called).double()
        error = float((got - exact).norm() / exact.norm())
        assert error < bound, (candidate, error)
        count += 1
    assert count > 1, "there is a choice"


def test_open_sizes() -> None:
    """Candidates of open sizes serve all sizes."""
    rows = torch.export.Dim("rows", min=1, max=200)
    w = torch.randn(24, 40)
    model = Weighted(F.linear, w)
    for candidate, program in programs(model, (torch.randn(50, 40),), "cpu-fp32", dynamic_shapes=({0: rows},)):
        for n in (1, 3, 17, 200):
            x = torch.randn(n, 40)
            torch.testing.assert_close(program(x), model(x), msg=lambda m, c=candidate, n=n: f"{c}, {n} rows: {m}")
