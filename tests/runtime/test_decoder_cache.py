"""A decoder writes one row of its cache for one token, whichever operator of torch's writes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapilli
from lapilli.capture import capture
from lapilli.codegen.select import schedule_of
from lapilli.legalize.passes import prepare
from lapilli.lower import lower
from lapilli.schedule.task import Task
from lapilli.target import ANY, TARGETS

HEADS, LENGTH, WIDTH = 2, 11, 4
Write = Callable[[Tensor, Tensor, Tensor], Any]  # (cache, place [1], row)


def _scatter(cache: Tensor, place: Tensor, row: Tensor) -> Any:
    cache.scatter_(2, place[None, None, :, None].expand(row.shape), row)


def _assign(cache: Tensor, place: Tensor, row: Tensor) -> None:
    cache[:, :, place] = row


def _assign_apart(cache: Tensor, place: Tensor, row: Tensor) -> None:
    """Index tensors for dimensions that are not neighbours: the entries' own stand in front."""
    cache[torch.zeros(1, dtype=torch.long), :, place] = row[:, :, 0]


AT_PLACE: dict[str, Write] = {
    "index_copy": lambda cache, place, row: cache.index_copy_(2, place, row),
    "index_put": lambda cache, place, row: cache.index_put_((torch.tensor([[0]]), torch.arange(2)[:, None], place), row[0]),
    "scatter": _scatter,
    "assign": _assign,
    "assign apart": _assign_apart,
    "copy": lambda cache, place, row: cache.copy_(cache.index_copy(2, place, row)),
}  # fmt: skip


def _slice_scatter(cache: Tensor, place: Tensor, row: Tensor) -> Any:
    cache.copy_(torch.slice_scatter(cache, row, 2, 3, 4))


def _assign_slice(cache: Tensor, place: Tensor, row: Tensor) -> None:
    cache[:, :, 3:4] = row


def _select_scatter(cache: Tensor, place: Tensor, row: Tensor) -> Any:
    cache.copy_(torch.select_scatter(cache, row[:, :, 0], 2, 3))


AT_THREE: dict[str, Write] = {
    "slice_scatter": _slice_scatter,
    "select_scatter": _select_scatter,
    "assign slice": _assign_slice,
    "copy into a slice": lambda cache, place, row: cache[:, :, 3:4].copy_(row),
    "copy into slices": lambda cache, place, row: cache[:1][:, :2].narrow(2, 3, 1).copy_(row),
    "copy into a selection": lambda cache, place, row: cache.select(2, 3).copy_(row[:, :, 0]),
}


class Decoder(nn.Module):
    """One layer of attention over a cache, with positions rotated and keys normalised, as decoders do."""

    def __init__(self, write: Write, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write = write
        self.project = nn.Linear(8, 3 * HEADS * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.k = nn.Buffer(torch.zeros(1, HEADS, LENGTH, WIDTH, dtype=dtype))
        self.v = nn.Buffer(torch.zeros(1, HEADS, LENGTH, WIDTH, dtype=dtype))

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        q, k, v = self.project(x).view(1, 1, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        k = self.norm(k)
        k = k * torch.cos(place) + torch.cat([-k[..., 2:], k[..., :2]], -1) * torch.sin(place)
        self.write(self.k, place, k.to(self.k.dtype))
        self.write(self.v, place, v.to(self.v.dtype))
        seen = torch.arange(LENGTH) <= place
        return F.scaled_dot_product_attention(q, self.k.float(), self.v.float(), attn_mask=seen[None])


def _writes(model: nn.Module, target: str) -> list[tuple[Task, int | None]]:
    """The kernels that store into states, and how many elements each computes."""
    inputs = (torch.randn(1, 1, 8), torch.tensor([3]))
    graph = lower(prepare(capture(model, inputs)), "fp32", TARGETS[target].half)
    planned = schedule_of(graph, TARGETS[target])
    assert len(planned.stored) == 2 and {s.name for s in planned.stored.values()} == {"k", "v"}
    found = [t for t in planned.tasks if t.out.id in planned.stored]
    sizes = [[a.extent.value for a in t.axes] for t in found]
    return [(t, torch.Size([n or 0 for n in size]).numel()) for t, size in zip(found, sizes, strict=True)]


@pytest.mark.part(4)
@pytest.mark.parametrize("target", ["any-fp32", "gpu-fp32", "cpu-fp32"])
@pytest.mark.parametrize("name", [*AT_PLACE, *AT_THREE])
def test_one_token_writes_one_row(name: str, target: str) -> None:
    for task, count in _writes(Decoder((AT_PLACE | AT_THREE)[name]), target):
        assert task.partial and count == HEADS * WIDTH, name


@pytest.mark.parametrize("name", [*AT_PLACE, *AT_THREE])
def test_the_cache_is_what_torch_makes_it(name: str) -> None:
    model = Decoder((AT_PLACE | AT_THREE)[name]).requires_grad_(False)
    with lapilli.compile(model, (torch.randn(1, 1, 8), torch.tensor([0]))) as program:
        for k in (3,) if name in AT_THREE else (0, 1, 4, LENGTH - 1, 1):
            given = torch.randn(1, 1, 8), torch.tensor([k])
            torch.testing.assert_close(program(*given), model(*given), rtol=1e-5, atol=1e-5)
            for state, value in program.state().items():
                torch.testing.assert_close(torch.from_numpy(value), getattr(model, state), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["index_copy", "scatter", "assign slice"])
def test_half_a_word_is_stored_alone_where_the_device_can(name: str) -> None:
    """A device that stores whole words only computes the whole cache."""
    model = Decoder((AT_PLACE | AT_THREE)[name], torch.float16)
    assert all(task.partial and count == HEADS * WIDTH for task, count in _writes(model, "gpu-fp16"))
    assert not any(task.partial for task, _ in _writes(model, ANY.name))


class Counting(nn.Module):
    """The place is a state too, which the run changes."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Buffer(torch.zeros(1, dtype=torch.int32))
        self.cache = nn.Buffer(torch.zeros(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.cache.index_copy_(0, self.place.long(), x)
        self.place += 1
        return self.cache.sum(0)


class Shifting(nn.Module):
    """What is stored needs other elements of the cache than those that it replaces: it is computed apart before."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = nn.Buffer(torch.arange(15.0).view(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.cache[1:] = self.cache[:-1] * 2 + x
        return self.cache.sum(0)


class Adding(Shifting):
    """Every second row is changed, from what it was."""

    def forward(self, x: Tensor) -> Tensor:
        self.cache[1::2] += x
        return self.cache.sum(0)


@pytest.mark.parametrize("make", [Counting, Shifting, Adding])
def test_what_is_stored_may_need_states(make: Callable[[], nn.Module]) -> None:
    model = make()
    x = torch.randn(1, 3)
    planned = schedule_of(lower(prepare(capture(model, (x,)))), ANY)
    assert any(t.partial for t in planned.tasks)
    with lapilli.compile(model, (x,)) as program:
        for _ in range(4):
            torch.testing.assert_close(program(x), model(x))
            for state, value in program.state().items():
                torch.testing.assert_close(torch.from_numpy(value), getattr(model, state))
    assert all(c.error < 1e-6 for c in lapilli.verify(make(), (x,)))


def test_several_values_for_one_row() -> None:
    """The interpreter keeps the last, and what lies outside is not stored."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = nn.Buffer(torch.zeros(4, 2))

        def forward(self, x: Tensor, places: Tensor) -> Tensor:
            self.cache.index_copy_(0, places, x)
            return x

    from lapilli.ir.interpret import run

    graph = lower(prepare(capture(Model(), (torch.ones(3, 2), torch.tensor([0, 1, 2])))))
    states: dict[str, Any] = {}
    run(graph, [torch.arange(6.0).view(3, 2).numpy(), torch.tensor([1, 1, 9]).numpy()], states=states)
    assert states["cache"].tolist() == [[0, 0], [2, 3], [0, 0], [0, 0]]
