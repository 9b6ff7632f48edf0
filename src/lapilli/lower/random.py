"""Random numbers, as a function of a key, the call, and the element's position. They are computed where they are read.

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011). Its
counter consists of the element's position and the call's stream; the key is the seed. Distributions are those of torch, the
numbers are not.

The key is a state of the program, `lapilli.random`: two int32, the number of the run, which every run increments, and a
seed. Both are initially 0: a program repeats its numbers after `program.reset()`, and draws others after
`program.set_state({"lapilli.random": numpy.array([0, seed], "int32")})`. Programs within torch follow torch.manual_seed:
for `lapilli::run` and mobile modules the state is set before every run (`runtime/seeding.py`); for the eager device and
torch.compile the key consists of two symbols instead (`eager/launch.py`).
"""

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
_WEYL = (0x9E3779B9, 0xBB67AE85)  # the increments of the key in every round
_ROUNDS = 10


def _word(value: int) -> int:
    """The signed integer with the 32 bits of an unsigned one."""
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
    """The state, and its value for the next run."""
    axes, at = fresh_axes(state.shape)
    body = load(state, at) + where(binary("eq", index(at[0]), 0), const(1), const(0))
    return state, Map(state.shape, state.dtype, f"{STATE}.next", "random", axes=axes, body=body)


def stream(call: Call) -> Expr:
    """A number that distinguishes the call from others in its program."""
    return const(_word(zlib.crc32(call.name.encode())))


def philox(counter: Sequence[Expr], key: Sequence[Expr]) -> list[Expr]:
    """Four random 32-bit words from a counter of four words and a key of two."""
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


def words_at(call: Call, place: Int) -> list[Expr]:
    """Four random words for the element number `place` of a call."""
    return philox([index(place), const(0), stream(call), const(0)], seed(call))


def words(call: Call, at: Sequence[Int]) -> list[Expr]:
    """Four random words for an element of the call's result."""
    linear = as_int(0)
    for i, size in zip(at, call.shape, strict=True):
        linear = linear * size + i
    return words_at(call, linear)


def unit(word: Expr) -> Expr:
    """A random word as a float, uniform in [0, 1), and a multiple of 2^-24."""
    return cast_to(binary("ushr", word, 8), DType.float32) * 2.0**-24


def uniform_at(call: Call, at: Sequence[Int]) -> Expr:
    """Uniform in [0, 1)."""
    return unit(words(call, at)[0])


def normal_at(call: Call, at: Sequence[Int]) -> Expr:
    """Standard normal: sqrt(-2 log(1 - u)) * cos(2 pi v) (Box and Muller 1958). 1 - u is in (0, 1], so that the logarithm
    is finite.
    """
    first, second, *_ = words(call, at)
    radius = unary("sqrt", unary("log", 1.0 - unit(first)) * -2.0)
    return radius * unary("cos", unit(second) * (2 * math.pi))


@lowering(aten.rand.default, aten.rand.generator, aten.rand_like.default)
def rand(call: Call, *_: Any, **__: Any) -> Node:
    """Uniform in [0, 1), of a given size or of the shape of the argument."""
    return call.map(lambda *at: uniform_at(call, at))


@lowering(aten.randn.default, aten.randn.generator, aten.randn_like.default)
def randn(call: Call, *_: Any, **__: Any) -> Node:
    """Standard normal, of a given size or of the shape of the argument."""
    return call.map(lambda *at: normal_at(call, at))


@lowering(aten.uniform.default)
def uniform(call: Call, _: Node, low: float = 0.0, high: float = 1.0, **__: Any) -> Node:
    """Uniform in [low, high), of the shape of the argument."""
    most = torch.finfo(getattr(torch, call.dtype.name)).max
    if not (abs(low) <= most and abs(high) <= most):
        raise TypeError(f"its bounds {low} and {high} do not both fit into {call.dtype.name}")
    return call.map(lambda *at: uniform_at(call, at) * float(high - low) + float(low))


@lowering(aten.normal.float_float)
def normal(call: Call, mean: float, std: float, *_: Any, **__: Any) -> Node:
    """Normal with mean and standard deviation `std`, of the given size."""
    return call.map(lambda *at: normal_at(call, at) * float(std) + float(mean))


@lowering(aten.normal_functional.default)
def normal_like(call: Call, _: Node, mean: float = 0.0, std: float = 1.0, **__: Any) -> Node:
    """Normal with mean and standard deviation `std`, of the shape of the argument."""
    return normal(call, mean, std)


def _integers(call: Call, low: int, high: int) -> Node:
    """Uniform integers from low to high - 1: low + floor(u * (high - low)) for a random word as a fraction u (Lemire 2019,
    without rejection).
    """
    if not 0 < high - low < 2**31:
        raise TypeError(f"{call.op} from {low} to {high} is not supported: the range must be below 2^31")
    return call.map(
        lambda *at: cast_to(binary("umulhi", words(call, at)[0], const(high - low)) + low, call.dtype.compute)
    )


@lowering(aten.randint.default, aten.randint.generator)
def randint(call: Call, high: int, *_: Any, **__: Any) -> Node:
    """Uniform integers from 0 to high - 1, of the given size."""
    return _integers(call, 0, high)


@lowering(aten.randint.low, aten.randint.low_generator)
def randint_low(call: Call, low: int, high: int, *_: Any, **__: Any) -> Node:
    """Uniform integers from low to high - 1, of the given size."""
    return _integers(call, low, high)


@lowering(aten.randint_like.default)
def randint_like(call: Call, _: Node, high: int, **__: Any) -> Node:
    """Uniform integers from 0 to high - 1, of the shape of the argument."""
    return _integers(call, 0, high)


@lowering(aten.randint_like.low_dtype)
def randint_like_low(call: Call, _: Node, low: int, high: int, **__: Any) -> Node:
    """Uniform integers from low to high - 1, of the shape of the argument."""
    return _integers(call, low, high)


def _bernoulli(call: Call, p: Operand) -> Node:
    """1 with probability p, else 0; p broadcasts to the result."""

    def body(*at: Int) -> Expr:
        return cast_to(binary("lt", uniform_at(call, at), element(p, at, DType.float32)), call.dtype.compute)

    return call.map(body)


@lowering(aten.bernoulli.default)
def bernoulli(call: Call, p: Node, **_: Any) -> Node:
    """1 with probability p, else 0; the shape of p."""
    return _bernoulli(call, p)


@lowering(aten.bernoulli.p, aten.bernoulli.Tensor)
def bernoulli_like(call: Call, _: Node, p: Operand = 0.5, **__: Any) -> Node:
    """1 with probability p, else 0; the shape of the first argument, to which p broadcasts."""
    return _bernoulli(call, p)


@lowering(aten.native_dropout.default)
def native_dropout(call: Call, x: Node, p: float, train: bool | None = True) -> tuple[Node, Node]:
    """Keeps each element with probability 1 - p, and divides it by that. Returns the result and the mask, both of the shape
    of x.
    """
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
    """Multiplies negative elements by a random slope between low and high; at inference, by their mean.

    Returns the result and the slopes (1 for positive elements; at inference, `noise`), both of the shape of x.
    """

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
    """A permutation of 0 ... n-1, [n]: the order of random keys. Equal keys (a pair has probability 2^-31) keep their
    order.
    """
    keys = torch.randint(2**31 - 1, (n,), dtype=torch.int32)
    return keys.argsort().to(dtype or torch.int64)


@decomposition(aten.multinomial.default)
def multinomial(p: torch.Tensor, n: int, replacement: bool = False, *, generator: Any = None) -> torch.Tensor:
    """n draws from categories with weights p [*, categories]: int64 [*, n].

    Exponential clocks with rates p: each is first with its probability, and the order of the first n is that of n draws
    without replacement (Efraimidis and Spirakis 2006).
    """
    rates = p.float()
    if replacement or n == 1:
        rates = rates.unsqueeze(-2).expand(*p.shape[:-1], n, p.shape[-1])
        return (rates / -torch.rand(rates.shape, device=p.device).log()).argmax(-1)
    return torch.topk(rates / -torch.rand(rates.shape, device=p.device).log(), n).indices
