"""Work grows with the number of different layers, and what is done once is done right: equal tasks have one kernel, others have
their own.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from lapilli.capture import capture
from lapilli.codegen import alike
from lapilli.codegen.build import Builder
from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.select import schedule_of, write_all
from lapilli.compiler import compile_to_bytes
from lapilli.ir.expr import Expr
from lapilli.ir.integer import Int, Quotient, Remainder, Var
from lapilli.ir.node import Node
from lapilli.legalize import decompose
from lapilli.legalize.passes import prepare
from lapilli.lower import lower
from lapilli.schedule.task import Task
from lapilli.target import ANY, CPU, GPU, GPU_HALF, GPU_MATRIX, Target


class Layer(nn.Module):
    """Attention with a cache, and a gated feed-forward part."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        self.keys, self.values = (nn.Buffer(torch.zeros(1, 2, context, width // 2)) for _ in range(2))

    def forward(self, x: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(2, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        keys, values = self.keys.index_copy_(2, places, k), self.values.index_copy_(2, places, v)
        seen = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int = 32, context: int = 48) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Layer(width, context) for _ in range(layers))
        self.positions = nn.Buffer(torch.arange(context))

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        """tokens: [1, n] int64; start: [1] int64."""
        places = start + torch.arange(tokens.shape[1])
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, places, self.positions <= places[:, None])
        return F.linear(x[:, -1], self.words.weight)


def methods(layers: int) -> dict[str, Any]:
    model = Decoder(layers).eval().half()
    start, many, one = torch.tensor([0]), torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    sizes = {"tokens": {1: Dim("n", min=2, max=48)}, "start": None}
    return {"prefill": (model, (many, start), sizes), "decode": (model, (one, start))}


class Sources(Builder):
    """Leaves the kernels as they are written, for tests of what is done before."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, bytes] = {}

    def add(self, sources: Iterable[str]) -> None:
        self.found |= dict.fromkeys(sources, b"\0" * 4)

    def finish(self, progress: Any = None) -> dict[str, bytes]:
        return self.found


def work(layers: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often what takes time is done: kernels written and compiled, calls decomposed, the model traced again."""
    count = {"written": 0, "sources": 0, "decomposed": 0, "traced again": 0}

    def counted(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **given: Any) -> Any:
            count[name] += 1
            return f(*args, **given)

        return call

    class Counted(Sources):
        def finish(self, progress: Any = None) -> dict[str, bytes]:
            count["sources"] += len(self.found)
            return super().finish(progress)

    with monkeypatch.context() as patch:
        of = alike.Kernels.of

        def written(self: alike.Kernels, task: Task, *given: object) -> KernelSource:
            before = self.written
            made = of(self, task, *given)
            count["written"] += self.written - before
            return made

        patch.setattr(alike.Kernels, "of", written)
        patch.setattr(decompose, "_traced", counted("decomposed", decompose._traced))
        patch.setattr("lapilli.legalize.passes.decompose", counted("traced again", decompose.decompose))
        patch.setattr("lapilli.compiler.Builder", Counted)
        compile_to_bytes(methods(layers))
    return count


def test_work_does_not_grow_with_identical_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    four, sixteen = work(4, monkeypatch), work(16, monkeypatch)
    assert four == sixteen, "the same layers, four times as many"
    assert four["traced again"] == 0
    assert four["written"] > 50, "what is counted is what is called"
    assert four["sources"] > 50, "what is counted is what is called"


def test_nothing_of_ours_waits_for_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is off while a model is compiled, so what refers to itself would add up: half of all objects, once."""
    monkeypatch.setattr("lapilli.compiler.Builder", Sources)
    gc.collect()
    gc.disable()
    try:
        compile_to_bytes(methods(2))
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = Counter(
            type(x).__qualname__ for x in gc.garbage if type(x).__module__.startswith("lapilli.") and _is_value(x)
        )
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left


def test_nothing_of_ours_is_kept_after_a_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of divisions once kept a quarter of a million objects, which the interpreter's end looked at for seconds."""
    monkeypatch.setattr("lapilli.compiler.Builder", Sources)

    def kept() -> Counter[str]:
        gc.collect()
        ours = Quotient | Remainder | Var | Expr | Node | Task
        return Counter(type(x).__qualname__ for x in gc.get_objects() if isinstance(x, ours))

    before = kept()
    compile_to_bytes(methods(2))
    assert not kept() - before


def _is_value(x: object) -> bool:
    return isinstance(x, Int | Expr | Node | Task)


TARGETS = (ANY, CPU, GPU, GPU_HALF, GPU_MATRIX)


class Convolutions(nn.Module):
    """Layers that differ in one thing at a time: sizes, strides, padding, groups, an activation, which value is added."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.same = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.grouped, self.wide = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 5, padding=2)
        self.last = nn.Conv2d(8, 16, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.same[0](x))
        y = F.relu(self.same[1](y)) + x
        y = F.relu(self.same[2](y)) + y
        y = torch.where(y > 0.5, y, -0.0 * y) + torch.where(y > 0.5, y, 0.0 * y)
        y = F.gelu(self.grouped(y)) - F.silu(self.wide(y))
        z = self.last(y)
        return torch.cat([z.softmax(1), z.softmax(2), z.flip(2), z.flip(3), z[:, :, z.shape[2] - 1 :].expand_as(z)], 1)


class Gathers(nn.Module):
    """Computed indices in different orders, and numbers that differ in their last bit or only in their sign."""

    def forward(self, x: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, ...]:
        """x: [n, n]; i, j: [n] int64."""
        ones = (x[i, j], x[j, i], x[i][:, j], x[j][:, i], x[i, j] + x[j, j])
        others = (
            x * 1.5,
            x * 1.5000001,
            x + 1e-38,
            x.clamp(0.0),
            x.clamp(-0.0),
            x.cumsum(0),
            x.cumsum(1),
            x.sort(1)[0],
        )
        return ones + others


class Likenesses(nn.Module):
    """Operators that read the same and differ in what they compute: reductions along each dimension and of all, scans, windows,
    products and pointwise functions.
    """

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """x, y: [5, 7], in (0, 1)."""
        along = [torch.sum, torch.mean, torch.prod, torch.amax, torch.amin, torch.logsumexp, torch.std, torch.var]
        results = [f(z, d) for f in along for z in (x, y) for d in (0, 1)]
        results += [f(z) for f in (torch.sum, torch.prod, torch.amax, torch.amin, torch.std) for z in (x, y)]
        results += [f(z, d) for f in (torch.argmax, torch.argmin, torch.any, torch.all) for z in (x, y) for d in (0, 1)]
        results += [f(x, d) for f in (torch.cumsum, torch.cumprod, F.softmax, F.log_softmax, F.softmin) for d in (0, 1)]
        results += [x.sort(d, descending)[k] for d in (0, 1) for descending in (False, True) for k in (0, 1)]
        results += [x.cummax(0)[0], x.cummin(0)[0], x.topk(3)[0], x.topk(3, largest=False)[0], x.median(1)[0]]
        results += [F.max_pool1d(x, 3), F.avg_pool1d(x, 3), -F.max_pool1d(-x, 3), F.layer_norm(x, (7,)), F.normalize(x)]
        results += [x @ y.T, y @ x.T, x.T @ y, torch.cdist(x, y), torch.cdist(x, y, 1.0)]
        results += [
            f(x, y) for f in (torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.pow)
        ]
        results += [f(x) for f in (torch.exp, torch.log, torch.sqrt, torch.sin, torch.cos, torch.erf, torch.sigmoid)]
        return results


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], Any]]] = {
    "prefill": lambda: methods(3)["prefill"],
    "decode": lambda: (*methods(3)["decode"], None),
    "in floats": lambda: (Decoder(3).eval(), methods(3)["prefill"][1], methods(3)["prefill"][2]),
    "convolutions": lambda: (Convolutions().eval(), (torch.rand(2, 8, 9, 13),), ({0: Dim("batch", max=9)},)),
    "gathers": lambda: (
        Gathers(),
        (torch.rand(7, 7), torch.arange(7), torch.arange(7).flip(0)),
        ({0: Dim("n"), 1: Dim("n")}, {0: Dim("n")}, {0: Dim("n")}),
    ),
    "likenesses": lambda: (Likenesses(), (torch.rand(5, 7), torch.rand(5, 7)), None),
    "recurrent": lambda: (nn.LSTM(8, 8, 3, batch_first=True).eval(), (torch.rand(2, 5, 8),), None),
}


def said(w: KernelSource, place: Callable[[Node], Node]) -> tuple[object, ...]:
    bindings = [(place(b.node).id, b.type, b.written, b.texel, b.part, b.parts) for b in w.bindings]
    return w.source, bindings, w.params, w.groups, w.local, w.name, w.flops, w.shared, w.needs


@pytest.mark.part(3)
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize("case", CASES)
def test_shared_kernels_are_those_that_each_task_would_have(
    case: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = prepare(capture(*CASES[case]()))
    schedule = schedule_of(lower(module, half_storage=target.half), target)
    shared = write_all(schedule)
    monkeypatch.setattr(alike.Kernels, "of", lambda self, task, *given: self.write(task))
    alone = write_all(schedule)
    assert shared.keys() == alone.keys()
    for task in schedule.tasks:
        out = task.out.id
        assert said(shared[out], lambda n: n) == said(alone[out], lambda n: n), task.label
        assert shared[out].task is task


def test_results_of_equal_calls_are_told_apart() -> None:
    """A call that is decomposed, of two results of calls that were decomposed alike."""

    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.lcm(x & 127, y & 127)

    x = torch.arange(9, dtype=torch.int32)
    graph = prepare(capture(Model(), (x, x.flip(0)))).graph
    (divided,) = (n for n in graph.nodes if n.target is torch.ops.aten.gcd.default)
    assert divided.args[0] is not divided.args[1]


def test_layers_of_another_size_have_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 20)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = F.relu(layer(x))
            return x

    made: list[int] = []
    of = alike.Kernels.of

    def counted(self: alike.Kernels, task: Task, *given: object) -> KernelSource:
        before = self.written
        found = of(self, task, *given)
        made.append(self.written - before)
        return found

    schedule = schedule_of(lower(prepare(capture(Three().eval(), (torch.rand(7, 16),)))), ANY)
    monkeypatch.setattr(alike.Kernels, "of", counted)
    written = write_all(schedule)
    products = [w for w in written.values() if "linear" in w.task.label]
    assert len(products) == 3
    assert len({w.source for w in written.values()}) <= sum(made) < len(written)
