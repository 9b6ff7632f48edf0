"""The next token: what is kept as in Hugging Face's processors; draws as in the interpreter, and with exact probabilities."""

from __future__ import annotations

import math
from typing import Any

import as_gpu
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

import lapilli
from lapilli import sampling
from lapilli.capture import capture
from lapilli.errors import InvalidInputError
from lapilli.ir import interpret
from lapilli.legalize.passes import prepare
from lapilli.lower import lower
from lapilli.lower.random import STATE
from lapilli.sampling import next_token

PLANS = ["cpu-fp32", "gpu-fp32", pytest.param("any-fp32", marks=pytest.mark.poor_device), "any-fp32-few"]
NAN, INF = math.nan, math.inf


class Draw(nn.Module):
    def forward(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        return next_token(logits, temperature, top_k, top_p)


@pytest.fixture(autouse=True)
def _gpu_plans_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    as_gpu.accept_gpu_plans(monkeypatch.setattr)


def parameters(temperature: Any, top_k: Any, top_p: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor(temperature, dtype=torch.float32), torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float32)


def key(seed: int) -> dict[str, Any]:
    return {STATE: np.array([0, seed], "int32")}


class DrawByKey(nn.Module):
    def forward(self, logits: Tensor, temperature: Tensor, key: Tensor) -> Tensor:
        return next_token(logits, temperature, key=key)


@pytest.mark.parametrize("plan", PLANS)
def test_draws_by_key_follow_from_it_alone(plan: str) -> None:
    """Not from the number of rows, the place among them, or earlier runs; other keys draw others."""
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(3)).repeat(6, 1)
    keys = torch.tensor([[0, 1], [1, 1], [0, 2], [0, 1], [-5, 7], [2**31 - 1, -(2**31)]], dtype=torch.int32)
    args = logits, torch.full((6,), 2.0), keys
    with lapilli.compile(DrawByKey(), args, target=plan) as program:
        found = program(*args)
        assert torch.equal(found, program(*args)) and len(set(found.tolist())) > 3 and found[0] == found[3]
    for rows in ([1], [4, 0, 2]):
        some = tuple(a[rows] for a in args)
        with lapilli.compile(DrawByKey(), some, target=plan) as program:
            assert torch.equal(program(*some), found[rows])
    alone = DrawByKey()(*args)
    assert torch.equal(alone, DrawByKey()(*args)) and alone[0] == alone[3]
    with pytest.raises(InvalidInputError, match="key is torch.int64"):
        next_token(logits, key=keys.long())


# -- what is kept


@pytest.mark.parametrize("style", ["different", "halves", "ties"])
@pytest.mark.parametrize("top_p", [0.0, 1e-6, 0.3, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 2, 50, 999, 1000, 1001])
def test_what_is_kept_is_what_transformers_keeps(top_k: int, top_p: float, style: str) -> None:
    """Of elements that are equal to the last one kept, top-p of transformers keeps those that its sort happens to put last. We keep
    all of them.
    """
    x = torch.randn(8, 1000, generator=torch.Generator().manual_seed(top_k)).double() * 3
    x = x.half().double() if style == "halves" else x.round() if style == "ties" else x
    want = x / 0.7
    if top_k > 0:
        want = TopKLogitsWarper(top_k)(None, want)
    if top_p < 1:
        want = TopPLogitsWarper(top_p)(None, want)
    lowest = torch.where(want > -INF, x, INF).amin(-1, keepdim=True)
    got = sampling.kept(x, torch.tensor(0.7), torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64))
    assert torch.equal(got, x >= lowest)
    if style == "different":
        assert torch.equal(got, want > -INF)


# -- devices against the interpreter


def special_rows(size: int, dtype: torch.dtype) -> Tensor:
    """Rows of logits, most of which are special."""
    r = torch.Generator().manual_seed(size)
    x = torch.randn(12, size, generator=r) * torch.tensor([0.01, 1, 4, 30] * 3)[:, None]
    x[1] = x[1].round()
    x[2] = -3.5
    x[3, torch.rand(size, generator=r) < 0.5] = -INF
    x[4, size // 2] = NAN
    x[5] = -INF
    x[6] = -INF
    x[6, size // 3] = 1.0
    x[7, size // 2] = INF
    x[8] = torch.where(torch.rand(size, generator=r) < 0.5, 0.0, -0.0)
    x[9] *= 1e-30
    return x.to(dtype)


CHOICES = [  # temperature, top_k, top_p
    (1.0, 0, 1.0), (0.0, 5, 0.5), (0.7, 1, 1.0), (0.7, 40, 1.0), (2.0, 0, 0.9), (0.7, 40, 0.9), (1.0, 0, 0.0), (1.0, 7, 1e-9),
    (100.0, 0, 0.999), (1e-5, 0, 0.95), (INF, 3, 1.0), (NAN, 0, 1.0), (-1.0, 0, 1.0), (1.0, -1, 2.0), (1.0, 10**9, NAN),
    (1.0, 0, -1.0),
]  # fmt: skip


@pytest.mark.part(18)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 7, 256, 4097, 9001])
def test_devices_draw_what_the_interpreter_draws(size: int, dtype: torch.dtype, plan: str) -> None:
    """The same random words, and float64: a set that differs by one element changes some of the draws."""
    x = special_rows(size, dtype)
    args = (x, *parameters([1.0] * 12, [0] * 12, [1.0] * 12))
    graph = lower(prepare(capture(Draw(), args, None)))
    named = plan.replace("fp32", "fp16") if dtype is torch.float16 and not plan.startswith("any") else plan
    with lapilli.compile(Draw(), args, target=named, fallback="error") as program:
        for seed, choice in enumerate(CHOICES):
            given = (x, *(p.expand(12).contiguous() for p in parameters(*choice)))
            program.set_state(key(seed))
            want = interpret.run(
                graph, [t.float().numpy() if t.is_floating_point() else t.numpy() for t in given], states=key(seed)
            )[0]
            assert np.array_equal(program(*given).numpy(), want), choice
            rows = torch.tensor(want)
            if choice[0] in (0.0, -1.0) or math.isnan(choice[0]):
                assert torch.equal(rows, x.argmax(-1))
            finite = torch.isfinite(x.amax(-1))
            assert torch.equal(rows[~finite], x.argmax(-1)[~finite])
            kept = sampling.kept(
                torch.where(finite[:, None], x.float(), 0.0), *parameters(max(choice[0], 1e-30), *choice[1:])
            )
            assert kept.gather(1, rows[:, None])[finite].all() or not choice[0] > 0


@pytest.mark.part(6)
@pytest.mark.parametrize("seed", range(12))
def test_random_draws(seed: int) -> None:
    """Any size, number of rows, type, plan, and parameters that differ from row to row."""
    r = np.random.default_rng(seed)
    size, rows = int(r.choice([3, 31, 257, 1000, 4096, 8193, 20011])), int(r.choice([1, 2, 5, 33]))
    dtype = [torch.float32, torch.float16, torch.bfloat16][seed % 3]
    x = torch.from_numpy(r.standard_normal((rows, size)).astype("f4") * r.choice([0.01, 1, 4, 30]))
    x = [x, x.round(), torch.where(x < 0, -INF, x), x * 0][r.integers(4)].to(dtype)
    temperatures, limits = [0.0, 1e-4, 0.3, 0.7, 1.0, 2.0, 100.0], [0, 1, 2, 40, size // 2, size - 1, size, size + 7]
    args = (
        x, *parameters(r.choice(temperatures, rows), r.choice(limits, rows), r.choice([0.0, 0.1, 0.5, 0.9, 0.999, 1.0], rows))
    )  # fmt: skip
    graph = lower(prepare(capture(Draw(), args, None)))
    plans = ["gpu-fp16", "cpu-fp16"] if dtype is torch.float16 else ["gpu-fp32", "cpu-fp32"]
    with lapilli.compile(Draw(), args, target=plans[r.integers(2)], fallback="error") as program:
        program.set_state(key(seed))
        arrays = [t.float().numpy() if t.is_floating_point() else t.numpy() for t in args]
        assert np.array_equal(program(*args).numpy(), interpret.run(graph, arrays, states=key(seed))[0])


@pytest.mark.parametrize("plan", ["cpu-fp32", pytest.param("gpu-fp32", marks=pytest.mark.long)])
def test_draws_have_the_exact_probabilities(plan: str) -> None:
    """Pearson's statistic of 4,096 draws stays below what a right sampler exceeds with one seed in a million."""
    r = torch.Generator().manual_seed(3)
    x, rows = torch.randn(300, generator=r), 1024
    args = (x.expand(rows, 300).contiguous(), *parameters(0.8, 60, 0.9))
    with lapilli.compile(Draw(), args, target=plan, fallback="error") as program:
        program.set_state(key(11))
        runs = [program(*args) for _ in range(4)]
    assert not torch.equal(runs[0], runs[1])
    kept = sampling.kept(x, *args[1:])
    assert 20 < int(kept.sum()) < 60
    expected = torch.where(kept, x.double() / 0.8, -INF).softmax(-1) * 4 * rows
    counts = torch.bincount(torch.cat(runs), minlength=300).double()
    assert counts[~kept].sum() == 0 and expected[kept].min() > 5
    statistic = float(((counts - expected) ** 2 / expected)[kept].sum())
    free = int(kept.sum()) - 1
    limit = free * (1 - 2 / (9 * free) + 4.75 * math.sqrt(2 / (9 * free))) ** 3  # Wilson and Hilferty 1931
    assert statistic < limit, (statistic, limit)


def test_a_seed_repeats_its_draws() -> None:
    args = (torch.zeros(5, 2000), *parameters(1.0, 0, 1.0))
    with lapilli.compile(Draw(), args, fallback="error") as program:
        first = [program(*args) for _ in range(2)]
        program.reset()
        assert all(torch.equal(a, program(*args)) for a in first)
        program.set_state(key(1))
        assert not torch.equal(first[0], program(*args))


@pytest.mark.long
def test_few_numbers_in_large_vocabularies() -> None:
    """Of 151,936 equal logits each is as likely: the mean of draws is in the middle, within five standard errors."""
    size = 151936
    args = (torch.zeros(1, size).expand(64, size).half().contiguous(), *parameters(1.0, 0, 1.0))
    with lapilli.compile(Draw(), args, fallback="error") as program:
        drawn = torch.cat([program(*args) for _ in range(4)]).double()
        assert len(drawn.unique()) > 250  # 256 of so many: 0.2 pairs are expected
        assert abs(drawn.mean() / size - 0.5) < 5 / math.sqrt(12 * 256)
        top = program(args[0], *parameters(1.0, size - 1, 0.5))
        assert len(top.unique()) > 60  # all are equal, all are kept


# -- in models


def test_open_batches_views_and_what_follows() -> None:
    """Logits as a view, parameters by row, and a comparison as the kernel's epilogue."""

    class Step(nn.Module):
        def forward(self, x: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
            token = next_token(x[:, -1], temperature, 3, 0.9)
            return token, token == 2

    x = torch.randn(4, 3, 50)
    batch = torch.export.Dim("batch", min=2, max=9)
    with lapilli.compile(
        Step(), (x, torch.zeros(4)), dynamic_shapes=({0: batch}, {0: batch}), fallback="error"
    ) as program:
        for rows in (2, 4, 9):
            x = torch.randn(rows, 3, 50)
            token, same = program(x, torch.zeros(rows))
            assert torch.equal(token, x[:, -1].argmax(-1)) and torch.equal(same, token == 2)
            heat = torch.linspace(0, 1, rows)
            token, _ = program(x, heat)
            kept = sampling.kept(x[:, -1], heat.clamp(min=1e-6), torch.tensor(3), torch.tensor(0.9))
            assert token[0] == x[0, -1].argmax() and kept.gather(1, token[:, None]).all()


class Flag(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return next_token(x, 0) == 2


@pytest.mark.parametrize("plan", PLANS)
def test_results_that_are_no_whole_words(plan: str) -> None:
    x = torch.randn(5, 3)
    with lapilli.compile(Flag(), (x,), target=plan, fallback="error") as program:
        assert torch.equal(program(x), x.argmax(-1) == 2)


def test_one_row_and_eager_pytorch() -> None:
    x = torch.tensor([0.0, 3.0, 3.0, -1.0])
    assert next_token(x, 0) == 1 and next_token(x, 1.0, top_k=1) in (1, 2)
    assert next_token(torch.tensor([[0.0, NAN, 1.0], [-INF, -INF, -INF]])).tolist() == [1, 0]
    drawn = torch.stack([next_token(x, 1.0, 2) for _ in range(50)])
    assert sorted(drawn.unique().tolist()) == [1, 2]
    args = (x, *parameters(1.0, 2, 1.0))
    with lapilli.compile(Draw(), args, fallback="error") as program:
        assert sorted({int(program(*args)) for _ in range(30)}) == [1, 2]
        assert program(*args).shape == ()


def test_verify_takes_the_draw_for_one_kernel() -> None:
    checks = lapilli.verify(Draw(), (torch.randn(2, 5000), *parameters(1.0, 40, 0.9)))
    assert [c.error for c in checks if "choice" in c.kernel] == [0.0]


def test_on_the_device_and_in_compiled_graphs() -> None:
    x = torch.randn(3, 500)
    there = [t.to("vulkan") for t in (x, *parameters(0.0, 3, 0.9))]
    assert torch.equal(next_token(*there).cpu(), x.argmax(-1))
    compiled = torch.compile(Draw(), backend="vulkan", fullgraph=True)
    assert torch.equal(compiled(*there).cpu(), x.argmax(-1))
    there[1] = torch.tensor(1.0).to("vulkan")
    for f in (next_token, compiled):
        drawn = f(*there).cpu()
        assert sampling.kept(x, *parameters(1.0, 3, 0.9)).gather(1, drawn[:, None]).all()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((torch.zeros(3, dtype=torch.int64),), "floating-point"), ((torch.tensor(1.0),), "vocabulary"),
        ((torch.zeros(2, 3), 1.0, 2.0), "integer"), ((torch.zeros(2, 3), torch.ones(3)), "temperature has shape"),
        ((torch.zeros(3), 1.0, torch.ones(1, dtype=torch.int64)), "top_k has shape"),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(given: Any, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        next_token(*given)
