"""One rule everywhere: what runs a model on a device does the same with the same tensors, whatever called it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from agreement import Function
from torch import nn
from torch.export import Dim
from torch.utils.mobile_optimizer import optimize_for_mobile

import lapilli
import lapilli.mobile
from lapilli.export import to_vulkan

Run = Callable[..., Any]
DYNAMIC = {0: Dim("n", min=0, max=1 << 26)}


def host(model: nn.Module, *args: torch.Tensor, dynamic: bool = True) -> Run:
    shapes = tuple(DYNAMIC for _ in args) if dynamic else None
    with torch.no_grad():
        return lapilli.compile(model, args, dynamic_shapes=shapes)


def resident(model: nn.Module, *args: torch.Tensor, dynamic: bool = True) -> Run:
    return host(model, *args, dynamic=dynamic)


def compiled(model: nn.Module, *args: torch.Tensor, dynamic: bool = True) -> Run:
    torch._dynamo.reset()
    return torch.compile(model, backend="vulkan", dynamic=dynamic)


def eager(model: nn.Module, *args: torch.Tensor, dynamic: bool = True) -> Run:
    return model


def exported(model: nn.Module, *args: torch.Tensor, dynamic: bool = True) -> Run:
    shapes = tuple({0: Dim("n", min=2, max=1 << 26)} for _ in args) if dynamic else None
    return to_vulkan(torch.export.export(model, args, dynamic_shapes=shapes)).module()


def mobile(model: nn.Module, *args: torch.Tensor, dynamic: bool = True) -> Run:
    lapilli.mobile.install()
    traced = torch.jit.trace(model, args, check_trace=False)
    return optimize_for_mobile(traced, backend="vulkan")


ON_HOST = {"program": host, "torch.compile, host": compiled, "mobile": mobile}
ON_DEVICE = {"resident": resident, "torch.compile": compiled, "eager": eager, "lapilli::run": exported}
ALL = pytest.mark.parametrize("name", [*ON_HOST, *ON_DEVICE])
THERE = pytest.mark.parametrize("name", list(ON_DEVICE))


class One(Function):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return self.function(x)


class Two(Function):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
        return self.function(x, y)


def made(name: str, model: nn.Module, *args: torch.Tensor, dynamic: bool = True) -> Run:
    """The model by a front end; it takes and gives tensors of the host."""
    run = (ON_HOST | ON_DEVICE)[name](model.eval(), *args, dynamic=dynamic)
    if name in ON_HOST:
        return run

    def call(*given: torch.Tensor) -> Any:
        with torch.no_grad():
            found = run(*(t.to("vulkan") for t in given))
        assert found.device.type == "vulkan"
        return found.cpu()

    return call


@ALL
def test_sizes_that_change(name: str) -> None:
    model = Two(lambda x, y: torch.softmax(x * 2 + y, -1).cumsum(0))
    run = made(name, model, torch.rand(4, 3), torch.rand(4, 3))
    for n in (2, 4, 17, 1, 0) if name != "lapilli::run" else (2, 4, 17):  # torch.export's own bounds there
        x, y = torch.rand(n, 3), torch.rand(n, 3)
        torch.testing.assert_close(run(x, y), model(x, y), rtol=1e-5, atol=1e-5)


@THERE
@pytest.mark.parametrize(
    "view",
    [lambda t: t[1:], lambda t: t[3:8], lambda t: t[::2], lambda t: t.flip(0), lambda t: t[2:3].expand(5)],
    ids=["one on", "three on", "steps", "flipped", "repeated"],
)
def test_where_a_tensor_begins_and_how_it_lies(name: str, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = One(lambda x: x * 3 - 1)
    run = ON_DEVICE[name](model, torch.rand(5))
    base = torch.rand(9)
    with torch.no_grad():
        found = run(view(base.to("vulkan")))
    assert torch.equal(found.cpu(), view(base) * 3 - 1)


@THERE
def test_one_tensor_twice(name: str) -> None:
    run = ON_DEVICE[name](Two(lambda x, y: x * 2 + y), torch.rand(4), torch.rand(4))
    x = torch.rand(4)
    there = x.to("vulkan")
    with torch.no_grad():
        found = run(there, there)
        found.zero_()  # is no view of what was given
    assert torch.equal(there.cpu(), x)
    with torch.no_grad():
        torch.testing.assert_close(run(there, there).cpu(), x * 3)


@ALL
@pytest.mark.parametrize(
    "function, values",
    [
        (lambda x: x + 1, [2**31 - 1, 0]), (lambda x: x + 1, [2**40, 0]), (lambda x: x * x, [2**20, 3]), (lambda x: x - 5, [7, -9]),
        (lambda x: x + 2**40, [101, 0]),
    ],
    ids=["a sum beyond", "an input beyond", "a product beyond", "small", "a number beyond"],
)  # fmt: skip
def test_integers_beyond_32_bits_are_right_or_refused(name: str, function: Any, values: list[int]) -> None:
    model = One(function)
    x = torch.tensor(values)
    run = made(name, model, torch.tensor([1, 2]))
    try:
        found = run(x)
    except (lapilli.LapilliError, RuntimeError) as error:
        assert "32 bits" in str(error)
        assert "small" not in str(values)
        assert max(map(abs, values)) > 100
    else:
        assert torch.equal(found, function(x))


@ALL
def test_random_numbers_differ_from_call_to_call(name: str) -> None:
    run = made(name, One(lambda x: x + torch.rand_like(x)), torch.zeros(64))
    first, second = run(torch.zeros(64)), run(torch.zeros(64))
    assert not torch.equal(first, second)
    for found in (first, second):
        assert float(found.min()) >= 0
        assert float(found.max()) < 1
        assert 0.2 < float(found.mean()) < 0.8


@ALL
def test_random_numbers_follow_the_seed(name: str) -> None:
    """torch.manual_seed inside of torch. A program that is called by itself counts its runs, which `reset` begins anew."""
    model = One(lambda x: x + torch.rand_like(x))
    run, zeros = (ON_HOST | ON_DEVICE)[name](model.eval(), torch.zeros(64)), torch.zeros(64)
    if name in ON_DEVICE:
        zeros = zeros.to("vulkan")
    seeds = [np.array([0, seed], "int32") for seed in (7, 8, 7)]
    found = []
    with torch.no_grad():
        run(zeros)
        for seed in seeds:
            if isinstance(run, lapilli.Program):
                run.set_state({"lapilli.random": seed})
            else:
                torch.manual_seed(int(seed[1]))
            found.append((run(zeros).cpu(), run(zeros).cpu()))
    assert torch.equal(found[0][0], found[2][0]) and torch.equal(found[0][1], found[2][1])
    assert not torch.equal(found[0][0], found[0][1]) and not torch.equal(found[0][0], found[1][0])


class Counts(nn.Module):
    """Its result may be empty, what it keeps is not."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * 2


@pytest.mark.parametrize("name", ["program", "resident", "eager", "torch.compile"])
def test_what_a_run_keeps_does_not_depend_on_the_size_of_its_result(name: str) -> None:
    model = Counts().eval()
    if name in ("eager", "torch.compile"):
        model = model.to("vulkan")
    run = {"program": host, **ON_DEVICE}[name](model, torch.rand(4))
    device = "cpu" if name == "program" else "vulkan"
    before = model.count.cpu().clone()  # tracing may have counted too
    with torch.no_grad():
        for n in (4, 0, 2):
            assert run(torch.ones(n).to(device)).cpu().tolist() == [2.0] * n
    kept = torch.from_numpy(next(iter(run.state().values()))) if isinstance(run, lapilli.Program) else model.count.cpu()
    assert torch.equal(kept, before + 3)


@THERE
@pytest.mark.parametrize("view", [lambda t: t, lambda t: t[1:], lambda t: t[::2]], ids=["whole", "one on", "steps"])
def test_inputs_that_the_model_changes(name: str, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What is read where it is written, what is read elsewhere, and memory beside that of the input."""
    if name == "lapilli::run":
        pytest.skip("torch.export makes a functional graph, and copies the result itself")

    def change(x: torch.Tensor) -> torch.Tensor:
        x.add_(x.flip(0)).mul_(2)
        return x + 1

    model = One(change)
    base = torch.rand(9)
    example = view(base.clone())
    run = ON_DEVICE[name](model, example.contiguous())
    there, wanted = base.to("vulkan"), base.clone()
    with torch.no_grad():
        found = run(view(there))
        expected = change(view(wanted))
    torch.testing.assert_close(found.cpu(), expected)
    torch.testing.assert_close(there.cpu(), wanted)


@pytest.mark.part(2)
@THERE
def test_memory_that_is_not_there(name: str) -> None:
    """PyTorch's exception, whether it is a result or something between that does not fit; afterwards all is as before."""
    model = One(lambda x: torch.sort(x.repeat_interleave(2), 0).values.cumsum(0))
    run = ON_DEVICE[name](model, torch.rand(8))
    few = torch.rand(8)
    gc.collect()
    torch.vulkan.empty_cache()
    # Chunks that other tensors keep may have room: the result does not fit into it.
    unused = torch.vulkan.memory_reserved() - torch.vulkan.memory_allocated()
    many = torch.rand((unused + (64 << 20)) // 4)
    there = many.to("vulkan")
    with torch.no_grad():
        run(few.to("vulkan"))
        torch.vulkan.empty_cache()
        free = torch.vulkan.memory_reserved() + (24 << 20)
        torch.vulkan.set_per_process_memory_fraction(free / torch.vulkan.mem_get_info()[1])
        try:
            with pytest.raises(torch.OutOfMemoryError, match="vulkan:0 is out of memory"):
                run(there)
        finally:
            torch.vulkan.set_per_process_memory_fraction(1.0)
        assert torch.equal(there.cpu(), many)
        torch.testing.assert_close(run(few.to("vulkan")).cpu(), model(few))
