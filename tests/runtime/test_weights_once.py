"""Weights lie once in a file and once on the device: those of two methods or plans, those that are tied, and parts of others."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapilli
from lapilli.compiler import compile_to_bytes
from lapilli.graph import split_large_weights
from lapilli.runtime.description import Description

WORDS, WIDTH = 4096, 128


class Tied(nn.Module):
    """A language model's first and last layer, one weight, with layers between; a state counts its calls."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [n] int64; the result is [n, words]."""
        x = self.words(tokens)
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return F.linear(x, self.words.weight)


def weights(model: nn.Module, size: int) -> int:
    return sum(p.numel() * size for p in model.parameters())


def methods(model: nn.Module) -> dict[str, Any]:
    many, one = torch.arange(16), torch.arange(1)
    return {"many": (model, (many,), ({0: torch.export.Dim("n", min=2, max=64)},)), "one": (model, (one,))}


def code(data: bytes) -> int:
    """Bytes of a program that are no constants."""
    found = Description.of(data)
    ends = sorted({(c.offset, c.offset + c.size) for c in found.constants})
    held, last = 0, 0
    for start, end in ends:
        held += max(0, end - max(start, last))
        last = max(last, end)
    return len(data) - held


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("split", [False, True])
def test_a_file_holds_weights_once(precision: str, split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if split:  # as a large embedding is, into parts that are constants
        limit = 1 << 19
        monkeypatch.setattr(split_large_weights.split_large_weights, "__defaults__", (limit,))
    model = Tied().eval()
    data = compile_to_bytes(methods(model), precision=precision)
    names = [c.name for c in Description.of(data).constants]
    assert any("weight_" in name for name in names) == split
    assert len(data) - code(data) <= 1.02 * weights(model, 2 if precision == "fp16" else 4)


def test_constants_in_the_same_memory_lie_in_one_place_only_if_they_are_parts() -> None:
    class Overlapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.arange(4096, dtype=torch.float32)
            self.first, self.second = nn.Buffer(whole[:2048]), nn.Buffer(whole[1024:3072])  # neither holds the other
            self.part, self.odd = nn.Buffer(whole[1024:1040]), nn.Buffer(whole[1:33])  # at 4,096 and at 4 bytes
            self.turned = nn.Buffer(whole[:2048].view(32, 64).T)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return x + self.first, x * self.second, x[:16] + self.part, x[:32] - self.odd, x[:64, None] + self.turned

    model, x = Overlapping(), torch.rand(2048)
    data = compile_to_bytes(model, (x,))
    with lapilli.Program(data) as program:
        for got, wanted in zip(program(x), model(x), strict=True):
            torch.testing.assert_close(torch.as_tensor(got), wanted)
    places = {c.name.removeprefix("b_"): c.offset for c in Description.of(data).constants}
    assert places["part"] in (places["first"] + 4096, places["second"])
    assert places["odd"] % 64 == 0


def test_methods_share_what_is_packed() -> None:
    """The device holds what two methods pack alike as often as a program of one of them does."""
    model = Tied(layers=6).eval()
    tokens = torch.arange(5)
    used = {}
    for name, chosen in (("one", ["one"]), ("both", ["one", "again"]), ("many", ["one", "again", "many"])):
        given = {**methods(model), "again": (model, (torch.arange(1),))}
        with lapilli.Program(compile_to_bytes({k: given[k] for k in chosen})) as program:
            used[name] = program.memory().constants
            for method in program.methods.values():
                x = tokens if method is program.methods.get("many") else tokens[:1]
                got = torch.as_tensor(method(x))
                torch.testing.assert_close(got, model(x), atol=1e-4, rtol=1e-5)
    assert used["both"] == used["one"]
    assert used["many"] <= 1.02 * used["one"]


@pytest.mark.parametrize("half", [False, True])
def test_matrix_units_read_what_another_method_reads_as_it_lies(half: bool) -> None:
    """A program for matrix units brings each weight to the device once, whether the model or the program is in half precision."""
    model = Tied().eval()
    data = compile_to_bytes(
        methods(model.half() if half else model), precision="fp32" if half else "fp16", target="gpu-fp16-matrix"
    )
    for method in Description.of(data).methods:
        bytes_of: Counter[str] = Counter()
        for buffer in method.plans[0].buffers:
            if buffer.kind in ("packed", "constant"):
                bytes_of[buffer.kind] += int(buffer.size)
        assert bytes_of["packed"] == 0, method.name
        assert bytes_of["constant"] <= 1.02 * weights(model, 2), method.name


def test_a_method_alone_packs_what_it_reads_on_matrix_units() -> None:
    (method,) = Description.of(
        compile_to_bytes({"many": methods(Tied().eval())["many"]}, precision="fp16", target="gpu-fp16-matrix")
    ).methods
    kinds = Counter(b.kind for b in method.plans[0].buffers)
    assert kinds["packed"] == 2, "the layers; the embedding lies there for the lookup"


@pytest.mark.parametrize("count", [1, 3, 16])
def test_a_tied_weight_lies_once_without_matrix_units(count: int, gpu_plans: None) -> None:
    model, tokens = Tied().eval().requires_grad_(False), torch.arange(count)
    with lapilli.compile(model, (tokens,), target="gpu-fp32", fallback="error") as program:
        torch.testing.assert_close(program(tokens), model(tokens), rtol=1e-4, atol=1e-4)
        assert program.memory().constants <= 1.01 * weights(model, 4)


def test_weights_larger_than_the_staging_memory_are_packed() -> None:
    """They pass through one buffer, whatever their order: a larger one takes the place of one that is too small."""
    torch.manual_seed(0)
    widths = [64, 1500, 900, 1700, 300, 2100, 64]  # of 0.4 to 6 MB, more than what lies in staging memory at once
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
    x = torch.rand(3, 64)
    with lapilli.compile(model, (x,)) as program:
        loads = [len(plan.load) for method in program.description.methods for plan in method.plans]
        assert max(loads) == len(widths) - 1
        torch.testing.assert_close(program(x), model(x), rtol=1e-5, atol=1e-6)
