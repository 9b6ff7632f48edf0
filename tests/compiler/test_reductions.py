"""Which kernels reduce what, on devices that need not be there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plans import plan

from lapilli.codegen.select import write_all
from lapilli.ir.integer import Symbol
from lapilli.target import CPU, KNOWN, Target, of_device

H100 = of_device(KNOWN["h100"], half=True, matrix=True)


def kernels(f: Callable[..., Any], *given: torch.Tensor, target: Target = H100, dynamic: Any = None) -> list[str]:
    s = plan(f, *given, target=target, dynamic=dynamic)
    made = write_all(s)
    return [f"{made[t.out.id].name} {' x '.join(map(str, t.out.shape))}" for t in s.order.run]


@pytest.mark.parametrize(
    "length, target, wanted",
    [
        (64, H100, "row_sum 98304"),
        (8192, H100, "row_sum 98304"),
        (15, H100, "reduce_sum 98304"),  # too short to be shared
        (64, CPU, "reduce_sum 98304"),
    ],
)
def test_a_reduction_of_contiguous_rows_is_a_row(length: int, target: Target, wanted: str) -> None:
    assert kernels(lambda x: x.sum(-1), torch.empty(98304, length), target=target) == [wanted]


def test_others_are_not() -> None:
    assert kernels(lambda x: x.sum(0), torch.empty(64, 300)) == ["reduce_sum 300"]
    assert kernels(lambda x: x.argmax(1), torch.empty(300, 64)) == ["reduce_argmax 300"]


@pytest.mark.parametrize(
    "shape, wanted",
    [
        ((100352, 64), ["reduce_sum 64"]),
        ((4096, 1024), ["reduce_sum 16 x 1024", "reduce_sum 1024"]),
        ((4096, 384), ["reduce_sum 384"]),  # a second kernel would take longer than it saves
        ((64, 1 << 20), ["reduce_sum 1048576"]),  # results enough
    ],
)
def test_reductions_across_rows_are_divided(shape: tuple[int, int], wanted: list[str]) -> None:
    found = kernels(lambda x: x.sum(0), torch.empty(shape))
    assert found[-len(wanted) :] == wanted
    assert len(found) == len(wanted) or shape[0] > 8192  # pieces of whole programs first


def test_pieces_of_several_axes_are_whole_axes() -> None:
    """Neighbours in memory are folded together."""
    found = kernels(lambda x: x.sum((0, 2, 3)), torch.empty(32, 64, 56, 56))
    assert found == ["row_sum 64 x 32", "reduce_sum 64"]


def test_an_open_number_has_pieces() -> None:
    shapes = ({0: torch.export.Dim("n", min=2), 1: torch.export.Dim("c", min=2)},)
    first, second = kernels(lambda x: x.sum(0), torch.empty(4096, 384), dynamic=(shapes,))
    assert "max(64, " in first and second.startswith("reduce_sum")


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("most", [100, 1 << 20, 1 << 24])
def test_products_of_open_sizes_have_few_steps(rank: int, most: int) -> None:
    """However large the product of their bounds is: indices have 31 bits."""
    n = torch.export.Dim("n", min=2, max=most)
    s = plan(lambda x: x.sum(), torch.empty((6,) * rank), target=CPU, dynamic=((dict.fromkeys(range(rank), n),),))
    assert sum(t.reduction is not None for t in s.order.run) <= 3, [t.out for t in s.order.run]
    sizes = {a for t in s.order.run for i in t.out.shape for a in i.atoms() if isinstance(a, Symbol)}
    for count in (2, 3, 37, min(most, int(2 ** (31 / rank)))):
        for i in (i for t in s.order.run for i in t.out.shape):
            pieces = i.evaluate(dict.fromkeys(sizes, count))
            assert 1 <= pieces <= max(128, -(-(count**rank) // 64)), (count, i)


def test_batch_norm_in_training_reduces_twice() -> None:
    """Whatever else follows from its mean and variance."""
    norm = torch.ops.aten._native_batch_norm_legit_functional.default
    numbers = [torch.ones(64) for _ in range(4)]
    found = kernels(lambda x, *rest: norm(x, *rest, True, 0.1, 1e-5), torch.empty(32, 64, 14, 14), *numbers)
    assert sum(name.startswith(("row", "reduce")) for name in found) == 2
