"""Operators on lists of tensors on the device "vulkan".

The property: they give what the same operator gives for one tensor after the other, whatever the tensors are and whatever memory
they share; and many tensors take few launches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lapilli.eager
from lapilli.eager.dispatch import _composite
from lapilli.eager.lists import ListOperator

lapilli.eager.enable()

Tensors = list[torch.Tensor]


def one_by_one(name: str, lists: list[Tensors], rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensors:
    """The same by calls with a single tensor, in their order."""
    op = getattr(torch, f"_foreach_{name}")
    found: Tensors = []
    for k in range(len(lists[0])):
        numbers = [[x[k]] if isinstance(x, list) else x for x in rest]
        made = op([of[k] for of in lists][:1], *([of[k]] for of in lists[1:]), *numbers, **kwargs)
        found += lists[0][k : k + 1] if name.endswith("_") else made
    return found


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each call ran by a program of lists."""
    found: list[bool] = []
    call = ListOperator._queue

    def counted(self: ListOperator, *args: Any) -> Any:
        made = call(self, *args)
        found.append(made is not None)
        return made

    monkeypatch.setattr(ListOperator, "_queue", counted)
    yield found


CASES: list[tuple[str, int, tuple[Any, ...], dict[str, Any]]] = [
    ("add_", 2, (), {"alpha": -0.3}), ("add_", 2, (), {}), ("add_", 1, (0.7,), {}), ("add", 2, (), {"alpha": 2}),
    ("sub_", 2, (), {"alpha": 0.5}), ("sub", 1, (3,), {}), ("mul_", 1, (0.9,), {}), ("mul", 2, (), {}), ("div_", 2, (), {}),
    ("div", 1, (7,), {}), ("maximum_", 2, (), {}), ("minimum", 2, (), {}), ("clamp_max_", 1, (0.6,), {}),
    ("clamp_min", 1, (0.5,), {}), ("lerp_", 2, (0.2,), {}), ("lerp_", 2, (0.8,), {}), ("lerp", 3, (), {}),
    ("addcmul_", 3, (0.4,), {}), ("addcdiv_", 3, (-0.1,), {}), ("addcdiv", 3, (), {}), ("sqrt", 1, (), {}), ("neg_", 1, (), {}),
    ("abs_", 1, (), {}), ("exp", 1, (), {}), ("log_", 1, (), {}), ("reciprocal", 1, (), {}), ("rsqrt_", 1, (), {}),
    ("sigmoid_", 1, (), {}), ("sign", 1, (), {}), ("tanh", 1, (), {}),
]  # fmt: skip


def drawn(count: int, dtype: torch.dtype, seed: int) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    shapes = [(3,), (5, 7), (1,), (2, 3, 4, 5), (), (257,), (1, 1)]
    return [torch.rand(shapes[k % len(shapes)], generator=draw).add(0.1).to(dtype) for k in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "lists", "rest", "kwargs"), CASES, ids=[f"{c[0]}{c[1]}{c[2]}" for c in CASES])
def test_as_one_by_one_and_as_the_cpu(
    name: str, lists: int, rest: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype, queued: list[bool]
) -> None:
    for count in (2, 7, 45):
        given = [drawn(count, dtype, seed) for seed in range(lists)]
        op = getattr(torch, f"_foreach_{name}")

        def run(of: list[Tensors], op: Callable[..., Any] = op) -> Tensors:
            made = op(*of, *rest, **kwargs)
            return of[0] if name.endswith("_") else list(made)

        ours = run([[t.to("vulkan") for t in of] for of in given])
        assert queued == [True]
        queued.clear()
        single = one_by_one(name, [[t.to("vulkan") for t in of] for of in given], rest, kwargs)
        want = run([[t.clone() for t in of] for of in given])
        bound = 4 * torch.finfo(dtype).eps  # two roundings each here and there
        for a, b, c in zip(ours, single, want, strict=True):
            assert torch.equal(a.cpu(), b.cpu())
            assert a.dtype == c.dtype and a.shape == c.shape and a.stride() == c.stride()
            assert (a.cpu().double() - c.double()).abs().max() <= bound * (c.double().abs().max() + 1)


@pytest.mark.parametrize("name", ["add_", "mul_", "div_", "addcdiv_", "addcmul_", "lerp_", "add", "sub"])
def test_a_number_for_each_tensor(name: str, queued: list[bool]) -> None:
    lists = {"addcdiv_": 3, "addcmul_": 3, "lerp_": 2}.get(name, 1)
    given = [[t.to("vulkan") for t in drawn(40, torch.float32, seed)] for seed in range(lists)]
    numbers = [0.05 + 0.1 * k for k in range(40)]
    want = one_by_one(name, [[t.clone() for t in of] for of in given], (numbers,), {})
    made = getattr(torch, f"_foreach_{name}")(*given, numbers)
    got = given[0] if name.endswith("_") else made
    assert queued == [True]
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", ["add_", "mul_", "div_", "mul"])
def test_one_number_on_the_device_for_all(name: str, queued: list[bool]) -> None:
    given = [t.to("vulkan") for t in drawn(40, torch.float32, 0)]
    number = torch.tensor(0.3, device="vulkan")
    want = [getattr(torch.Tensor, name)(t.clone(), number) for t in given]
    made = getattr(torch, f"_foreach_{name}")(given, number)
    assert queued == [True]
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(made or given, want, strict=True))


@pytest.mark.parametrize("number", [0, 1, -0.0, float("inf"), float("nan"), 2e-38, 3e38, True, 2**40, 1e300])
def test_any_number(number: float) -> None:
    """But for subnormal ones, which devices may take for zero."""
    given = [torch.tensor([0.0, -0.0, 1.5, float("inf"), float("nan"), -3e38, 2e-38]) for _ in range(5)]
    for name in ("add", "mul"):
        ours: Any
        try:
            want = getattr(torch, f"_foreach_{name}")(given, number)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=str(error)[:20]):
                getattr(torch, f"_foreach_{name}")([t.to("vulkan") for t in given], number)
            continue
        ours = getattr(torch, f"_foreach_{name}")([t.to("vulkan") for t in given], number)
        for a, b in zip(ours, want, strict=True):
            tiny = b.abs() < 2**-126
            assert torch.equal(torch.nan_to_num(a.cpu())[~tiny], torch.nan_to_num(b)[~tiny])


def _view(base: torch.Tensor, kind: int) -> torch.Tensor:
    n = base.numel()
    choices = (
        base[: n // 2], base[n // 2 :], base[1:], base, base[::2], base[: n // 64 * 64].view(-1, 64).t(),
        base[:64].view(8, 8), base[:0], base[:48].view(2, 3, 2, 4).contiguous(memory_format=torch.channels_last),
    )  # fmt: skip
    return choices[kind % len(choices)]


def test_random_lists_that_share_memory() -> None:
    """Views of few tensors, in any list and any order: the calls of one tensor after the other decide."""
    random.seed(3)
    for case in range(40):
        name, lists = random.choice((("add_", 2), ("mul_", 2), ("lerp_", 2), ("addcmul_", 3), ("neg_", 1), ("add", 2)))
        rest = (0.25,) if name in ("lerp_", "addcmul_") else ()
        count = random.choice((2, 3, 9, 33))
        bases = random.choice((2, count + 3, 4 * count))
        memory = [
            torch.rand(random.choice((128, 192)), generator=torch.Generator().manual_seed(k)) for k in range(bases)
        ]
        picks = [[(random.randrange(bases), random.randrange(9)) for _ in range(count)]]
        for _ in range(1, lists):
            picks.append(
                [(random.randrange(bases), kind) if random.random() < 0.7 else (b, kind) for b, kind in picks[0]]
            )

        def views(device: str, memory: Tensors = memory, picks: Any = picks) -> tuple[Tensors, list[Tensors]]:
            moved = [t.clone().to(device) for t in memory]
            return moved, [[_view(moved[b], kind) for b, kind in of] for of in picks]

        singly, given = views("vulkan")
        if any(t.shape != first.shape for of in given for t, first in zip(of, given[0], strict=True)):
            continue
        device, ours = views("vulkan")
        made = getattr(torch, f"_foreach_{name}")(*ours, *rest)
        want = one_by_one(name, given, rest, {})
        for a, b in zip([*device, *(made or ())], [*singly, *(want if made else ())], strict=True):
            assert torch.equal(a.cpu(), b.cpu()), (case, name)


def test_what_a_program_does_not_fit_is_left_to_torch(queued: list[bool]) -> None:
    def lists(*tensors: torch.Tensor) -> Tensors:
        return [t.to("vulkan") for t in tensors]

    ints = lists(torch.arange(4), torch.arange(3))
    torch._foreach_add_(ints, 2)
    assert [t.tolist() for t in ints] == [[2, 3, 4, 5], [2, 3, 4]]
    mixed = lists(torch.ones(3), torch.ones(3).half())
    torch._foreach_mul_(mixed, 2.5)
    assert [t.tolist() for t in mixed] == [[2.5] * 3] * 2
    empty = lists(torch.ones(0), torch.ones(2))
    torch._foreach_add_(empty, 1.0)
    assert empty[1].tolist() == [2, 2]
    broadcast = lists(torch.zeros(2, 2), torch.zeros(3))
    torch._foreach_add_(broadcast, lists(torch.ones(2), torch.ones(1)))
    assert broadcast[1].tolist() == [1, 1, 1]
    assert queued == []
    with pytest.raises(RuntimeError, match="same number of tensors|must have the same"):
        torch._foreach_add_(lists(torch.ones(1), torch.ones(1)), lists(torch.ones(1)))
    with pytest.raises(RuntimeError):
        torch._foreach_add_(lists(torch.ones(2), torch.ones(2)), [1.0])


def test_changes_of_what_a_gradient_needs_are_noticed() -> None:
    """As for single tensors: PyTorch compares versions."""
    factors = [torch.rand(3, device="vulkan") for _ in range(3)]
    x = torch.rand(3, device="vulkan", requires_grad=True)
    total = (x * factors[0]).sum()
    torch._foreach_mul_(factors, 2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
    with torch.inference_mode():
        kept = [torch.ones(2, device="vulkan") for _ in range(2)]
        torch._foreach_add_(kept, 1.0)
    assert kept[1].tolist() == [2, 2]


def test_negated_views_are_what_they_stand_for() -> None:
    """PyTorch resolves them before it calls a kernel, after calls with plain tensors too."""
    for _ in range(2):
        x = torch.arange(6.0).to("vulkan")
        given = [torch._neg_view(x[:3]), torch._neg_view(x[3:])]
        added = [torch.ones(3, device="vulkan") for _ in range(2)]
        torch._foreach_add(added, 1.0)
        assert [t.tolist() for t in torch._foreach_add(added, given)] == [[1, 0, -1], [-2, -3, -4]]
        with pytest.raises(RuntimeError, match="negation"):  # as on the CPU
            torch._foreach_add_(given, added)


def test_one_number_for_all_has_no_dimensions() -> None:
    for device in ("cpu", "vulkan"):
        given = [torch.ones(3, device=device) for _ in range(2)]
        with pytest.raises(RuntimeError, match="0 dim"):
            torch._foreach_mul(given, torch.ones(1, device=device))


def test_gradients_go_through() -> None:
    a = [torch.rand(3, 2).to("vulkan").requires_grad_() for _ in range(3)]
    total = sum(
        (t.sum() for t in torch._foreach_mul(torch._foreach_add(a, 1.0), 3.0)), torch.zeros((), device="vulkan")
    )
    total.backward()
    assert all(t.grad is not None and torch.equal(t.grad.cpu(), torch.full((3, 2), 3.0)) for t in a)
    version = a[0]._version
    with torch.no_grad():
        torch._foreach_add_(a, 1.0)
    assert a[0]._version == version + 1


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
        (torch.optim.AdamW, {"lr": 0.01, "maximize": True}),
        (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.NAdam, {"lr": 0.01}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_optimizers_take_the_steps_that_they_take_on_the_cpu(
    kind: Any, options: dict[str, Any], queued: list[bool]
) -> None:
    def trained(device: str) -> Tensors:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 8) for _ in range(6)]
        model = torch.nn.Sequential(*layers, torch.nn.Tanh()).to(device)
        optimizer = kind(model.parameters(), foreach=True, **options)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(device)
        for _ in range(4):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            decay.step()
        return [p.detach().cpu() for p in model.parameters()]

    for a, b in zip(trained("vulkan"), trained("cpu"), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    assert any(queued)


def test_a_step_of_many_tensors_takes_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [torch.rand(16, device="vulkan") for _ in range(100)]
    grads = [torch.rand(16, device="vulkan") for _ in range(100)]
    torch._foreach_add_(params, grads, alpha=-0.1)
    kernel = _composite[torch.ops.aten._foreach_add_.List]
    assert isinstance(kernel, ListOperator)
    launches: list[int] = []
    (prepared,) = [p for p in kernel.prepared.values() if p is not None and len(p.sizes) == 100]
    enqueue = prepared.enqueue

    def counted(*words: int) -> None:
        launches.append(1)
        enqueue(*words)

    monkeypatch.setattr(prepared, "enqueue", counted)
    torch._foreach_add_(params, grads, alpha=-0.1)
    assert len(launches) == 4
