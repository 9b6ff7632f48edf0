"""Integer expressions: simplification keeps the value, bounds hold."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from lapilli.ir.integer import (
    Atom,
    Int,
    Var,
    as_int,
    ceildiv,
    is_below,
    is_nonnegative,
    maximum,
    minimum,
    mod,
    product,
    symbol,
    var,
)
from lapilli.schedule.layout import estimate

Value = Callable[[dict[Atom, int]], int]


def atom(i: Int) -> Atom:
    return i.terms[0][0][0]


def build(rng: random.Random, leaves: list[Int], depth: int) -> tuple[Int, Value]:
    """A random expression, and the same computed without our arithmetic."""
    if depth == 0 or rng.random() < 0.2:
        if rng.random() < 0.3:
            n = rng.randint(-7, 12)
            return as_int(n), lambda v: n
        leaf = rng.choice(leaves)
        return leaf, lambda v: v[atom(leaf)]
    (a, fa), (b, fb) = build(rng, leaves, depth - 1), build(rng, leaves, depth - 1)
    n = rng.choice([1, 2, 3, 4, 6, 8, 12])
    kinds: list[tuple[Int, Value]] = [
        (a + b, lambda v: fa(v) + fb(v)),
        (a - b, lambda v: fa(v) - fb(v)),
        (a * n, lambda v: fa(v) * n),
        (a // n, lambda v: fa(v) // n),
        (a % n, lambda v: fa(v) % n),
        (minimum(a, b), lambda v: min(fa(v), fb(v))),
        (maximum(a, b), lambda v: max(fa(v), fb(v))),
        (a * b, lambda v: fa(v) * fb(v)),
        (a * n + b % n, lambda v: fa(v) * n + fb(v) % n),
        (ceildiv(a, n), lambda v: -(-fa(v) // n)),
    ]
    return rng.choice(kinds)


@pytest.mark.parametrize("seed", range(40))
def test_random_expressions(seed: int) -> None:
    """50 expressions on 20 points each: the value is that of Python's arithmetic, and lies within the bounds; what is said
    to be known is so."""
    rng = random.Random(seed)
    for _ in range(50):
        n = symbol("n", 1, 6)
        leaves = [var("i", rng.randint(1, 9)), var("j", rng.choice([4, 8])), var("k", n), n]
        e, value = build(rng, leaves, 4)
        low, high = e.bounds
        for _ in range(20):
            size = rng.randint(1, 6)
            point: dict[Atom, int] = {atom(n): size}
            for leaf in leaves[:3]:
                a = atom(leaf)
                assert isinstance(a, Var)
                point[a] = rng.randrange(int(a.extent.evaluate({atom(n): size})))
            want = value(point)
            assert e.evaluate(point) == want
            assert low is None or low <= want
            assert high is None or high >= want
            assert not is_nonnegative(e) or want >= 0
            for bound in (3, 8):
                assert not is_below(e, as_int(bound)) or want < bound


@pytest.mark.parametrize("seed", range(20))
def test_sizes_of_one_name_with_different_bounds(seed: int) -> None:
    """Programs name their sizes alike: what is known of a size of one must not be taken for known of another's."""
    rng = random.Random(seed)
    for _ in range(200):
        bounds = [(low, low + rng.choice([0, 1, 5, 40])) for low in (rng.randint(0, 3), rng.randint(1, 9))]
        n, m = (symbol(name, low, high) for name, (low, high) in zip("nm", bounds, strict=True))
        e, value = build(rng, [n, m], 3)
        for _ in range(5):
            point = {atom(s): rng.randint(*b) for s, b in zip((n, m), bounds, strict=True)}
            want = value(point)
            assert e.evaluate(point) == want
            assert e.bounds[0] is None or e.bounds[0] <= want
            assert e.bounds[1] is None or e.bounds[1] >= want


@pytest.mark.parametrize("seed", range(10))
def test_substitution_keeps_the_value(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        i, j, k = var("i", 12), var("j", 5), var("k", 3)
        e, value = build(rng, [i, j], 4)
        new = e.substitute({atom(i): k * 4 + 1, atom(j): k + 2})
        for at in range(3):
            assert new.evaluate({atom(k): at}) == value({atom(i): at * 4 + 1, atom(j): at + 2})


def test_equal_expressions_are_equal_objects() -> None:
    i, j = var("i", 4), var("j", 5)
    assert (i + j) * 3 - i == j * 3 + i * 2
    assert hash(i * j + 1) == hash(1 + j * i)
    assert i - i == 0


def test_division_takes_out_whole_multiples() -> None:
    c, h, w = var("c", 8), var("h", 4), var("w", 6)
    linear = (h * 6 + w) * 8 + c
    assert linear // 8 == h * 6 + w
    assert linear % 8 == c
    assert linear // 48 == h
    assert linear // 8 % 6 == w
    assert (h * 8 + c) // 4 == h * 2 + c // 4
    assert (linear * 2 + 1) // 2 == linear


def test_recombination() -> None:
    """r*(x % y) + r*y*(x // y) = r*x"""
    t = var("t", 100)
    assert t % 7 + (t // 7) * 7 == t
    assert (t % 7) * 3 + (t // 7) * 21 + 5 == t * 3 + 5
    assert (t // 4 % 5) * 4 + (t // 20) * 20 + t % 4 == t
    s = var("s", 9)
    assert (t % 8) * s + (t // 8) * s * 8 == t * s


def test_nested_division_and_modulus() -> None:
    t = var("t", 1000)
    assert t // 4 // 5 == t // 20
    assert t % 24 % 8 == t % 8
    assert (t % 24) // 8 == t // 8 % 3


def test_small_values_need_no_modulus() -> None:
    u = var("u", 7)
    assert u % 7 == u
    assert u % 9 == u
    assert u // 7 == 0
    assert (u + 7) % 7 == u
    assert (u + 7) // 7 == 1


def test_negative_values_round_down() -> None:
    u = var("u", 5)
    e = (u - 7) // 3
    assert [e.evaluate({atom(u): n}) for n in range(5)] == [-3, -2, -2, -2, -1]
    assert [((u - 7) % 3).evaluate({atom(u): n}) for n in range(5)] == [(n - 7) % 3 for n in range(5)]


def test_symbolic_sizes() -> None:
    n = symbol("n", 1, 16)
    b, i = var("b", n), var("i", 49)
    linear = b * 49 + i
    assert linear // 49 == b
    assert linear % 49 == i
    other = var("t", n * 49)
    assert (other // 49) * 49 + other % 49 == other
    assert (n * 8) // 8 == n
    assert (n * 8 * 4) % n == 0
    assert (n * 4 + 3).bounds == (7, 67)
    assert is_nonnegative(n - 1 - b)
    assert is_below(b, n)


def test_division_by_a_symbol() -> None:
    n = symbol("n", 1, 16)
    i, j = var("i", 3), var("j", n)
    linear = i * n + j
    assert linear // n == i
    assert linear % n == j


def test_extrema_that_are_known_vanish() -> None:
    i, n = var("i", 5), symbol("n", 8, 20)
    assert minimum(i, 10) == i
    assert maximum(i, n) == n
    assert minimum(i, n - 4) == i
    assert minimum(i, i) == i
    assert minimum(i, 3).bounds == (0, 3)
    assert maximum(i, 3).bounds == (3, 4)


def test_bounds_of_products_of_negatives() -> None:
    i, j = var("i", 4), var("j", 3)
    assert ((i - 2) * (j - 1)).bounds[0] is not None
    values = [(a - 2) * (b - 1) for a, b in itertools.product(range(4), range(3))]
    low, high = ((i - 2) * (j - 1)).bounds
    assert low is not None and high is not None
    assert low <= min(values) and high >= max(values)


def test_indices_of_empty_tensors_are_nothing_special() -> None:
    """0 divides nothing that anybody reads."""
    i = var("i", 0)
    assert i // 0 == 0
    assert mod(i, as_int(0)) == 0


def test_product() -> None:
    n = symbol("n")
    assert product([as_int(3), n, as_int(4)]) == n * 12
    assert product([]) == 1


def test_text() -> None:
    c, h = var("c", 8), var("h", 4)
    assert repr(h * 8 + c + 1) == "c + 8*h + 1"
    assert repr(as_int(0)) == "0"


def test_numbers_beyond_64_bits() -> None:
    """Bounds of sizes are evaluated for symbols without an end."""
    n, m = symbol("n"), symbol("m")
    (a,), (b,) = n.atoms(), m.atoms()
    many = {a: 2**40, b: 2**41}
    assert (maximum(n, m) * minimum(n, m) * n).evaluate(many) == 2**121


def test_estimates_divide_by_no_zero() -> None:
    n = symbol("n", 0, None)
    assert estimate(n) == 8 and estimate(n // 3) == 2
    assert estimate((n * 6) // (n // 16)) == 96  # with 64, for of 8 there are no sixteenths
    pair = minimum(symbol("a", 0, 3) // 2, symbol("b", 0, 3) // 2)
    assert estimate(n // (pair - 1)) == 1  # of no size is that a number
