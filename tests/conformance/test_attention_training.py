"""Attention that records gradients, on eager tensors and by torch.compile, against PyTorch's in float64."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import lapilli.eager
from lapilli import attention_operators, backend
from lapilli.attention_operators import ATTENTION, ATTENTION_BACKWARD
from lapilli.backend import trace

lapilli.eager.enable()
inf = float("inf")


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the queries of every backward operator that autograd calls."""
    torch.zeros(1, device="vulkan")  # the device registers the operator itself
    found: list[tuple[int, ...]] = []

    def noted(grad: Tensor, q: Tensor, *rest: Any) -> Any:
        found.append(tuple(q.shape))
        return ATTENTION_BACKWARD(grad, q, *rest)

    monkeypatch.setattr(attention_operators, "ATTENTION_BACKWARD", noted)
    return found


def results(f: Callable[..., Tensor], given: list[Tensor], device: str, dtype: torch.dtype) -> list[Tensor]:
    """The result of f(q, k, v), and the gradients of a weighted sum of it."""
    leaves = [t.to(device, dtype).requires_grad_() for t in given]
    made = f(*leaves)
    weights = torch.linspace(-1, 1, made.numel()).reshape(made.shape).to(device, made.dtype)
    return [x.detach().cpu() for x in (made, *torch.autograd.grad((made * weights).sum(), leaves))]


def attention(device: str, **options: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        moved: Any = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
        with sdpa_kernel(SDPBackend.MATH) if device == "cpu" else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, **moved)

    return attend


def _mask(*shape: int) -> Tensor:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) > 0.3
    mask[..., 1, :] = False  # a query without any key
    return mask


CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6), {}),
    "one": ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1), {}),
    "primes": ((1, 2, 67, 13), (1, 2, 71, 13), (1, 2, 71, 11), {"scale": 0.7}),
    "causal": ((2, 3, 33, 8), (2, 3, 33, 8), (2, 3, 33, 8), {"is_causal": True}),
    "causal, more keys": ((1, 2, 5, 8), (1, 2, 9, 8), (1, 2, 9, 8), {"is_causal": True}),
    "shared heads": ((2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), {"enable_gqa": True}),
    "mask": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), {"attn_mask": _mask(5, 7)}),
    "mask of a batch": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), {"attn_mask": _mask(2, 1, 5, 7)}),
    "numbers": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), {"attn_mask": torch.linspace(-3, 3, 35).reshape(5, 7)}),
    "mask, one batch dimension": ((3, 5, 8), (3, 7, 8), (3, 7, 8), {"attn_mask": _mask(5, 7)}),
    "one batch dimension": ((3, 5, 8), (3, 7, 8), (3, 7, 8), {}),
    "three batch dimensions": ((2, 1, 3, 5, 8), (2, 1, 3, 7, 8), (2, 1, 3, 7, 8), {}),
}  # fmt: skip
BOUNDS = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of the largest number: a few units in the last place of operands, weights and gradients of scores, each rounded once."""


@pytest.mark.part(32)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    "way",
    [
        "eager",
        "compiled",
        "compiled, tensors of the CPU",
        "compiled, weights kept",
        "compiled, tensors of the CPU, weights kept",
    ],
)
def test_gradients(
    way: str, dtype: torch.dtype, case: str, parts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = "kept" in way and dtype is torch.float32
    monkeypatch.setattr(trace, "are_weights_small", lambda *operands: kept)
    *shapes, options = CASES[case]
    given = [torch.randn(shape).to(dtype) for shape in shapes]
    device = "cpu" if "CPU" in way else "vulkan"
    if dtype is not torch.float32 and isinstance(mask := options.get("attn_mask"), Tensor) and mask.is_floating_point():
        options = {**options, "attn_mask": mask.to(dtype)}
    exact = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in options.items()}
    wanted = results(attention("cpu", **exact), given, "cpu", torch.float64)
    f = attention(device, **options) if device == "vulkan" else partial(F.scaled_dot_product_attention, **options)
    found = results(torch.compile(f, backend=backend.vulkan) if "compiled" in way else f, given, device, dtype)
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == dtype
        assert float((got - want).abs().max()) <= BOUNDS[dtype] * max(float(want.abs().max()), 1.0)
    assert parts == ([] if kept else [shapes[0]])


@pytest.mark.parametrize("special", [inf, -inf, float("nan")], ids=str)
@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
def test_special_values_stay_where_they_are(which: int, special: float) -> None:
    """What is finite and what is not, as in PyTorch: another batch and other heads do not see it."""
    given = [torch.randn(2, 2, 5, 8) for _ in range(3)]
    given[which][1, 0, 2, 3] = special
    found, wanted = (results(attention(d), given, d, torch.float32) for d in ("vulkan", "cpu"))
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got[1, 1], want[1, 1], rtol=1e-4, atol=1e-5)
        assert not want.isfinite()[~got.isfinite()].any()  # nothing that PyTorch has a number for


def test_the_weights_are_not_kept() -> None:
    """A layer's forward pass leaves its operands and its result, and no number for each pair of tokens."""
    sizes = (2, 2, 256, 8)
    q, k, v = (torch.randn(sizes, device="vulkan", requires_grad=True) for _ in range(3))
    before = torch.accelerator.memory_allocated()
    made = F.scaled_dot_product_attention(q, k, v)
    assert 0 < torch.accelerator.memory_allocated() - before < 256 * 256 * 4
    made.sum().backward()


@pytest.mark.parametrize(
    ("batch", "shared", "wanted"),
    [
        ((5, 2), (5, 2), [(2, 2), (2, 2), (1, 2)]),
        ((1, 5), (1, 5), [(1, 3), (1, 2)]),
        ((2, 9), (2, 3), [(2, 3), (2, 3), (2, 3)]),  # three heads of queries for each of keys
        ((7,), (7,), [(4,), (3,)]),
    ],
)
def test_long_sequences_in_parts(
    batch: tuple[int, ...], shared: tuple[int, ...], wanted: list[tuple[int, ...]], parts: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(attention_operators, "_MOST_SCORES", 4 * 5 * 7)
    given = [torch.randn(*batch, 5, 8), *(torch.randn(*shared, 7, 8) for _ in range(2))]
    for mask in (None, _mask(5, 7), _mask(*batch, 5, 7), _mask(*(1 for _ in batch), 5, 7)):
        parts.clear()
        options = {"attn_mask": mask, "enable_gqa": batch != shared}
        found, exact = (results(attention(d, **options), given, d, torch.float32) for d in ("vulkan", "cpu"))
        assert parts == [(*sizes, 5, 8) for sizes in wanted]
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "dtype", "again"), [(32, torch.float32, 0), (33, torch.float32, 1), (32, torch.float16, 1)]
)
def test_small_weights_are_kept(tokens: int, dtype: torch.dtype, again: int, parts: list[tuple[int, ...]]) -> None:
    """By torch.compile, in float32: 32 tokens of 8 numbers have as many weights as numbers."""
    q, k, v = (torch.randn(2, 2, tokens, 8, device="vulkan", dtype=dtype, requires_grad=True) for _ in range(3))
    torch.compile(attention("vulkan"), backend=backend.vulkan)(q, k, v).sum().backward()
    assert len(parts) == again


@pytest.mark.parametrize("batch", [(), (2,), (2, 3, 1)])
def test_results_may_be_changed_in_place(batch: tuple[int, ...]) -> None:
    """Where PyTorch's composition lets them be: its own kernels, which save the result, take four dimensions alone."""
    given = [torch.randn(*batch, n, 8) for n in (5, 7, 7)]
    found = []
    for device in ("vulkan", "cpu"):
        leaves = [t.to(device).requires_grad_() for t in given]
        made = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2])
        made.mul_(3)
        found.append([g.cpu() for g in torch.autograd.grad(made.square().sum(), leaves)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_other_calls_are_composed(parts: list[tuple[int, ...]]) -> None:
    """Gradients of a mask, dropout, shared batches, and operands without elements are PyTorch's."""
    q, k, v = (torch.randn(2, 3, n, 8, device="vulkan", requires_grad=True) for n in (5, 7, 7))
    bias = torch.randn(5, 7, device="vulkan", requires_grad=True)
    F.scaled_dot_product_attention(q, k, v, bias).sum().backward()
    assert bias.grad is not None
    F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).sum().backward()
    F.scaled_dot_product_attention(q, k[:1], v[:1]).sum().backward()
    F.scaled_dot_product_attention(q[:0], k[:0], v[:0]).sum().backward()
    assert not parts


def test_gradients_of_gradients() -> None:
    given = [torch.randn(1, 2, n, 4) for n in (3, 5, 5)]

    def second(device: str) -> list[Tensor]:
        leaves = [t.to(device).requires_grad_() for t in given]
        first = torch.autograd.grad(attention(device)(*leaves).square().sum(), leaves, create_graph=True)
        return [g.cpu() for g in torch.autograd.grad(torch.cat([g.flatten() for g in first]).square().sum(), leaves)]

    torch.testing.assert_close(second("vulkan"), second("cpu"), rtol=1e-3, atol=1e-4)


def test_gradients_of_gradients_where_operands_are_one_tensor() -> None:
    x, found = torch.randn(1, 2, 3, 4), []
    for device in ("vulkan", "cpu"):
        leaf = x.to(device).requires_grad_()
        (first,) = torch.autograd.grad(attention(device)(leaf, leaf, leaf).square().sum(), leaf, create_graph=True)
        found.append([g.detach().cpu() for g in (first, *torch.autograd.grad(first.square().sum(), leaf))])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("device", ["vulkan", "cpu"])
def test_autocast_in_compiled_graphs(device: str, parts: list[tuple[int, ...]]) -> None:
    """Operands in float32 are rounded, and the result is in half precision, as in eager calls."""
    given = [torch.randn(2, 2, n, 8) for n in (5, 7, 7)]
    bias = torch.randn(5, 7)

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return F.scaled_dot_product_attention(q, k, v, bias.to(device))

    leaves = [t.to(device).requires_grad_() for t in given]
    made = torch.compile(f, backend=backend.vulkan)(*leaves)
    assert made.dtype == torch.bfloat16
    found = [g.cpu() for g in torch.autograd.grad(made.float().square().sum(), leaves)]
    exact = [t.clone().requires_grad_() for t in given]
    wanted = torch.autograd.grad(attention("cpu", attn_mask=bias)(*exact).square().sum(), exact)
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == torch.float32 and parts
        assert float((got - want).abs().max()) <= BOUNDS[torch.bfloat16] * max(float(want.abs().max()), 1.0)


def test_traces_hold_pytorchs_operators(tmp_path: Path) -> None:
    """And none of ours, which a process without Lapilli does not know."""
    q, k, v = (torch.randn(1, 2, n, 4, device="vulkan", requires_grad=True) for n in (3, 5, 5))
    traced = torch.jit.trace(attention("vulkan"), (q, k, v))
    assert "lapilli" not in str(traced.graph) and "PythonOp" not in str(traced.graph)
    traced.save(str(tmp_path / "attention.pt"))
    torch.testing.assert_close(traced(q, k, v).cpu(), attention("vulkan")(q, k, v).cpu(), rtol=1e-4, atol=1e-5)


def test_functional_gradients() -> None:
    given = [torch.randn(1, 2, n, 4) for n in (3, 5, 5)]

    def of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v).square().sum()

    found, wanted = (torch.func.grad(of, (0, 1, 2))(*(t.to(d) for t in given)) for d in ("vulkan", "cpu"))
    torch.testing.assert_close([g.cpu() for g in found], list(wanted), rtol=1e-4, atol=1e-5)


def test_checkpoints_and_one_gradient_alone(parts: list[tuple[int, ...]]) -> None:
    q, k, v = (torch.randn(1, 2, 4, 4) for _ in range(3))
    found = []
    for device in ("vulkan", "cpu"):
        leaf = k.to(device).requires_grad_()
        made = checkpoint(F.scaled_dot_product_attention, q.to(device), leaf, v.to(device), use_reentrant=False)
        found.append(torch.autograd.grad(made.square().sum(), leaf)[0].cpu())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert len(parts) == 1


def test_what_the_operators_mean() -> None:
    """On the CPU, where a graph runs that the device does not take."""
    q, k, v = (torch.randn(2, 3, n, 8, requires_grad=True) for n in (5, 7, 7))
    made = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    torch.testing.assert_close(ATTENTION(q, k, v, None, True, 0.3, False), made)
    grad = torch.randn_like(made)
    found = ATTENTION_BACKWARD(grad, q, k, v, made, None, True, 0.3, False)
    torch.testing.assert_close(found, torch.autograd.grad(made, (q, k, v), grad))
