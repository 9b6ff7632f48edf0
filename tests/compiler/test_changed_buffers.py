"""Buffers that a model changes in place become states without tracing it again, and torch does what is left to it."""

from __future__ import annotations

import copy
import random
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from lapilli.capture import capture
from lapilli.graph.module import Module
from lapilli.legalize import passes
from lapilli.legalize.passes import functional

# What is written has memory of its own: PyTorch itself does not say what a copy between overlapping memory gives.
CHANGES = (
    "{b}.add_(({v} + 0))",
    "{b}.mul_(0.5)",
    "{b}.copy_(({v} + 0))",
    "{b}.index_copy_(0, i, ({v} + 0)[:2])",
    "{b}.index_fill_(1, i, 3.0)",
    "{b}.clamp_(-1, 1)",
    "{b}.masked_fill_(({v} + 0) > 0.5, 0.25)",
    "{b}[1:3].add_(({v} + 0)[:2])",
    "{b}.t().mul_(2.0)",
    "{b}[i] = ({v} + 0)[:2]",
)
VALUES = (
    "{b} + x",
    "{b}",
    "{b}.t()",
    "{b}[1:].sum(0) + {v}",
    "{v}.relu()",
    "{b} * {v}",
    "{b}.view(-1).reshape(4, 4) + 1",
    "{b}.add_(1.0)",
    "{b}.detach()",
)


def model(seed: int) -> tuple[nn.Module, str]:
    """The first of the random models that PyTorch runs: it refuses to copy between parts of memory that overlap."""
    chance = random.Random(seed)
    while True:
        made, text = drawn(chance)
        with suppress(RuntimeError):
            copy.deepcopy(made)(torch.zeros(4, 4), torch.tensor([2, 0]))
            return made, text


def drawn(chance: random.Random) -> tuple[nn.Module, str]:
    """A model of two buffers, a and b, with random changes of them and reads before and after."""
    lines, values = [], ["x"]
    for n in range(chance.randint(2, 7)):
        given = {"b": f"self.{chance.choice('ab')}", "v": chance.choice(values)}
        if chance.random() < 0.5:
            lines.append(chance.choice(CHANGES).format(**given))
        else:
            lines.append(f"v{n} = {chance.choice(VALUES).format(**given)}")
            values.append(f"v{n}")
    kept = chance.sample(values, min(len(values), chance.randint(1, 3)))
    text = "\n    ".join([*lines, f"return {', '.join(f'{v} + 0' if chance.random() < 0.8 else v for v in kept)},"])
    space: dict[str, Any] = {}
    exec(f"def forward(self, x, i):\n    {text}\n", space)

    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Buffer(torch.arange(16.0).reshape(4, 4) / 8 - 1)
            self.b = nn.Buffer(torch.arange(16.0).reshape(4, 4).flip(0) / 16)

    Changes.forward = space["forward"]
    return Changes().eval(), text


def run(module: Module, inputs: tuple[Tensor, ...]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What a module's graph gives in torch: its outputs, and the new values of its states."""
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            held = module.constants.get(node)
            held = module.states[node].value if held is None and node in module.states else held
            values[node] = (next(given) if held is None else held).clone()
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    states = {s.name: values[s.new] for s in module.states.values() if s.new is not None}
    return [values[o] for o in module.outputs], states


@pytest.mark.parametrize("seed", range(60))
def test_random_changes(seed: int) -> None:
    changes, text = model(seed)
    inputs = (torch.linspace(-2, 2, 16).reshape(4, 4), torch.tensor([2, 0]))
    expected = copy.deepcopy(changes)
    wanted = expected(*(x.clone() for x in inputs))
    got, states = run(functional(capture(changes, inputs)), inputs)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=1e-6, msg=lambda m: f"{text}\n{m}")
    after = {name: states.get(name, buffer) for name, buffer in changes.named_buffers()}
    torch.testing.assert_close(after, dict(expected.named_buffers()), atol=0, rtol=1e-6, msg=lambda m: f"{text}\n{m}")


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Buffer(torch.zeros(4, 4))
        self.steps = nn.Buffer(torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        self.steps.add_(1)
        return self.keys.index_copy_(0, i, x) * self.steps


def test_a_cache_needs_no_second_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> None:
        raise AssertionError("the model is traced again")

    monkeypatch.setattr(passes, "decompose", refuse)
    module = functional(capture(Cache(), (torch.ones(2, 4), torch.tensor([2, 0]))))
    assert [s.name for s in module.states.values()] == ["keys", "steps"]
    assert not any(n.target._schema.is_mutable for n in module.graph.nodes if n.op == "call_function")


def test_buffers_in_the_same_memory_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shared(Cache):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Buffer(self.keys[:2])

        def forward(self, x: Tensor, i: Tensor) -> Tensor:
            return self.keys.add_(1.0).sum() + self.first

    class Asked(Exception):
        pass

    def asked(_: Any) -> None:
        raise Asked

    monkeypatch.setattr(passes, "decompose", asked)
    with pytest.raises(Asked):
        functional(capture(Shared(), (torch.ones(2, 4), torch.tensor([2, 0]))))
