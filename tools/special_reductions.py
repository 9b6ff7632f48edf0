"""Reductions, sorting and losses, for tools/special_values.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from special_cases import INF, NAN, VALUES, Case, Family


def modest(x: torch.Tensor) -> torch.Tensor:
    """Without finite numbers whose squares overflow: torch's own norms have no result there."""
    return torch.where((x.abs() > 1e15) & x.isfinite(), 1.0, x)


def rows(width: int) -> torch.Tensor:
    """Rows of ordinary numbers with special ones among them."""
    g = torch.Generator().manual_seed(width)
    specials = [
        [],
        [NAN],
        [NAN, INF],
        [INF],
        [-INF],
        [INF, -INF],
        [INF, INF],
        [-INF, -INF, 1.0],
        [1e29, 3e28, 2e29],
        [1e38, 1e38],
        [3.4e38],
        [1e-45, 1e-40],
        [-0.0],
        [NAN, -INF, NAN],
        [1e7, 1e-7],
        [65504.0, 65504.0],
        [1e20],
        [89.0, -104.0],
    ]
    table = torch.randn(len(specials) + 8, width, generator=g)
    for k, s in enumerate(specials):
        places = torch.randperm(width, generator=g)[: len(s)]
        table[k, places] = torch.tensor(s)[: len(places)]
    fills = [-INF, INF, NAN, 0.0, -0.0, 1e-40, 2.0**96, 2.0**110]  # of the last, sums are exact
    for k, value in enumerate(fills):
        table[len(specials) + k] = value
    return table


def reductions(width: int) -> Family:
    family = Family(f"reduce {width}", {"x": rows(width)}, differentiable=True)
    atol = 2e-6 * width**0.5
    both: dict[str, Callable[[Any], Any]] = {
        "sum": lambda v: v.x.sum(1),
        "mean": lambda v: v.x.mean(1),
        "std": lambda v: v.x.std(1),
        "var": lambda v: v.x.var(1),
        "var 0": lambda v: v.x.var(1, correction=0),
        "std all": lambda v: v.x.std(),
        "amax": lambda v: v.x.amax(1),
        "amin": lambda v: v.x.amin(1),
        "amax 0": lambda v: v.x.amax(0),
        "amax all": lambda v: v.x.amax(),
        "max": lambda v: v.x.max(1),
        "min": lambda v: v.x.min(1),
        "max 0": lambda v: v.x.max(0),
        "argmax": lambda v: v.x.argmax(1),
        "argmin": lambda v: v.x.argmin(1),
        "argmax all": lambda v: v.x.argmax(),
        "aminmax": lambda v: torch.aminmax(v.x, dim=1),
        "any": lambda v: v.x.any(1),
        "all": lambda v: v.x.all(1),
        "count nonzero": lambda v: v.x.count_nonzero(1),
        "softmax": lambda v: v.x.softmax(1),
        "softmax 0": lambda v: v.x.softmax(0),
        "log softmax": lambda v: v.x.log_softmax(1),
        "softmin": lambda v: F.softmin(v.x, 1),
        "logsumexp": lambda v: v.x.logsumexp(1),
        "norm": lambda v: v.x.norm(dim=1),
        "norm 1": lambda v: v.x.norm(1, dim=1),
        "norm inf": lambda v: v.x.norm(INF, dim=1),
        "norm -inf": lambda v: v.x.norm(-INF, dim=1),
        "norm 3": lambda v: v.x.norm(3, dim=1),
        "norm 0": lambda v: v.x.norm(0, dim=1),
        "prod": lambda v: (v.x / 2).prod(1),
        "cumsum": lambda v: v.x.cumsum(1),
        "cumprod": lambda v: v.x[:, :8].cumprod(1),
        "cummax": lambda v: v.x.cummax(1),
        "cummin": lambda v: v.x.cummin(1),
        "logcumsumexp": lambda v: v.x.logcumsumexp(1),
        "nansum": lambda v: v.x.nansum(1),
        "nanmean": lambda v: v.x.nanmean(1),
        "layer norm": lambda v: F.layer_norm(modest(v.x), v.x.shape[1:]),
        "rms norm": lambda v: F.rms_norm(modest(v.x), v.x.shape[1:]),
        "normalize": lambda v: F.normalize(v.x, dim=1),
        "batch norm": lambda v: F.batch_norm(v.x, v.x[0].nan_to_num(0, 0, 0), v.x[0].nan_to_num(0, 0, 0).abs() + 1),
        "instance norm": lambda v: F.instance_norm(modest(v.x).reshape(1, *v.x.shape)),
        "group norm": lambda v: F.group_norm(modest(v.x).unsqueeze(2), 1),
        "mul sum": lambda v: (v.x * v.x).sum(1),
        "masked sum": lambda v: (v.x * (v.x > 0)).sum(1),
        "where sum": lambda v: torch.where(v.x > 0, v.x, 0.0).sum(1),
        "gumbel like": lambda v: (v.x * 3).softmax(-1).argmax(-1),
        "equal": lambda v: v.x == v.x.amax(1, keepdim=True),
        "std mean": lambda v: torch.std_mean(v.x, dim=1),
        "dist": lambda v: torch.dist(v.x[0], v.x[11]),
        "median": lambda v: v.x.median(1),
        "nanmedian": lambda v: v.x.nanmedian(1).values,
        "sort": lambda v: torch.sort(v.x, dim=1, stable=True),
        "sort down": lambda v: torch.sort(v.x, dim=1, descending=True, stable=True),
        "argsort": lambda v: torch.argsort(v.x, dim=1, stable=True),
        "topk": lambda v: v.x.topk(3, 1).values,
        "topk small": lambda v: v.x.topk(3, 1, largest=False).values,
        "kthvalue": lambda v: v.x.kthvalue(2, 1).values,
        # NaN has no place in torch's order of numbers.
        "mode": lambda v: torch.where(v.x.isnan(), 0.0, v.x).mode(1).values,
        "msort": lambda v: torch.msort(v.x),
        "quantile": lambda v: v.x.quantile(0.25, 1),
        "searchsorted": lambda v: torch.searchsorted(torch.arange(-3.0, 4.0).to(v.x.device).to(v.x.dtype), v.x),
        "diff": lambda v: v.x.diff(dim=1),
        "trapezoid": lambda v: torch.trapezoid(v.x, dim=1),
        "cosine": lambda v: F.cosine_similarity(v.x, v.x.flip(1)),
        "cdist": lambda v: torch.cdist(v.x[:12], v.x[:12]),
        "bucketize": lambda v: torch.bucketize(v.x, torch.arange(-3.0, 4.0).to(v.x.device).to(v.x.dtype)),
        "isin": lambda v: torch.isin(v.x, torch.tensor([0.0, INF, NAN], device=v.x.device, dtype=v.x.dtype)),
        "renorm": lambda v: torch.renorm(v.x, 2, 0, 1.0),
    }
    none = {
        "all", "amax", "amax 0", "amax all", "amin", "aminmax", "any", "argmax", "argmax all", "argmin", "argsort",
        "batch norm", "bucketize", "cdist", "count nonzero", "cumprod", "dist", "equal", "gumbel like", "isin",
        "kthvalue", "logcumsumexp", "median", "mode", "nanmedian", "norm -inf", "norm 0", "norm 3", "norm inf",
        "prod", "quantile", "renorm", "searchsorted", "std all", "topk", "topk small",
    }  # fmt: skip
    whole = {
        "quantile",
        "cdist",
        "renorm",
        "searchsorted",
        "bucketize",
        "prod",
        "cumprod",
        "logcumsumexp",
        "dist",
        "gumbel like",
        "equal",
        "norm 3",
    }
    close = {
        "layer norm",
        "rms norm",
        "group norm",
        "instance norm",
        "cosine",
        "std",
        "std mean",
        "var",
        "norm 3",
        "softmax",
        "softmin",
        "cumsum",
        "mean",
        "nanmean",
    }
    references: dict[str, Callable[[Any], Any]] = {
        "std mean": lambda v: (v.x.std(1), v.x.mean(1)),  # torch's own mean is NaN here where a row has an infinity
    }
    for name, f in both.items():
        exact = name not in ("equal", "gumbel like", "cdist")
        family.cases.append(
            Case(
                name,
                f,
                atol,
                rtol=5e-5 if name in close else 2e-5,
                exact=exact,
                half=name not in whole,
                differentiable=name not in none,
                reference=references.get(name),
            )
        )
    return family


def undone(width: int) -> Family:
    """Sums over a row beside sums of its negatives: 0 where all is finite. A compiler that knows the length may take them for 0
    everywhere."""
    x = rows(width)
    # Products are exact, so that a multiply-add is no other number.
    y = torch.where(x.isfinite(), 2 * x.sign(), x).flip(0)
    family = Family(f"undone {width}", {"x": x, "y": y}, differentiable=True)
    cases: dict[str, Callable[[Any], Any]] = {
        "sum of x + sum of -x": lambda v: v.x.sum(1) + (-v.x).sum(1),
        "sum of -x + sum of x": lambda v: (-v.x).sum(1) + v.x.sum(1),
        "sum 0 of x + sum of -x": lambda v: v.x.sum(0) + (-v.x).sum(0),
        "sum of xy + sum of -xy": lambda v: (v.x * v.y).sum(1) + (-v.x * v.y).sum(1),
        "sum of xy - sum of yx": lambda v: (v.x * v.y).sum(1) - (v.y * v.x).sum(1),
        "sum of x/y + sum of x/-y": lambda v: (v.x / v.y).sum(1) + (v.x / -v.y).sum(1),
        "sum of x - y + sum of y - x": lambda v: (v.x - v.y).sum(1) + (v.y - v.x).sum(1),
        "mean of x + mean of -x": lambda v: v.x.mean(1) + (-v.x).mean(1),
        "sum of x / sum of -x": lambda v: v.x.sum(1) / (-v.x).sum(1),
        "amax + amin of -x": lambda v: v.x.amax(1) + (-v.x).amin(1),
        "x less its row": lambda v: v.x - v.x.sum(1, keepdim=True) - (-v.x).sum(1, keepdim=True),
        "average pool": lambda v: F.avg_pool1d(v.x[None], 1) + F.avg_pool1d(-v.x[None], 1),
        "product": lambda v: v.x @ v.y.t() + v.x @ (-v.y).t(),
        "sum - sum and its negative": lambda v: v.x.sum(1) - (v.x.sum(1) + (-v.x).sum(1)),
    }
    for name, f in cases.items():
        family.cases.append(Case(name, f, 4e-6 * width, half=False, differentiable=" of " in name and "/" not in name))
    return family


def losses() -> Family:
    g = torch.Generator().manual_seed(9)
    x = VALUES.reshape(16, 4).clone()
    y = torch.rand(16, 4, generator=g)
    family = Family("loss", {"x": x, "y": y, "p": x.nan_to_num(0.5, 1, 0).clamp(0, 1)}, differentiable=True)
    cases: dict[str, Callable[[Any], Any]] = {
        "mse": lambda v: F.mse_loss(v.x, v.y, reduction="none"),
        "l1": lambda v: F.l1_loss(v.x, v.y, reduction="none"),
        "smooth l1": lambda v: F.smooth_l1_loss(v.x, v.y, reduction="none"),
        "huber": lambda v: F.huber_loss(v.x, v.y, reduction="none"),
        "bce": lambda v: F.binary_cross_entropy(v.p, v.y, reduction="none"),
        "bce logits": lambda v: F.binary_cross_entropy_with_logits(v.x, v.y, reduction="none"),
        "cross entropy": lambda v: F.cross_entropy(v.x, torch.arange(16).to(v.x.device) % 4, reduction="none"),
        "cross entropy ignored": lambda v: F.cross_entropy(
            v.x, torch.where(torch.arange(16) < 3, -100, 1).to(v.x.device)
        ),
        "nll": lambda v: F.nll_loss(v.x, torch.arange(16).to(v.x.device) % 4, reduction="none"),
        "kl": lambda v: F.kl_div(v.x, v.y, reduction="none"),
        "poisson": lambda v: F.poisson_nll_loss(v.x, v.y, reduction="none"),
        "hinge": lambda v: F.hinge_embedding_loss(v.x, torch.sign(v.y - 0.5), reduction="none"),
        "soft margin": lambda v: F.soft_margin_loss(v.x, torch.sign(v.y - 0.5), reduction="none"),
        "mse mean": lambda v: F.mse_loss(v.x, v.y),
        "margin ranking": lambda v: F.margin_ranking_loss(v.x, v.y, torch.sign(v.y - 0.5), reduction="none"),
        "cosine loss": lambda v: F.cosine_embedding_loss(v.x, v.y, torch.ones(16).to(v.x.device), reduction="none"),
        "triplet": lambda v: F.triplet_margin_loss(v.x, v.y, v.p, reduction="none"),
    }
    skip = {"hinge", "soft margin", "margin ranking", "cosine loss", "triplet", "gaussian", "bce"}
    for name, f in cases.items():
        family.cases.append(Case(name, f, 1e-6, half=False, differentiable=name not in skip))
    return family
