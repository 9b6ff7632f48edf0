"""torch.compile(model, backend="vulkan"), against torch on the CPU: tensors of the CPU, and of the device."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from counting import Counting
from installed import run_installed
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

import lapilli
from lapilli import autoload, backend
from lapilli.backend import executable
from lapilli.errors import CompileError

autoload.register()
CPU_OR_DEVICE = pytest.mark.parametrize("device", ["cpu", "vulkan"])


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    backend._live.clear()  # graphs of tests before this one wait for the garbage collector
    torch.manual_seed(0)
    executable._warned.clear()
    yield
    torch._dynamo.reset()


def compiled(model: Any, **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend=backend.vulkan, **options)


def moved(tree: Any, device: str) -> Any:
    return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, tree)


def agree(f: Any, *calls: tuple[Any, ...], device: str = "cpu", **options: Any) -> None:
    """Equal results, results on the right device, and arguments changed alike."""
    own = copy.deepcopy(f).to(device) if isinstance(f, nn.Module) else f
    run = compiled(own, **options)
    for args in calls:
        given = moved(copy.deepcopy(args), device)
        with torch.no_grad():
            got, want = run(*given), f(*args)
        assert {x.device.type for x in tree_leaves(got) if isinstance(x, torch.Tensor)} <= {device}
        half = {torch.float16, torch.bfloat16} & {x.dtype for x in tree_leaves(want) if isinstance(x, torch.Tensor)}
        bounds: Any = {} if half else {"rtol": 1e-4, "atol": 1e-5}  # torch's own for half precision
        torch.testing.assert_close(moved(got, "cpu"), want, check_stride=device == "cpu", **bounds)
        torch.testing.assert_close(moved(given, "cpu"), args, rtol=1e-4, atol=1e-5)


class Network(nn.Module):
    """Convolutions, batch norm, dropout, attention; several results, a None and a number among them."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> Any:
        y = self.features(x).flatten(2).transpose(1, 2)
        y = F.dropout(y, 0.5, self.training) + self.attention(y, y, y)[0]
        return {"scores": self.head(y.mean(1)) * scale, "map": y.transpose(1, 2), "none": None, "size": x.shape[0]}


@CPU_OR_DEVICE
def test_a_model(device: str) -> None:
    agree(
        Network().eval(),
        (torch.rand(2, 3, 8, 8),),
        (torch.rand(2, 3, 8, 8),),
        device=device,
        options={"fallback": "error"},
    )


def functions() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    def mutates(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        y[1:].zero_()
        return x.sum()

    def aliases(x: torch.Tensor) -> Any:
        y = x.relu() * 2
        return x.t(), x, x[0], y, y.t(), y[0], (x + 1).t(), y.expand(2, 3, 4)

    def breaks(x: torch.Tensor) -> torch.Tensor:
        y = x.relu() + 1
        torch._dynamo.graph_break()
        return y.exp() * x.max().item()

    def conditional(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 3, lambda x: x.sin(), lambda x: x.cos(), (x,))

    x = torch.rand(3, 4)
    return {
        "mutation": (mutates, (x, torch.rand(3, 4))),
        "aliases": (aliases, (x,)),
        "graph_break": (breaks, (x,)),
        "strides": (lambda x, y, z: (x.softmax(-1), y + z), (x.t(), torch.rand(6, 8)[::2, 1::2], torch.rand(3, 1).expand(3, 4))),
        "integers": (lambda x, i: (x[i], i + 1, x.argmax(-1)), (x, torch.tensor([2, 0]))),
        "bools": (lambda x, m: (x.masked_fill(m, 0.0), m.logical_not()), (x, x > 0.5)),
        "half": (lambda x: (x.bfloat16() * 2, x.half() + 1), (x,)),
        "no_tensor": (lambda n: torch.arange(n) * 2 + torch.ones(n), (5,)),
        "empty": (lambda x: x * 2, (torch.rand(0, 3),)),
        "scalar": (lambda x: x * 2, (torch.tensor(3.0),)),
        "sizes_of_data": (lambda x: x[x > 0.5], (torch.rand(20),)),
        "condition": (conditional, (torch.rand(4),)),
    }  # fmt: skip


@CPU_OR_DEVICE
@pytest.mark.parametrize("name", functions())
def test_functions(name: str, device: str) -> None:
    if name == "no_tensor":
        device = "cpu"
    f, args = functions()[name]
    agree(f, args, device=device)


def test_numbers_as_arguments() -> None:
    """Integers become sizes, floats are computed with on the host: neither is compiled in for long, nor a reason for the CPU."""
    counting = Counting()
    f = lambda x, n, s: (x * s + s**2, x.repeat(n, 1), torch.arange(n), n * 2)  # noqa: E731
    run = torch.compile(f, backend=counting)
    for n, s in ((2, 2.5), (3, 3.25), (5, 4.125), (7, 0.1)):
        x = torch.rand(3, 4)
        torch.testing.assert_close(run(x, n, s), f(x, n, s))
    assert counting.graphs <= 3 and all(not r.on_cpu for _, r in backend.reports())


def test_channels_last_results_lie_as_they_do_in_torch() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3))
    model, x = model.to(memory_format=torch.channels_last), torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last)
    agree(model, (x,))


# -- sizes


@CPU_OR_DEVICE
def test_dynamic_shapes(device: str) -> None:
    def f(x: torch.Tensor) -> Any:
        return (x @ x.t()).softmax(-1).reshape(-1)[: x.shape[0] * 2], x.relu(), x.shape[0] * 2 + 1, x.numel() // 3

    agree(f, *((torch.rand(n, m),) for n, m in ((3, 4), (7, 6), (13, 2), (300, 400))), device=device, dynamic=True)


@pytest.mark.long
def test_gradients_of_quantiles_of_open_sizes() -> None:
    """What is scattered is summed up over the product of several sizes, whose bound is far beyond what there can be."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.quantile(x, 0.3, 1)

    compiled = torch.compile(f, backend="vulkan", dynamic=True)
    for n in (6, 5):
        x = torch.randn(n, n, n, n)
        found, wanted = (x.clone().requires_grad_() for _ in range(2))
        compiled(found).sum().backward()
        f(wanted).sum().backward()
        torch.testing.assert_close(found.grad, wanted.grad)


def test_many_sizes() -> None:
    """Optimizers and losses over lists of tensors have a size for each; kernels take 32 numbers."""

    def f(*given: torch.Tensor) -> list[torch.Tensor]:
        joined, outer = torch.cat([x * 2 for x in given]), [torch.outer(x, given[0]) for x in given]
        sums = torch.stack([x.sum() * x.shape[0] for x in given])
        return [joined, joined.softmax(0), sums, torch.cat([x.T.flatten() for x in outer]) * 2, torch.cat(outer).sum(1)]

    agree(f, *(tuple(torch.rand(n + k) for k in range(40)) for n in (2, 5)), dynamic=True)


@CPU_OR_DEVICE
def test_marked_dimensions_are_compiled_once(device: str) -> None:
    model, counting = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2)).eval(), Counting()
    run = torch.compile(copy.deepcopy(model).to(device), backend=counting)
    with torch.no_grad():
        for n, h in ((2, 16), (4, 20), (20, 33), (3, 31)):
            x = torch.rand(n, 3, h, 16)
            given = x.to(device)
            torch._dynamo.mark_dynamic(given, 0, min=2, max=32)
            torch._dynamo.mark_dynamic(given, 2, min=8, max=64)
            torch.testing.assert_close(run(given).cpu(), model(x), rtol=1e-4, atol=1e-5)
    assert counting.graphs == 1


# -- weights


@CPU_OR_DEVICE
def test_changed_weights_are_seen(device: str) -> None:
    """In place, by another tensor, and (on the CPU) behind torch's back; once compiled anew, then copied."""
    model, x = nn.Linear(4, 4).to(device), torch.rand(3, 4).to(device)
    run = compiled(model)

    def swap() -> None:
        model.weight.data = model.weight.data * 2

    def behind() -> None:
        model.weight.data.add_(1)

    changes = [
        lambda: None,
        lambda: model.weight.mul_(2),
        swap,
        lambda: model.load_state_dict(nn.Linear(4, 4).state_dict()),
    ]
    changes += [swap, lambda: model.bias.zero_()] + [behind] * (device == "cpu")
    with torch.no_grad():
        for change in changes:
            change()
            torch.testing.assert_close(run(x).cpu(), model(x).cpu())
            torch.testing.assert_close(run(x).cpu(), model(x).cpu())


def test_weights_of_inference_mode() -> None:
    """They have no version."""
    with torch.inference_mode():
        model, x = nn.Linear(4, 4), torch.rand(3, 4)
        run = compiled(model)
        torch.testing.assert_close(run(x), model(x))
        model.weight.zero_()
        torch.testing.assert_close(run(x), model(x))


def test_weights_leave_the_device_with_the_model() -> None:
    model = nn.Linear(512, 512)
    run = compiled(model)
    run(torch.rand(2, 512).requires_grad_()).sum().backward()
    held = torch.vulkan.memory_allocated()
    assert held >= 512 * 512 * 4
    del model, run
    torch._dynamo.reset()
    assert torch.vulkan.memory_allocated() <= held - 512 * 512 * 4


def test_tied_weights_and_buffers_that_change() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("cache", torch.zeros(4, 4))

        def forward(self, token: torch.Tensor, place: torch.Tensor) -> Any:
            self.cache.index_copy_(0, place, self.embed(token))
            return self.head(self.cache.sum(0))

    model = Decoder()
    like, run = copy.deepcopy(model), compiled(model)
    with torch.no_grad():
        for k in range(4):
            args = torch.tensor([k + 1]), torch.tensor([k])
            torch.testing.assert_close(run(*args), like(*args))
    torch.testing.assert_close(model.cache, like.cache)


# -- training


def train(model: nn.Module, run: Any, batches: list[tuple[torch.Tensor, torch.Tensor]], optimizer: Any) -> list[float]:
    made = optimizer(model.parameters(), lr=1e-2)
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(run(x), y)
        made.zero_grad()
        loss.backward()
        made.step()
        losses.append(loss.item())
    return losses


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(x)).mean(1))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 5),
    )  # fmt: skip


@CPU_OR_DEVICE
@pytest.mark.parametrize("kind", ["convolutional", "transformer"])
def test_training_tracks_the_cpu(kind: str, device: str) -> None:
    model = convolutional() if kind == "convolutional" else Transformer()
    x = torch.rand(8, 1, 12, 12) if kind == "convolutional" else torch.randint(0, 20, (8, 6))
    batches = [(x, torch.randint(0, 5, (8,)))] * 6
    optimizer = torch.optim.AdamW if kind == "convolutional" else torch.optim.SGD
    own = copy.deepcopy(model).to(device)
    want = train(model, model, batches, optimizer)
    got = train(own, compiled(own), moved(batches, device), optimizer)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    reports = dict(backend.reports())
    assert not reports["forward"].on_cpu and not reports["backward"].on_cpu
    if kind == "convolutional":
        torch.testing.assert_close(own[1].running_var.cpu(), model[1].running_var, rtol=1e-3, atol=1e-4)


def test_activations_stay_on_the_device() -> None:
    """What AOTAutograd saves for the backward graph is never downloaded."""
    x = torch.rand(16, 16, requires_grad=True)
    y = compiled(lambda x: (x @ x).tanh().sin())(x)
    saved = {t.device.type for t in y.grad_fn.saved_tensors}
    assert saved == {"vulkan"}
    y.sum().backward()
    grad, x.grad = x.grad, None
    (x @ x).tanh().sin().sum().backward()
    torch.testing.assert_close(grad, x.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@CPU_OR_DEVICE
def test_results_can_be_changed_in_place(device: str, dtype: torch.dtype, turned: bool, dynamic: bool) -> None:
    """In training too: autograd forbids it for a view that a function with several results returns."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x + 1

    x = torch.arange(20.0).reshape(4, 5).to(dtype).to(device)
    x = (x.t() if turned else x).detach().requires_grad_()
    y, z = torch.compile(f, backend="vulkan", dynamic=dynamic)(x)
    y.mul_(0.5)
    z.add_(1)
    (y * z).sum().backward()
    assert x.grad is not None and torch.equal(x.grad.cpu(), 2 * x.detach().cpu() + 2)


@pytest.mark.parametrize("other", [(4, 5), (20,)])
@CPU_OR_DEVICE
def test_equal_gradients_have_memory_of_their_own(device: str, other: tuple[int, ...]) -> None:
    """Autograd takes what nobody else holds for its own, and adds to it in place."""
    x, y = (torch.zeros(shape, device=device, requires_grad=True) for shape in ((4, 5), other))
    compiled = torch.compile(lambda x, y: (x.view(y.shape) + y).sin(), backend="vulkan")
    for times in (1, 2):
        compiled(x, y).sum().backward()
        assert x.grad is not None and y.grad is not None and x.grad.data_ptr() != y.grad.data_ptr()
        assert x.grad[0, 0].item() == y.grad.view(-1)[0].item() == times


@pytest.mark.parametrize("device", ["cpu"])
def test_views_that_are_marks_on_their_memory(device: str) -> None:
    x = torch.randn(8, device=device)
    f = lambda x: (lambda z: (z, z.conj(), z.conj().imag))(torch.fft.fft(x))  # noqa: E731
    for ours, own in zip(torch.compile(f, backend="vulkan")(x), f(x), strict=True):
        torch.testing.assert_close(
            ours.resolve_conj().resolve_neg(), own.resolve_conj().resolve_neg(), rtol=1e-4, atol=1e-5
        )


@CPU_OR_DEVICE
def test_results_that_the_graph_made_by_a_view_can_be_changed_in_place(device: str) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2), x + 1

    x = torch.rand(2, 3, 4, 8, device=device, requires_grad=True)
    y, z = torch.compile(f, backend="vulkan")(x)
    y.detach().mul_(1)
    (y.mul_(0.5).sum() + z.sum()).backward()
    own = x.detach().cpu().requires_grad_()
    y, z = f(own)
    ((y * 0.5).sum() + z.sum()).backward()
    assert x.grad is not None and own.grad is not None
    torch.testing.assert_close(x.grad.cpu(), own.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("turned", [False, True])
def test_changes_of_what_a_gradient_needs_are_seen(turned: bool) -> None:
    """On the device, where a result and what is kept of it are the same memory; results on the CPU are copies."""
    x = torch.zeros(3, 4, device="vulkan")
    x = (x.t() if turned else x).detach().requires_grad_()
    y, z = torch.compile(lambda x: (x.exp(), x + 1), backend="vulkan")(x)
    with pytest.raises(RuntimeError, match="in.?place"):
        y.mul_(5)
        (y + z).sum().backward()


CHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "all": lambda x, y: x.mul_(2),
    "a column": lambda x, y: x[:, :1].copy_(y),
    "rows": lambda x, y: x[1:].add_(y),
    "turned": lambda x, y: x.t().mul_(y),
    "a diagonal": lambda x, y: x.diagonal().fill_(3.0),
    "another": lambda x, y: y.mul_(2),
}
VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "half": lambda x: x[x.shape[0] // 2 :],
    "corner": lambda x: x[x.shape[0] // 2 :, 1:],
    "turned": lambda x: x.t()[x.shape[0] // 2 :],
    "parts": lambda x: torch.chunk(x, 2),
    "steps": lambda x: x[1::2, :2],
    "itself": lambda x: x,
}
PLACES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "offset": lambda base: base[1:26].view(5, 5),
    "turned": lambda base: base[2:27].view(5, 5).t(),
    "steps": lambda base: base.view(6, 6)[1:, 1:],
}


@CPU_OR_DEVICE
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.part(8)
def test_views_of_what_is_changed_lie_where_they_do_in_torch(place: str, change: str, device: str) -> None:
    """An argument in the middle of other memory is changed, and a view of it is a result: at fixed and open sizes, in training
    too. Where PyTorch's own backends fail, ours is right (`x.mul_(2)`, then `x[n // 2 :]`: aot_eager begins elsewhere)."""
    for dynamic in (False, True):
        for trains in (False, True):
            torch._dynamo.reset()

            def f(x: torch.Tensor, y: torch.Tensor) -> Any:
                CHANGES[change](x, y)
                return [view(x) for view in VIEWS.values()], y * 3

            found = []
            for function in (f, torch.compile(f, backend="vulkan", dynamic=dynamic)):
                base = torch.arange(36.0, device=device)
                x, y = PLACES[place](base), torch.full((1, 1), 2.0, requires_grad=trains, device=device)
                if trains and change != "all":
                    x, y = PLACES[place](base), y.clone()  # what needs gradients is no leaf
                results = tree_leaves(function(x, y))
                with torch.no_grad():
                    base += 100  # views see it
                found.append([*(t.detach().clone() for t in results), base])
            for ours, torchs in zip(*found, strict=True):
                assert torch.equal(ours, torchs)


@CPU_OR_DEVICE
def test_gradients_that_no_input_changes(device: str) -> None:
    """Zeros, which the forward graph keeps for its backward graph on the device, are gradients of tensors of the CPU."""
    x = torch.rand(5, device=device, requires_grad=True)
    (compiled(lambda x: x**0)(x) * 3).sum().backward()
    assert x.grad.device == x.device
    assert torch.equal(x.grad.cpu(), torch.zeros(5))


def test_gradients_with_dynamic_sizes() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.reshape(-1, 2).sum(0) * x.shape[0]).sum() + x.mean(0).prod()

    run = compiled(f, dynamic=True)
    for n in (4, 6, 10):
        x = torch.rand(n, 4, requires_grad=True)
        like = x.detach().clone().requires_grad_()
        run(x).backward()
        f(like).backward()
        torch.testing.assert_close(x.grad, like.grad)


def test_a_size_that_only_a_weight_has_in_a_graph_of_parts() -> None:
    """After a graph break, sizes of weights are symbols; singular values cut the graph in parts."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randn(10, 2, 3, 3))

        def forward(self, x: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
            weight = self.weight
            positive = torch.bincount((q > 0).flatten().long(), minlength=3)
            return positive, torch.linalg.svdvals(q), nn.functional.conv2d(x, weight)  # type: ignore[arg-type]

    with torch.no_grad():
        agree(Attending(), *((torch.randn(1, 2, n, 8), torch.randn(1, 3, n)) for n in (5, 7)), dynamic=True)


@pytest.mark.parametrize("width", [None, 1], ids=["one of two sizes is seen alone", "none is"])
def test_gradients_where_a_size_is_seen_in_a_product_only(width: int | None) -> None:
    """The backward graph is given values of n * m rows, and m alone or neither; the exponential of a matrix cuts it in parts."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, 1).sin() @ w.unsqueeze(0)
        return torch.linalg.matrix_exp(rows @ rows.mT * 0.01)

    run = compiled(f, dynamic=True)
    for n, m in ((4, 3), (5, 7), (6, 2)):
        x, w = torch.rand(n, m), torch.rand(width or m, requires_grad=True)
        like = w.detach().clone().requires_grad_()
        run(x, w).sum().backward()
        f(x, like).sum().backward()
        torch.testing.assert_close(w.grad, like.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 2])
def test_attention_with_heads_of_an_open_size(heads: int) -> None:
    def f(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        split = [F.linear(x, w).unflatten(-1, (heads, -1)).transpose(1, 2) for w in weights]
        return F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)

    run = compiled(f, dynamic=True, options={"fallback": "error"})
    for batch, length, head in ((2, 4, 4), (3, 7, 1), (1, 5, 20)):
        given = [torch.randn(batch, length, 3), *(torch.randn(heads * head, 3) for _ in range(3))]
        torch.testing.assert_close(run(*given), f(*given), rtol=1e-5, atol=1e-5)


def test_statistics_of_a_norm_that_runs_on_the_cpu() -> None:
    """torch has them in float32 for bfloat16 on devices, and in bfloat16 on the CPU."""

    def f(x: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (8,), w) * torch.linalg.svdvals(m)[0].to(x.dtype)

    given = [torch.rand(6, 8, dtype=torch.bfloat16), torch.rand(8, dtype=torch.bfloat16), torch.rand(20, 20)]
    wanted = [t.clone().requires_grad_() for t in given[:2]]
    f(*wanted, given[2]).sum().backward()  # type: ignore[call-arg]
    found = [t.to("vulkan").requires_grad_() for t in given[:2]]
    compiled(f)(*found, given[2].to("vulkan")).sum().backward()
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.grad.cpu(), want.grad, rtol=2**-6, atol=0.05)  # sums of 8 numbers of 8 bits


def refuse(monkeypatch: Any, number: int) -> None:
    """The graph of this number, from 1 on, is not compiled."""
    made = executable._program
    calls: list[int] = []

    def refused(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            raise CompileError("for this test")
        return made(*args)

    monkeypatch.setattr(executable, "_program", refused)


def test_a_backward_graph_that_runs_in_torch_gets_what_it_takes_for_tensors_of_the_cpu(monkeypatch: Any) -> None:
    """What the forward graph has saved for it lies on the device."""
    refuse(monkeypatch, 2)
    x = torch.rand(5, 3, requires_grad=True)
    with pytest.warns(UserWarning, match="runs in torch"):
        compiled(lambda x: (x.sin() * x.exp()).tanh())(x).sum().backward()
    like = x.detach().clone().requires_grad_()
    (like.sin() * like.exp()).tanh().sum().backward()
    torch.testing.assert_close(x.grad, like.grad)


def test_training_with_a_dynamic_batch() -> None:
    """Batch norm counts the elements of its channels: a number made of sizes."""
    model = convolutional()
    like, run = copy.deepcopy(model), compiled(model, dynamic=True, options={"fallback": "error"})
    for n in (4, 9):
        x = torch.rand(n, 1, 12, 12)
        got, want = run(x), like(x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        got.square().sum().backward()
        want.square().sum().backward()
    torch.testing.assert_close(model[1].running_var, like[1].running_var, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model[4].weight.grad, like[4].weight.grad, rtol=1e-3, atol=1e-4)


@CPU_OR_DEVICE
def test_dropout(device: str) -> None:
    run = compiled(lambda x: F.dropout(x, 0.25))
    x = torch.ones(10000, device=device, requires_grad=True)
    torch.manual_seed(1)
    first, second = run(x), run(x)
    torch.manual_seed(1)
    assert torch.equal(run(x).cpu(), first.cpu()) and not torch.equal(first.cpu(), second.cpu())
    assert abs(float((first == 0).float().mean().cpu()) - 0.25) < 0.02
    second.sum().backward()
    assert torch.equal(x.grad.cpu(), second.detach().cpu())


# -- options and reports


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"precison": "fp16"},
            "no option 'precison' .did you mean 'precision'.*; there are precision, fallback, device",
        ),
        ({"precision": "fp61"}, "precision is 'fp61' .did you mean 'fp16'"),
        ({"fallback": "gpu"}, 'fallback is .gpu. .*: choose one of "cpu", "error"'),
        ({"device": 3.5}, "device is 3.5: give an index"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message) as failure:
        compiled(lambda x: x + 1, options=options)(torch.rand(3))
    assert isinstance(failure.value.inner_exception, lapilli.CompileError)


def test_an_unknown_device() -> None:
    with pytest.raises(lapilli.NoDeviceError, match="no Vulkan device 'GeForce 9999'; choose one by .* UUID: 0 "):
        compiled(lambda x: x + 1, options={"device": "GeForce 9999"})(torch.rand(3))


def test_modes_change_nothing() -> None:
    with pytest.warns(UserWarning, match='mode="max-autotune" changes nothing'):
        compiled(lambda x: x + 1, mode="max-autotune")(torch.rand(3))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="mode is 'quickest': choose one of"):
        compiled(lambda x: x + 2, mode="quickest")(torch.rand(3))


def test_half_precision() -> None:
    model, x = nn.Linear(64, 64), torch.rand(8, 64)
    with torch.no_grad():
        error = (compiled(model, options={"precision": "fp16"})(x) - model(x)).abs().max()
    assert 1e-6 < error < 1e-2


def spectrum(x: torch.Tensor) -> torch.Tensor:
    return torch.fft.rfft((x @ x).double()).abs().float()


@CPU_OR_DEVICE
def test_a_fallback_is_reported_once(device: str) -> None:
    x = torch.rand(256, 256).to(device) / 16
    with pytest.warns(
        UserWarning, match=r"run on the CPU in torch: .*aten\._fft_r2c\.default: no GPU lowering.*reports\(\)"
    ):
        got = compiled(spectrum)(x)
    torch.testing.assert_close(got.cpu(), spectrum(x.cpu()), rtol=1e-4, atol=1e-3)
    kind, report = backend.reports()[-1]
    assert (
        kind == "inference"
        and report.segments == ("gpu", "cpu")
        and "aten._fft_r2c.default" in [o.operator for o in report.on_cpu]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(lambda x: torch.fft.rfft(x.double()).abs())(x)


def test_fallbacks_can_be_refused() -> None:
    with pytest.raises(lapilli.UnsupportedOperatorError, match=r"aten\._fft_r2c\.default: no GPU lowering"):
        compiled(spectrum, options={"fallback": "error"})(torch.rand(64, 64))


def test_a_graph_that_cannot_be_compiled_runs_in_torch() -> None:
    """A region that is compiled by itself is an operator that Lapilli does not know."""
    region = torch.compiler.nested_compile_region(lambda x: x.sin() + 1)
    f = lambda x: region(x) * region(x + 1)  # noqa: E731
    x = torch.rand(3, 4)
    with pytest.warns(UserWarning, match="a graph runs in torch, for Lapilli cannot compile it: .*invoke_subgraph"):
        torch.testing.assert_close(compiled(f)(x), f(x))
    with pytest.raises(lapilli.CompileError, match="invoke_subgraph"):
        compiled(f, options={"fallback": "error"})(x)


# -- processes

_PROGRAM = """
import sys, torch
from lapilli.codegen import slang
made, original = [], slang.compile
slang.compile = lambda source: made.append(source) or original(source)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
x = torch.rand(4, 8)
with torch.no_grad():
    torch.testing.assert_close(torch.compile(model, backend="vulkan")(x), model(x))
print(len(made))
"""


def test_a_second_process_finds_all_kernels(tmp_path: Path) -> None:
    """By entry point, with nothing imported but torch."""
    cache = str(tmp_path / "cache")
    counts = [int(run_installed(_PROGRAM, tmp_path, LAPILLI_CACHE_DIR=cache)) for _ in range(2)]
    assert counts[0] > 1 and counts[1] == 0


WIDE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "arithmetic": lambda x: x * 2 + 1,
    "sort": lambda x: x.sort()[0],
    "cumsum": lambda x: x.cumsum(0),
    "float": lambda x: x.float().relu(),
}


@CPU_OR_DEVICE
@pytest.mark.filterwarnings("ignore:.*runs on the CPU:UserWarning")
@pytest.mark.parametrize("name", WIDE)
def test_integers_beyond_32_bits(name: str, device: str) -> None:
    """Such a call runs in torch, and those after it on the device again."""
    f = WIDE[name]
    run, x, wide = compiled(f), torch.tensor([4, -3, 7]), torch.tensor([2**33, -3, 2**40])
    assert torch.equal(run(x.to(device)).cpu(), f(x))
    with pytest.warns(UserWarning, match="a graph runs in torch: an int64 tensor has values .* 32 bits"):
        assert torch.equal(run(wide.to(device)).cpu(), f(wide))
    with warnings.catch_warnings(action="error"):
        assert torch.equal(run(x.to(device)).cpu(), f(x))


def test_integers_beyond_32_bits_are_refused_without_fallback() -> None:
    run = compiled(lambda x: x + 1, options={"fallback": "error"})
    with pytest.raises(ValueError, match="int64 tensor has values that do not fit into the 32 bits"):
        run(torch.tensor([2**33]))


@CPU_OR_DEVICE
@pytest.mark.filterwarnings("ignore:a graph runs in torch:UserWarning")
def test_numbers_beyond_32_bits(device: str) -> None:
    run, x = compiled(lambda x, k: (x + k, x.float() * k), dynamic=True), torch.tensor([4, -3, 7])
    for k in (3, 4, 2**33, 5):
        sum_, product = run(x.to(device), k)
        assert torch.equal(sum_.cpu(), x + k) and torch.equal(product.cpu(), x.float() * k)


def test_dynamo_leaves_our_code_alone() -> None:
    """Also what the build makes, which an editable install has elsewhere."""
    import flatbuffers.builder
    from torch._dynamo import trace_rules

    import lapilli.program.schema

    compiled(lambda x: x + 1)(torch.ones(2))
    for module in (lapilli.program.schema, flatbuffers.builder, lapilli.player):
        assert trace_rules.check_file(module.__file__).skipped, module


def test_a_size_too_long_to_be_written() -> None:
    """Its formula has parts with names, and the player is asked for it."""

    def pairs(*lines: torch.Tensor) -> torch.Tensor:
        return torch.cat([(a[:, None] * b).flatten() for a, b in itertools.permutations(lines, 2)])

    compiled = torch.compile(pairs, backend="vulkan", dynamic=True)
    for first in (2, 3):
        lines = [torch.randn(first + k) for k in range(6)]
        torch.testing.assert_close(compiled(*lines), pairs(*lines))


def test_a_maximum_equals_one_of_the_numbers_that_it_was_found_among() -> None:
    """What a backward graph compares is saved by the forward one: here it would be computed again on the CPU, where it is rounded
    otherwise, beside the gradient of grid_sample."""
    grid = F.affine_grid(torch.linspace(0.9, -0.1, 6).reshape(1, 2, 3), [1, 3, 4, 5], align_corners=False)

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.logsigmoid(F.grid_sample(x, grid, align_corners=False)).amax(1)

    x = torch.tensor([0.5196, 1.0271, 0.4385]).reshape(1, 3, 1, 1).requires_grad_()
    (wanted,) = torch.autograd.grad(f(x).sum(), x)
    (got,) = torch.autograd.grad(torch.compile(f, backend="vulkan")(x).sum(), x)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_forward_graph_that_runs_in_torch_saves_what_was_traced(dtype: torch.dtype, monkeypatch: Any) -> None:
    """Statistics of a norm in half precision are traced as float32 for the device, and the backward graph takes them so."""
    refuse(monkeypatch, 1)
    given = [torch.rand(6, 3, 5).to(dtype), torch.rand(3).to(dtype), torch.rand(3).to(dtype)]

    def f(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, None, None, w, b, training=True) * 2

    wanted = [t.clone().requires_grad_() for t in given]
    f(*wanted).square().sum().backward()
    found = [t.to("vulkan").requires_grad_() for t in given]
    with pytest.warns(UserWarning, match="runs in torch"):
        compiled(f)(*found).square().sum().backward()
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.grad.cpu(), want.grad, rtol=2**-5, atol=0.3)  # sums of 30 numbers of 8 bits


def test_results_in_words_of_sizes_that_may_be_negative() -> None:
    """Four bools are a word. Where a size is a difference, its stride has a maximum with 1."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x[:, 2 * x.shape[0] :] < 0

    run = compiled(f, dynamic=True, options={"fallback": "error"})
    for shape in ((3, 9, 5), (2, 11, 7), (4, 9, 2)):
        x = torch.randn(shape)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(run(x), f(x))


def gradients_agree(f: Callable[..., torch.Tensor], device: str, *given: torch.Tensor) -> None:
    """The result and the gradients of all floats that are given."""

    def run(call: Callable[..., torch.Tensor], device: str) -> list[torch.Tensor]:
        leaves = [x.to(device).clone().requires_grad_(x.is_floating_point()) for x in given]
        result = call(*leaves)
        (result * torch.linspace(-1, 1, result.numel(), device=device).view(result.shape)).sum().backward()
        return [x.cpu() for x in (result.detach(), *(x.grad for x in leaves if x.grad is not None))]

    torch.testing.assert_close(run(compiled(f), device), run(f, "cpu"), rtol=1e-4, atol=1e-5)


@CPU_OR_DEVICE
@pytest.mark.filterwarnings("ignore:operators run on the CPU:UserWarning")
@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weighted"])
def test_gradients_of_bags(mode: str, device: str) -> None:
    """The second is empty. What the forward graph saves tells which rows are in a bag, how many, and which is the largest."""
    table, words = torch.randn(20, 8), torch.randint(20, (9,))

    def f(table: torch.Tensor, words: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if mode == "weighted":
            return F.embedding_bag(words, table, starts[:-1], mode="sum", per_sample_weights=weights)
        options: Any = {"padding_idx": 3, "include_last_offset": True} if mode == "mean" else {}
        return F.embedding_bag(words, table, starts, mode=mode, **options)

    words[4] = 3
    gradients_agree(f, device, table, words, torch.tensor([0, 3, 3, 5, 9]), torch.rand(9))


@CPU_OR_DEVICE
@pytest.mark.filterwarnings("ignore:a graph runs in torch:UserWarning")
@pytest.mark.parametrize("name", ["inv", "solve", "cholesky"])
def test_gradients_of_operators_that_check_their_argument(name: str, device: str) -> None:
    """The check is an effect, whose graph begins with a token: None where it runs."""

    def f(x: torch.Tensor) -> torch.Tensor:
        a = x @ x.mT + 5 * torch.eye(4, device=x.device)
        return torch.linalg.solve(a, x) if name == "solve" else getattr(torch.linalg, name)(a)

    gradients_agree(f, device, torch.randn(4, 4))
