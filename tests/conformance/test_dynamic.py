"""Sizes that are known when the program runs: one program for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import FLOAT_BOUND, relative_error
from image_models import image, model_of, small
from torch import nn
from torch.export import Dim

import lapilli
from lapilli.codegen import select

ANY_ORDER = (2, 16, 1, 7, 3, 16, 1)


def agree(program: lapilli.Program, model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        assert relative_error(program(x), model(x)) <= FLOAT_BOUND


@pytest.mark.parametrize(
    "target", [None, pytest.param("any-fp32", marks=pytest.mark.poor_device), "cpu-fp32", "gpu-fp32"]
)
def test_batches_in_any_order(target: str | None, gpu_plans: None) -> None:
    model = small()
    batch = Dim("batch", min=1, max=16)
    program = lapilli.compile(model, (torch.randn(2, 3, 16, 14),), dynamic_shapes=({0: batch},), target=target)
    for n in ANY_ORDER:
        agree(program, model, torch.randn(n, 3, 16, 14))


@pytest.mark.parametrize("target", [None, "gpu-fp32"])
def test_image_sizes_in_any_order(target: str | None, gpu_plans: None) -> None:
    """Batch, height and width all vary; odd sizes too."""
    model = small()
    shapes = ({0: Dim("batch", min=1, max=4), 2: Dim("height", min=8, max=64), 3: Dim("width", min=8, max=64)},)
    program = lapilli.compile(model, (torch.randn(2, 3, 16, 20),), dynamic_shapes=shapes, target=target)
    for n, h, w in ((1, 16, 16), (3, 9, 31), (4, 64, 8), (2, 33, 33), (1, 8, 8), (3, 9, 31)):
        agree(program, model, torch.randn(n, 3, h, w))


def test_a_classifier() -> None:
    """MobileNetV2 for batches of 1 to 16."""
    model = model_of("mobilenet_v2")
    x = image("mobilenet_v2", 16)
    program = lapilli.compile(model, (x[:2],), dynamic_shapes=({0: Dim("batch", min=1, max=16)},), target="cpu-fp32")
    with torch.no_grad():
        want = model(x)
    for n in (16, 1, 7):
        assert relative_error(program(x[:n]), want[:n]) <= FLOAT_BOUND


def test_same_bits_after_other_sizes() -> None:
    model = small()
    program = lapilli.compile(model, (torch.randn(2, 3, 16, 14),), dynamic_shapes=({0: Dim("batch", min=1, max=16)},))
    x = torch.randn(5, 3, 16, 14)
    first = program(x)
    program(torch.randn(9, 3, 16, 14))
    assert torch.equal(program(x), first)


@pytest.mark.poor_device
def test_sizes_out_of_bounds() -> None:
    program = lapilli.compile(
        nn.Linear(4, 3), (torch.randn(2, 4),), dynamic_shapes=({0: Dim("batch", min=1, max=16)},), target="any-fp32"
    )
    for bad, reason in ((17, "batch in 1..16; .* batch = 17"), (0, "batch in 1..16; .* batch = 0")):
        with pytest.raises(lapilli.InvalidInputError, match=reason):
            program(torch.randn(bad, 4))
    with pytest.raises(lapilli.InvalidInputError):
        program(torch.randn(2, 5))
    assert program(torch.randn(16, 4)).shape == (16, 3)


@pytest.mark.poor_device
def test_derived_sizes_that_do_not_fit() -> None:
    """The message has the input, the bounds, the size and what was given."""
    half = Dim("half", min=1, max=20)
    model = nn.Softmax(0)
    program = lapilli.compile(model, (torch.randn(9),), dynamic_shapes=({0: 2 * half + 1},), target="any-fp32")
    for n in (3, 41, 17):
        agree(program, model, torch.randn(n))
    (symbol,) = program.description.methods[0].symbols
    assert (symbol.min, symbol.max, symbol.factor, symbol.offset) == (1, 20, 2, 1)
    for bad, reason in ((43, "which is half = 21"), (1, "which is half = 0"), (8, "no whole half gives 8")):
        with pytest.raises(lapilli.InvalidInputError, match=rf"half in 1..20; .* shape \({bad},\), .*{reason}"):
            program(torch.randn(bad))


def test_dims_keep_their_names() -> None:
    """In nested inputs, keyword arguments and derived sizes."""

    class Model(nn.Module):
        def forward(self, parts: dict[str, list[torch.Tensor]], scale: torch.Tensor) -> torch.Tensor:
            return torch.cat(parts["x"]) * scale

    a, b = Dim("rows", min=1, max=9), Dim("columns", min=2, max=8)
    inputs = {"parts": {"x": [torch.randn(3, 4), torch.randn(6, 4)]}, "scale": torch.randn(4)}
    shapes = {"parts": {"x": [{0: a, 1: b}, {0: 2 * a, 1: b}]}, "scale": (b,)}
    program = lapilli.compile(Model(), inputs, dynamic_shapes=shapes, target="any-fp32")
    assert [s.shape for s in program.inputs] == [("rows", "columns"), ("(2 * rows)", "columns"), ("columns",)]
    assert program(**inputs).shape == (9, 4)


class Deep(nn.Module):
    """200 layers with residuals, of a kernel each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(200))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [x]
        for k, layer in enumerate(self.layers):
            x = torch.relu(layer(x))
            if k % 7 == 3:
                kept.append(x)
            if k % 11 == 5:
                x = x + kept[len(kept) // 2]
        return x


@pytest.mark.parametrize("target", ["any-fp32", "cpu-fp32"])
def test_new_sizes_only_record_again(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured: the processor time that the calling thread takes to submit a new size, beyond that of a known size."""
    monkeypatch.delenv("LAPILLI_VALIDATION", raising=False)  # validation layers take their own time
    program = lapilli.compile(
        Deep().eval(), (torch.randn(2, 8),), dynamic_shapes=({0: Dim("n", min=1, max=4096)},), target=target
    )
    assert len(program.description.methods[0].plans[0].run) >= 200
    inputs = {n: torch.randn(n, 8).numpy() for n in (4096, 16, 17)}
    native = program._loaded.native

    def submit(n: int) -> float:
        start = time.thread_time()
        run = native.submit([inputs[n]])
        seconds = time.thread_time() - start
        with run:
            run.wait()
        return seconds

    pipelines = native.info()["pipeline_cache"]
    submit(17)
    small = program.memory()
    submit(4096)
    assert program.memory().arena > 100 * small.arena
    new, known, limit = [], [], 1e-3  # 0.2 to 0.4 ms are usual: docs/notes/dynamic.md
    for _ in range(8):
        for _ in range(15):
            new.append(submit(16))
            known.append(submit(16))
            submit(17)
        if min(new) - min(known) < limit:
            break
        time.sleep(0.5)  # the machine may be busy for a while: the least of several spells counts
    assert native.info()["pipeline_cache"] == pipelines
    assert min(new) - min(known) < limit


CASES: list[tuple[str, Callable[..., Any], tuple[tuple[int, ...], ...]]] = [
    ("pointwise", lambda x: (x * 2 + 1).relu(), ((3, 5),)),
    ("reduction over the dynamic size", lambda x: x.sum(0), ((3, 5),)),
    ("softmax over the dynamic size", lambda x: x.softmax(0), ((3, 5),)),
    ("mean, divided by the dynamic size", lambda x: x.mean(), ((3, 5),)),
    ("flatten", lambda x: x.flatten(1) * 2, ((3, 4, 5),)),
    ("reshape that merges the dynamic size", lambda x: x.reshape(-1, 5) + 1, ((3, 4, 5),)),
    ("split and merge heads", lambda x: x.view(x.shape[0], 4, 2, 3).transpose(1, 2).reshape(x.shape[0], -1), ((3, 24),)),
    ("cat with itself", lambda x: torch.cat([x, x * 2], 0), ((3, 5),)),
    ("slice from the end", lambda x: x[:, -2:] + x[:, :2], ((3, 5),)),
    ("flip along the dynamic size", lambda x: x.flip(0), ((3, 5),)),
    ("transpose", lambda x: x.t() + 1, ((3, 5),)),
    ("pad the dynamic size", lambda x: nn.functional.pad(x, (0, 0, 1, 2)), ((3, 5),)),
    ("matmul", lambda x, w: x @ w, ((3, 8), (8, 6))),
    ("matmul with itself", lambda x: x @ x.t(), ((3, 8),)),
    ("batched matmul", lambda x: x @ x.transpose(1, 2), ((3, 4, 8),)),
    ("layer norm", lambda x: nn.functional.layer_norm(x, (8,)), ((3, 8),)),
    ("group norm", lambda x: nn.functional.group_norm(x, 2), ((3, 4, 6),)),
    ("max pool", lambda x: nn.functional.max_pool2d(x, 3, 2, 1), ((3, 2, 7, 7),)),
    ("adaptive pool", lambda x: nn.functional.adaptive_avg_pool2d(x, (3, 2)), ((3, 2, 7, 7),)),
    ("upsample", lambda x: nn.functional.interpolate(x, scale_factor=2.0), ((3, 2, 4, 4),)),
    ("size as a number", lambda x: x * x.shape[0], ((3, 5),)),
    ("stack and unbind", lambda x: torch.stack(list(x.unbind(1)), 0), ((3, 3),)),
    ("argmax", lambda x: x.argmax(1), ((3, 7),)),
]  # fmt: skip


@pytest.mark.parametrize("f, shapes", [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_operators(f: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]) -> None:
    """The first size of the first input varies."""

    class Model(nn.Module):
        def forward(self, *args: torch.Tensor) -> Any:
            return f(*args)

    n = Dim("n", min=1, max=32)
    dynamic = (({0: n}, *[None] * (len(shapes) - 1)),)
    torch.manual_seed(6)
    rest = [torch.randn(s) for s in shapes[1:]]
    program = lapilli.compile(Model(), (torch.randn(shapes[0]), *rest), dynamic_shapes=dynamic, target="any-fp32")
    for size in (3, 1, 32, 5):
        x = torch.randn(size, *shapes[0][1:])
        want, got = f(x, *rest), program(x, *rest)
        if want.is_floating_point():
            assert relative_error(got, want) <= FLOAT_BOUND
        else:
            assert torch.equal(got, want)


def test_templates_with_too_many_open_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template whose parameters no device takes gives way to the generic kernel."""
    monkeypatch.setattr(select, "MAX_PARAMS", 4)
    model, x = torch.nn.Conv2d(8, 8, 3, stride=2, padding=1), torch.randn(2, 8, 9, 11)
    sizes = {0: Dim("n", min=2, max=8), 2: Dim("h", min=4, max=32), 3: Dim("w", min=4, max=32)}
    with lapilli.compile(model, (x,), dynamic_shapes=(sizes,)) as program:
        for given in (x, torch.randn(3, 8, 30, 5)):
            torch.testing.assert_close(program(given), model(given), rtol=1e-5, atol=1e-5)


class ChangesAView(torch.nn.Module):
    """torch.export leaves n open; torch's own way to functional form compares it with the example's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = torch.unbind(x, 1)
        second.flatten(0, 1).floor_()
        return first


def test_a_size_that_torch_fixes_is_told() -> None:
    dims = ({2: Dim("n", min=2, max=64)},)
    with pytest.warns(UserWarning, match="Size 2 of 'x' is not dynamic in the compiled program"):
        program = lapilli.compile(ChangesAView(), (torch.randn(1, 2, 4, 1),), dynamic_shapes=dims)
    x = torch.randn(1, 2, 4, 1)
    torch.testing.assert_close(program(x.clone()), ChangesAView()(x.clone()))
    with pytest.raises(lapilli.InvalidInputError, match=r"must be float32 of shape \(1, 2, 4, 1\)"):
        program(torch.randn(1, 2, 3, 1))


SHARED_WORDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "two groups": lambda x: x.reshape(x.shape[0], 2, x.shape[1] // 2).sum(0).reshape(-1),
    "groups of two": lambda x: x.reshape(x.shape[0], x.shape[1] // 2, 2).sum(0).reshape(-1),
    "turned groups": lambda x: x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).sum(0).reshape(-1),
    "all pairs": lambda x: (x[:, None] * x[None]).sum(-1).reshape(-1),
    "turned": lambda x: x.t().reshape(-1),
    "three dimensions": lambda x: (x[:, :, None] + x[:, None, :2]).reshape(-1),
    "a part": lambda x: x[:, 1:].reshape(-1),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.bool], ids=str)
@pytest.mark.part(5)
def test_results_that_share_words(dtype: torch.dtype) -> None:
    """Neighbours of a word must be neighbours in memory, whatever sizes the axes have that they are computed along."""
    for name, f in SHARED_WORDS.items():
        torch._dynamo.reset()

        def converted(x: torch.Tensor, f: Callable[[torch.Tensor], torch.Tensor] = f) -> torch.Tensor:
            made = f(x)
            return made > 2 if dtype is torch.bool else made.to(dtype)

        compiled = torch.compile(converted, backend="vulkan", dynamic=True)
        for n, c in ((2, 4), (3, 6), (5, 2), (1, 10)):
            x = torch.arange(n * c).reshape(n, c).remainder(5).float()
            assert torch.equal(compiled(x), converted(x)), (name, n, c)
