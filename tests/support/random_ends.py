"""Random ends of products of a few rows: residuals, gates, rotations by the angles of a position, rows of a table, choices by flags
and integers, results stored in a state. Kernels read what an end needs before there are sums; that must not show.

    python tests/support/random_ends.py [--seconds 60] [--seed 0] [--plan gpu-fp16-matrix] [--gpu-plans]

An upper bound of the error is carried through the expression, beside its value in float64.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import random_cases
import torch
from torch import Tensor, nn

import lapilli

PLANS = ("gpu-fp32", "gpu-fp16", "gpu-fp16-matrix")
_LEAVES = ("y", "gate", "bias", "residual", "angles", "table", "scalar")
_OPERATIONS = ("add", "mul", "sub", "silu", "flags", "position", "rotate", "half")
_PLACES = 11


@dataclass(frozen=True)
class Bounded:
    """A value in float64, and how far a result may be from it. rounding: of one operation, relative."""

    value: Tensor
    error: Tensor
    rounding: float

    def made(self, value: Tensor, error: Tensor) -> Bounded:
        return Bounded(value, error + self.rounding * value.abs(), self.rounding)

    def moved(self, f: Any) -> Bounded:
        return Bounded(f(self.value), f(self.error), self.rounding)


def _rotated(x: Tensor) -> Tensor:
    middle = x.shape[-1] // 2
    return torch.cat([x[..., middle:], x[..., :middle]], -1)


class Ends(nn.Module):
    """A product of `rows` rows, and a random expression of it."""

    w: Tensor
    v: Tensor
    bias: Tensor
    angles: Tensor
    table: Tensor

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        r = random.Random(seed)
        self.rows = r.choice((1, 1, 1, 2, 3, 5, 8))
        self.terms = r.choice((8, 24, 64, 136, 576, 1032))
        self.columns = r.choice((1, 2, 7, 16, 34, 64, 129, 200))
        self.gated, self.stored = r.random() < 0.4, r.random() < 0.4
        self.tree = self._grown(r, r.choice((1, 2, 3, 4)))
        shapes = {"w": (self.columns, self.terms), "v": (self.columns, self.terms), "bias": (self.columns,),
                  "angles": (_PLACES, self.columns), "table": (5, self.columns)}  # fmt: skip
        for name, shape in shapes.items():
            scale = self.terms**0.5 if name in "wv" else 1
            self.register_parameter(name, nn.Parameter((torch.randn(shape) / scale).to(dtype), requires_grad=False))
        self.cache = nn.Buffer(torch.zeros(_PLACES, self.rows, self.columns, dtype=dtype))

    def _grown(self, r: random.Random, depth: int) -> Any:
        if depth == 0:
            return r.choice([n for n in _LEAVES if n != "gate" or self.gated])
        op = r.choice(_OPERATIONS)
        if op == "rotate" and self.columns % 2:
            op = "add"
        inner = self._grown(r, depth - 1) if depth > 1 else "y"
        other = self._grown(r, r.randrange(depth)) if op in ("add", "mul", "sub", "flags", "position") else None
        return (op, inner, other, r.randrange(-2, _PLACES))

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        shape = (self.rows, self.columns)
        tokens, flags = torch.randint(-5, 5, (self.rows,)), torch.rand(self.columns) < 0.5
        position = torch.randint(-_PLACES, _PLACES, (1,))
        return (
            torch.randn(self.rows, self.terms).to(dtype),
            torch.randn(shape).to(dtype),
            tokens,
            flags,
            position,
            torch.randn(()),
        )

    def forward(
        self, x: Tensor, residual: Tensor, tokens: Tensor, flags: Tensor, position: Tensor, scalar: Tensor
    ) -> Tensor:
        y, gate = (nn.functional.linear(x, w) for w in (self.w, self.v))
        leaves = {
            "y": y, "gate": gate, "bias": self.bias, "residual": residual,
            "angles": self.angles[position], "table": self.table[tokens], "scalar": scalar.to(x.dtype),
        }  # fmt: skip

        def of(tree: Any) -> Tensor:
            if isinstance(tree, str):
                return leaves[tree]
            op, first, second, number = tree
            a, b = of(first), of(second) if second is not None else None
            if op == "silu":
                return nn.functional.silu(a)
            if op == "rotate":
                return _rotated(a) if a.ndim else a
            if op == "half":
                return a.half().to(a.dtype)
            assert b is not None
            if op in ("flags", "position"):
                return torch.where(flags if op == "flags" else position > number, a, b)
            return a + b if op == "add" else a - b if op == "sub" else a * b

        result = of(self.tree).expand(self.rows, self.columns)
        if not self.stored:
            return result
        self.cache[position] = result
        return self.cache * 1

    def bounded(self, args: tuple[Tensor, ...], rounding: float) -> Bounded:
        """What `forward` gives."""
        x, residual, tokens, flags, position, scalar = (a.double() if a.is_floating_point() else a for a in args)
        half = 2.0**-11

        def exact(value: Tensor) -> Bounded:
            return Bounded(value, torch.zeros_like(value), rounding)

        def product(w: Tensor) -> Bounded:
            terms = x.abs() @ w.double().abs().mT
            return exact(x).made(x @ w.double().mT, self.terms * 2.0**-23 * terms)

        leaves = {
            "y": product(self.w), "gate": product(self.v), "bias": exact(self.bias.double()), "residual": exact(residual),
            "angles": exact(self.angles.double()[position]), "table": exact(self.table.double()[tokens]),
            "scalar": exact(scalar).made(scalar, torch.zeros_like(scalar)),
        }  # fmt: skip

        def of(tree: Any) -> Bounded:
            if isinstance(tree, str):
                return leaves[tree]
            op, first, second, number = tree
            a, b = of(first), of(second) if second is not None else None
            if op == "silu":  # its derivative is at most 1.1; 8: exp and a division
                return a.made(nn.functional.silu(a.value), 1.1 * a.error + 8 * rounding * a.value.abs())
            if op == "rotate":
                return a.moved(lambda t: _rotated(t) if t.ndim else t)
            if op == "half":
                return a.made(a.value, a.error + half * a.value.abs() + 2.0**-25)
            assert b is not None
            if op in ("flags", "position"):
                which = flags if op == "flags" else position > number
                return a.made(torch.where(which, a.value, b.value), torch.where(which, a.error, b.error))
            if op == "mul":
                return a.made(a.value * b.value, a.value.abs() * b.error + b.value.abs() * a.error + a.error * b.error)
            return a.made(a.value + b.value if op == "add" else a.value - b.value, a.error + b.error)

        result = of(self.tree).moved(lambda t: t.expand(self.rows, self.columns))
        if not self.stored:
            return result
        value, error = torch.zeros(self.cache.shape).double(), torch.zeros(self.cache.shape).double()
        value[position], error[position] = result.value, result.error
        return Bounded(value, error, rounding)


def check(seed: int, plan: str) -> list[str]:
    """Compares a case with its value in float64; the kernels of its products. Raises AssertionError."""
    torch.manual_seed(seed)
    dtype = torch.float32 if plan == "gpu-fp32" else torch.float16
    model = Ends(seed, dtype).eval()
    args = model.inputs(dtype)
    with lapilli.compile(model, args, target=plan, fallback="error") as program:
        got = program(*args)
        names = [d.kernel for p in program.description.methods[0].plans for d in p.run]
    wanted = model.bounded(args, 2.0**-22 if dtype is torch.float32 else 2.0**-10)
    apart = (got.double() - wanted.value).abs()
    bound = 2 * wanted.error + 2.0**-24  # numbers below the least normal half
    worst = int((apart - bound).argmax()) if apart.numel() else 0
    assert bool((apart <= bound).all()), (
        f"{model.rows} x {model.terms} x {model.columns}, {model.tree}: {got.flatten()[worst]} for "
        f"{wanted.value.flatten()[worst]}, at most {bound.flatten()[worst]} apart"
    )
    return [n for n in names if n in ("matvec", "few_rows")]


if __name__ == "__main__":
    random_cases.main(__doc__, "ends", PLANS, check)
