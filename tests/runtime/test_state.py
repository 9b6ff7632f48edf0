"""Buffers that a model changes live on the device between runs; inputs that it changes are changed; outputs are fresh."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapilli
from lapilli import InvalidInputError, UnsupportedOperatorError
from lapilli.capture import capture
from lapilli.codegen.select import schedule_of
from lapilli.compiler import compile_to_bytes
from lapilli.ir.interpret import run
from lapilli.legalize.passes import prepare
from lapilli.lower import lower
from lapilli.player import NativeProgram
from lapilli.runtime.description import Description
from lapilli.target import ANY

pytestmark = pytest.mark.poor_device


class Counts(nn.Module):
    """A float and an integer that count; the old value is read too."""

    def __init__(self) -> None:
        super().__init__()
        self.total = nn.Buffer(torch.tensor([1.0, 2.0, 3.0]))
        self.calls = nn.Buffer(torch.tensor(0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        old = self.total * 2
        self.total += x
        self.calls += 1
        return old, self.total.sum() + x, self.calls


class Swaps(nn.Module):
    """Two buffers, each of which gets what the other held."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Buffer(torch.arange(8.0)), nn.Buffer(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        a = self.a + x
        self.a.copy_(self.b + 1)
        self.b.copy_(a)
        return x


class Rolls(nn.Module):
    """What is written somewhere is read elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Buffer(torch.arange(12.0).view(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.line.copy_(torch.cat([self.line[1:], x[None]]))
        return self.line.mean(0)


class Recurrent(nn.Module):
    """The old state is an operand of a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.Linear(8, 8)
        self.h = nn.Buffer(torch.zeros(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.h.copy_(torch.tanh(self.cell(self.h) + x))
        return self.h * 1.0


class Leaks(nn.Module):
    """A product is added to the state, whose sum then divides it: a new value that is both written and read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.w = nn.Linear(8, 16)
        self.m = nn.Buffer(torch.ones(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        self.m.mul_(0.5).add_(self.w(x))
        return torch.softmax(self.m, -1) @ self.w.weight


class Normalises(nn.Module):
    """Rows of the state are read whole, and written."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Buffer(torch.rand(4, 40).softmax(-1))

    def forward(self, x: Tensor) -> Tensor:
        self.p.copy_((self.p * 3 + x).softmax(-1))
        return self.p - x


class Overwrites(nn.Module):
    """A state that no run reads; the model returns nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Buffer(torch.zeros(2, 3, dtype=torch.int32), persistent=False)
        self.seen = nn.Buffer(torch.zeros(6, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        self.last.copy_(x)
        self.seen.logical_or_(x.flatten() > 2)
        return x + 1


class Cache(nn.Module):
    """Attention of one query over a cache of keys and values; `position` says where the new ones go."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = nn.Buffer(torch.zeros(2, 16, 8)), nn.Buffer(torch.zeros(2, 16, 8))
        self.places = nn.Buffer(torch.arange(16)[None, :, None])

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        here = self.places == position
        self.k.copy_(torch.where(here, x, self.k))
        self.v.copy_(torch.where(here, x * 2, self.v))
        scores = (x @ self.k.transpose(1, 2)).masked_fill((self.places > position).transpose(1, 2), -1e9)
        return scores.softmax(-1) @ self.v


def _ints() -> Tensor:
    return torch.randint(0, 5, (2, 3), dtype=torch.int32)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "counts": (Counts, lambda k: (torch.randn(3),)),
    "swaps": (Swaps, lambda k: (torch.randn(8),)),
    "rolls": (Rolls, lambda k: (torch.randn(4),)),
    "recurrent": (Recurrent, lambda k: (torch.randn(2, 8),)),
    "leaks": (Leaks, lambda k: (torch.randn(4, 8),)),
    "normalises": (Normalises, lambda k: (torch.randn(4, 40),)),
    "overwrites": (Overwrites, lambda k: (_ints(),)),
    "cache": (Cache, lambda k: (torch.randn(2, 1, 8), torch.tensor(k))),
}


def check_state(program: lapilli.Program, model: nn.Module, tolerance: float = 1e-5) -> None:
    buffers = dict(model.named_buffers())
    state = program.state()
    assert state
    for name, value in state.items():
        np.testing.assert_allclose(value, buffers[name].numpy(), rtol=tolerance, atol=tolerance)
        assert value.dtype == buffers[name].numpy().dtype


@pytest.mark.part(3)
@pytest.mark.parametrize("target", ["gpu-fp32", "cpu-fp32", "any-fp32"])
@pytest.mark.parametrize("name", MODELS)
def test_a_run_sees_what_the_last_one_left(name: str, target: str, gpu_plans: None) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(3)
    model = make().requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    with lapilli.compile(model, inputs(0), target=target) as program:
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())  # the model itself is left alone
        for k in range(5):
            given = inputs(k)
            torch.testing.assert_close(program(*given), model(*given), rtol=1e-4, atol=1e-5)
            check_state(program, model)


@pytest.mark.parametrize("name", MODELS)
def test_the_interpreter_agrees(name: str) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(4)
    model = make().requires_grad_(False)
    graph = lower(prepare(capture(copy.deepcopy(model), inputs(0))))  # its arrays are the model's own buffers
    states: dict[str, Any] = {}
    for k in range(3):
        given = inputs(k)
        want = model(*given)
        got = run(graph, [x.numpy() for x in given], states=states)
        for a, b in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
            np.testing.assert_allclose(a, b.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_is_verified(name: str) -> None:
    make, inputs = MODELS[name]
    checks = lapilli.verify(make(), inputs(1))
    assert checks and all(c.error < 1e-5 for c in checks)


def test_half_precision_does_not_round_states() -> None:
    """4095 + 1 + 1 + ... needs more than the 11 bits of fp16."""

    class Total(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = nn.Buffer(torch.full((4, 4), 4095.0))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            self.total += x
            return self.total, self.total.sum()

    with lapilli.compile(Total(), (torch.ones(4, 4),), precision="fp16") as program:
        for _ in range(3):
            last, _ = program(torch.ones(4, 4))
        assert torch.equal(last, torch.full((4, 4), 4098.0))
        assert program.state()["total"].dtype == np.float32


def test_half_precision_buffers() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = nn.Buffer(torch.arange(5).half())

        def forward(self, x: Tensor) -> Tensor:
            self.h += x
            return self.h.float()

    for precision in ("fp32", "fp16"):
        with lapilli.compile(Half(), (torch.ones(5).half(),), precision=precision) as program:
            for k in range(3):
                assert torch.equal(program(torch.ones(5).half()), torch.arange(5.0) + k + 1)


def test_reset_and_set_state() -> None:
    with lapilli.compile(Counts(), (torch.ones(3),)) as program:
        first = [t.clone() for t in program(torch.ones(3))]
        program(torch.ones(3))
        program.reset()
        for a, b in zip(program(torch.ones(3)), first, strict=True):
            assert torch.equal(a, b)
        program.set_state({"total": torch.tensor([10.0, 20.0, 30.0]), "calls": np.array(41)})
        old, _, calls = program(torch.zeros(3))
        assert old.tolist() == [20, 40, 60] and calls.item() == 42
        state = program.state()
        with pytest.raises(InvalidInputError, match="no state.*sum.*total"):
            program.set_state({"sum": np.zeros(3, np.float32)})
        with pytest.raises(InvalidInputError, match="'calls'"):
            program.set_state({"total": np.zeros(3, np.float32), "calls": np.zeros(2, np.int64)})
        with pytest.raises(InvalidInputError, match="float64"):
            program.set_state({"total": np.zeros(3)})
        assert all(np.array_equal(v, state[k]) for k, v in program.state().items())


def test_programs_have_their_own_states_and_files_the_initial_ones(tmp_path: Path) -> None:
    path = tmp_path / "counts.lap"
    with lapilli.compile(Counts(), (torch.ones(3),)) as program:
        program(torch.ones(3))
        program.save(path)
        with lapilli.load(path) as second, lapilli.load(path) as third:
            for _ in range(3):
                second(torch.ones(3))
            assert [p.state()["calls"].item() for p in (program, second, third)] == [1, 3, 0]
            assert third.state()["total"].tolist() == [1, 2, 3]


def test_runs_in_flight_take_place_in_order() -> None:
    with lapilli.compile(Counts(), (torch.ones(3),)) as program:
        futures = [program.submit(torch.ones(3)) for _ in range(20)]
        assert [f.result()[2].item() for f in reversed(futures)] == list(range(20, 0, -1))


def test_no_run_of_a_thread_is_lost() -> None:
    with lapilli.compile(Counts(), (torch.ones(3),)) as program:
        seen: list[int] = []

        def work() -> None:
            for _ in range(20):
                seen.append(int(program(torch.ones(3))[2]))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert sorted(seen) == list(range(1, 81))
        assert program.state()["total"].tolist() == [81, 82, 83]


def test_profiling_leaves_the_state_alone() -> None:
    with lapilli.compile(Counts(), (torch.ones(3),)) as program:
        program(torch.ones(3))
        program.profile([np.ones(3, np.float32)], repeat=3)
        assert program.state()["calls"] == 1 and program.state()["total"].tolist() == [2, 3, 4]


def test_dynamic_sizes_beside_states() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = nn.Buffer(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.total += x.sum(0)
            return x - self.total

    model = Sums()
    batch = torch.export.Dim("batch", min=1, max=9)
    with lapilli.compile(model, (torch.ones(3, 4),), dynamic_shapes={"x": {0: batch}}) as program:
        for n in (3, 1, 9, 2, 3):
            x = torch.randn(n, 4)
            torch.testing.assert_close(program(x), model(x))


def test_a_cache_is_written_in_place() -> None:
    """No second cache in memory, and no kernel that only copies one."""
    graph = lower(prepare(capture(Cache(), (torch.randn(2, 1, 8), torch.tensor(0)))))
    planned = schedule_of(graph, ANY)
    assert sorted(s.name for s in planned.stored.values()) == ["k", "v"]
    assert not any(t.out.shape == (2, 16, 8) and t.out.id not in planned.stored for t in planned.tasks)  # type: ignore[comparison-overlap]


def test_zeros_take_no_room_in_the_file() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = nn.Buffer(torch.zeros(1 << 20))

        def forward(self, x: Tensor) -> Tensor:
            self.cache += x
            return self.cache.sum()

    data = compile_to_bytes(Large(), (torch.ones(1),), target="any-fp32")
    assert len(data) < 1 << 18
    description = Description.of(data)
    (state,) = description.states
    assert (state.name, state.dtype, state.shape, state.size, state.constant) == (
        "cache", "float32", (1 << 20,), 4 << 20, None,
    )  # fmt: skip
    assert not description.constants or max(c.size for c in description.constants) < 64


class SliceCache(nn.Module):
    """Slices of a cache are assigned, one after the other, at a place that varies and at a fixed one."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Buffer(torch.zeros(2, 16, 8))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.k[:, position] = x
        self.k[:, :2, 1::3] += 1
        return self.k.sum(1)


class CopyCache(SliceCache):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.k.index_copy_(1, position, x)
        return self.k.sum(1)


class PutCache(SliceCache):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.k[:, position] = x.relu() + 1
        return self.k.sum(1)


class FixedCache(SliceCache):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.k[1:, 5 : 5 + x.shape[1]] = x[:1] + position[0]
        return self.k.sum(1)


class SoftCache(SliceCache):
    """What is written at a place is the end of a row of reductions."""

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.k[:, 4 : 4 + x.shape[1]] = x.softmax(-1)
        return self.k.sum(1) + position[0]


class LastCache(SliceCache):
    """The computed place is along the last dimension, in memory one by one."""

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.k.index_copy_(2, position % 8, x.sum(1, keepdim=True).expand(2, 16, 8)[:, :, : x.shape[1]])
        return self.k.sum(1)


CACHES = [SliceCache, SoftCache, CopyCache, PutCache, FixedCache, LastCache]


@pytest.mark.part(4)
@pytest.mark.parametrize("target", ["gpu-fp32", "cpu-fp32", "any-fp32"])
@pytest.mark.parametrize("make", CACHES)
@pytest.mark.parametrize("count", [1, 3])
def test_slices_of_a_cache_are_assigned(
    make: Callable[[], nn.Module], count: int, target: str, gpu_plans: None
) -> None:
    model = make()
    with lapilli.compile(model, (torch.randn(2, count, 8), torch.arange(count)), target=target) as program:
        for k in (0, 1, 7, 16 - count, 7):
            given = torch.randn(2, count, 8), torch.arange(k, k + count)
            torch.testing.assert_close(program(*given), model(*given))
            check_state(program, model)


@pytest.mark.parametrize("make", CACHES[2:])
def test_only_what_changes_in_a_cache_is_computed(make: Callable[[], nn.Module]) -> None:
    graph = lower(prepare(capture(make(), (torch.randn(2, 3, 8), torch.arange(3)))))
    planned = schedule_of(graph, ANY)
    (task,) = (t for t in planned.tasks if t.out.id in planned.stored)
    assert task.partial
    work = [a.extent.value for a in task.axes]
    assert work == {FixedCache: [1, 3, 8], LastCache: [2, 16, 3]}.get(type(make()), [2, 3, 8])  # type: ignore[arg-type]
    assert all(c.error < 1e-6 for c in lapilli.verify(make(), (torch.randn(2, 3, 8), torch.arange(3) + 2)))


@pytest.mark.parametrize("target", ["gpu-fp16", "cpu-fp16", "any-fp32"])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_caches_of_other_types(kind: torch.dtype, target: str, gpu_plans: None) -> None:
    model = CopyCache()
    model.k = nn.Buffer(torch.zeros(2, 16, 8).to(kind))
    make = lambda: (torch.randn(2, 1, 8) * 3).to(kind)  # noqa: E731
    with lapilli.compile(model, (make(), torch.tensor([0])), precision="fp16", target=target) as program:
        for k in (3, 0, 15):
            given = make(), torch.tensor([k])
            torch.testing.assert_close(program(*given), model(*given), rtol=1e-2, atol=1e-2)
            if kind is not torch.bfloat16:
                assert np.array_equal(program.state()["k"], model.k.numpy())


def test_places_that_a_cache_lacks_are_not_written() -> None:
    """torch refuses them; here nothing else may be harmed."""
    model = CopyCache()
    with lapilli.compile(model, (torch.randn(2, 1, 8), torch.tensor([0]))) as program:
        for k in (16, 1000, -1000):
            program(torch.ones(2, 1, 8), torch.tensor([k]))
            assert not program.state()["k"].any()


# -- inputs that change


class Adds(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x += y
        y.mul_(2)
        return x, x * y


def test_inputs_are_changed() -> None:
    with lapilli.compile(Adds(), (torch.ones(2, 3), torch.ones(3))) as program:
        x, y = torch.randn(2, 3), torch.randn(3)
        a, b = x.clone(), y.clone()
        got, want = program(x, y), Adds()(a, b)
        torch.testing.assert_close((*got, x, y), (*want, a, b))
        got[0].add_(1)
        assert torch.equal(x, a)  # the output is no alias of the input
        strided = torch.zeros(3, 2).T
        program(strided, torch.ones(3))
        assert torch.equal(strided, torch.ones(2, 3))
        array, two = np.zeros((2, 3), np.float32), np.ones(3, np.float32)
        outputs = program(array, two)
        assert isinstance(outputs[0], np.ndarray) and (array == 1).all() and (two == 2).all()


def test_inputs_are_changed_when_a_result_is_taken() -> None:
    with lapilli.compile(Adds(), (torch.ones(2, 3), torch.ones(3))) as program:
        x = torch.zeros(2, 3)
        future = program.submit(x, torch.ones(3))
        future.result()
        future.result()
        assert torch.equal(x, torch.ones(2, 3))


def test_inputs_that_cannot_be_changed_are_refused() -> None:
    with lapilli.compile(Adds(), (torch.ones(2, 3), torch.ones(3))) as program:
        fixed = np.zeros((2, 3), np.float32)
        fixed.flags.writeable = False
        with pytest.raises(InvalidInputError, match="changes its input 'x'.*read-only"):
            program(fixed, np.ones(3, np.float32))
        with pytest.raises(InvalidInputError, match="changes its input 'y'"):
            program.submit(torch.zeros(2, 3), torch.ones(1).expand(3))


# -- outputs that share memory with something


class Aliases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Buffer(torch.arange(6.0).view(2, 3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = x * 2
        return {
            "input": x, "view": x.view(3, 2), "part": x[1], "twice": y, "again": y, "turned": y.T, "constant": self.table,
            "row": self.table[0], "wide": self.table[:, :1].expand(2, 4),
        }  # fmt: skip


def test_outputs_are_fresh() -> None:
    x = torch.randn(2, 3)
    with lapilli.compile(Aliases(), (x,)) as program:
        for _ in range(2):
            got, want = program(x), Aliases()(x)
            torch.testing.assert_close(got, want)
            pointers = {v.untyped_storage().data_ptr() for v in [x, *got.values()]}
            assert len(pointers) == 1 + len(got)
            for value in got.values():
                value.zero_()  # and the next run gives the same again


def _view_of_a_copy(x: Tensor) -> Tensor:
    y = x.clone()
    y.view(-1).add_(1)
    y.T.mul_(2)
    return y


def _views_seen_through_each_other(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 0
    flat = y.view(-1)
    y.relu_()
    flat.sub_(3)
    return y, flat


def _slices(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:3] += 1
    y[0] = y[1] * 2
    y[..., -1].fill_(7)
    return y


def _slice_of_the_input(x: Tensor) -> Tensor:
    x[:, 1:3] += 1
    return x.sum()


@pytest.mark.parametrize(
    "f",
    [
        _view_of_a_copy,
        _views_seen_through_each_other,
        _slices,
        _slice_of_the_input,
    ],
)
def test_writing_in_place_means_what_it_means_in_torch(f: Callable[[Tensor], Any]) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return f(x)

    x = torch.randn(3, 4)
    theirs = x.clone()
    with lapilli.compile(Model(), (torch.randn(3, 4),)) as program:
        torch.testing.assert_close(program(x), f(theirs))
        torch.testing.assert_close(x, theirs)


# -- operators that the player leaves to torch


def test_the_player_refuses_programs_with_host_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    from lapilli.program.writer import Writer

    written = Writer.__post_init__

    def with_host(self: Writer) -> None:
        self.host_operators = ["aten.linalg_svd.default"]
        written(self)

    monkeypatch.setattr(Writer, "__post_init__", with_host)
    data = compile_to_bytes(Counts(), (torch.ones(3),), target="any-fp32")
    assert Description.of(data).host_operators == ("aten.linalg_svd.default",)
    with pytest.raises(UnsupportedOperatorError, match=r"aten\.linalg_svd\.default.*fallback"):
        NativeProgram.load(data)
    with NativeProgram.load(data, allow_host=True) as native:
        assert native.info()["host_operators"] == ["aten.linalg_svd.default"]


def test_an_input_without_elements_carries_a_size() -> None:
    class Sized(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.ones(x.shape[0]) * 2 + y.sum()

    n = torch.export.Dim("n", min=0, max=9)
    shapes = {"x": {0: n}, "y": None}
    with lapilli.compile(Sized(), (torch.empty(3, 0), torch.ones(2)), dynamic_shapes=shapes) as program:
        for k in (3, 5, 1, 0):
            assert torch.equal(program(torch.empty(k, 0), torch.ones(2)), torch.full((k,), 4.0))
