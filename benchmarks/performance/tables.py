"""The tables, each a function that measures its lines one after another."""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from common import apart, median
from torch import Tensor, nn

import lapilli.eager
from lapilli.compiler import compile_to_bytes
from lapilli.runtime.program import Program
from performance.measuring import HAS_CUDA, Row, host, host_to_host, kernels, reference
from performance.models import GPT, Prefill, Sentence, classifier


@dataclass(frozen=True)
class Options:
    """device: of Lapilli, as for `lapilli.load`; small: sizes that a CPU takes."""

    device: str | int | None
    small: bool


@dataclass(frozen=True)
class Table:
    """title and text: of the page; lines: measures them."""

    title: str
    text: str
    lines: Callable[[Options], Iterator[Row]]


def batch_1(options: Options) -> Iterator[Row]:
    """Networks with one input."""
    precision = "fp32" if options.small else "fp16"
    for name in ("mobilenet_v2", "resnet18" if options.small else "resnet50"):
        yield host_to_host(name, classifier(name), [torch.rand(1, 3, 224, 224)], precision, options.device)
    tokens = 64 if options.small else 128
    words = torch.randint(0, 2000, (1, tokens), generator=torch.Generator().manual_seed(1))
    yield host_to_host(f"MiniLM-L6, {tokens} tokens", Sentence(tokens).eval(), [words], precision, options.device)
    if not options.small:
        yield host_to_host("vit_b_16", classifier("vit_b_16"), [torch.rand(1, 3, 224, 224)], precision, options.device)


def batches(options: Options) -> Iterator[Row]:
    """Networks with many inputs."""
    size, names = (4, ("resnet18",)) if options.small else (64, ("resnet50", "vit_b_16"))
    for name in names:
        image = torch.rand(size, 3, 224, 224)
        precision = "fp32" if options.small else "fp16"
        yield host_to_host(f"{name}, batch {size}", classifier(name), [image], precision, options.device)


def products(options: Options) -> Iterator[Row]:
    """Matrix products."""
    sizes = (128, 256, 512) if options.small else (1024, 4096, 8192)
    for dtype in (torch.float32,) if options.small else (torch.float16, torch.float32):
        for n in sizes:
            if dtype is torch.float32 and n > 4096:
                continue
            inputs = [torch.randn(n, n).to(dtype) for _ in range(2)]
            name = str(dtype).removeprefix("torch.")
            yield kernels(f"{n}³, {name}", torch.matmul, inputs, 2 * n**3, options.device)


def attention(options: Options) -> Iterator[Row]:
    """scaled_dot_product_attention, full and causal."""
    shapes = [(1, 4, 256, 64)] if options.small else [(1, 32, 2048, 128), (1, 12, 4096, 64), (64, 12, 197, 64)]
    dtype = torch.float32 if options.small else torch.float16
    for shape in shapes:
        for causal in (False, True):
            batch, heads, n, size = shape
            inputs = [torch.randn(shape).to(dtype) for _ in range(3)]
            yield kernels(
                f"{'×'.join(map(str, shape))}{', causal' if causal else ''}",
                lambda q, k, v, causal=causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
                inputs,
                4 * batch * heads * n * n * size / (2 if causal else 1),
                options.device,
            )


LLAMAS: dict[str, dict[str, int]] = {
    "SmolLM2-135M": {"layers": 30, "width": 576, "heads": 9, "groups": 3, "size": 64, "hidden": 1536, "words": 49152},
    "Llama-3.2-1B": {"layers": 16, "width": 2048, "heads": 32, "groups": 8, "size": 64, "hidden": 8192, "words": 128256},
}  # fmt: skip
"""By the models whose shapes these are."""


@torch.inference_mode()
def one_token(options: Options) -> Iterator[Row]:
    """One token of a language model, early and late in a filled cache."""
    import tokens

    for name in ("135m",) if options.small else ("135m", "1b"):
        torch.manual_seed(0)
        model, cases = tokens.network(name)
        title = {"135m": "SmolLM2-135M", "1b": "Llama-3.2-1B"}[name]
        for m in tokens.measure(title, model, cases, None, options.device):
            row = Row(f"{title}, {m.case}", {"lapilli": m.call, "lapilli, device": m.device}, m.error)
            row.seconds |= {k: v for k, v in {"torch": m.eager, "CUDA graph": m.graph}.items() if v is not None}
            row.note = f"dispatches: {m.dispatches} levels; torch's error {m.torchs_error:.1e}"
            yield row


@torch.inference_mode()
def prefill(options: Options) -> Iterator[Row]:
    """Prompts of an open length, from tokens of the host to logits there."""
    for name, shape in LLAMAS.items():
        if not options.small or name == "SmolLM2-135M":
            yield from _prompts(name, shape, (64,) if options.small else (128, 512, 4096), options)


def _prompts(name: str, shape: dict[str, int], lengths: tuple[int, ...], options: Options) -> Iterator[Row]:
    model = Prefill(**shape, most=8192).eval().to(torch.float32 if options.small else torch.float16)
    given = [torch.randint(0, shape["words"], (1, n), generator=torch.Generator().manual_seed(n)) for n in lengths]
    data = compile_to_bytes(model, (given[0],), dynamic_shapes=({1: torch.export.Dim("length", min=2, max=8192)},))
    exact = [reference(model, [tokens]) if tokens.shape[1] <= 512 else None for tokens in given]
    theirs = model.to(host())

    def torchs(tokens: Tensor) -> Tensor:
        result: Tensor = theirs(tokens.to(host())).cpu()
        return result

    with Program(data, options.device) as program:
        for tokens, wanted in zip(given, exact, strict=True):
            row = Row(f"{name}, {tokens.shape[1]} tokens")
            row.error = apart(program(tokens), torchs(tokens) if wanted is None else wanted)
            row.note = "error from torch in half precision" if wanted is None else ""
            row.seconds["lapilli"] = median(program.bind(tokens))
            row.seconds["torch"] = median(functools.partial(torchs, tokens))
            yield row


def training(options: Options) -> Iterator[Row]:
    """A step: forward, backward, SGD; torch.compile(backend="vulkan") and eager tensors on the device beside CUDA or the CPU.

    torch's steps are in a process of their own: one process trains on CUDA or on the device "vulkan", not on both."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        theirs = pool.submit(_torchs_steps, options).result()
    lapilli.eager.enable()
    for case, (seconds, first) in zip(_steps(options), theirs, strict=True):
        row = Row(case.name, {"torch": seconds}, note=case.note)
        torch._dynamo.reset()  # else the sizes of one network are dynamic in the next
        step = _trainer(case, "vulkan", True)
        row.error = apart(step(), torch.tensor(first))
        row.seconds["lapilli"] = _steady(step)
        step = _trainer(case, "vulkan", False)
        row.seconds["lapilli, eager"] = _steady(step)
        yield row


def _steady(step: Callable[[], Tensor]) -> float:
    """Median seconds of a step, once the device's clock has risen: while programs are compiled it falls to a sixth."""
    end = time.perf_counter() + _WARM_UP
    while time.perf_counter() < end:
        step()
    return median(step, iterations=30)


_WARM_UP = 3.0
"""Seconds."""


def _torchs_steps(options: Options) -> list[tuple[float, float]]:
    """Seconds of a step, and the loss of the first one."""
    found = []
    for case in _steps(options):
        step = _trainer(case, host(), False)
        first = float(step())
        found.append((_steady(step), first))
    return found


@dataclass(frozen=True)
class _Step:
    name: str
    make: Callable[[], nn.Module]
    x: Tensor
    labels: Tensor
    half: bool = False
    note: str = ""


def _steps(options: Options) -> list[_Step]:
    batch, rows = (2, 2) if options.small else (32, 16)
    draw = torch.Generator().manual_seed(1)
    image, labels = torch.rand(batch, 3, 224, 224, generator=draw), torch.randint(0, 1000, (batch,), generator=draw)
    text = torch.randint(0, 1024, (rows, 257), generator=draw)
    name = f"ResNet18, batch {batch}"
    tf32 = "torch's convolutions use TF32" if HAS_CUDA else ""
    steps = [_Step(name, lambda: classifier("resnet18").train(), image, labels, note=tf32)]
    if not options.small:
        steps.append(
            _Step(f"{name}, autocast to float16", lambda: classifier("resnet18").train(), image, labels, half=True)
        )
    return [*steps, _Step(f"GPT of 6 layers of 384, batch {rows} × 256", GPT, text[:, :-1], text[:, 1:])]


def _trainer(case: _Step, device: str, compiled: bool) -> Callable[[], Tensor]:
    """A step, which gives its loss when the device has done it."""
    model = case.make().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    given, wanted = case.x.to(device), case.labels.to(device)

    def loss(given: Tensor, wanted: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.float16, enabled=case.half):
            logits = model(given)
        return F.cross_entropy(logits.float().flatten(0, -2), wanted.flatten())

    run: Any = torch.compile(loss, backend="vulkan") if compiled else loss

    def step() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = run(given, wanted)
        value.backward()
        optimizer.step()
        return value.detach().cpu()

    return step


def compiling(options: Options) -> Iterator[Row]:
    """Compilation and loading, in this process; kernels that earlier tables have left are in the cache."""
    small = (("SmolLM2-135M", 2), ("SmolLM2-135M", 4))
    for name, layers in small if options.small else (("SmolLM2-135M", 8), ("SmolLM2-135M", 30), ("Llama-3.2-1B", 16)):
        model = Prefill(**(LLAMAS[name] | {"layers": layers}), most=2048).eval().half()
        tokens = torch.zeros(1, 64, dtype=torch.int64)
        length = torch.export.Dim("length", min=2, max=2048)
        row = Row(f"{name}'s shape, {layers} layers")
        start = time.perf_counter()
        data = compile_to_bytes(model, (tokens,), dynamic_shapes=({1: length},))
        row.seconds["compile"] = time.perf_counter() - start
        start = time.perf_counter()
        with Program(data, options.device) as program:
            row.seconds["load"] = time.perf_counter() - start
            held = program.memory()
            row.seconds["first run, 64 tokens"] = _seconds(lambda: program(tokens))  # noqa: B023
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        sizes = (f"{what} {size / 1e6:.1f} MB" for what, size in (("file", len(data)), ("device", held.device_total)))
        row.note = f"weights {weights / 1e6:.1f} MB, {', '.join(sizes)}"
        yield row


def _seconds(function: Callable[[], object]) -> float:
    """Of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


TABLES: dict[str, Table] = {
    "batch-1": Table(
        "One input at a time",
        "From a tensor of the host to a tensor of the host. *lapilli*: memory bound once (`program.bind`); *call*: `program(x)`. "
        "The CUDA graph is replayed from device to device, without the copies.",
        batch_1,
    ),
    "batches": Table("Batches", "From host to host; the copies of the inputs count.", batches),
    "products": Table("Matrix products", "By the devices' clocks. float32 without TF32.", products),
    "attention": Table(
        "Attention",
        "`scaled_dot_product_attention` of batch × heads × tokens × width, by the devices' clocks. The rate of causal attention "
        "counts half of the products.",
        attention,
    ),
    "tokens": Table(
        "A token",
        "One step of a language model in half precision with a cache of 4,096 places. *lapilli*: from NumPy to NumPy; *device*: "
        "from the first dispatch to the last by its clock; torch's ways end with their result on the host.",
        one_token,
    ),
    "prefill": Table(
        "Prompts", "A prompt of open length, from tokens on the host to the next token's logits there.", prefill
    ),
    "training": Table("Training", 'One step with SGD. *lapilli*: `torch.compile(backend="vulkan")`.', training),
    "compiling": Table("Compilation and loading", "Kernels of the tables before are in the cache.", compiling),
}
