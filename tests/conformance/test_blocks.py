"""Weights of few bits: whatever a model makes of them, a few rows read them as they are, and the floats are never there."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import random_codes
import torch
import torch.nn.functional as F
from agreement import Function

import lapilli
from lapilli.codegen import gpu_tiles

pytestmark = pytest.mark.usefixtures("on_any_device")

Weights = dict[str, torch.Tensor]
N, K, GROUP = 96, 384, 32


class Quantized(Function):
    """A linear layer without bias, whose matrix is made of weights."""

    def __init__(self, weights: Weights, matrix: Callable[..., torch.Tensor]) -> None:
        super().__init__(lambda x, *w: F.linear(x, matrix(*w)), *weights.values())
        self.weights, self.matrix = list(weights.values()), matrix


def codes(low: int, high: int, dtype: torch.dtype = torch.int8, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape or (N, K)).to(dtype)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape or (N, K // GROUP, 1)) / 8 + 0.01


def grouped(q: torch.Tensor) -> torch.Tensor:
    return q.reshape(q.shape[0], -1, GROUP)


def unpacked(q: torch.Tensor) -> torch.Tensor:
    return torch.stack([q & 15, q >> 4], -1).reshape(q.shape[0], -1)


# name: (bits of a packed code, weights, what the model makes of them)
FORMS: dict[str, tuple[int, Weights, Callable[..., torch.Tensor]]] = {
    "symmetric": (4, {"q": codes(-8, 8), "s": scales()}, lambda q, s: (grouped(q).float() * s).reshape(N, K)),
    "zero points in floats": (
        4, {"q": codes(0, 16), "z": codes(0, 16, torch.int8, N, K // GROUP, 1).float(), "s": scales()},
        lambda q, z, s: ((grouped(q).float() - z) * s).reshape(N, K),
    ),
    "zero points in integers": (
        4, {"q": codes(-8, 8), "z": codes(-8, 8, torch.int8, N, K // GROUP, 1), "s": scales()},
        lambda q, z, s: ((grouped(q).int() - z.int()).float() * s).reshape(N, K),
    ),
    "a scale and a minimum": (
        4, {"q": codes(0, 16, torch.uint8), "s": scales(), "m": scales()},
        lambda q, s, m: (grouped(q).float() * s - m).reshape(N, K),
    ),
    "a scale for a column": (8, {"q": codes(-128, 128), "s": scales(N, 1)}, lambda q, s: q.float() * s),
    "one scale": (8, {"q": codes(-100, 100)}, lambda q: q.float() * 0.0125),
    "eight bits with zero points": (
        8, {"q": codes(0, 256, torch.uint8), "s": scales(N, 1)}, lambda q, s: (q.float() - 128) * s
    ),
    "[K, N]": (4, {"q": codes(-8, 8, torch.int8, K, N), "s": scales(1, N)}, lambda q, s: (q.float() * s).mT),
    "two in a byte": (
        4, {"q": codes(0, 256, torch.uint8, N, K // 2), "s": scales()},
        lambda q, s: (grouped(unpacked(q)).float() * s - 1).reshape(N, K),
    ),
    "scales of halves": (
        4, {"q": codes(-8, 8), "s": scales().half()}, lambda q, s: (grouped(q).half() * s).reshape(N, K).float()
    ),
}  # fmt: skip


def check(model: Quantized, x: torch.Tensor, bits: int | None, rounding: float = 0.0) -> None:
    """bits: of the codes that a kernel of blocks is to read; None: any kernel. rounding: of the model's own weights."""
    weights, matrix = model.weights, model.matrix(*model.weights).double()
    with lapilli.compile(model, (x,), target="gpu-fp32", fallback="error") as program:
        got = program(x)
        names = [k.name for k in program.description.kernels]
        constants = program.memory().constants
    # Every product and every addition rounds once, and what computes a weight rounds a few times.
    bound = (x.shape[-1] + 8) * 2.0**-23 * float((x.abs().double() @ matrix.abs().mT).max())
    bound += rounding * float(x.abs().double().sum(-1).max())
    assert (got.double() - x.double() @ matrix.mT).abs().max() <= bound
    if bits is not None:
        assert "few_rows" in names or "matmul" in names
        shared = 4 * sum(w.numel() for w in weights[1:])
        assert constants <= matrix.numel() * bits // 8 + shared + 256 * len(weights), "the floats are there too"


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("name", FORMS)
def test_few_rows(name: str, rows: int) -> None:
    bits, weights, matrix = FORMS[name]
    check(Quantized(weights, matrix), torch.randn(rows, K), bits)


@pytest.mark.parametrize("name", FORMS)
def test_many_rows(name: str) -> None:
    """Tiles decode the weights on their way into shared memory."""
    bits, weights, matrix = FORMS[name]
    check(Quantized(weights, matrix), torch.randn(37, K), bits)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("rows", [9, 17, 32])
def test_work_groups_share_sums(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tiles that decode: each of a few work groups has a part of the terms, the last one perhaps fewer than others, or none."""
    parts, columns = list[int](), 200
    monkeypatch.setattr(gpu_tiles, "become_numbers_straight", lambda m: False)  # test_rows_of_codes.py has these
    for terms in (512, 1056):
        torch.manual_seed(terms)
        q, s = codes(-8, 8, torch.int8, columns, terms), (torch.rand(columns, terms // 32, 1) / 8 + 0.01).half()
        model = Quantized({"q": q, "s": s}, lambda q, s: (grouped(q) * s).reshape(len(q), -1).float())
        x = torch.randn(rows, terms)
        for units in (9, 20):
            plan = "gpu-fp16-matrix"
            with (
                random_codes.taken(units, plan) as found,
                lapilli.compile(model, (x,), target=plan, precision="fp16", fallback="error") as program,
            ):
                got = program(x)
            parts.extend(t.parts for t in found)
            matrix = model.matrix(q, s).double()
            # Rows, weights and results are rounded to halves.
            bound = 3 * 2.0**-11 * float((x.abs().double() @ matrix.abs().mT).max())
            assert (got.double() - x.double() @ matrix.mT).abs().max() <= bound
    assert {2, 4} <= {*parts}, parts


LONG: dict[str, tuple[int, int, int, int]] = {  # rows, columns, terms, those of a scale
    "several chunks of a row": (1, 34, 9216, 64),
    "whole vectors that no chunk divides": (2, 32, 9248, 32),
    "rows that take the memory of one step": (8, 18, 4096, 128),
    "scales of fewer than a vector": (1, 20, 4096, 8),
    "lines of single words": (3, 96, 1032, 8),
    "fewer terms than a team has vectors": (1, 300, 64, 16),
}


@pytest.mark.part(1)
@pytest.mark.parametrize("case", LONG)
@pytest.mark.parametrize("bits", [4, 8])
def test_lines_of_any_length(case: str, bits: int) -> None:
    rows, n, k, group = LONG[case]
    torch.manual_seed(n)
    weights = {"q": codes(-(1 << bits - 1), 1 << bits - 1, torch.int8, n, k), "s": scales(n, k // group, 1)}
    model = Quantized(weights, lambda q, s: (q.reshape(n, -1, group).float() * s).reshape(n, k))
    check(model, torch.randn(rows, k), bits)


@pytest.mark.part(1)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("bits", [(4, 8), (8, 4), (4, 0), (4, 4)])
def test_a_gate_of_other_codes(bits: tuple[int, int], rows: int) -> None:
    """One kernel computes both products only if their lines are read in the same steps. 0: floats."""
    torch.manual_seed(rows)
    parts = [torch.randn(N, K) if b == 0 else codes(-(1 << b - 1), 1 << b - 1) for b in bits]
    s = scales()

    def f(x: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
        first, second = (p if p.is_floating_point() else (grouped(p).to(x.dtype) * w[2]).reshape(N, K) for p in w[:2])
        return torch.sigmoid(F.linear(x, first)) * F.linear(x, second)

    x = torch.randn(rows, K)
    with lapilli.compile(Function(f, *parts, s), (x,), target="gpu-fp32", fallback="error") as program:
        got = program(x)
    wanted = f(x.double(), *(w.double() if w.is_floating_point() else w for w in parts), s.double()).float()
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 9])
def test_infinity_and_nan(rows: int) -> None:
    """A code of 0 makes NaN of infinity, others keep it: what a code stands for is a number before it is multiplied."""
    _, weights, matrix = FORMS["symmetric"]
    model = Quantized(weights, matrix)
    x = torch.randn(rows, K)
    x[0, 5] = torch.inf
    x[-1, 7] = -torch.inf if rows > 1 else x[-1, 7]
    with lapilli.compile(model, (x,), target="gpu-fp32", fallback="error") as program:
        got = program(x)
    wanted = x.double() @ matrix(*weights.values()).double().mT
    torch.testing.assert_close(got, wanted.float(), rtol=1e-4, atol=1e-4, equal_nan=True)
    assert got[0].isinf().any() and got[0].isnan().any()


def test_codes_that_are_read_otherwise_as_well() -> None:
    """The floats stay for the operators that read them."""
    q, s = FORMS["symmetric"][1].values()

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w = (grouped(q).float() * s).reshape(N, K)
        return F.linear(x, w), w.sum(1)

    x = torch.randn(2, K)
    with lapilli.compile(Function(f), (x,), target="gpu-fp32", fallback="error") as program:
        for got, wanted in zip(program(x), f(x), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def any_form(seed: int) -> tuple[Quantized, torch.Tensor, float]:
    """Weights, what is made of them and a shape, by chance, and how far torch rounds the weights."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    n, k = r.choice((128, 257, 600)), r.choice((128, 256, 264, 1000))
    group = r.choice([g for g in (8, 32, 64, k) if k % g == 0])
    low, high = r.choice(((-8, 8), (0, 16), (-7, 8), (-128, 128), (0, 256), (3, 5), (5, 40)))
    q = codes(
        low, high, torch.uint8 if low >= 0 and r.random() < 0.7 else torch.int8 if high <= 128 else torch.uint8, n, k
    )
    weights = {"q": q, "s": scales(n, k // group, 1), "z": torch.randint(-8, 9, (n, k // group, 1))}
    zero = r.choice(("none", "int", "float", "after", "constant"))
    real = r.choice((torch.float32, torch.float32, torch.float16))
    if zero == "int":
        weights["z"] = weights["z"].to(torch.int8)
    turned = r.random() < 0.3

    def matrix(q: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        w, s = q.reshape(n, k // group, group), s.to(real)
        if zero == "int":
            w = (w.int() - z.int()).to(real) * s
        elif zero == "float":
            w = (w.to(real) - z.to(real)) * s
        elif zero == "after":
            w = w.to(real) * s - z.to(real)
        else:
            w = (w.to(real) - 5) * s if zero == "constant" else s * w
        return w.reshape(n, k).float()

    # Halves are rounded after each of up to three operators, and kernels may leave that out.
    rounding = (
        3 * 2.0**-11 * float((q.float().abs().max() + 8) * weights["s"].max() + 8) if real is torch.float16 else 0.0
    )
    x = torch.randn(r.choice((1, 2, 5, 8, 9, 33)), k)
    if turned:
        weights["q"] = q.reshape(n, k).mT.contiguous()
        return Quantized(weights, lambda q, s, z: matrix(q.mT, s, z)), x, rounding
    return Quantized(weights, matrix), x, rounding


@pytest.mark.parametrize("seed", range(24))
def test_any_form(seed: int) -> None:
    model, x, rounding = any_form(seed)
    check(model, x, None, rounding)
