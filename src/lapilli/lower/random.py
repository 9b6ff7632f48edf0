"""Random numbers: a function of a key, of the call and of the element, computed where it is read.

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011). Its counter
is the number of the element and the stream of the call; the key is the seed. The distributions are torch's, the numbers
are not.

The key is a state of the program, `lapilli.random`: two int32, the number of the run, which moves on with every run, and a
seed. Both begin as 0: a program gives the same numbers again after `program.reset()`, and others after
`program.set_state({"lapilli.random": numpy.array([0, seed], "int32")})`. Programs inside of torch follow torch.manual_seed: those
of `lapilli::run` and of mobile modules are given the state before every run (`runtime/seeding.py`), those of the eager device and
of torch.compile get the key as two symbols instead (`eager/launch.py`)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lapilli.ir.axes import fresh_axes
from lapilli.ir.dtype import DType
from lapilli.ir.expr import Expr, binary, cast_to, const, index, load, unary, where
from lapilli.ir.integer import Int, as_int
from lapilli.ir.node import Map, Node, State
from lapilli.lower.registry import RANDOM_KEY, Call, Operand, decomposition, element, lowering
from lapilli.runtime.description import RANDOM_STATE

aten = torch.ops.aten

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # what the key grows by in every round
_ROUNDS = 10


def _word(value: int) -> int:
    """The 32 bits of an unsigned number as a signed one."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


STATE = RANDOM_STATE


def seed(call: Call) -> tuple[Expr, Expr]:
    """The two words of the key."""
    if call.shared.keyed:
        first, second = map(call.shared.word, RANDOM_KEY)
        return first, second
    if call.shared.random is None:
        call.shared.random = State((as_int(2),), DType.int32, STATE, "state", value=np.zeros(2, np.int32))
    state = call.shared.random
    return load(state, [as_int(0)]), load(state, [as_int(1)])


def next_numbers(state: State) -> tuple[State, Node]:
    """The state, and its value after a run."""
    axes, at = fresh_axes(state.shape)
    body = load(state, at) + where(binary("eq", index(at[0]), 0), const(1), const(0))
    return state, Map(state.shape, state.dtype, f"{STATE}.next", "random", axes=axes, body=body)


def stream(call: Call) -> Expr:
    """The number that tells a call from the others of its program."""
    return const(_word(zlib.crc32(call.name.encode())))


def philox(counter: Sequence[Expr], key: Sequence[Expr]) -> list[Expr]:
    """Four words of 32 random bits from a counter of four words and a key of two."""
    c, k = list(counter), list(key)
    for _ in range(_ROUNDS):
        (h0, l0), (h1, l1) = (
            (binary("umulhi", c[i], _word(m)), c[i] * _word(m)) for i, m in zip((0, 2), _MULTIPLIERS, strict=True)
        )
        c = [
            binary("bitxor", binary("bitxor", h1, c[1]), k[0]),
            l1,
            binary("bitxor", binary("bitxor", h0, c[3]), k[1]),
            l0,
        ]
        k = [word + _word(w) for word, w in zip(k, _WEYL, strict=True)]
    return c


def words(call: Call, at: Sequence[Int]) -> list[Expr]:
    """Random words of an element of the call's result."""
    linear = as_int(0)
    for i, size in zip(at, call.shape, strict=True):
        linear = linear * size + i
    return philox([index(linear), const(0), stream(call), const(0)], seed(call))


def unit(word: Expr) -> Expr:
    """Uniform in [0, 1), a multiple of 2^-24."""
    return cast_to(binary("ushr", word, 8), DType.float32) * 2.0**-24


def uniform_at(call: Call, at: Sequence[Int]) -> Expr:
    return unit(words(call, at)[0])


def normal_at(call: Call, at: Sequence[Int]) -> Expr:
    """Box and Muller (1958): 1 - u is in (0, 1]."""
    first, second, *_ = words(call, at)
    radius = unary("sqrt", unary("log", 1.0 - unit(first)) * -2.0)
    return radius * unary("cos", unit(second) * (2 * math.pi))


@lowering(aten.rand.default, aten.rand.generator, aten.rand_like.default)
def rand(call: Call, *_: Any, **__: Any) -> Node:
    return call.map(lambda *at: uniform_at(call, at))


@lowering(aten.randn.default, aten.randn.generator, aten.randn_like.default)
def randn(call: Call, *_: Any, **__: Any) -> Node:
    return call.map(lambda *at: normal_at(call, at))


@lowering(aten.uniform.default)
def uniform(call: Call, _: Node, low: float = 0.0, high: float = 1.0, **__: Any) -> Node:
    most = torch.finfo(getattr(torch, call.dtype.name)).max
    if not (abs(low) <= most and abs(high) <= most):
        raise TypeError(f"its bounds {low} and {high} do not both fit into {call.dtype.name}")
    return call.map(lambda *at: uniform_at(call, at) * float(high - low) + float(low))


@lowering(aten.normal.float_float)
def normal(call: Call, mean: float, std: float, *_: Any, **__: Any) -> Node:
    return call.map(lambda *at: normal_at(call, at) * float(std) + float(mean))


@lowering(aten.normal_functional.default)
def normal_like(call: Call, _: Node, mean: float = 0.0, std: float = 1.0, **__: Any) -> Node:
    return normal(call, mean, std)


def _integers(call: Call, low: int, high: int) -> Node:
    """low + floor(u * (high - low)) of a random word as a fraction u (Lemire 2019, without rejection)."""
    if not 0 < high - low < 2**31:
        raise TypeError(f"{call.op} from {low} to {high} is not supported: the range must be below 2^31")
    return call.map(
        lambda *at: cast_to(binary("umulhi", words(call, at)[0], const(high - low)) + low, call.dtype.compute)
    )


@lowering(aten.randint.default, aten.randint.generator)
def randint(call: Call, high: int, *_: Any, **__: Any) -> Node:
    return _integers(call, 0, high)


@lowering(aten.randint.low, aten.randint.low_generator)
def randint_low(call: Call, low: int, high: int, *_: Any, **__: Any) -> Node:
    return _integers(call, low, high)


@lowering(aten.randint_like.default)
def randint_like(call: Call, _: Node, high: int, **__: Any) -> Node:
    return _integers(call, 0, high)


@lowering(aten.randint_like.low_dtype)
def randint_like_low(call: Call, _: Node, low: int, high: int, **__: Any) -> Node:
    return _integers(call, low, high)


def _bernoulli(call: Call, p: Operand) -> Node:
    def body(*at: Int) -> Expr:
        return cast_to(binary("lt", uniform_at(call, at), element(p, at, DType.float32)), call.dtype.compute)

    return call.map(body)


@lowering(aten.bernoulli.default)
def bernoulli(call: Call, p: Node, **_: Any) -> Node:
    return _bernoulli(call, p)


@lowering(aten.bernoulli.p, aten.bernoulli.Tensor)
def bernoulli_like(call: Call, _: Node, p: Operand = 0.5, **__: Any) -> Node:
    return _bernoulli(call, p)


@lowering(aten.native_dropout.default)
def native_dropout(call: Call, x: Node, p: float, train: bool | None = True) -> tuple[Node, Node]:
    """Each element is kept with probability 1 - p and divided by it."""
    kept = call.map(
        lambda *at: binary("ge", uniform_at(call, at), float(p)) if train else const(True), dtype=DType.bool
    )
    scale = 0.0 if p == 1 else 1 / (1 - p)
    if not train:
        return call.pointwise(lambda a: a, x), kept

    def body(*at: Int) -> Expr:
        return where(element(kept, at, DType.bool), element(x, at, DType.float32) * scale, const(0.0))

    return call.map(body), kept


@lowering(aten.rrelu_with_noise_functional.default)
def rrelu(
    call: Call,
    x: Node,
    noise: Node,
    low: float = 1 / 8,
    high: float = 1 / 3,
    training: bool = False,
    *_: Any,
    **__: Any,
) -> tuple[Node, Node]:
    """Negative elements times a random slope, which is the second result, or times the mean slope at inference."""

    if not training:
        mean = float((low + high) / 2)
        return call.pointwise(lambda a: where(binary("gt", a, 0.0), a, a * mean), x), noise

    def slope(*at: Int) -> Expr:
        drawn = uniform_at(call, at) * float(high - low) + float(low)
        return where(binary("gt", element(x, at, DType.float32), 0.0), const(1.0), drawn)

    slopes = call.map(slope)
    return call.pointwise(lambda a, s: a * s, x, slopes), slopes


@decomposition(aten.randperm.default)
def randperm(n: int, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    """A permutation of 0 .. n-1: the order of random keys. Equal keys, one pair in 2^31, keep their order."""
    keys = torch.randint(2**31 - 1, (n,), dtype=torch.int32)
    return keys.argsort().to(dtype or torch.int64)


@decomposition(aten.multinomial.default)
def multinomial(p: torch.Tensor, n: int, replacement: bool = False, *, generator: Any = None) -> torch.Tensor:
    """Exponential clocks of rates p [..., categories]: each is the first to ring with its probability, and the first n are n
    draws without replacement (Efraimidis and Spirakis 2006). Result: int64 [..., n]."""
    rates = p.float()
    if replacement or n == 1:
        rates = rates.unsqueeze(-2).expand(*p.shape[:-1], n, p.shape[-1])
        return (rates / -torch.rand(rates.shape, device=p.device).log()).argmax(-1)
    return torch.topk(rates / -torch.rand(rates.shape, device=p.device).log(), n).indices
