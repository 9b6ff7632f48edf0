"""int64 in compiled programs: kernels compute in 32 bits, and a run is right or raises IntegerOverflowError."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from agreement import Function
from torch import Tensor, nn

import lapilli
from lapilli import autoload, backend
from lapilli.compiler import compile_to_bytes
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, const, index, load, unary, where
from lapilli.ir.integer import as_int, symbol, var
from lapilli.ir.interval import INT32, MOST
from lapilli.ir.node import Constant, Input, Map, Reduce
from lapilli.ir.ranges import Ranges, fits, most
from lapilli.player import NativeProgram
from lapilli.runtime.description import Description
from lapilli.stream import Stream

autoload.register()
LEAST = -(2**31)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def spread(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(len(shape)))


def cancelling() -> Tensor:
    """Large numbers whose sum is small."""
    x = spread(-(2**31), 2**31, 2, 20_000)
    x[:, ::2] = -x[:, 1::2] - 1
    return x.clamp(LEAST, MOST)


# A function, and arguments of one shape each, some of which have results of 32 bits.
CASES: dict[str, tuple[Callable[..., Any], list[tuple[Tensor, ...]]]] = {
    "mul": (lambda x: x * x, [(ints(46340, -46340),), (ints(46341, 0),), (ints(65536, 0),), (ints(MOST, LEAST),)]),
    "add": (
        lambda x, y: x + y,
        [(ints(MOST - 1, LEAST + 1), ints(1, -1)), (ints(MOST, 0), ints(1, 0)), (ints(0, LEAST), ints(0, -1))],
    ),
    "add with alpha": (
        lambda x, y: torch.add(x, y, alpha=3),
        [(ints(2, 2), ints(4, 5)), (ints(0, -5), ints(2**30, 2))],
    ),
    "sub": (
        lambda x, y: x - y,
        [(ints(MOST, LEAST), ints(0, 0)), (ints(LEAST, 0), ints(1, 0)), (ints(0, 0), ints(LEAST, 0))],
    ),
    "rsub": (lambda x, y: torch.rsub(x, y), [(ints(3, 4), ints(5, 6)), (ints(LEAST, 4), ints(5, 6))]),
    "addcmul": (lambda x, y: torch.addcmul(x, x, y), [(ints(3, 4), ints(5, 6)), (ints(2**20, 4), ints(2**11, 6))]),
    "square": (lambda x: x.square(), [(ints(46340, 0),), (ints(0, -46341),)]),
    "sum": (
        lambda x: x.sum(),
        [(ints(MOST, -MOST, MOST),), (ints(MOST, 1, 0),), (ints(LEAST, 0, -1),), (ints(LEAST, 0, 0),)],
    ),
    "sum of int32": (lambda x: x.int().sum(), [(ints(MOST, -1),), (ints(MOST, 1),)]),
    "sum of many": (
        lambda x: x.sum(-1),
        [(spread(0, 2**16, 2, 20_000),), (spread(0, 2**18, 2, 20_000),), (cancelling(),)],
    ),
    "cumsum": (lambda x: x.cumsum(0), [(ints(MOST, LEAST, MOST),), (ints(MOST, 1, -1),)]),
    "prod": (
        lambda x: x.prod(),
        [(ints(2**10, 2**10, 2**10),), (ints(2**10, 2**10, 2**11),), (ints(2**20, 2**20, 0),)],
    ),
    "cumprod": (lambda x: x.cumprod(0), [(ints(3, -4, 5),), (ints(2**16, 2**16, 0),)]),
    "shift": (
        lambda x, y: x << y,
        [(ints(1, -1), ints(30, 31)), (ints(1, 0), ints(31, 0)), (ints(0, 3), ints(63, 40)), (ints(0, 5), ints(63, 1))],
    ),
    "pow": (lambda x: x**4, [(ints(215, -215),), (ints(216, 0),), (ints(-(2**15), 0),)]),
    "pow of tensors": (
        lambda x, y: x**y,
        [(ints(-2, 7), ints(31, 0)), (ints(-2, 7), ints(32, 0)), (ints(1, -1), ints(2**20, 3))],
    ),
    "matrices": (
        lambda x, y: x @ y,
        [
            (spread(-4096, 4096, 5, 70), spread(-4096, 4096, 70, 3)),
            (torch.full((5, 70), 2**14), torch.full((70, 3), 2**14)),
        ],
    ),
    "from floats": (
        lambda x: (x * 2).long(),
        [(torch.tensor([2.0**30 - 64, -(2.0**30)]),), (torch.tensor([2.0**30, 0]),), (torch.tensor([1e30, 0]),)],
    ),
    "scatter": (
        lambda x, y: x.scatter_add(0, torch.tensor([0, 0, 1]), y),
        [(ints(1, 2, 3), ints(4, 5, 6)), (ints(2**30, 0, 0), ints(2**29, 2**29, 0))],
    ),
    "index_add": (
        lambda x, y: x.index_add(0, torch.tensor([0, 0, 1]), y),
        [(ints(1, 2, 3), ints(4, 5, 6)), (ints(2**30, 0, 0), ints(2**29, 2**29, 0))],
    ),
    "several": (
        lambda x: (x.abs().sum(), torch.stack([x * k * x for k in range(2, 40)])),
        [(ints(5, 6),), (ints(2**14, 0),)],
    ),
    "nothing": (lambda x: x * x, [(torch.zeros(0, 3, dtype=torch.int64),)]),
}


def flat(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def is_small(result: Tensor) -> bool:
    return not result.numel() or (int(result.min()) >= LEAST and int(result.max()) <= MOST)


@pytest.mark.poor_device
@pytest.mark.parametrize("name", CASES)
def test_results_are_right_or_refused(name: str) -> None:
    f, calls = CASES[name]
    program = lapilli.compile(Function(f), calls[0])
    assert "cpu" not in program.report().segments
    for args in calls:
        want = flat(f(*args))
        if all(map(is_small, want)):
            for ours, theirs in zip(flat(program(*args)), want, strict=True):
                assert torch.equal(ours, theirs)
        else:
            with pytest.raises(lapilli.IntegerOverflowError, match="do not fit into the 32 bits"):
                program(*args)
    for ours, theirs in zip(flat(program(*calls[0])), flat(f(*calls[0])), strict=True):
        assert torch.equal(ours, theirs)  # a failed run leaves nothing behind


def test_small_random_numbers_are_never_refused() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return ((x * y + x - y) * 3 + x.cumsum(0) * y.sum(0)).prod(1) + (x << 2).sum(1)

    program = lapilli.compile(Function(f), (ints(1, 2).view(1, 2).repeat(5, 1),) * 2)
    for seed in range(20):
        torch.manual_seed(seed)
        x, y = (torch.randint(-12, 12, (5, 2)) for _ in range(2))
        assert torch.equal(program(x, y), f(x, y))


def checks(f: Callable[..., Any], *args: Tensor, dynamic: Any = None) -> tuple[str, ...]:
    data = compile_to_bytes(Function(f), args, dynamic_shapes=dynamic, target="any-fp32")
    return Description.of(data).methods[0].checks


UNCHECKED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "moved": (lambda x: x.flip(0).view(2, -1)[:, 1:].clone(), (ints(1, 2, 3, 4),)),
    "chosen": (lambda x: torch.where(x > 2, x, 0).clamp(0, 9).maximum(x // 3), (ints(1, 2, 3, 4),)),
    "counted": (lambda x: (x > 2).sum() * 3, (ints(1, 2, 3, 4),)),
    "positions": (lambda x: (x != 1).long().cumsum(0) * (x != 1) + 1, (ints(1, 2, 3, 4),)),
    "arange": (lambda x: torch.arange(x.shape[0]) * 100 + x % 7, (ints(1, 2, 3, 4),)),
    "steps": (lambda x: x + 1, (ints(1, 2, 3, 4),)),
    "bits": (lambda x: (x & 255) * 1000 | 3, (ints(1, 2, 3, 4),)),
    "places": (lambda x: x.argmax(-1) + x.topk(2).indices.sum(-1) * 10, (torch.rand(3, 9),)),
    "places of many": (lambda x: x.argmax(-1) * 10, (torch.rand(2, 20_000),)),
    "bytes": (lambda x: x.to(torch.uint8).sum() * 2, (ints(1, 2, 3, 4),)),
    "buckets": (lambda x: (torch.log(x.float().abs() / 16) / 2.0794 * 16).long() + 16, (ints(1, 2, 3, 4),)),
    "remainders": (lambda x: (x % 1000) * 1000 + x // 1000, (ints(1, 2, 3, 4),)),
    "wrapped": (lambda x: (x.int() * x.int()).long(), (ints(1, 2, 3, 4),)),
}  # fmt: skip


@pytest.mark.parametrize("name", UNCHECKED)
def test_what_fits_is_not_looked_at(name: str) -> None:
    f, args = UNCHECKED[name]
    assert checks(f, *args) == ()


WIDE: dict[str, Callable[[Tensor], Any]] = {
    "through float": lambda x: x.float().long(),
    "through float, rounded": lambda x: (x / 1).floor().long(),
    "through float, clamped": lambda x: x.float().clamp(max=2147483647.0).long(),
    "mean of a group": lambda x: x.scatter_reduce(0, torch.tensor([0, 0]), x, "mean"),
    "cancelling factors": lambda x: torch.addmm(
        x.view(1, 2), x.view(2, 1)[:1], x.view(1, 2), beta=2**30, alpha=-(2**30)
    ),
    "negative quotients": lambda x: (x.clamp(-100, -50) // 100) + x,
    "least quotient": lambda x: x // -1,
    "least beyond": lambda x: x.clamp(min=2**40),
    "greatest beyond": lambda x: x.clamp(max=-(2**40)),
    "no bound": lambda x: x.clamp(-(2**40), 2**40),
    "compared above": lambda x: (x < 2**31, x <= 2**40, x == 2**31 - 1, x >= 2**31, x > 2**40, x != 2**31),
    "compared below": lambda x: (x > -(2**31) - 1, x == -(2**40), x < -(2**40), x.float() * 8 > 2**33),
    "sizes": lambda x: x + x.shape[0] ** 3,
    "sizes, compared": lambda x: x < x.shape[0] ** 3 * 2,
    "a number of sizes": lambda x: torch.full((1,), x.shape[0] ** 3, dtype=torch.int64) + x,
}


@pytest.mark.parametrize(
    "name, dynamic",
    [(name, n) for name in WIDE for n in (None, 10_000, 2**31 - 1) if n is None or "sizes" in name],
    ids=str,
)
def test_nothing_is_wrong_at_the_ends(name: str, dynamic: int | None) -> None:
    """Whatever a program gives is what torch gives."""
    f = WIDE[name]
    ends = [MOST, LEAST, 0, -1, 5, 2**30, -(2**30), 2**31 - 2**20, -(2**31) + 2**20]
    shapes = None if dynamic is None else (({0: torch.export.Dim("n", min=2, max=dynamic)},),)
    program = lapilli.compile(Function(f), (ints(3, 4),), dynamic_shapes=shapes)
    given = 0
    for first in ends:
        for second in ends:
            x = ints(first, second)
            try:
                got = program(x)
            except (lapilli.IntegerOverflowError, lapilli.InvalidInputError):
                continue
            given += 1
            for ours, theirs in zip(flat(got), flat(f(x)), strict=True):
                assert torch.equal(ours, theirs), x
    assert given > 0
    if dynamic is not None:
        x = torch.arange(2000)
        for ours, theirs in zip(flat(program(x)), flat(f(x)), strict=True):
            assert torch.equal(ours, theirs)


def test_long_chains() -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(400):
            x = (x + 1) % 1000
        return x

    x = ints(1, 700, 999)
    assert torch.equal(lapilli.compile(Function(f), (x,))(x), f(x))


def test_what_may_not_fit_is_looked_at() -> None:
    assert checks(lambda x: x.topk(2).values * 2, ints(1, 2)) and checks(lambda x: x.max(0).values * 2, ints(1, 2))
    assert checks(lambda x: (x + x) * 2, ints(1, 2)) == ("add (aten.add.Tensor)", "mul (aten.mul.Tensor)")


@pytest.mark.poor_device
def test_inputs_near_the_end_are_refused_where_a_step_is_added() -> None:
    x = ints(2**31 - 2**20, -(2**31 - 2**20))
    program = lapilli.compile(Function(lambda x: (x + 1000, x - 1, -x, x.abs())), (x,))
    for ours, theirs in zip(program(x), (x + 1000, x - 1, -x, x.abs()), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(lapilli.InvalidInputError, match=r"what is computed from them.*\(-2146435072\.\.2146435072\)"):
        program(x + 1)
    exact = lapilli.compile(Function(lambda x: x // 2), (x,))
    assert torch.equal(exact(ints(MOST, LEAST)), ints(MOST // 2, LEAST // 2))


def test_open_sizes() -> None:
    n = torch.export.Dim("n", min=1, max=1000)
    assert checks(lambda x: (x > 0).sum() * x.shape[0], torch.rand(5), dynamic=(({0: n},),)) == ()
    program = lapilli.compile(Function(lambda x: x.sum() + x.shape[0]), (ints(1, 2, 3),), dynamic_shapes=(({0: n},),))
    for size in (2, 1000, 7, 129):
        x = torch.full((size,), (2**31 - 1) // size - 1)
        assert torch.equal(program(x), x.sum() + size)
        with pytest.raises(lapilli.IntegerOverflowError):
            program(x + 2)


class Counter(nn.Module):
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.tensor(0))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.total += x.sum()
        return self.total


def test_states() -> None:
    """A counter is not looked at; a sum is. After a failed run the states begin anew with reset()."""
    program = lapilli.compile(Counter(), (ints(1, 2),))
    assert all("count" not in c for c in program.description.methods[0].checks)
    assert int(program(ints(2**30, 0))) == 2**30
    with pytest.raises(lapilli.IntegerOverflowError, match=r"aten\.add"):
        program(ints(2**30, 5))
    program.reset()
    assert int(program(ints(3, 4))) == 7


class Kept(nn.Module):
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.tensor([0, 0]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.kept + 1
        self.kept.copy_(x)
        return y


def test_a_state_that_is_no_counter_is_looked_at() -> None:
    program = lapilli.compile(Kept(), (ints(1, 2),))
    program(ints(MOST, 5))
    with pytest.raises(lapilli.IntegerOverflowError):
        program(ints(0, 0))


def test_every_way_to_run_a_program() -> None:
    program = lapilli.compile(Function(lambda x: x * x), (ints(1, 2),))
    future = program.submit(ints(2**16, 0))
    with pytest.raises(lapilli.IntegerOverflowError, match=r"mul \(aten\.mul\.Tensor\)"):
        future.result()
    outputs = np.full(2, -7, np.int64)
    bound = program.bind(np.array([2**16, 1]), outputs=outputs)
    with pytest.raises(lapilli.IntegerOverflowError):
        bound()
    assert outputs.tolist() == [-7, -7]  # nothing was written
    assert len(program.outputs) == 1


def test_segments_are_looked_at() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.cond(x.max() > 9, lambda x: x * x, lambda x: x // 2, (x,))

    program = lapilli.compile(Function(f), (ints(1, 2),))
    assert len(program.report().segments) > 1
    assert torch.equal(program(ints(3, 40)), ints(9, 1600))
    assert torch.equal(program(ints(3, -(2**20))), ints(1, -(2**19)))
    with pytest.raises(lapilli.IntegerOverflowError):
        program(ints(3, 2**20))


def test_streams_give_the_result_of_checks() -> None:
    native = NativeProgram.load(compile_to_bytes(Function(lambda x: x * x), (ints(1, 2),)), cache_dir="")
    stream = Stream()
    x, y, failed = stream.allocate(16), stream.allocate(16), stream.allocate(4)
    for values, expected in (([3, 4], 0), ([2**16, 0], 1), ([5, 6], 0)):
        x.write(0, np.array(values))
        stream.enqueue(native, 0, [], [(x, 0)], [(y, 0), (failed, 0)])
        assert np.frombuffer(failed.read(0, 4), np.int32)[0] == expected
    assert np.frombuffer(y.read(0, 16), np.int64).tolist() == [25, 36]
    with pytest.raises(lapilli.InvalidInputError, match="the result of its checks is the last one"):
        stream.enqueue(native, 0, [], [(x, 0)], [(y, 0)])


@pytest.mark.parametrize("device", ["cpu", "vulkan"])
def test_torch_compile_runs_such_a_call_in_torch(device: str) -> None:
    compiled = torch.compile(Function(lambda x: x * x), backend=backend.vulkan)
    assert torch.equal(compiled(ints(3, 4).to(device)).cpu(), ints(9, 16))
    with pytest.warns(UserWarning, match="a graph runs in torch: the int64 results of mul"):
        assert torch.equal(compiled(ints(2**16, 4).to(device)).cpu(), ints(2**32, 16))
    strict = torch.compile(Function(lambda x: x * x), backend=backend.vulkan, options={"fallback": "error"})
    with pytest.raises(ValueError, match="do not fit into the 32 bits"):
        strict(ints(2**16, 4).to(device))


# --- ranges

X, Y, N = symbol("x", 3, 9), symbol("y", 0, None), as_int(5)
SMALL = Constant((N,), DType.int64, "c", value=np.array([-3, 0, 7, 2, 1]))
UNKNOWN = Input((N,), DType.int32, "x")


def element(node: Any) -> Expr:
    return load(node, (var("i", N),))


@pytest.mark.parametrize(
    "e, expected",
    [
        (element(SMALL), (-3, 7)),
        (element(UNKNOWN), INT32),
        (element(SMALL) * element(SMALL), (-21, 49)),
        (element(SMALL) - element(UNKNOWN), (-3 - MOST, 7 + 2**31)),
        (index(X) * 2 + 1, (7, 19)),
        (index(Y), (0, MOST)),
        (-element(SMALL), (-7, 3)),
        (unary("abs", element(SMALL)), (0, 7)),
        (binary("max", element(SMALL), 2), (2, 7)),
        (binary("mod", element(UNKNOWN), 10), (0, 9)),
        (binary("bitand", element(UNKNOWN), 255), (0, 255)),
        (binary("bitxor", index(X), 5), (0, 15)),
        (binary("shr", element(SMALL), 1), (-3, 7)),
        (binary("shl", element(SMALL), 3), (-24, 56)),
        (binary("pow", element(SMALL), 2), (-49, 49)),
        (binary("floordiv", element(UNKNOWN), 2), INT32),
        (where(binary("lt", element(UNKNOWN), 3), element(SMALL), const(100)), (-3, 100)),
        (binary("umulhi", element(UNKNOWN), 3), INT32),
    ],
    ids=str,
)
def test_ranges_of_expressions(e: Expr, expected: tuple[float, float]) -> None:
    assert Ranges().expr(e) == expected


def test_ranges_of_values() -> None:
    i, r = var("i", N), var("r", as_int(100))
    axes = (next(iter(r.atoms())),)
    ranges = Ranges()
    assert ranges.node(Reduce((), DType.int64, "s", axes=(), raxes=axes, op="sum", body=index(r) + 1)) == (0, 10000)  # type: ignore[arg-type]
    assert ranges.node(Reduce((), DType.int64, "a", axes=(), raxes=axes, op="argmax", body=index(r))) == (0, 99)  # type: ignore[arg-type]
    assert (
        ranges.node(Reduce((), DType.float32, "f", axes=(), raxes=axes, op="sum", body=index(r, DType.float32)))[1]  # type: ignore[arg-type]
        > 1e30
    )
    known = Map((N,), DType.int64, "m", axes=(next(iter(i.atoms())),), body=element(UNKNOWN))  # type: ignore[arg-type]
    ranges.known[known.id] = (0, 3)
    assert ranges.expr(element(known) * 5) == (0, 15)
    assert most(symbol("n", 0, None) * 4) == MOST and most(symbol("n", 0, 7) * 4) == 28
    assert fits(INT32) and not fits((0, 2**31))


def test_ranges_hold() -> None:
    """Random expressions of small numbers: what Python computes lies in the range."""
    rng = random.Random(5)
    exact: dict[str, Callable[[int, int], int]] = {
        "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "min": min, "max": max,
        "mod": lambda a, b: a % b if b else 0, "bitand": lambda a, b: a & b, "bitor": lambda a, b: a | b,
        "bitxor": lambda a, b: a ^ b, "floordiv": lambda a, b: a // b, "fmod": lambda a, b: int(math.fmod(a, b)),
        "shr": lambda a, b: a >> (b & 7), "shl": lambda a, b: a << (b & 7), "div": lambda a, b: int(a / b),
    }  # fmt: skip

    def made(depth: int, values: dict[int, int]) -> tuple[Expr, int]:
        if depth == 0:
            node = Input((), DType.int8, "x")
            values[node.id] = rng.randint(-128, 127)
            return load(node, ()), values[node.id]
        (a, x), (b, y) = made(depth - 1, values), made(depth - 1, values)
        op = rng.choice(sorted(exact))
        if op in ("mod", "floordiv", "fmod", "div") and y == 0:
            op = "add"
        if op in ("shl", "shr"):
            b = binary("bitand", b, 7)
        return binary(op, a, b), exact[op](x, y)

    for _ in range(500):
        e, value = made(rng.randint(1, 4), {})
        low, high = Ranges().expr(e)
        assert low <= value <= high, (e, value, low, high)
