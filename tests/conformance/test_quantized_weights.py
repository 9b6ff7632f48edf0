"""Weights in codes: any format, shape and plan gives what float64 does with the dequantized weights, and neither the file nor the
device's memory holds the floats."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.ao.quantization.fx._decomposed
import torch.nn.functional as F

import lapilli
from lapilli.target import TARGETS

decomposed = torch.ops.quantized_decomposed
PLANS = ("cpu-fp32", "gpu-fp32", "gpu-fp16-matrix")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, on_any_device: None) -> None:
    small = replace(TARGETS["gpu-fp16-matrix"], shared_memory=32768)  # as software drivers have
    monkeypatch.setitem(TARGETS, "gpu-fp16-matrix", small)


@dataclass(frozen=True)
class Format:
    """bits of a code; group: elements along the rows that share a scale, or a row (-1), or all (0); zero: whether there are zero
    points."""

    bits: int
    group: int
    zero: bool
    half: bool = False


class Weights(torch.nn.Module):
    """Codes [n, k] of a format, and the numbers that they mean."""

    q: torch.Tensor
    s: torch.Tensor
    z: torch.Tensor | None

    def __init__(self, n: int, k: int, form: Format, writes: str) -> None:
        super().__init__()
        low, high = -(1 << form.bits - 1), 1 << form.bits - 1
        self.form, self.writes, self.low, self.high = form, writes, low, high - 1
        blocks = 1 if form.group <= 0 else -(-k // form.group)
        shape = (n, blocks) if form.group else (1, 1)
        self.register_buffer("q", torch.randint(low, high, (n, k), dtype=torch.int8))
        self.register_buffer("s", torch.rand(shape) / 8 + 0.01)
        self.register_buffer("z", torch.randint(low // 2, high // 2, shape, dtype=torch.int8) if form.zero else None)
        self.numbers_of_all = float(self.s[0, 0]), 0 if self.z is None else int(self.z[0, 0])

    @property
    def ideal(self) -> int:
        """Bytes of codes and parameters. Codes take 4 or 8 bits where rows are no whole words, and those of 7 do."""
        n, k = self.q.shape
        bits = self.form.bits if k % 32 == 0 and self.form.bits < 7 else 4 if self.form.bits <= 4 else 8
        rows = (k * bits + 7) // 8
        scales = self.s.numel() * (self.s.element_size() + (1 if self.form.zero else 0))
        return n * rows + scales

    def numbers(self) -> torch.Tensor:
        group, real = self.form.group, torch.float16 if self.form.half else torch.float32
        if self.writes == "decomposed" and group == 0:
            return decomposed.dequantize_per_tensor(
                self.q, *self.numbers_of_all, self.low, self.high, torch.int8, out_dtype=real
            )
        if self.writes == "decomposed" and group == -1:
            zero = torch.zeros_like(self.s[:, 0], dtype=torch.int64) if self.z is None else self.z[:, 0]
            return decomposed.dequantize_per_channel(
                self.q, self.s[:, 0], zero, 0, self.low, self.high, torch.int8, out_dtype=real
            )
        if self.writes == "decomposed" and self.q.shape[1] % group == 0:
            return decomposed.dequantize_per_channel_group(
                self.q, self.s, self.z, self.low, self.high, torch.int8, group, real
            )
        block = [-1, -1] if group == 0 else [1, group]
        return torch.ops.lapilli.dequantize(self.q, self.s.to(real), self.z, block, real)

    def exact(self) -> torch.Tensor:
        """The numbers in float64."""
        k = self.q.shape[1]
        at = torch.zeros(k, dtype=torch.int64) if self.form.group <= 0 else torch.arange(k) // self.form.group
        scale = self.s.half() if self.form.half else self.s
        value = self.q.double() - (0 if self.z is None else self.z.double()[:, at])
        return value * scale.double()[:, at]


class Linear(Weights):
    b: torch.Tensor | None

    def __init__(self, n: int, k: int, form: Format, writes: str, bias: bool) -> None:
        super().__init__(n, k, form, writes)
        self.register_buffer("b", torch.randn(n) if bias else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.numbers()
        return F.linear(x, w, None if self.b is None else self.b.to(w.dtype))


def size_of(program: lapilli.Program) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.lap"
        program.save(path)
        return path.stat().st_size


def check(
    model: Linear,
    x: torch.Tensor,
    plan: str,
    others: Sequence[torch.Tensor] = (),
    dynamic: Callable[[], object] | None = None,
) -> None:
    """others: further inputs, for open sizes."""
    half = model.form.half or plan == "gpu-fp16-matrix"
    shapes = None if dynamic is None else (dynamic(),)
    precision: Literal["fp16", "fp32"] = "fp16" if plan == "gpu-fp16-matrix" else "fp32"
    target = "gpu-fp16" if model.form.half and plan == "gpu-fp32" else plan
    w = model.exact()
    with lapilli.compile(
        model, (x,), target=target, precision=precision, fallback="error", dynamic_shapes=shapes
    ) as program:
        constants = program.memory().constants
        file = sum(c.size for c in program.description.constants)
        for given in (x, *others):
            exact = given.double() @ w.mT
            exact = exact if model.b is None else exact + model.b.double()
            # Sums round once a term, and a number that is decoded a few times. In half precision rows, weights and results are
            # rounded as well, and torch's own would be.
            scale = given.abs().double() @ w.abs().mT + (0 if model.b is None else model.b.abs().double())
            unit = 2.0**-11 * 4 if half else 2.0**-24 * 8
            bound = scale * (2.0**-24 * (given.shape[-1] + 8) + unit) + (2.0**-13 if half else 1e-30)
            assert ((program(given).double() - exact).abs() <= bound).all()
    # Lines are filled up to whole words, and parameters for four columns at once on drivers of type CPU.
    n, k = model.q.shape
    padding = (n + 3) * 32 + (n + 3) // 4 * 4 * 8 * model.s.shape[1] + k * 4 + 2048 + 256 * 4
    assert constants <= model.ideal + padding, (constants, model.ideal)
    assert file <= 1.05 * model.ideal + n * 4 + 512, (file, model.ideal)


FORMATS = {
    "4 bits, groups": Format(4, 32, False), "4 bits, groups, zero points": Format(4, 32, True),
    "4 bits, rows": Format(4, -1, False), "8 bits, rows": Format(8, -1, False), "8 bits, groups": Format(8, 64, True),
    "8 bits, one scale": Format(8, 0, True), "4 bits, halves": Format(4, 32, False, True), "6 bits, groups": Format(6, 16, False),
    "5 bits, rows, zero points": Format(5, -1, True), "3 bits, halves": Format(3, 32, True, True),
    "2 bits, one scale": Format(2, 0, False), "1 bit": Format(1, 32, True),
}  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, plan: str) -> None:
    torch.manual_seed(0)
    form = FORMATS[name]
    model = Linear(96, 256, form, "decomposed", True)
    for rows in (1, 20):
        check(model, torch.randn(rows, 256).to(torch.float16 if form.half else torch.float32), plan)


def test_a_megabyte_of_weights_is_half_a_megabyte() -> None:
    model = Linear(1024, 1024, Format(4, 64, False), "decomposed", False)
    with lapilli.compile(model, (torch.randn(1, 1024),)) as program:
        assert size_of(program) <= 1.05 * 1024 * 1024 * (0.5 + 4 / 64) + 60_000


def any_linear(seed: int) -> tuple[Linear, torch.Tensor, str, list[torch.Tensor]]:
    """A layer, its input, a plan, and inputs of other sizes if that of the first is open."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    n = r.choice((1, 3, 17, 64, 130, 257))
    k = r.choice((2, 8, 20, 33, 64, 100, 129, 264, 512))
    group = r.choice((0, -1, 8, 12, 32, 64, 50))
    form = Format(r.choice((4, 8, r.randrange(1, 9))), -1 if group > k else group, r.random() < 0.5, r.random() < 0.25)
    model = Linear(n, k, form, r.choice(("decomposed", "blocks")), r.random() < 0.5)
    shape = r.choice(((1,), (2,), (7,), (8,), (9,), (40,), (2, 3), (1, 1), (3, 1, 5)))
    real = torch.float16 if form.half else torch.float32
    others = [torch.randn(rows, k).to(real) for rows in (1, 3, 30)] if len(shape) == 1 and r.random() < 0.3 else []
    return model, torch.randn(*shape, k).to(real), r.choice(PLANS), others


@pytest.mark.parametrize("seed", range(40))
def test_any_linear(seed: int) -> None:
    model, x, plan, others = any_linear(seed)
    if others:
        x = torch.randn(5, x.shape[-1]).to(x.dtype)
        check(model, x, plan, others, lambda: {0: torch.export.Dim("rows", min=1, max=4096)})
    else:
        check(model, x, plan)


class Both(Weights):
    """An embedding whose table is also the last layer's matrix."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        w = self.numbers()
        return F.linear(F.embedding(ids, w) + 1, w)


@pytest.mark.parametrize("plan", PLANS[:2])
def test_tied_embedding(plan: str) -> None:
    torch.manual_seed(0)
    model = Both(300, 128, Format(4, 32, True), "decomposed")
    ids, w = torch.randint(0, 300, (2, 3)), model.exact()
    with lapilli.compile(model, (ids,), target=plan, fallback="error") as program:
        torch.testing.assert_close(program(ids).double(), (w[ids] + 1) @ w.mT, rtol=1e-5, atol=1e-3)
        # Tables are read as they lie, and kernels of drivers of type CPU have a copy of their own.
        assert (
            program.memory().constants <= (2 if plan == "cpu-fp32" else 1) * model.ideal + 16 * model.s.numel() + 4096
        )


class OfPackedZeros(torch.nn.Module):
    """A layer whose zero points are codes of a few bits as well, several in a byte, as ONNX's MatMulNBits has them."""

    w: torch.Tensor
    s: torch.Tensor
    z: torch.Tensor

    def __init__(self, n: int, k: int, bits: int, block: int) -> None:
        super().__init__()
        self.k, self.bits, self.block = k, bits, block
        self.register_buffer("w", torch.randint(0, 256, (n, k * bits // 8), dtype=torch.uint8))
        self.register_buffer("s", torch.rand(n, k // block) / 64 + 0.01)
        self.register_buffer("z", torch.randint(0, 256, (n, k // block * bits // 8), dtype=torch.uint8))

    def weight(self, kind: torch.dtype) -> torch.Tensor:
        codes = torch.ops.lapilli.unpack(self.w, 0, self.k, self.bits)
        zeros = torch.ops.lapilli.unpack(self.z, 0, self.k // self.block, self.bits)
        found: torch.Tensor = torch.ops.lapilli.dequantize(codes, self.s.to(kind), zeros, [1, self.block], kind)
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight(x.dtype))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("bits, block", [(4, 16), (4, 128), (2, 32)])
def test_zero_points_of_few_bits(bits: int, block: int, plan: str) -> None:
    """Their place in a byte depends on the block, and is not taken for that of further bits of a code."""
    torch.manual_seed(0)
    model = OfPackedZeros(200, 1024, bits, block)
    ideal = sum(b.nbytes for b in model.buffers()) + (0 if plan != "cpu-fp32" else 4 * model.s.numel())
    precision: Literal["fp16", "fp32"] = "fp16" if plan == "gpu-fp16-matrix" else "fp32"
    w = model.weight(torch.float64)
    for rows in (1, 20):
        x = torch.randn(rows, 1024)
        with lapilli.compile(model, (x,), target=plan, precision=precision, fallback="error") as program:
            # Sums round once a term, decoding twice; rows, scales, weights and results, if they are halves.
            unit = 2.0**-24 * 1040 + (2.0**-11 * 4 if precision == "fp16" else 0)
            bound = x.abs().double() @ w.abs().mT * unit
            assert ((program(x).double() - x.double() @ w.mT).abs() <= bound).all()
            assert program.memory().constants <= 1.05 * ideal


def test_convolution_keeps_codes_in_the_file() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("q", torch.randint(-128, 128, (64, 32, 3, 3), dtype=torch.int8))
            self.register_buffer("s", torch.rand(64) / 8 + 0.01)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            zero = torch.zeros(64, dtype=torch.int64)
            w = decomposed.dequantize_per_channel(self.q, self.s, zero, 0, -128, 127, torch.int8)
            return F.conv2d(x, w, padding=1)

    torch.manual_seed(0)
    model, x = Model(), torch.randn(1, 32, 7, 6)
    for plan in PLANS[:2]:
        with lapilli.compile(model, (x,), target=plan, fallback="error") as program:
            w = model.q.double() * model.s.double().reshape(-1, 1, 1, 1)
            exact = F.conv2d(x.double(), w, padding=1)
            scale = F.conv2d(x.double().abs(), w.abs(), padding=1)
            # Winograd's algorithm, which the plan for drivers of type CPU takes here, loses three bits more.
            assert ((program(x).double() - exact).abs() <= scale * 2.0**-24 * (288 + 64)).all()
            assert size_of(program) <= 1.05 * (model.q.numel() + 256) + 60_000


@pytest.mark.parametrize(
    ("low", "high", "zero", "dtype"),
    [(240, 255, 250, torch.uint8), (250, 255, 255, torch.uint8), (120, 130, 125, torch.uint8), (118, 127, 120, torch.int8)],
)  # fmt: skip
def test_few_codes_at_the_end_of_their_type(low: int, high: int, zero: int, dtype: torch.dtype) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("q", torch.randint(low, high + 1, (24, 64)).to(dtype))
            self.register_buffer("s", torch.rand(24, 1) + 0.1)
            self.register_buffer("z", torch.full((24, 1), zero, dtype=torch.int32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, torch.ops.lapilli.dequantize(self.q, self.s, self.z, [1, -1], torch.float32))

    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 64)
    w = (model.q.double() - zero) * model.s.double()
    for plan in PLANS[:2]:
        with lapilli.compile(model, (x,), target=plan, fallback="error") as program:
            bound = (x.double().abs() @ w.mT.abs()) * 2.0**-24 * 80
            assert ((program(x).double() - x.double() @ w.mT).abs() <= bound).all()
            assert size_of(program) <= 24 * 32 + 24 * 8 + 60_000


class Products(torch.nn.Module):
    def forward(self, *given: torch.Tensor) -> list[torch.Tensor]:
        return [torch._int_mm(a, b) for a, b in zip(given[::2], given[1::2], strict=True)]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("left", [torch.int8, torch.uint8])
def test_products_of_bytes_are_exact(plan: str, left: torch.dtype) -> None:
    """Sums in one part, in several, and of integers: of any numbers, and of those whose products are largest."""
    torch.manual_seed(0)
    given: list[torch.Tensor] = []
    limits = torch.iinfo(left)
    for m, k, n in ((1, 1000, 5), (9, 1025, 12), (3, 2600, 4), (2, 4100, 8)):
        a = torch.randint(limits.min, limits.max + 1, (m, k)).to(left)
        b = torch.randint(-128, 128, (k, n)).to(torch.int8)
        a[0], b[:, 0] = max(limits.min, limits.max, key=abs), -128
        given += [a, b]
    precision: Literal["fp16", "fp32"] = "fp16" if plan == "gpu-fp16-matrix" else "fp32"
    with lapilli.compile(Products(), tuple(given), target=plan, precision=precision, fallback="error") as program:
        for got, a, b in zip(program(*given), given[::2], given[1::2], strict=True):
            assert torch.equal(got, (a.long() @ b.long()).int())
