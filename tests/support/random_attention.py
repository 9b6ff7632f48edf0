"""Attention in 16 bits of random sizes, masks and layouts, by each tile that a kernel may take.

python tests/support/random_attention.py [--seconds 60] [--seed 0] [--plan gpu-fp16-matrix] [--gpu-plans]
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import as_gpu
import random_cases
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapilli
from lapilli.codegen import attention_tiles, flash_attention
from lapilli.target import TARGETS

ON_UNITS = ("gpu-fp16-matrix", "gpu-bf16-matrix")
PLANS = (*ON_UNITS, "gpu-fp32", "cpu-fp32")
STRANGE = (torch.nan, torch.inf, -torch.inf)
MOST = 2**24
"""Terms of the products of a case at most."""


@dataclass
class Case:
    """batch: outer dimensions. share: heads of queries that read the same keys. size, width: of rows of keys and of values. mask:
    kind and shape. turned: heads lie inside of tokens. open: the number of queries is. strange: of an input, a number that is not
    finite. tile: which of the kernel's, if it has several.
    """

    batch: tuple[int, ...]
    heads: int
    share: int
    queries: int
    keys: int
    size: int
    width: int
    causal: bool
    mask: tuple[str, str] | None
    scale: float | None
    turned: bool
    open: bool
    strange: tuple[str, float] | None
    tile: int

    @property
    def terms(self) -> int:
        return math.prod(self.batch) * self.heads * self.share * self.queries * self.keys * (self.size + self.width)


def case(seed: int, most: int = MOST) -> Case:
    r = random.Random(seed)
    sizes = (1, 7, 15, 16, 17, 31, 33, 64, 65, 100, 128, 129, 197, 260)
    queries, keys = r.choice(sizes[3:] if r.random() < 0.8 else sizes), r.choice(sizes)
    keys = queries if r.random() < 0.3 else keys
    size = r.choice((8, 16, 20, 32, 40, 64, 64, 72, 80, 96, 128, 160, 256))
    width = size if r.random() < 0.7 else r.choice((8, 16, 24, 32, 50, 64, 112, 128))
    causal = r.random() < 0.35
    mask = None
    if not causal and r.random() < 0.5:
        mask = r.choice(("bool", "float")), r.choice(("lines", "keys", "all", "one head"))
    strange = (r.choice(("q", "k", "v")), r.choice(STRANGE)) if r.random() < 0.15 else None
    given = Case(
        r.choice(((1,), (1,), (2,), (3,), (2, 2))), r.choice((1, 1, 2, 3)), r.choice((1, 1, 1, 2, 4)), queries, keys, size, width,
        causal, mask, r.choice((None, None, 1.0, 0.02, -0.3)), r.random() < 0.4, r.random() < 0.2, strange, r.randrange(6),
    )  # fmt: skip
    while given.terms > most:
        if max(given.heads, given.share, *given.batch) > 1:
            given = replace(given, heads=1, share=1, batch=(1,))
        else:
            given = replace(given, queries=given.queries // 2 + 1, keys=given.keys // 2 + 1)
    return given


NARROW = [s for s in range(80) if (c := case(s)).size + c.width <= 80]
"""Seeds for tests: drivers take long to compile the emulation of long rows, which other tests of attention have."""


def plan_of(seed: int, put: Callable[[Any, str, Any], None]) -> str:
    """The plan of a test, with the memory of work groups that software devices have. put: what sets an item."""
    plan = ON_UNITS[seed % 2]
    put(TARGETS, plan, replace(TARGETS[plan], shared_memory=as_gpu.SHARED))
    return plan


class Attends(nn.Module):
    def __init__(self, given: Case) -> None:
        super().__init__()
        self.given = given

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        c = self.given
        q, k, v = heads_apart(c, q, k, v)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=c.causal, scale=c.scale, enable_gqa=c.share > 1
        )


def inputs_of(c: Case, dtype: torch.dtype) -> list[Tensor]:
    def rows(heads: int, count: int, size: int) -> Tensor:
        shape = (*c.batch, count, heads, size) if c.turned else (*c.batch, heads, count, size)
        return torch.randn(shape).to(dtype)

    inputs = [
        rows(c.heads * c.share, c.queries, c.size),
        rows(c.heads, c.keys, c.size),
        rows(c.heads, c.keys, c.width),
    ]
    if c.strange is not None:
        chosen = inputs["qkv".index(c.strange[0])].flatten()
        chosen[torch.randint(len(chosen), (1,))] = c.strange[1]
        at = "qkv".index(c.strange[0])
        inputs[at] = chosen.view(inputs[at].shape)
    if c.mask is not None:
        ones = (1,) * len(c.batch)
        shape = {
            "lines": (c.queries, c.keys),
            "keys": (*c.batch, 1, 1, c.keys),
            "all": (*c.batch, c.heads * c.share, c.queries, c.keys),
            "one head": (*ones, 1, c.queries, c.keys),
        }[c.mask[1]]
        kept = torch.rand(shape) < 0.7
        inputs.append(kept if c.mask[0] == "bool" else torch.randn(shape).to(dtype).masked_fill(~kept, -torch.inf))
    return inputs


def exact(c: Case, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """In float64, as the documentation of torch's function has it. (What it calls on a CPU has other results for a negative scale
    with is_causal.)
    """
    (values,) = heads_apart(c, v)
    return weights_of(c, q, k, mask) @ values.double().repeat_interleave(c.share, -3)


def weights_of(c: Case, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    q, k = (x.double() for x in heads_apart(c, q, k))
    scores = q @ k.repeat_interleave(c.share, -3).mT * (c.size**-0.5 if c.scale is None else c.scale)
    if c.causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if mask is not None:
        scores = scores + (torch.where(mask, 0.0, -torch.inf) if mask.dtype is torch.bool else mask)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(empty, 0)


def heads_apart(c: Case, *given: Tensor) -> list[Tensor]:
    return [x.transpose(-3, -2) if c.turned else x for x in given]


def _strange_row(c: Case, v: Tensor) -> int:
    """The last key whose value is no finite number; -1: all are."""
    found = torch.argwhere(~v.isfinite())
    return int(found[:, -3 if c.turned else -2].max()) if len(found) else -1


def check(seed: int, plan: str, most: int = MOST) -> list[str]:
    """Compares a case with the exact result; the name of its kernel. most: terms of its products. Raises AssertionError."""
    c = case(seed, most)
    dtype = torch.bfloat16 if "bf16" in plan else torch.float16
    torch.manual_seed(seed)
    model, inputs = Attends(c), inputs_of(c, dtype)
    shapes = None
    if c.open and (c.mask is None or c.mask[1] == "keys"):
        count = torch.export.Dim("count", min=1, max=4096) if c.queries > 1 else None
        rows = len(c.batch) + (0 if c.turned else 1)
        shapes = {"q": {rows: count}, "k": None, "v": None} | ({"mask": None} if c.mask else {})
    possible = attention_tiles.attention_tiles

    def chosen(*args: object) -> list[attention_tiles.AttentionTile]:
        found = possible(*args)  # type: ignore[arg-type]
        return [found[c.tile % len(found)]] if found else []

    with mock.patch.object(flash_attention, "attention_tiles", chosen):
        made = lapilli.compile(model, tuple(inputs), dynamic_shapes=shapes, target=plan, fallback="error")
    with made as program:
        got = program(*inputs).double()
        names = [d.kernel for p in program.description.methods[0].plans for d in p.run]
    q, k, v, *mask = inputs
    wanted = exact(c, q, k, v, *mask)
    # Weights and results are rounded to the type, in which weights below its least normal number lose digits.
    size = exact(c, q, k, v.nan_to_num(0, 0, 0).abs(), *mask).nan_to_num(0, 0, 0)
    info = torch.finfo(dtype)
    bound = (
        1.5 * info.eps * size
        + 1e-4 * info.eps
        + c.keys * info.smallest_normal * info.eps * v.nan_to_num(0, 0, 0).abs().max()
    )
    if c.causal:
        # Whether a weight of zero meets a value that comes after the query is not promised: 0 times infinity is NaN.
        unseen = exact(c, q, k, v.nan_to_num(0, 0, 0), *mask)
        before = torch.arange(c.queries)[:, None] < _strange_row(c, v)
        wanted = torch.where(before & got.isfinite(), unseen, wanted)
    off = (got - wanted).abs()
    finite = wanted.isfinite()
    # An infinity of a value that is multiplied by a weight too small for the type is NaN.
    assert bool((got.isfinite() == finite).all()), (
        f"{c}: {int((got.isfinite() != finite).sum())} are finite, or are not"
    )
    worst = float((off / bound)[finite].max()) if finite.any() else 0.0
    assert worst <= 1, f"{c}: {worst:.2f} of the bound"
    return [name for name in names if name.startswith("attention")][:1] or ["other kernels"]


if __name__ == "__main__":
    random_cases.main(__doc__, "calls", PLANS, check)
