"""Transformers at small sizes, in half precision, beside torch with CUDA in the same run: a token of language models of two shapes,
at positions early and late in a filled cache, and encoders at batch 1. Weights are random; every result is compared with torch's.

    python benchmarks/tokens.py [--models 135m 1b minilm vit] [--layers N] [--target PLAN] [--kernels]

Milliseconds: "call" from NumPy to NumPy, "device" from the first dispatch to the last by its clock; of torch, a call with eager
kernels and one replay of a CUDA graph, each with its result on the host.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from common import apart, cuda_graph, median, report
from torch import Tensor, nn
from torch.nn import functional as F

from lapilli.compiler import compile_to_bytes
from lapilli.runtime.program import Program

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from decoder import Decoder

CONTEXT = 4096
SHAPES = {  # of SmolLM2-135M and Llama-3.2-1B
    "135m": dict(words=49152, width=576, layers=30, heads=9, groups=3, inner=1536),
    "1b": dict(words=128256, width=2048, layers=16, heads=32, groups=8, inner=8192),
}
POSITIONS = (100, 4000)


class EncoderLayer(nn.Module):
    """Attention and a feed-forward network; norms come after them (BERT), or before (ViT)."""

    def __init__(self, width: int, heads: int, before: bool) -> None:
        super().__init__()
        self.heads, self.before = heads, before
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, part in zip(self.norms, (self.attention, self.network), strict=True):
            x = x + part(norm(x)) if self.before else norm(x + part(x))
        return x

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def network(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Text(nn.Module):
    """MiniLM-L6's shape: tokens [1, n] to embeddings [1, n, 384]."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(30522, 384), nn.Embedding(512, 384), nn.LayerNorm(384)
        self.layers = nn.Sequential(*(EncoderLayer(384, 12, False) for _ in range(layers)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.norm(self.words(tokens) + self.places.weight[: tokens.shape[1]]))


class Image(nn.Module):
    """ViT-B/16's shape: an image [1, 3, 224, 224] to logits [1, 1000]."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 16, 16)
        self.first, self.places = (nn.Parameter(torch.randn(1, n, 768) / 50) for n in (1, 197))
        self.layers = nn.Sequential(*(EncoderLayer(768, 12, True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(768), nn.Linear(768, 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = torch.cat([self.first, self.patches(image).flatten(2).transpose(1, 2)], 1) + self.places
        return self.head(self.norm(self.layers(x))[:, 0])


def torch_times(model: nn.Module, args: tuple[Tensor, ...]) -> tuple[float | None, float | None]:
    """Seconds of a call with CUDA, eager and as a graph; None without."""
    if not torch.cuda.is_available():
        return None, None
    on = [a.cuda() for a in args]
    eager = median(lambda: model(*on).cpu(), 5, 30, 5)
    queue, out = cuda_graph(lambda: model(*on))

    def replay() -> None:
        queue()
        out.cpu()

    return eager, median(replay, 5, 50, 5)


def exactly(model: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
    """By torch in float32, of the same halves."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wide = copy.deepcopy(model).float().to(device)
    return wide(*(a.to(device).float() if a.is_floating_point() else a.to(device) for a in args))


def dispatches(program: Program) -> str:
    plan = next(p for p in program.description.methods[0].plans if p.name == program.plan)
    return f"{len(plan.run)} in {1 + sum(d.barrier for d in plan.run)}"


@dataclass(frozen=True)
class Measured:
    """Of one case: seconds by NumPy's user, by the device's clock, of torch with eager kernels and as a CUDA graph (None without
    CUDA); distances of both results from float32's; kernels: seconds of each by kind."""

    case: str
    dispatches: str
    call: float
    device: float
    eager: float | None
    graph: float | None
    error: float
    torchs_error: float
    kernels: dict[str, list[float]]


def measure(
    name: str,
    model: nn.Module,
    cases: Mapping[str, tuple[Tensor, ...]],
    target: str | None,
    device: str | int | None = None,
) -> Iterator[Measured]:
    """Every case. device: as for `lapilli.load`. Caches, if there are any, are filled with random numbers."""
    first = next(iter(cases.values()))
    start = time.perf_counter()
    program = Program(compile_to_bytes(model, first, precision="fp16", target=target), device)
    print(f"{name}: compile {time.perf_counter() - start:.1f} s, plan {program.plan}", flush=True)
    caches = {
        n: torch.randn(b.shape, dtype=b.dtype) / 4 for n, b in model.named_buffers() if n.endswith(("keys", "values"))
    }
    with program:
        if torch.cuda.is_available():
            model.cuda()
        for case, args in cases.items():
            given = [a.numpy() for a in args]
            if caches:
                program.set_state({n: v.numpy() for n, v in caches.items()})
                for n, b in model.named_buffers():
                    if n in caches:
                        b.copy_(caches[n])
            found = apart(program(*args), exactly(model, args))
            theirs = apart(model(*(a.to(next(model.parameters()).device) for a in args)), exactly(model, args))
            call = median(lambda: program.run_flat(given), 20, 200, 5)  # noqa: B023
            profile = program.profile(given, repeat=20)
            kernels: dict[str, list[float]] = {}
            for k in profile.kernels:
                kernels.setdefault(f"{k.kernel} {k.label}"[:70], []).append(k.seconds)
            eager, graph = torch_times(model, args)
            yield Measured(case, dispatches(program), call, profile.seconds, eager, graph, found, theirs, kernels)
    model.cpu()


def network(name: str, layers: int | None = None) -> tuple[nn.Module, dict[str, tuple[Tensor, ...]]]:
    """A model of those that are measured, in half precision, and its cases."""
    if name in SHAPES:
        shape = SHAPES[name] | ({"layers": layers} if layers else {})
        model: nn.Module = Decoder(context=CONTEXT, **shape)
        token = torch.tensor([[17]])
        cases: dict[str, tuple[Tensor, ...]] = {f"position {p}": (token, torch.tensor([p])) for p in POSITIONS}
    else:
        makers: dict[str, Callable[[int], nn.Module]] = {"minilm": Text, "vit": Image}
        model = makers[name](layers or {"minilm": 6, "vit": 12}[name])
        given = torch.randint(30000, (1, 128)) if name == "minilm" else torch.randn(1, 3, 224, 224).half()
        cases = {"batch 1": (given,)}
    return model.half().eval().requires_grad_(False), cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["135m", "1b", "minilm", "vit"])
    parser.add_argument("--layers", type=int, help="instead of each model's own number")
    parser.add_argument("--target", help="compile for this plan or device only")
    parser.add_argument("--kernels", action="store_true", help="show the time of each kind of kernel, too")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows: list[list[str]] = []
    with torch.no_grad():
        for name in options.models:
            for m in measure(name, *network(name, options.layers), options.target):
                cells = ["" if x is None else f"{x * 1e3:.3f}" for x in (m.call, m.device, m.eager, m.graph)]
                rows.append([name, m.case, m.dispatches, *cells, f"{m.error:.1e}", f"{m.torchs_error:.1e}"])
                print(" | ".join(rows[-1]), flush=True)
                for label, times in sorted(m.kernels.items(), key=lambda x: -sum(x[1])) if options.kernels else ():
                    total, each = sum(times) * 1e6, sum(times) / len(times) * 1e6
                    print(f"    {total:8.1f} us  {len(times):3} x {each:6.2f}  {label}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    columns = ["model", "", "dispatches, levels", "call", "device", "torch eager", "CUDA graph", "error", "torch's"]
    report("tokens", device, columns, rows, rows)


if __name__ == "__main__":
    main()
