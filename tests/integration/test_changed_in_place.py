"""Arguments that a compiled graph changes: of those of which some entries are replaced, nothing else is written."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

from lapilli import autoload, backend
from lapilli.eager import vulkan

autoload.register()


@pytest.fixture(autouse=True)
def anew() -> None:
    torch._dynamo.reset()
    backend._live.clear()  # graphs of tests before this one wait for the garbage collector


def in_place() -> list[int]:
    """How many arguments each graph that was made last changes in place."""
    return [len(e._run._in_place) for e in backend._live.values() if e._run is not None][-1:]


def entry(cache: Tensor, at: Tensor, new: Tensor) -> Tensor:
    cache.index_copy_(1, at, new)
    return cache.sum(1)


def put(cache: Tensor, at: Tensor, new: Tensor) -> Tensor:
    cache[:, at] = new
    return cache * 2


def slices(cache: Tensor, at: Tensor, new: Tensor) -> Tensor:
    cache[:, 2:4] = new
    return cache[:, 1:3] + 1


def twice(cache: Tensor, at: Tensor, new: Tensor) -> Tensor:
    cache.index_copy_(1, at, new)
    cache.index_copy_(1, at + 1, new * 2)
    return cache.sum()


def read_before(cache: Tensor, at: Tensor, new: Tensor) -> Tensor:
    old = cache.sum(1)
    cache.index_copy_(1, at, new)
    return old + cache.amax(1)


def new_of_old(cache: Tensor, at: Tensor, new: Tensor) -> Tensor:
    cache.index_copy_(1, at, cache[:, 1:3] + new)
    return cache.amax(1)


def added(cache: Tensor, at: Tensor, new: Tensor) -> Tensor:
    cache.index_put_((torch.tensor([0, 0], device=cache.device), at), new[0], accumulate=True)
    return cache.sum(1)


def counted(cache: Tensor, at: Tensor, new: Tensor) -> Tensor:
    cache += 1
    return cache.sum(1)


def a_view(cache: Tensor, at: Tensor, new: Tensor) -> Tensor:
    cache.index_copy_(1, at, new)
    return cache[:, 1:]


def itself(cache: Tensor, at: Tensor, new: Tensor) -> Tensor:
    return cache.index_copy_(1, at, new)


CASES: list[tuple[Callable[..., Tensor], int]] = [
    (entry, 1), (put, 1), (slices, 0), (twice, 0), (read_before, 0), (new_of_old, 0), (added, 0), (counted, 0), (a_view, 1),
    (itself, 1),
]  # fmt: skip


def given(rows: int = 3, places: int = 7, width: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(rows * places * width)
    cache, new = (torch.randn(rows, n, width, generator=made) for n in (places, 2))
    return cache, torch.tensor([4, 1]), new


@pytest.mark.parametrize("function, changed", CASES)
def test_functions(function: Callable[..., Tensor], changed: int) -> None:
    """Calls in a row, each on what the one before left."""
    host = given()
    own = [x.to("vulkan") for x in host]
    run = torch.compile(function, backend="vulkan")
    with torch.no_grad():
        for _ in range(3):
            want = function(*host)
            got = run(*own)
            torch.testing.assert_close(got.cpu(), want)
            torch.testing.assert_close(own[0].cpu(), host[0])
    assert in_place() == [changed]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_types(dtype: torch.dtype) -> None:
    cache, at, new = given()
    host = (cache.to(dtype), at, new.to(dtype))
    own = [x.to("vulkan") for x in host]
    with torch.no_grad():
        itself(*host)
        torch.compile(itself, backend="vulkan")(*own)
    assert own[0].cpu().equal(host[0]) and in_place() == [int(dtype.is_floating_point)]


@pytest.mark.parametrize("first", [0, 1, 3, 64])
def test_parts_of_memory(first: int) -> None:
    """A cache that begins anywhere in a tensor: what lies before and behind it stays."""
    whole = torch.randn(first + 3 * 7 * 5 + 9)
    there = whole.to("vulkan")
    _, at, new = given()
    run = torch.compile(entry, backend="vulkan")
    with torch.no_grad():
        for start in (first, 0):  # where a graph is called with another place, too
            entry(whole[start : start + 105].view(3, 7, 5), at, new)
            run(there[start : start + 105].view(3, 7, 5), at.to("vulkan"), new.to("vulkan"))
            torch.testing.assert_close(there.cpu(), whole)


def test_other_layouts_are_right() -> None:
    host = given()
    own = [x.to("vulkan") for x in host]
    for turned in (lambda x: x.transpose(0, 2).contiguous().transpose(0, 2), lambda x: x.expand(1, *x.shape)[0]):
        a, b = turned(host[0].clone()), turned(own[0].clone())
        with torch.no_grad():
            entry(a, host[1], host[2])
            torch.compile(entry, backend="vulkan")(b, own[1], own[2])
        torch.testing.assert_close(b.cpu(), a)


def two(cache: Tensor, other: Tensor, at: Tensor, new: Tensor) -> Tensor:
    cache.index_copy_(1, at, new)
    return cache.sum(1) + other.sum(1)


def test_arguments_that_share_memory() -> None:
    memory = torch.randn(3, 7, 5)
    _, at, new = given()
    there = memory.to("vulkan")
    run = torch.compile(two, backend="vulkan")
    with torch.no_grad():
        for _ in range(2):
            want = two(memory, memory, at, new)
            got = run(there, there, at.to("vulkan"), new.to("vulkan"))
            torch.testing.assert_close((got.cpu(), there.cpu()), (want, memory))
            want = two(memory, memory[:, 1:], at, new)
            got = run(there, there[:, 1:], at.to("vulkan"), new.to("vulkan"))
            torch.testing.assert_close((got.cpu(), there.cpu()), (want, memory))


def with_integers(cache: Tensor, at: Tensor, new: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    cache.index_copy_(1, at, new)
    return cache.sum(1), number * number


@pytest.mark.filterwarnings("ignore:a graph runs in torch")
@pytest.mark.filterwarnings("ignore:.*runs on the CPU")
def test_integers_that_prove_too_large() -> None:
    """The graph runs again, in torch, after it has changed the cache."""
    host = given()
    own = [x.to("vulkan") for x in host]
    run: Any = torch.compile(with_integers, backend="vulkan")
    with torch.no_grad():
        for number in (3, 1 << 20, 5):
            want = with_integers(*host, torch.tensor([number]))
            got = run(*own, torch.tensor([number]).to("vulkan"))
            torch.testing.assert_close([t.cpu() for t in got], list(want))
            torch.testing.assert_close(own[0].cpu(), host[0])


def test_parts_on_the_cpu() -> None:
    def function(cache: Tensor, at: Tensor, new: Tensor) -> Tensor:
        cache.index_copy_(1, at, new)
        return torch.linalg.eigvals(cache[0, :5] @ cache[0, :5].T).abs().sort()[0]

    host = given()
    own = [x.to("vulkan") for x in host]
    with torch.no_grad():
        want = function(*host)
        got = torch.compile(function, backend="vulkan")(*own)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(own[0].cpu(), host[0])


def program(seed: int) -> Callable[..., Any]:
    """A random function of two caches, which it reads and changes in some order."""
    draw = random.Random(seed)
    steps = [(draw.randrange(5), draw.randrange(2), draw.randrange(3)) for _ in range(draw.randint(2, 5))]

    def function(first: Tensor, second: Tensor, at: Tensor, new: Tensor) -> Any:
        caches, results = [first, second], []
        for kind, which, n in steps:
            cache, other = caches[which], caches[1 - which]
            if kind == 0:
                cache.index_copy_(1, at + n, new)
            elif kind == 1:
                cache[:, n : n + 2] = new * 2 + other[:, :2]
            elif kind == 2:
                cache[n] = other[(n + 1) % 3]
            elif kind == 3:
                results.append(cache.sum(1) * other.amax(1))
            else:
                new = new + cache[:, n : n + 2]
        return [*results, new]

    return function


@pytest.mark.parametrize("seed", range(14))
def test_random_programs(seed: int) -> None:
    function = program(seed)
    cache, at, new = given()
    host = [cache, cache.flip(1).clone(), at, new]
    own = [copy.deepcopy(x).to("vulkan") for x in host]
    run = torch.compile(function, backend="vulkan")
    with torch.no_grad():
        for _ in range(2):
            want, got = function(*host), run(*own)
            torch.testing.assert_close([t.cpu() for t in got], list(want), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close([own[k].cpu() for k in range(2)], host[:2], rtol=1e-4, atol=1e-4)


def test_memory_is_not_taken_twice() -> None:
    """A call takes no memory for a cache that it changes."""
    cache = torch.zeros(1, 4096, 512, device="vulkan")
    run = torch.compile(itself, backend="vulkan")
    at, new = torch.tensor([7], device="vulkan"), torch.ones(1, 1, 512, device="vulkan")
    with torch.no_grad():
        run(cache, at, new)
        vulkan.synchronize()
        before = vulkan.memory_allocated()
        vulkan.reset_peak_memory_stats()
        run(cache, at, new)
        vulkan.synchronize()
    assert vulkan.max_memory_allocated() - before < cache.nbytes // 2
    assert cache[0, 7].cpu().eq(1).all() and not cache[0, 6].cpu().any()
