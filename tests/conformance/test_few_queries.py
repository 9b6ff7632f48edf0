"""Attention of a few queries, whose keys are shared out among work groups (kernels/gpu_attention_few.slang)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from taken_plan import taken_plan
from torch import Tensor, nn
from torch.nn import functional as F

import lapilli

pytestmark = pytest.mark.usefixtures("on_any_device")


class Attention(nn.Module):
    """mask: none, "bool" or "float"; a query sees the keys up to its position."""

    def __init__(self, mask: str, grouped: bool) -> None:
        super().__init__()
        self.mask, self.grouped = mask, grouped

    def forward(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
        seen = torch.arange(k.shape[-2])[None, :] <= position[:, None]
        mask = {"none": None, "bool": seen, "float": torch.where(seen, 0.0, -torch.inf).to(q.dtype)}[self.mask]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.grouped)


def test_many_heads_need_no_parts() -> None:
    """They keep the device busy; a second kernel and the memory of parts would be for nothing."""
    q, k = torch.randn(600, 1, 1, 4), torch.randn(600, 1, 200, 4)
    check(Attention("bool", False), (q, k, k, torch.tensor([150])), parts=False)


def check(model: Attention, args: tuple[Tensor, ...], parts: bool, **how: Any) -> None:
    half = args[0].dtype is torch.float16
    target = "gpu-fp16-matrix" if half else "gpu-fp32"
    with lapilli.compile(model, args, target=target, precision="fp16" if half else "fp32", **how) as program:
        plan = taken_plan(program)
        names, counted = [d.kernel for d in plan.run], any(d.label == "zero" for d in plan.run)
        found = [program(*args) for _ in range(2)]
        assert torch.equal(*found) or found[0].isnan().any()
    assert ("attention_few" in names, "attention_join" in names, counted) == (True, False, parts), names
    exact = model(*(x.double() if x.is_floating_point() else x for x in args))
    # halves: rounding of the result and, in torch's own, of weights; floats: sums of some thousand terms
    torch.testing.assert_close(found[0].double(), exact, rtol=0, atol=2e-3 if half else 3e-6, equal_nan=True)


SHAPES = [  # batch, heads, heads of keys, queries, keys, width of queries, of values
    (1, 9, 3, 1, 256, 64, 64), (2, 8, 2, 1, 700, 128, 128), (1, 4, 4, 3, 77, 40, 24), (1, 6, 2, 2, 513, 64, 64),
    (3, 2, 2, 4, 128, 20, 33), (1, 1, 1, 1, 1, 8, 8), (1, 6, 1, 1, 300, 96, 96), (1, 2, 2, 1, 9000, 16, 16),
    (1, 4, 2, 8, 200, 32, 32), (1, 16, 1, 1, 130, 8, 8), (2, 3, 3, 7, 129, 7, 5),
]  # fmt: skip


@pytest.mark.part(20)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
def test_few_queries(shape: tuple[int, ...], mask: str, dtype: torch.dtype) -> None:
    batch, heads, shared, queries, keys, width, values = shape
    r = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(batch, h, n, d, generator=r).to(dtype)
        for h, n, d in ((heads, queries, width), (shared, keys, width), (shared, keys, values))
    )
    check(Attention(mask, heads != shared), (q, k, v, torch.arange(queries) + keys // 3), parts=keys > 64)


def test_an_open_batch_has_a_second_kernel() -> None:
    """The number of counters is not known."""
    q, k = torch.randn(2, 8, 1, 16), torch.randn(2, 2, 300, 16)
    model, position = Attention("bool", True), torch.tensor([100])
    batch = torch.export.Dim("batch", min=0, max=50)
    shapes = ({0: batch}, {0: batch}, {0: batch}, None)
    with lapilli.compile(model, (q, k, k, position), target="gpu-fp32", dynamic_shapes=shapes) as program:
        for n in (2, 0, 1, 5):
            q, k = torch.randn(n, 8, 1, 16), torch.randn(n, 2, 300, 16)
            torch.testing.assert_close(program(q, k, k, position), model(q, k, k, position), rtol=0, atol=3e-6)


def test_several_attentions_at_once_and_runs_at_once() -> None:
    """Each counts for itself, though they wait for nobody; and so does each run."""

    class Three(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
            first, second = (F.scaled_dot_product_attention(q * f, k, v) for f in (1.0, 2.0))
            return [first, second, F.scaled_dot_product_attention(first + second, k, v)]

    random = torch.Generator().manual_seed(2)
    given = [[torch.randn(1, 3, n, 24, generator=random) for n in (1, 500, 500)] for _ in range(8)]
    with lapilli.compile(Three(), tuple(given[0]), target="gpu-fp32") as program:
        for args, run in [(args, program.submit(*args)) for args in given * 2]:
            torch.testing.assert_close(run.result(), Three()(*args), rtol=0, atol=3e-6)


@pytest.mark.parametrize("mask", ["none", "bool"])
def test_open_numbers_of_keys(mask: str) -> None:
    keys = torch.export.Dim("keys", min=0, max=5000)
    q, k = torch.randn(1, 8, 1, 16), torch.randn(1, 2, 300, 16)
    model, position = Attention(mask, True), torch.tensor([100])
    shapes = (None, {2: keys}, {2: keys}, None)
    with lapilli.compile(model, (q, k, k, position), target="gpu-fp32", dynamic_shapes=shapes) as program:
        for n in (0, 1, 2, 127, 128, 129, 1000, 4999):
            k, v = torch.randn(2, 1, 2, n, 16).unbind()
            wanted = model(q.double(), k.double(), v.double(), position)
            torch.testing.assert_close(program(q, k, v, position).double(), wanted, rtol=0, atol=3e-6)


def test_values_of_fewer_heads_than_keys() -> None:
    q, k, v = torch.randn(2, 8, 1, 16), torch.randn(2, 8, 300, 16), torch.randn(2, 2, 300, 16)
    model, position = Attention("none", True), torch.tensor([0])
    with lapilli.compile(model, (q, k, v, position), target="gpu-fp32") as program:
        torch.testing.assert_close(program(q, k, v, position), model(q, k, v, position), rtol=0, atol=3e-6)


class _Cached(nn.Module):
    """A cache: its keys up to the position are seen."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        super().__init__()
        self.k, self.v = nn.Buffer(k), nn.Buffer(v)

    def forward(self, q: Tensor, new: Tensor, position: Tensor) -> Tensor:
        self.k.index_copy_(2, position.clamp(min=0), new)
        self.v.index_copy_(2, position.clamp(min=0), new)
        seen = torch.arange(self.k.shape[-2])[None, :] <= position[:, None]
        return F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=seen)


def test_entries_of_a_cache_that_are_not_seen_are_not_read() -> None:
    """A cache may hold anything behind the last token, tile by tile; rows without keys are zero; NaN is kept where it is seen."""
    q, new = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8)
    k, v = torch.randn(1, 2, 400, 8), torch.randn(1, 2, 400, 8)
    given = (q, new, torch.tensor([100]))
    exact = _Cached(k.clone(), v.clone())(*given)
    k[:, :, 128:], v[:, :, 128:] = torch.nan, torch.inf
    with lapilli.compile(_Cached(k, v), given, target="gpu-fp32") as program:
        torch.testing.assert_close(program(*given), exact, rtol=0, atol=3e-6)
        assert (program(q, new, torch.tensor([-1])) == 0).all()
        new[0, 1] = torch.nan
        program(q, new, torch.tensor([50]))
        found = program(q, torch.zeros_like(new), torch.tensor([100]))
        assert found[0, 1].isnan().all() and found[0, 0].isfinite().all()
