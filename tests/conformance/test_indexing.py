"""Gathers, scatters, scans and sorts beyond single calls: long axes, sizes that vary, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import (
    FLOAT_BOUND,
    Case,
    assert_agree,
    expected,
    module_of,
    on_device,
    relative_error,
    through_interpreter,
)
from torch import Tensor, nn
from torch.export import Dim

import lapilli
from lapilli.ir import interpret
from lapilli.legalize.passes import prepare
from lapilli.lower import lower

aten = torch.ops.aten


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _with_ties(n: int) -> Tensor:
    x = torch.randint(0, n // 3, (2, n), generator=torch.Generator().manual_seed(n)).float()
    x[0, n // 2] = x[0, 1] = float("nan")
    return x


@pytest.mark.parametrize("n", [64, 65, 129, 1000, 5000])
@pytest.mark.parametrize("descending", [False, True])
def test_sorting_of_any_length_is_stable(n: int, descending: bool) -> None:
    cases = [Case(aten.sort.stable, (_with_ties(n),), {"stable": True, "dim": 1, "descending": descending})]
    assert_agree(through_interpreter(cases), expected(cases))


def test_long_sort_on_device() -> None:
    cases = [Case(aten.sort.stable, (_with_ties(1500),), {"stable": True, "dim": 1})]
    assert_agree(on_device(cases, "any-fp32"), expected(cases))


def test_long_scans_on_device() -> None:
    """Four passes; against float64, since errors must not grow with the length."""
    cases = [Case(aten.cumsum.default, (numbers(70_000) + 1, 0)), Case(aten.logcumsumexp.default, (numbers(300, 3), 0))]
    assert_agree(on_device(cases, "any-fp32"), [t.float() for t in expected(cases, lambda t: t.double())])


class Everything(nn.Module):
    """x [b, n] and a permutation of every row."""

    def forward(self, x: Tensor, order: Tensor) -> tuple[Tensor, ...]:
        values, positions = x.sort(stable=True, dim=1)
        return (
            x.cumsum(1), x.cummax(1)[1], values, positions, torch.searchsorted(values, x), x.gather(1, order),
            x.scatter_add(1, order, x), x[:, order[0]], x.index_add(1, order[0], x), torch.cdist(x, x),
            torch.zeros_like(x).scatter(1, order, x), x.masked_scatter(x > 0, x * 2), x.topk(3, 1)[0], x.nanmedian(1)[0],
        )  # fmt: skip


def _arguments(b: int, n: int) -> tuple[Tensor, Tensor]:
    return numbers(b, n), torch.stack([torch.randperm(n) for _ in range(b)])


def test_sizes_that_vary() -> None:
    b, n = Dim("b", min=2, max=16), Dim("n", min=4, max=300)
    sizes = ({0: b, 1: n}, {0: b, 1: n})
    program = lapilli.compile(Everything(), _arguments(4, 9), dynamic_shapes=sizes, target="any-fp32")
    for shape in ((4, 9), (16, 4), (3, 130), (2, 300), (4, 9)):
        x, order = _arguments(*shape)
        for ours, theirs in zip(program(x, order), Everything()(x, order), strict=True):
            if theirs.dtype.is_floating_point:
                assert relative_error(ours, theirs) <= FLOAT_BOUND
            else:
                assert torch.equal(ours, theirs)


COMPOSED: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
    (torch.matrix_exp, (numbers(2, 4, 4),)),
    (torch.matrix_exp, (20 * numbers(3, 3).triu(1),)),
    (torch.linalg.tensorinv, (numbers(2, 3, 6) + torch.eye(6).reshape(2, 3, 6),)),
    (lambda x, a, b: torch.addbmm(x, a, b, beta=0.5, alpha=2), (numbers(3, 5), numbers(4, 3, 6), numbers(4, 6, 5))),
    (lambda a, b: torch.einsum("bij,bkj->bik", a, b), (numbers(2, 3, 4), numbers(2, 5, 4))),
    (lambda a, b: torch.tensordot(a, b, dims=([1], [0])), (numbers(3, 4, 2), numbers(4, 5))),
    (torch.kron, (numbers(2, 3), numbers(3, 2))),
    (lambda a: torch.linalg.matrix_power(a, -3), (numbers(4, 4) + 4 * torch.eye(4),)),
    (lambda a: torch.quantile(a, 0.3, dim=1), (numbers(3, 20),)),
]


@pytest.mark.parametrize("case", range(len(COMPOSED)))
def test_what_torch_or_we_decompose(case: int) -> None:
    function, args = COMPOSED[case]

    class Model(nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return function(*given)

    graph = lower(prepare(torch.export.export(Model(), args)))
    (got,) = interpret.run(graph, [a.numpy() for a in args])
    assert relative_error(got, function(*(a.double() for a in args))) <= FLOAT_BOUND


REFUSED: list[tuple[Case, str]] = [
    (Case(aten.index.Tensor, (numbers(4), [numbers(4) > 0])), "a mask chooses is not known"),
    (Case(aten.index_put.default, (numbers(4), [numbers(4) > 9], numbers(0))), "a mask chooses is not known"),
    (Case(aten.as_strided.default, (numbers(4, 3).t(), [2, 2], [1, 2])), "not contiguous"),
    (Case(aten.as_strided_scatter.default, (numbers(4), numbers(2, 2), [2, 2], [1, 1])), "overlap"),
    (Case(aten.linalg_inv_ex.default, (torch.eye(65),)), "at most 64"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_the_gpu_cannot_do_is_refused_with_the_reason(case: int) -> None:
    call, reason = REFUSED[case]
    with pytest.raises(TypeError, match=reason):
        lower(module_of([call]))


class Running(nn.Module):
    """The running sum of copies of a vector, and of its first elements."""

    def __init__(self, copies: int, more: int = 0) -> None:
        super().__init__()
        self.copies, self.more = copies, more

    def forward(self, x: Tensor) -> Any:
        return torch.cat([x] * self.copies + [x[: self.more]]).cumsum(0)


@pytest.mark.parametrize("copies", [1, 2])
def test_an_axis_without_bound_gets_one_that_the_player_checks(copies: int) -> None:
    program = lapilli.compile(Running(copies), (numbers(5),), dynamic_shapes=({0: Dim("n")},), target="any-fp32")
    assert program.report().segments == ("gpu",)
    x = numbers(700)
    torch.testing.assert_close(program(x), torch.cat([x] * copies).cumsum(0), rtol=1e-4, atol=1e-4)
    with pytest.raises(lapilli.InvalidInputError, match=str(32768 // copies)):
        program(torch.ones(32768 // copies + 1))


def test_an_axis_without_bound_is_refused_where_it_is_no_multiple_of_an_input_size() -> None:
    exported = torch.export.export(Running(1, more=2), (numbers(5),), dynamic_shapes=({0: Dim("n", min=2)},))
    with pytest.raises(TypeError, match="give it a smaller `max` in its Dim"):
        lower(prepare(exported))


def test_a_scalar_mask_writes_what_every_place_gets() -> None:
    x = numbers(5, 3)
    cases = [Case(aten.index_put.default, (x, [x > 0], torch.tensor(0.0)))]
    assert_agree(through_interpreter(cases), expected(cases))


class Decompositions(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (*torch.linalg.svd(x, full_matrices=True), *torch.linalg.eigh(x.mT @ x))


@pytest.mark.parametrize(
    "x", [numbers(2, 6, 5), numbers(4, 7), numbers(5, 2) @ numbers(2, 5)], ids=["tall", "wide", "singular"]
)
def test_singular_vectors_and_eigenvectors(x: Tensor) -> None:
    """Their signs are open; that they are orthogonal and give the matrix back is not."""
    graph = lower(prepare(torch.export.export(Decompositions(), (x,))))
    u, s, vh, values, vectors = (torch.as_tensor(a) for a in interpret.run(graph, [x.numpy()]))
    k = s.shape[-1]
    square = x.mT @ x
    for q in (u, vh, vectors):
        torch.testing.assert_close(q.mT @ q, torch.eye(q.shape[-1]).expand_as(q), rtol=0, atol=1e-5)
    torch.testing.assert_close(u[..., :k] * s[..., None, :] @ vh[..., :k, :], x, rtol=0, atol=1e-5)
    torch.testing.assert_close(s, torch.linalg.svdvals(x), rtol=0, atol=1e-5)
    torch.testing.assert_close(vectors * values[..., None, :] @ vectors.mT, square, rtol=0, atol=1e-4)


def test_singular_values_on_device() -> None:
    cases = [Case(aten._linalg_svd.default, (numbers(5, 4), False, False))]
    assert_agree(on_device(cases, "any-fp32"), expected(cases))


def test_sums_leave_the_other_elements_alone() -> None:
    """-0 is -0 where nothing is added."""
    x, places, values = torch.full((5,), -0.0), torch.tensor([3]), torch.tensor([2.0])

    class Sums(torch.nn.Module):
        def forward(self, x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
            return [x.index_put((i,), v, accumulate=True), x.scatter_add(0, i, v), x.index_add(0, i, v)]

    program = lapilli.compile(Sums(), (x, places, values))
    for got, want in zip(program(x, places, values), Sums()(x, places, values), strict=True):
        assert torch.equal(got.signbit(), want.signbit())
        assert torch.equal(got, want)
