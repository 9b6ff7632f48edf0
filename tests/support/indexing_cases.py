"""Calls of operators that gather, scatter, sort and search, and of small linear algebra: the overloads and the corners that
torch's samples do not reach. All inputs come from one seed."""

from __future__ import annotations

from typing import Any

import torch
from agreement import Case

aten = torch.ops.aten
_generator = torch.Generator().manual_seed(11)
Cases = dict[Any, list[Case]]


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator)


def places(size: int, *shape: int, low: int = 0) -> torch.Tensor:
    return torch.randint(low, size, shape, generator=_generator)


def distinct(*shape: int) -> torch.Tensor:
    """Whole numbers, no two alike."""
    return torch.randperm(torch.Size(shape).numel(), generator=_generator).reshape(shape)


def gathers() -> Cases:
    x = f(4, 5, 6)
    rows, columns = places(4, 3, 2, low=-4), places(5, 2, low=-5)
    indexed = [
        (x, [rows]), (x, [rows, columns]), (x, [None, places(5, 7), columns[:1]]), (x, [rows, None, columns]),
        (x, [None, None, places(6)]), (distinct(8), [places(8, 3, 3)]), (x, [places(4, 0)]),
    ]  # fmt: skip
    bag = aten._embedding_bag.default
    weight, words = f(10, 3), places(10, 9)
    starts = torch.tensor([0, 4, 4, 7])
    bags = [Case(bag, (weight, words, starts, False, mode)) for mode in (0, 1, 2)]
    bags.append(Case(bag, (weight, words, starts, False, 0, False, f(9))))
    bags.append(Case(bag, (weight, words, torch.tensor([0, 3, 9]), False, 1, False, None, True)))
    bags.append(Case(bag, (weight, words, starts, False, 1, False, None, False, int(words[1]))))
    fold = aten.col2im.default
    forward = aten._embedding_bag_forward_only.default
    return {
        aten.index.Tensor: [Case(aten.index.Tensor, c) for c in indexed],
        aten._unsafe_index.Tensor: [Case(aten._unsafe_index.Tensor, c) for c in indexed[:2]],
        aten._embedding_bag.default: bags,
        forward: [Case(forward, (weight, words, starts))],
        fold: [
            Case(fold, (f(2, 3 * 6, 9), [4, 5], [2, 3], [1, 1], [0, 0], [1, 1])),
            Case(fold, (f(1, 2 * 4, 6), [6, 7], [2, 2], [2, 1], [1, 0], [2, 3])),
        ],
        aten.fill.Tensor: [Case(aten.fill.Tensor, (f(2, 3), torch.tensor(2.5)))],
        aten.copy.default: [Case(aten.copy.default, (f(2, 3), distinct(3)))],
        aten.slice_scatter.default: [
            Case(aten.slice_scatter.default, (f(4, 9), f(4, 3), 1, 1, 9, 3)),
            Case(aten.slice_scatter.default, (f(6), f(2), 0, -2)),
        ],
        aten.as_strided.default: [Case(aten.as_strided.default, (f(24), [3, 2, 4], [2, 7, 1], 3))],
        aten.as_strided_scatter.default: [
            Case(aten.as_strided_scatter.default, (f(5, 6), f(3, 2), [3, 2], [1, 7], 4)),
        ],
    }  # fmt: skip


def scatters() -> Cases:
    x, index, source = f(4, 7), places(4, 6, 5), f(6, 7)
    ints = distinct(4, 7)
    both = [rows := places(4, 3, 2, low=-4), places(7, 2, low=-7)]
    put = aten.index_put.default
    mask = torch.tensor([True, False, True, True])
    put_cases = [
        (x, both, f(3, 2), True), (x, [rows], f(3, 2, 7), True), (x, [rows], f(7), False), (x, [None, both[1]], f(4, 1), True),
        (x, [mask], torch.tensor(3.0), False), (x, [mask], f(7), True), (x, [x > 0], torch.tensor(0.0), False),
        (x, [mask], f(1, 7), False), (ints, both, distinct(3, 2), True), (x, [places(4, 0)], f(0, 7), False),
    ]  # fmt: skip
    scan_source = f(3, 70)
    special = torch.tensor([1.0, float("inf"), 2.0, float("-inf"), float("nan"), 3.0])
    scans = {
        o: [Case(o, (scan_source, 1)), Case(o, (f(5000), 0)), Case(o, (f(5, 4, 3), 1)), Case(o, (special, 0))]
        for o in (aten.cumsum.default, aten.cummax.default, aten.cummin.default, aten.logcumsumexp.default)
    }
    scans[aten.cumsum.default].append(Case(aten.cumsum.default, (distinct(3, 300) > 400, 1)))
    scans[aten.cumprod.default] = [Case(aten.cumprod.default, (1 + f(3, 70) / 10, 1), {"dtype": torch.float32})]
    reduce = aten.scatter_reduce.two
    return {
        **scans,
        put: [Case(put, c) for c in put_cases],
        aten._unsafe_index_put.default: [Case(aten._unsafe_index_put.default, put_cases[0])],
        reduce: [
            Case(reduce, (x, 0, index, source, how), {"include_self": own})
            for how in ("sum", "prod", "mean", "amax", "amin")
            for own in (True, False)
        ],
        aten.scatter.src: [Case(aten.scatter.src, (x, 0, distinct(4, 7).argsort(0)[:3], f(3, 7)))],
        aten.scatter.value: [Case(aten.scatter.value, (x, 1, places(7, 4, 3), 2.5))],
        aten.masked_scatter.default: [
            Case(aten.masked_scatter.default, (x, x > 0, f(40))), Case(aten.masked_scatter.default, (f(900), f(900) > 0, f(900))),
        ],
        aten.histogram.bin_ct: [
            Case(aten.histogram.bin_ct, (f(200), 9)),
            Case(aten.histogram.bin_ct, (f(99), 6), {"weight": f(99), "range": [-1.0, 2.0]}),
        ],
        aten.histogram.bins_tensor: [
            Case(aten.histogram.bins_tensor, (f(200), torch.tensor([-1.0, 0.0, 0.5, 3.0])), {"density": True})
        ],
        aten.segment_reduce.default: [
            Case(aten.segment_reduce.default, (f(9, 2), how), {"lengths": torch.tensor([4, 0, 5]), "unsafe": True})
            for how in ("sum", "mean", "max", "min", "prod")
        ],
        aten.histc.default: [Case(aten.histc.default, (f(500), 10)), Case(aten.histc.default, (f(20, 9), 7, -1, 1))],
    }  # fmt: skip


def searches() -> Cases:
    ties = places(9, 3, 200).float()
    ties[1, 50] = float("nan")
    found: Cases = {}
    stable = aten.sort.stable
    found[stable] = [
        Case(stable, (t,), {"stable": True, "dim": d, "descending": down})
        for t, d in ((ties, 1), (ties[:, :5], 0), (ties[:, :65].t(), 0), (distinct(300) % 7, 0), (ties > 4, 1))
        for down in (False, True)
    ]
    for overload in (aten.sort.default, aten.argsort.default):
        found[overload] = [Case(overload, (distinct(3, 130), -1, True)), Case(overload, (f(5, 6), 0))]
    found[aten.topk.default] = [
        Case(aten.topk.default, (distinct(4, 90), 5, 1, largest)) for largest in (True, False)
    ] + [Case(aten.topk.default, (f(9, 4), 2, 0))]  # fmt: skip
    found[aten.kthvalue.default] = [Case(aten.kthvalue.default, (f(4, 70), 9, 1, True))]
    numbers, holes = f(3, 41), f(3, 40)
    holes[0, 3] = holes[1] = float("nan")
    for name in ("median", "nanmedian"):
        along, whole = getattr(aten, name).dim, getattr(aten, name).default
        found[along] = [Case(along, (numbers, 1)), Case(along, (holes[::2], 1, True))]
        found[whole] = [Case(whole, (numbers,)), Case(whole, (holes,))]
    found[aten.mode.default] = [Case(aten.mode.default, (torch.tensor([[3, 1, 3, 1, 2], [4, 4, 0, 0, 4]]), 1))]
    edges, queries = f(3, 77).sort(1)[0], f(3, 20)
    search, bucket = aten.searchsorted.Tensor, aten.bucketize.Tensor
    found[search] = [Case(search, (edges, queries), {"right": right}) for right in (False, True)]
    found[search].append(Case(search, (edges[0].flip(0), queries), {"sorter": torch.arange(76, -1, -1)}))
    found[bucket] = [Case(bucket, (edges, edges[1]), {"right": right, "out_int32": right}) for right in (False, True)]
    found[aten.searchsorted.Scalar] = [Case(aten.searchsorted.Scalar, (edges[0], 0.25))]
    found[aten.bucketize.Scalar] = [Case(aten.bucketize.Scalar, (0.25, edges[0]))]
    members = distinct(5, 3)
    found[aten.isin.Tensor_Tensor] = [
        Case(aten.isin.Tensor_Tensor, (distinct(4, 7), members), {"invert": invert}) for invert in (False, True)
    ]
    found[aten.isin.Tensor_Scalar] = [Case(aten.isin.Tensor_Scalar, (distinct(4, 7), 5))]
    found[aten.isin.Scalar_Tensor] = [Case(aten.isin.Scalar_Tensor, (5, members))]
    return found


def factorisations() -> Cases:
    square, batch = f(7, 7), f(2, 3, 4, 4)
    dominant = f(6, 6) + 6 * torch.eye(6)
    definite = square @ square.t() + torch.eye(7)
    found: Cases = {}
    for overload in (aten._linalg_det.default, aten._linalg_slogdet.default, aten.linalg_lu_factor_ex.default,
                     aten._lu_with_info.default, aten.linalg_lu.default, aten.linalg_lu_factor.default):  # fmt: skip
        found[overload] = [Case(overload, (x,)) for x in (square, batch)]
    found[aten.linalg_lu.default].append(Case(aten.linalg_lu.default, (f(5, 3),)))
    for overload in (aten.inverse.default, aten.linalg_inv.default, aten.linalg_inv_ex.default):
        found[overload] = [Case(overload, (dominant,))]
    solve = aten.linalg_solve.default
    found[solve] = [
        Case(solve, (dominant, f(6, 2))), Case(solve, (dominant, f(6))), Case(solve, (dominant, f(3, 6)), {"left": False}),
    ]  # fmt: skip
    found[aten._linalg_solve_ex.default] = [Case(aten._linalg_solve_ex.default, (dominant, f(6, 2)))]
    found[aten.linalg_cholesky_ex.default] = [
        Case(aten.linalg_cholesky_ex.default, (definite,), {"upper": upper}) for upper in (False, True)
    ]
    v, tau = torch.geqrf(f(6, 4))
    found[aten.orgqr.default] = [Case(aten.orgqr.default, (v, tau))]
    found[aten.linalg_qr.default] = [
        Case(aten.linalg_qr.default, (x, mode)) for x in (f(6, 4), f(3, 5), square) for mode in ("reduced", "complete")
    ]
    singular = torch.diag(torch.tensor([3.0, -2.0, 0.0, 0.5]))
    svd = aten._linalg_svd.default
    found[svd] = [Case(svd, (x, False, False)) for x in (f(6, 4), f(3, 5), batch, singular)]
    eigh = aten._linalg_eigh.default
    found[eigh] = [Case(eigh, (x, uplo, False)) for x in (definite, batch, singular) for uplo in ("L", "U")]
    pinv, rank = aten.linalg_pinv, aten.linalg_matrix_rank
    found[pinv.default] = [Case(pinv.default, (f(6, 4), 1e-6))]
    for overload in (pinv.atol_rtol_float, pinv.atol_rtol_tensor, aten.pinverse.default):
        found[overload] = [Case(overload, (x,)) for x in (f(6, 4), f(3, 5), dominant)]
    for overload in (rank.atol_rtol_float, rank.atol_rtol_tensor):
        found[overload] = [Case(overload, (x,)) for x in (f(3, 5), f(5, 2) @ f(2, 5), singular)]
    found[rank.atol_rtol_float].append(Case(rank.atol_rtol_float, (singular,), {"atol": 1.0}))
    a, b = f(2, 5, 3), f(2, 4, 3)
    norms = (0.0, 1.0, 2.0, 3.5, float("inf"))
    found[aten.cdist.default] = [Case(aten.cdist.default, (a, b, p)) for p in norms]
    found[aten._cdist_forward.default] = [Case(aten._cdist_forward.default, (a, b, p, None)) for p in norms]
    found[aten._pdist_forward.default] = [Case(aten._pdist_forward.default, (f(6, 3), p)) for p in norms]
    three = (f(5, 3), f(2, 3, 4), f(5, 4))
    found[aten._trilinear.default] = [
        Case(aten._trilinear.default, (*three, [1, 3], [0], [1, 2], sums, *unroll))
        for sums, unroll in (
            ([2, 3], ()),
            ([2], ()),
            ([3], ()),
            ([], ()),
            ([1, 2, 3], ()),
            ([2, 3], (2,)),
            ([0, 3], (0,)),
        )
    ]
    return found
