"""Inputs that are rounded to float16: by the host while it copies them, or by a kernel where they are on the device.

The property: a program gives the same, whoever rounds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import hostile_files
import numpy as np
import pytest
import torch
from torch import nn

import lapilli
from lapilli.compiler import compile_to_bytes
from lapilli.errors import InvalidFileError, InvalidInputError
from lapilli.player import NativeProgram
from lapilli.program import schema
from lapilli.runtime.description import Description
from lapilli.stream import Stream


class Halved(nn.Module):
    """What a function makes of x in float16, in float32."""

    def __init__(self, then: Callable[..., torch.Tensor], weight: torch.Tensor) -> None:
        super().__init__()
        self.then, self.weight = then, nn.Parameter(weight.half(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(x.half(), self.weight).float()


def rounding(data: bytes, method: int = 0) -> list[str]:
    """The labels of the commands that a host may leave out, of the first plan."""
    return [d.label for d in Description.of(data).methods[method].plans[0].run if d.rounds_input]


def by_host(program: NativeProgram, *inputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    (result,) = program.run(list(inputs))
    return result


def by_device(program: NativeProgram, sizes: list[int], result: np.ndarray[Any, Any], x: np.ndarray[Any, Any]) -> Any:
    stream = Stream()
    source, target = stream.allocate(max(x.nbytes, 4)), stream.allocate(max(result.nbytes, 4))
    source.write(0, np.ascontiguousarray(x))
    stream.enqueue(program, 0, sizes, [(source, 0)], [(target, 0)])
    return np.frombuffer(target.read(0, result.nbytes), result.dtype).reshape(result.shape)


CASES: list[tuple[str, Callable[..., torch.Tensor], tuple[int, ...], tuple[int, ...]]] = [
    ("linear", nn.functional.linear, (5, 17), (33, 17)),
    ("one row", nn.functional.linear, (1, 1), (1, 1)),
    ("three axes", nn.functional.linear, (2, 7, 13), (8, 13)),
    ("product", torch.matmul, (3, 5, 11), (11, 9)),
    ("image", nn.functional.conv2d, (2, 3, 9, 11), (8, 3, 3, 3)),
    ("signal", nn.functional.conv1d, (1, 5, 31), (7, 5, 5)),
    ("volume", nn.functional.conv3d, (1, 2, 5, 6, 7), (4, 2, 3, 3, 3)),
]


@pytest.mark.parametrize(("then", "shape", "weight"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_whoever_rounds_the_result_is_the_same(
    then: Callable[..., torch.Tensor], shape: tuple[int, ...], weight: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model, x = Halved(then, torch.randn(weight)), torch.randn(shape)
    data = compile_to_bytes(model, (x,))
    assert rounding(data) == ["to"]
    program = NativeProgram.load(data, cache_dir="")
    got = by_host(program, x.numpy())
    assert np.array_equal(got, by_device(program, [], got, x.numpy()))
    # Every product of halves is exact in float64; what is left is the rounding of sums and results.
    exact = then(x.half().double(), model.weight.double())
    terms = then(x.half().double().abs(), model.weight.double().abs()).numpy()
    assert (abs(got - exact.numpy()) <= 2**-10 * terms + 1e-6).all()


def special() -> np.ndarray[Any, np.dtype[np.float32]]:
    """All halves, what lies between two of them or next to that, and what no half is near."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    positive = np.sort(halves[np.isfinite(halves) & (halves >= 0)])
    between = (positive[1:] + positive[:-1]) / 2
    near = [np.nextafter(between, np.float32(end)) for end in (0, np.inf)]
    ends = np.array([65504, 65519.996, 65520, 65536, 1e38, np.inf, np.nan, 1e-45, 2**-25, 2**-24, 5.9e-8], np.float32)
    found = np.concatenate([halves, between, *near, ends])
    return np.concatenate([found, -found]).astype(np.float32)


def test_every_half_and_all_that_lies_between() -> None:
    x = special()
    model = Halved(nn.functional.linear, torch.ones(1, 1))
    data = compile_to_bytes(model, (torch.from_numpy(x)[:, None],))
    assert rounding(data) == ["to"]
    program = NativeProgram.load(data, cache_dir="")
    with np.errstate(over="ignore"):
        want = x.astype(np.float16).astype(np.float32)
    normal = (abs(want) >= 2**-14) | (want == 0) | ~np.isfinite(want)  # a device may take smaller ones for zero
    got = by_host(program, x[:, None])[:, 0]
    assert np.array_equal(got[normal], want[normal], equal_nan=True)
    assert (abs(got[~normal] - want[~normal]) <= abs(want[~normal])).all()


def test_every_length_and_place_of_the_data() -> None:
    """The host rounds several numbers at once; what is left over one by one."""
    dim = torch.export.Dim("n", min=0, max=1 << 22)
    model = Halved(nn.functional.linear, torch.ones(1, 1))
    data = compile_to_bytes(model, (torch.zeros(5, 1),), dynamic_shapes=[{0: dim}])
    program = NativeProgram.load(data, cache_dir="")
    memory = np.random.default_rng(0).standard_normal((1 << 20) + 99, np.float32)
    for count in (*range(20), 63, 64, 65, 1021, (1 << 18) - 1, (1 << 18) + 1, (1 << 20) + 3):
        for start in (0, 1, 3):
            x = memory[start : start + count, None]
            got = by_host(program, x)
            assert np.array_equal(got, x.astype(np.float16).astype(np.float32)), (count, start)
            if count in (7, 1021):
                assert np.array_equal(got, by_device(program, [count], got, x))


def test_inputs_that_others_read_too_stay_as_they_are() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.half() @ x.half().t()).float() + x.sum()

    assert rounding(compile_to_bytes(Twice(), (torch.randn(8, 8),))) == []


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16])
def test_inputs_of_other_types_are_converted_by_kernels(dtype: torch.dtype) -> None:
    x = (torch.arange(15).reshape(3, 5) % 4 > 1).to(dtype)
    data = compile_to_bytes(Halved(nn.functional.linear, torch.ones(2, 5)), (x,))
    assert rounding(data) == []
    (got,) = NativeProgram.load(data, cache_dir="").run([x.numpy()])
    assert np.array_equal(got, x.double().sum(1, keepdim=True).expand(3, 2).numpy())


def test_what_is_rounded_can_be_a_result_too() -> None:
    class Returned(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            half = x.half()
            return half, (half @ half.t()).float()

    x = torch.randn(8, 8)
    data = compile_to_bytes(Returned(), (x,))
    assert rounding(data) == ["to"]
    half, product = NativeProgram.load(data, cache_dir="").run([x.numpy()])
    assert np.array_equal(half, x.half().numpy())
    assert np.allclose(product, (x.half().double() @ x.half().double().t()).numpy(), rtol=2e-3, atol=2e-3)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.then = nn.Conv2d(3, 8, 3, 2, 1), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self.first(x).relu().mean((2, 3)))


def test_half_precision_rounds_what_only_products_read() -> None:
    torch.manual_seed(0)
    model, x = Small().eval(), torch.randn(2, 3, 19, 21)
    assert rounding(compile_to_bytes(model, (x,))) == []
    data = compile_to_bytes(model, (x,), precision="fp16")
    assert rounding(data) == ["round"]
    program = lapilli.compile(model, (x,), precision="fp16")
    want = model.double()(x.half().double())
    assert (program(x) - want).abs().max() <= 2e-3 * want.abs().max()
    times = program.profile([x.numpy()]).kernels
    assert [t.label for t in times if t.seconds == 0] == ["round"]
    with pytest.raises(InvalidInputError, match="it was given as float16"):
        program(x.half())


def test_verify_checks_what_the_host_rounds() -> None:
    checks = lapilli.verify(Small().eval(), (torch.randn(2, 3, 19, 21),), precision="fp16")
    assert [check.error for check in checks if check.label == "round"] == [0.0]


def test_runs_after_each_other_and_methods_beside_each_other() -> None:
    torch.manual_seed(0)
    model, x = Small().eval(), torch.randn(2, 3, 19, 21)
    program = lapilli.compile({"a": (model, (x,)), "b": (model, (x[:1],))}, precision="fp16")
    a, b = program.methods["a"], program.methods["b"]
    first = a(x)
    for _ in range(3):
        other = torch.randn_like(x)
        assert not torch.equal(a(other), first)
        assert torch.equal(a(x), first)
        assert (b(x[:1]) - first[:1]).abs().max() < 1e-3


def one_plan() -> bytes:
    """Of one plan, which every device takes."""
    return compile_to_bytes(Halved(nn.functional.linear, torch.ones(3, 4)), (torch.ones(2, 4),), target="cpu-fp16")


def _damage(dispatch: Any, program: Any, how: int) -> None:
    plan = program.methods[0].plans[0]
    if how == 0:  # another command
        dispatch.roundsInput, plan.run[-1].roundsInput = False, True
    elif how == 1:  # what is read is no input
        given = next(b for b in plan.buffers if b.kind == schema.BufferKind.input)
        given.kind, given.last = schema.BufferKind.arena, len(plan.run) - 1
    elif how == 2:  # of other numbers
        program.methods[0].inputs[0].dtype = 4
    elif how == 3:  # at load
        plan.load.append(dispatch)
        plan.run.remove(dispatch)
    elif how == 4:  # twice
        plan.run.insert(0, dispatch)
    elif how == 5:  # nothing is written
        dispatch.written = 0
    elif how == 6:
        dispatch.bindings.pop()
    else:
        dispatch.written = 3


@pytest.mark.parametrize("how", range(8))
def test_damaged_files_are_refused(how: int) -> None:
    data = one_plan()
    program, section = hostile_files.parts_of(data)
    (dispatch,) = [d for d in program.methods[0].plans[0].run if d.roundsInput]
    _damage(dispatch, program, how)
    with pytest.raises(InvalidFileError, match="The program is damaged"):
        NativeProgram.load(hostile_files.file_from(program, section), cache_dir="")


def test_a_buffer_of_halves_of_another_size_is_refused() -> None:
    data = one_plan()
    for size in (0, 12, 20 + 4096):
        program, section = hostile_files.parts_of(data)
        method = program.methods[0]
        (dispatch,) = [d for d in method.plans[0].run if d.roundsInput]
        halves = next(b.buffer for k, b in enumerate(dispatch.bindings) if dispatch.written >> k & 1)
        entry = type(method.exprs[0])()
        entry.op, entry.value, entry.a, entry.b = 0, size, 0, 0
        method.exprs.append(entry)
        method.plans[0].buffers[halves].size = len(method.exprs) - 1
        loaded = NativeProgram.load(hostile_files.file_from(program, section), cache_dir="")
        with pytest.raises(InvalidFileError, match="is damaged"):
            loaded.run([np.ones((2, 4), np.float32)])


def test_the_input_of_a_command_that_is_left_out_cannot_be_read() -> None:
    data = one_plan()
    plan = Description.of(data).methods[0].plans[0]
    program = NativeProgram.load(data, cache_dir="")
    x = np.full((2, 4), 1 / 3, np.float32)
    (at,) = [k for k, d in enumerate(plan.run) if d.rounds_input]
    halves, given = sorted(plan.run[at].buffers, key=lambda buffer: plan.buffers[buffer].kind)
    found = program.read_buffer([x], at, halves, 16)
    assert np.array_equal(found.view(np.uint8)[:16].view(np.float16), x.astype(np.float16).ravel())
    with pytest.raises(InvalidInputError, match="the host rounds to halves"):
        program.read_buffer([x], at, given, 32)


def test_random_models_give_the_same() -> None:
    """Random chains over an input that is rounded, fixed and dynamic."""
    random.seed(7)
    for case in range(6):
        torch.manual_seed(case)
        width, rows, out = (random.choice((1, 3, 8, 17, 32)) for _ in range(3))
        layers = [nn.Linear(width, out), random.choice((nn.ReLU(), nn.Tanh())), nn.Linear(out, random.choice((1, 5)))]
        model, x = nn.Sequential(*layers).eval(), torch.randn(rows, width)
        dim = [{0: torch.export.Dim("n", min=1, max=64)}] if case % 2 and rows > 1 else None
        data = compile_to_bytes(model, (x,), dynamic_shapes=dim, precision="fp16")
        assert rounding(data) == ["round"]
        program = NativeProgram.load(data, cache_dir="")
        got = by_host(program, x.numpy())
        assert np.array_equal(got, by_device(program, [rows] if dim else [], got, x.numpy())), (case, width, rows)
