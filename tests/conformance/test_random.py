"""Random numbers: the generator's known answers, distributions, and independence of calls and elements."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from agreement import RANDOM, Array, Case, module_of, on_device, through_interpreter

import lapilli
from lapilli.ir import interpret
from lapilli.ir.dtype import DType
from lapilli.ir.expr import const
from lapilli.ir.node import Graph, Map
from lapilli.legalize.passes import prepare
from lapilli.lower import lower
from lapilli.lower.random import STATE, philox

aten = torch.ops.aten
N = 20000
BOUND = 5 / math.sqrt(N)  # five standard errors of a mean of variance 1


def drawn(overload: Any, *args: Any, **kwargs: Any) -> Array:
    return through_interpreter([Case(overload, args, kwargs)])[0]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((-1, -1, -1, -1), (-1, -1), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3 - 2**32, 0x13198A2E, 0x03707344),
            (0xA4093822 - 2**32, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_philox(counter: Any, key: Any, words: Any) -> None:
    """From the authors' test vectors (Random123, kat_vectors: philox4x32 10)."""
    made = philox([const(c) for c in counter], [const(k) for k in key])
    nodes = [Map((), DType.int32, f"w{k}", "test", axes=(), body=e) for k, e in enumerate(made)]
    got = interpret.run(Graph([], list(nodes), {}), [])
    assert [int(g) & 0xFFFFFFFF for g in got] == list(words)


def test_uniform() -> None:
    x = drawn(aten.rand.default, [100, N // 100])
    assert x.min() >= 0 and x.max() < 1
    assert abs(x.mean() - 0.5) < BOUND / math.sqrt(12) and abs(x.var() - 1 / 12) < BOUND / math.sqrt(180)
    assert abs(np.corrcoef(x.ravel()[:-1], x.ravel()[1:])[0, 1]) < BOUND
    y = drawn(aten.uniform.default, torch.zeros(N), -2.0, 4.0)
    assert y.min() >= -2 and y.max() < 4 and abs(y.mean() - 1) < BOUND * 6 / math.sqrt(12)


def test_normal() -> None:
    x = drawn(aten.randn.default, [N]).astype(np.float64)
    assert abs(x.mean()) < BOUND and abs(x.var() - 1) < BOUND * math.sqrt(2)
    assert abs((x**3).mean()) < BOUND * math.sqrt(15) and abs((x**4).mean() - 3) < BOUND * math.sqrt(96)
    y = drawn(aten.normal_functional.default, torch.zeros(N), 3.0, 0.5)
    assert abs(y.mean() - 3) < BOUND * 0.5 and abs(y.std() - 0.5) < BOUND


def test_integers() -> None:
    x = drawn(aten.randint.low, -3, 4, [N])
    assert x.dtype == np.int64
    values, counts = np.unique(x, return_counts=True)
    assert values.tolist() == list(range(-3, 4))
    assert np.abs(counts - N / 7).max() < 5 * math.sqrt(N * 6 / 49)


def test_bernoulli() -> None:
    assert abs(drawn(aten.bernoulli.p, torch.zeros(N), 0.3).mean() - 0.3) < BOUND * math.sqrt(0.21)
    p = torch.linspace(0, 1, 2).repeat(50)
    np.testing.assert_array_equal(drawn(aten.bernoulli.default, p), p.numpy())


def test_dropout_keeps_the_mean() -> None:
    case = Case(aten.native_dropout.default, (torch.ones(N), 0.25, True))
    values, kept = through_interpreter([case])
    np.testing.assert_array_equal(values, np.where(kept, np.float32(1 / 0.75), 0))
    assert abs(kept.mean() - 0.75) < BOUND * math.sqrt(3 / 16)


@pytest.mark.parametrize("rate", [0.2, 0.5])
def test_alpha_dropout_keeps_the_mean_and_the_variance(rate: float) -> None:
    """torch's Python reference of it moves the mean the wrong way, and ended the process."""

    class Dropped(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.alpha_dropout(x, rate, training=True)

    ones = torch.ones(N)
    torch.manual_seed(0)
    wanted = torch.nn.functional.alpha_dropout(ones, rate, training=True).unique()
    got = torch.from_numpy(interpret.run(lower(prepare(torch.export.export(Dropped(), (ones,)))), [ones.numpy()])[0])
    torch.testing.assert_close(got.unique(), wanted)
    assert abs((got == got.max()).double().mean() - (1 - rate)) < BOUND * math.sqrt(rate * (1 - rate))


def test_leaky_slopes() -> None:
    case = Case(aten.rrelu_with_noise_functional.default, (-torch.ones(N), torch.ones(N), 0.1, 0.3, True))
    values, slopes = through_interpreter([case])
    np.testing.assert_allclose(values, -slopes)
    assert slopes.min() >= 0.1 and slopes.max() < 0.3 and abs(slopes.mean() - 0.2) < BOUND * 0.2 / math.sqrt(12)


@pytest.mark.parametrize("replacement", [True, False])
def test_multinomial(replacement: bool) -> None:
    """Frequencies of the first draw are the weights; without replacement no category comes twice."""

    class Draw(torch.nn.Module):
        def forward(self, p: torch.Tensor) -> torch.Tensor:
            return torch.multinomial(p, 3, replacement)

    weights = torch.tensor([1.0, 0.0, 4.0, 2.0, 3.0])
    p = weights.repeat(4000, 1)
    (got,) = interpret.run(lower(prepare(torch.export.export(Draw(), (p,)))), [p.numpy()])
    assert got.shape == (4000, 3) and got.dtype == np.int64
    frequencies = np.bincount(got[:, 0], minlength=5) / 4000
    np.testing.assert_allclose(frequencies, weights / 10, atol=5 * math.sqrt(0.24 / 4000))
    distinct = [len(set(row)) for row in got.tolist()]
    assert (min(distinct) < 3) if replacement else (set(distinct) == {3})


def test_two_calls_differ_and_runs_repeat() -> None:
    cases = [Case(aten.rand.default, ([N],)), Case(aten.rand.default, ([N],))]
    first, second = through_interpreter(cases)
    assert abs(np.corrcoef(first, second)[0, 1]) < BOUND
    np.testing.assert_array_equal(first, through_interpreter(cases)[0])


@pytest.mark.poor_device
def test_device_and_interpreter_draw_the_same() -> None:
    cases = [
        Case(aten.rand.default, ([3, 7],)),
        Case(aten.randn.default, ([41],)),
        Case(aten.randint.low, (-3, 1 << 20, [9])),
        Case(aten.bernoulli.p, (torch.zeros(40), 0.5)),
    ]
    for ours, reference in zip(on_device(cases, "any-fp32"), through_interpreter(cases), strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("overload", RANDOM, ids=str)
def test_every_random_operator_has_a_program(overload: Any) -> None:
    """Shape and element type are torch's."""
    x = torch.full((3, 4), 0.5)
    arguments: dict[str, Any] = {
        "self": x, "noise": x, "input": x, "size": [3, 4], "high": 9, "low": 2, "p": 0.5, "mean": 1.0, "std": 2.0,
        "train": True, "training": True,
    }  # fmt: skip
    needed = [
        a
        for a in overload._schema.arguments
        if not a.kwarg_only and (not a.has_default_value() or a.name in ("p", "training"))
    ]
    values = [x if a.name == "p" and "Tensor" in str(a.type) else arguments[a.name] for a in needed]
    required = [a.name for a in overload._schema.arguments if a.kwarg_only and not a.has_default_value()]
    case = Case(overload, tuple(values), dict.fromkeys(required))  # a generator: torch's own
    for ours, theirs in zip(
        interpret.run(lower(module_of([case])), [t.numpy() for t in case.tensors]), case(), strict=True
    ):
        assert ours.shape == theirs.shape and ours.dtype == theirs.numpy().dtype


class Noise(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.nn.functional.dropout(x, 0.5, training=True), torch.rand(64)


def test_every_run_draws_other_numbers_and_reset_begins_anew() -> None:
    x = torch.ones(64)
    program = lapilli.compile(Noise(), (x,), target="any-fp32", fallback="error")
    first, second = program(x), program(x)
    assert not torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])
    program.reset()
    assert all(torch.equal(a, b) for a, b in zip(program(x), first, strict=True))
    program.set_state({STATE: np.array([0, 7], np.int32)})
    assert not torch.equal(program(x)[1], first[1])
