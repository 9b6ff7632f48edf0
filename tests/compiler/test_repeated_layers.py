"""Identical layers are traced twice and copied then: the graphs are those of torch.export, whatever the layers do."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

from lapilli.capture import capture, repeated_layers, sources

SCALE = torch.tensor(3.0)
COUNT = [0]
TAPS: list[Tensor] = []
NUMBER = 0


class Layer(nn.Module):
    """A layer with parts, a parameter and a state."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)
        self.factor = nn.Parameter(torch.randn(6))
        self.number = number
        self.mean = nn.Buffer(torch.zeros(6))

    def forward(self, x: Tensor) -> Any:
        """x: [n, 6]."""
        return x + F.gelu(self.linear(self.norm(x))) * self.factor


class Written(Layer):
    """Changes a buffer, a part of a buffer, and reads it again."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(x.mean(0))
        self.mean[:3].add_(1)
        return super().forward(x) + self.mean


class InPlace(Layer):
    """Changes its argument."""

    def forward(self, x: Tensor) -> Tensor:
        x.add_(self.linear(x))
        return x


class Sized(Layer):
    """Computes with the number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        return super().forward(x) + torch.arange(n).unsqueeze(1) * (n // 2) + torch.cat([x, x])[:n]


class View(Layer):
    """A result that shares the memory of its argument, and one of its own."""

    def forward(self, x: Tensor) -> Any:
        return x.view(x.shape), super().forward(x)


class Own(Layer):
    """Several results: an argument, a tensor, sizes and nothing."""

    def forward(self, x: Tensor) -> Any:
        return {"x": x, "y": (super().forward(x), x.shape[0] + 1, None)}


class Numbered(Layer):
    """An attribute that differs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.number


class Counting(Layer):
    """Reads and writes what is not its own."""

    def forward(self, x: Tensor) -> Tensor:
        COUNT[0] += 1
        return super().forward(x) * COUNT[0]


class Tapped(Layer):
    """Gives its result to another place, too: no trace of one layer shows that."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        TAPS.append(y)
        return y


def is_late() -> bool:
    global NUMBER
    NUMBER += 1
    return NUMBER > 3


class Late(Layer):
    """Does something else from the fourth layer on."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y * 2 if is_late() else y


class Calls(Layer):
    """Changes an attribute of its own."""

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return super().forward(x) * self.number


class Constant(Layer):
    """A tensor that it makes, and one of elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor([1.0, 2, 3, 4, 5, 6]) + SCALE


class Data(Layer):
    """A size that depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x[:, 0].nonzero().sum()


class Nested(Layer):
    """Layers within."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.inner = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = layer(x)
        return super().forward(x)


class Stack(nn.Module):
    def __init__(self, kind: type[Layer], count: int, numbered: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind(k + 1 if numbered else 1) for k in range(count))

    def forward(self, x: Tensor) -> Tensor:
        global NUMBER
        NUMBER = 0
        TAPS.clear()
        x = x * 2
        for layer in self.layers:
            y = layer(x)
            if isinstance(y, tuple):
                y = y[0] * y[1]
            elif isinstance(y, dict):
                y = y["x"] + y["y"][0] * y["y"][1]
            x = y
        return torch.stack([x, *TAPS]).sum(0)


def rows(program: ExportedProgram) -> list[Any]:
    """The graph, with nodes numbered in order; sizes are their expressions, because torch may compute one again for each layer."""
    names: dict[Any, str] = {}
    result: list[Any] = []
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            names[node] = str(value)
            continue
        names[node] = f"%{len(result)}"
        parts = torch.fx.node.map_arg((node.args, node.kwargs), names.__getitem__)
        shape = (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value
        stack = node.meta.get("nn_module_stack")
        result.append((node.op, str(node.target) if node.op != "placeholder" else "", str(parts), str(shape), stack))
    return result


def signature(program: ExportedProgram) -> list[Any]:
    s = program.graph_signature
    tensors = [n for n in program.graph.nodes if not isinstance(n.meta.get("val"), torch.SymInt)]
    names = {n.name: k for k, n in enumerate(tensors)}
    inputs = [(x.kind, x.target) for x in s.input_specs]
    return [inputs, [(x.kind, x.target, names.get(getattr(x.arg, "name", ""))) for x in s.output_specs]]


def both(kind: type[Layer], count: int, dynamic: bool, monkeypatch: pytest.MonkeyPatch, numbered: bool = False) -> int:
    """Compares a capture with torch's alone. Returns how many layers were copied."""
    copied = 0
    replayed = repeated_layers._replayed

    def counted(*given: Any) -> Any:
        nonlocal copied
        copied += 1
        return replayed(*given)

    shapes = ({0: Dim("n", min=2, max=64)},) if dynamic else None
    given = (torch.randn(5, 6),)
    with monkeypatch.context() as patch:
        COUNT[0] = 0
        patch.setattr(sources, "layers_once", lambda model: nullcontext())
        wanted = capture(Stack(kind, count, numbered).eval(), given, shapes)
    with monkeypatch.context() as patch:
        COUNT[0] = 0
        patch.setattr(repeated_layers, "_replayed", counted)
        model = Stack(kind, count, numbered).eval()
        found = capture(model, given, shapes)
    assert not any("forward" in vars(m) for m in model.modules()), "the model is as it was"
    assert rows(found) == rows(wanted)
    assert signature(found) == signature(wanted)
    x = torch.randn(7 if dynamic else 5, 6)
    assert torch.equal(found.module()(x), wanted.module()(x))
    return copied


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", [Layer, Written, Sized, Own])
def test_graphs_are_those_of_torch(kind: type[Layer], dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert both(kind, 6, dynamic, monkeypatch) == 4, "all but two are copied"


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", [InPlace, View, Calls, Counting, Tapped, Late, Constant, Data, Nested])
def test_layers_that_do_more_are_traced(kind: type[Layer], dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = both(kind, 5, dynamic, monkeypatch)
    assert copied == 0 or kind in (InPlace, Nested)


def test_attributes_make_another_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert both(Numbered, 5, False, monkeypatch, numbered=True) == 0
    assert both(Numbered, 5, False, monkeypatch) == 3


def test_hooks_and_few_layers_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hooked(Layer):
        def __init__(self, number: int = 0) -> None:
            super().__init__(number)
            self.linear.register_forward_hook(lambda m, given, y: y + 1)

    assert both(Hooked, 5, False, monkeypatch) == 0
    assert both(Layer, 2, False, monkeypatch) == 0


def test_layers_traced_do_not_grow_with_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [both(Layer, count, False, monkeypatch) for count in (4, 16)] == [2, 14]


def test_what_code_names_decides() -> None:
    """Functions, classes, modules and plain values are as they are for every layer; other things may change."""
    assert all(map(repeated_layers._is_closed, (Layer, Written, Sized, nn.TransformerEncoderLayer, nn.Linear)))
    assert not any(map(repeated_layers._is_closed, (Counting, Tapped, Late)))
    kept: list[int] = []

    class Closure(Layer):
        def forward(self, x: Tensor) -> Tensor:
            kept.append(1)
            return x

    assert not repeated_layers._is_closed(Closure)


def test_code_run_from_text_has_no_module() -> None:
    spaces: dict[str, Any] = {"nn": nn, "__builtins__": __builtins__}
    exec("class Texted(nn.Linear):\n    def forward(self, x):\n        return super().forward(x) + 1\n", spaces)
    assert spaces["Texted"].forward.__module__ is None
    assert repeated_layers._is_closed(spaces["Texted"])
