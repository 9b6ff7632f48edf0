"""int64 on the eager device: results that leave 32 bits are right, and those that do not are the device's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import opinfo
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lapilli import autoload

autoload.register()
pytestmark = pytest.mark.filterwarnings("ignore:.*runs on the CPU:UserWarning")

Make = Callable[[str], Tensor]


def count(n: int, device: str) -> Tensor:
    return torch.arange(n, device=device)


def large(device: str) -> Tensor:
    """Integers that fit into 32 bits, and of which two do not."""
    return count(10, device) * 2**27 + 2**30


LARGE: dict[str, Make] = {
    "sum": lambda d: count(100_000, d).sum(),
    "sum of int32": lambda d: count(100_000, d).int().sum(),
    "sum of floats": lambda d: torch.full((3,), 2e9, device=d).sum(dtype=torch.int64),
    "sum along a dimension": lambda d: count(120_000, d).view(2, -1).sum(1),
    "sum with out": lambda d: torch.sum(
        count(120_000, d).view(2, -1), 1, out=torch.empty(2, dtype=torch.int64, device=d)
    ),
    "cumsum": lambda d: count(100_000, d).cumsum(0),
    "trace": lambda d: large(d).diag().trace(),
    "prod": lambda d: (count(13, d) + 1).prod(),
    "cumprod": lambda d: (count(15, d) + 1).cumprod(0),
    "mul": lambda d: count(100_000, d) * count(100_000, d),
    "mul of int32 and int64": lambda d: count(100_000, d).int() * count(100_000, d),
    "mul by a number": lambda d: count(100_000, d) * 100_000,
    "mul in place": lambda d: count(100_000, d).mul_(100_000),
    "mm": lambda d: count(10_000, d).view(100, 100) @ count(10_000, d).view(100, 100),
    "dot": lambda d: count(10_000, d).dot(count(10_000, d)),
    "einsum": lambda d: torch.einsum("i,i->", count(10_000, d), count(10_000, d)),
    "addmm": lambda d: torch.addmm(*[large(d)[:4].view(2, 2)] * 3),
    "add": lambda d: large(d) + large(d),
    "add in place": lambda d: large(d).add_(large(d)),
    "add with alpha": lambda d: torch.add(count(9, d), count(9, d), alpha=2**30),
    "add of a number": lambda d: large(d) + 2**30,
    "sub": lambda d: -large(d) - large(d),
    "rsub": lambda d: -(2**30) - large(d),
    "pow": lambda d: count(2000, d) ** 3,
    "pow of a number": lambda d: 2 ** count(40, d),
    "pow of tensors": lambda d: count(40, d) ** count(9, d)[8:],
    "shift": lambda d: count(10, d) << 30,
    "scatter_add": lambda d: torch.zeros(3, dtype=torch.int64, device=d).scatter_add_(
        0, torch.zeros(5, dtype=torch.int64, device=d), large(d)[:5]
    ),
    "index_add": lambda d: torch.zeros(3, dtype=torch.int64, device=d).index_add_(
        0, torch.zeros(5, dtype=torch.int64, device=d), large(d)[:5]
    ),
    "conversion": lambda d: torch.tensor([3e9, -7.5], device=d).long(),
    "conversion beside infinity": lambda d: torch.tensor([3e9, float("inf"), -float("inf")], device=d).long()[:1],
    "what follows": lambda d: count(100_000, d).sum() + 1,
}

SMALL: dict[str, Make] = {
    "sum": lambda d: count(1000, d).sum(),
    "sum of bools": lambda d: (count(100_000, d) > 5).sum(),
    "sum of bytes": lambda d: torch.full((3000,), 255, dtype=torch.uint8, device=d).sum(),
    "sum in int32": lambda d: count(1000, d).int().sum(dtype=torch.int32),
    "sum of nothing": lambda d: count(0, d).sum(),
    "positions": lambda d: torch.ones(2, 9, dtype=torch.int64, device=d).cumsum(-1),
    "counter": lambda d: torch.zeros((), dtype=torch.int64, device=d).add_(1),
    "largest": lambda d: torch.full((2,), 2**30, device=d) + (2**30 - 1),
    "mul": lambda d: count(100, d) * count(100, d),
    "pow": lambda d: count(10, d) ** 3,
    "conversion": lambda d: torch.tensor([3e4, -7.5], device=d).long(),
}


@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE.keys())
def test_results_beyond_32_bits_are_right(make: Make) -> None:
    before = torch.vulkan.fallbacks()
    made = make("vulkan")
    assert made.is_vulkan and torch.vulkan.fallbacks() != before
    assert torch.equal(made.cpu(), make("cpu"))


@pytest.mark.parametrize("make", SMALL.values(), ids=SMALL.keys())
def test_results_within_32_bits_are_the_devices(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAPILLI_STRICT", "1")
    made = make("vulkan")
    assert torch.equal(made.cpu(), make("cpu"))


def test_strict_mode_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAPILLI_STRICT", "1")
    with pytest.raises(NotImplementedError, match=r"aten.sum.default on int64 .* may not fit into the 32 bits"):
        count(100_000, "vulkan").sum()


# --- every operator, with large integers in the place of its samples'

UNDEFINED = {
    "bincount", "bucketize", "empty", "empty_like", "empty_permuted", "empty_strided", "geometric", "new_empty",
    "new_empty_strided", "nn.functional.one_hot", "randint", "randint_like", "repeat_interleave", "searchsorted",
    "tensor_split", "to", "to_sparse",
}  # fmt: skip
"""Random numbers, memory that nobody has written, sorted arguments, sizes of results, sparse results; float64 is on the CPU."""
FOUND = {
    "_unsafe_masked_index_put_accumulate", "addbmm", "addcmul", "addmv", "cross", "index_put", "index_reduce", "lcm",
    "nn.functional.avg_pool1d", "nn.functional.avg_pool2d", "nn.functional.avg_pool3d", "nn.functional.bilinear",
    "nn.functional.conv2d", "nn.functional.conv_transpose2d", "put", "scatter_reduce.sum", "scatter_reduce.prod", "vdot",
}  # fmt: skip
"""Operators that were wrong, or are like them."""


def of_integers() -> list[str]:
    entries = (
        e
        for e in opinfo.database()
        if torch.int64 in e.dtypes and e.name not in UNDEFINED and e.name[:9] != "jiterator"
    )
    return sorted({e.name + (f".{e.variant_test_name}" if e.variant_test_name else "") for e in entries})


def large_calls(name: str) -> Iterator[tuple[Any, Any, Any, Any]]:
    """A sample's operator and arguments, with large integers in all int64 tensors, or in all but those that are indices."""
    entry = next(
        e for e in opinfo.database() if e.name + (f".{e.variant_test_name}" if e.variant_test_name else "") == name
    )
    samples = list(entry.sample_inputs("cpu", torch.int64, requires_grad=False))
    # Fractions as factors of integers, which PyTorch refuses in most operators, have no defined result.
    samples = [
        s for s in samples if "device" not in s.kwargs and not any(isinstance(v, float) for v in s.kwargs.values())
    ]
    for sample in samples[:1] + samples[-1:]:
        arguments = [sample.input, *sample.args]
        last = max((k for k, a in enumerate(arguments) if isinstance(a, Tensor)), default=0)
        for places in (range(len(arguments)), (0, last), (0,)):
            torch.manual_seed(len(arguments))
            given = [tree_map_only(Tensor, enlarged, a) if k in places else a for k, a in enumerate(arguments)]
            try:
                yield entry.op, given, sample.kwargs, entry.op(*copied(given, "cpu"), **sample.kwargs)
                break
            except (RuntimeError, IndexError, NotImplementedError):  # they are no indices
                continue


def enlarged(x: Tensor) -> Tensor:
    return torch.randint(-(2**30), 2**30, x.shape) if x.dtype is torch.int64 else x


def copied(arguments: Any, device: str) -> Any:
    return tree_map_only(Tensor, lambda x: x.clone().to(device), arguments)


@pytest.mark.parametrize("name", sorted({*opinfo.shard(of_integers(), 4), *FOUND} & {*of_integers()}))
def test_large_integers(name: str) -> None:
    """Each result of int64 is the CPU's, whatever its size."""
    for op, given, kwargs, expected in large_calls(name):
        found = op(*copied(given, "vulkan"), **copied(kwargs, "vulkan"))
        for ours, theirs in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            if isinstance(theirs, Tensor) and theirs.dtype is torch.int64:
                assert torch.equal(ours.cpu(), theirs), name
