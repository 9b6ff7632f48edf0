"""Kernels for GPUs on a software device: what went wrong on GPUs alone. `make random` runs whole programs so."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import Function

import lapilli

pytestmark = pytest.mark.usefixtures("on_any_device")


class WithWeights(torch.nn.Module):
    def __init__(self, f: Any, *weights: torch.Tensor) -> None:
        super().__init__()
        self.f, self.weights = f, torch.nn.ParameterList([torch.nn.Parameter(w, requires_grad=False) for w in weights])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(x, *self.weights)


def agrees(f: Any, *args: torch.Tensor, **named: Any) -> None:
    model = Function(f)
    with lapilli.compile(model, args, target="gpu-fp32", fallback="error", **named) as program:
        torch.testing.assert_close(program(*args), model(*args))


def test_rows_with_numbers_of_several_kinds_in_shared_memory() -> None:
    """Every array takes whole units of 16 bytes."""
    x, y = torch.randn(3, 5), torch.randint(-5, 5, (3, 5))
    agrees(lambda x, y: (x * y.amax(-1, keepdim=True)).sum(-1, keepdim=True) + x, x, y)


FEW_ROWS: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "one row": (F.linear, ((1, 64), (37, 64))),
    "a vector": (F.linear, ((64,), (37, 64))),
    "three rows, a bias": (F.linear, ((3, 12), (5, 12), (5,))),
    "eight rows": (F.linear, ((8, 1000), (129, 1000))),
    "nine rows are for tiles": (F.linear, ((9, 64), (37, 64))),
    "one column": (F.linear, ((2, 8), (1, 8))),
    "batches": (torch.matmul, ((5, 2, 36), (5, 36, 7))),
    "batches of lines": (lambda x, w: x @ w.mT, ((2, 3, 1, 20), (2, 3, 11, 20))),
    "a shared matrix": (torch.matmul, ((4, 2, 36), (36, 7))),
    "terms that are no fours": (F.linear, ((2, 7), (5, 7))),
    "rows that lie apart": (lambda x, w: F.linear(x[:, :32], w), ((4, 64), (9, 32))),
    "no terms": (F.linear, ((2, 0), (5, 0))),
    "an epilogue": (lambda x, w: F.gelu(F.linear(x, w)) + x.sum(), ((2, 16), (6, 16))),
}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("weights", [True, False])
def test_products_of_a_few_rows(precision: Any, weights: bool) -> None:
    """Matrices that are arguments, and constants, which may be packed."""
    random = torch.Generator().manual_seed(5)
    dtype = torch.float16 if precision == "fp16" else torch.float32
    shown = []
    for name, (f, shapes) in FEW_ROWS.items():
        x, *rest = (torch.randn(s, generator=random).to(dtype) for s in shapes)
        model = WithWeights(f, *rest) if weights else Function(f)
        given = (x,) if weights else (x, *rest)
        exact = f(x.double(), *(w.double() for w in rest))
        bound = 2e-3 if precision == "fp16" else 1e-5  # results, and what an epilogue keeps, are rounded to the type
        with lapilli.compile(model, given, target=f"gpu-{precision}", precision=precision, fallback="error") as program:
            torch.testing.assert_close(
                program(*given).double(), exact, rtol=bound, atol=bound, msg=lambda m, name=name: f"{name}: {m}"
            )
            shown.append(any(k.kernel == "few_rows" for k in program.profile(list(given), 1).kernels))  # type: ignore[arg-type]
    assert sum(shown) >= (9 if weights else 6)


@pytest.mark.long
def test_attention_reads_its_own_rows() -> None:
    """Of one row, whose stride says nothing about fours. Drivers give zeros, or nothing, for what is read beyond a value; here it
    is NaN, in a process that asks for that."""
    script = """
        import as_gpu, lapilli, torch
        as_gpu.on_any_device()
        class Attention(torch.nn.Module):
            def forward(self, all):
                return [torch.nn.functional.scaled_dot_product_attention(x * 2, x + 1, x) for x in all]
        shapes = [(*shape, width) for shape in ((1,), (2, 1), (3, 5)) for width in {widths}]
        given = [torch.randn(shape) for shape in shapes]
        program = lapilli.compile(Attention(), (given,), target="gpu-fp32")
        for ours, theirs in zip(program(given), Attention()(given), strict=True):
            torch.testing.assert_close(ours, theirs)
    """
    widths = (1, 2, 3, 5, 8) if os.environ.get("LAPILLI_TEST_ALL") else (3, 8)
    script = script.replace("{widths}", str(widths))
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "LAPILLI_BINDING_SLACK": "64",
        "LAPILLI_VALIDATION": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_convolution_of_many_open_sizes(tmp_path: Path) -> None:
    """A template has not room for all of them: then the filter is read as it is, and lives until then. On the device, whose
    programs leave strides open too, in a process whose device takes GPU plans from the start."""
    script = """
        import as_gpu, torch
        import torch.nn.functional as F
        as_gpu.on_any_device()
        def second(device):
            random = torch.Generator().manual_seed(1)
            w = torch.randn(4, 2, 3, 3, generator=random).to(device).requires_grad_()
            x = torch.randn(2, 4, 6, 6, generator=random).to(device).requires_grad_()
            y = F.conv_transpose2d(x, w, stride=2, padding=(0, 1), output_padding=1)
            first = torch.autograd.grad((y * y).sum(), (x, w), create_graph=True)
            return torch.autograd.grad(sum((g * g).sum() for g in first), (x, w))
        for ours, theirs in zip(second("vulkan"), second("cpu")):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
    """
    variables = os.environ | {"LAPILLI_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_convolution_that_reads_many_values_afterwards() -> None:
    """Where each is read in an order of its own, the sizes are more than a kernel takes as parameters."""

    def f(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        made = torch.nn.functional.conv2d(x, w, padding=1, groups=7)
        return ((made * a.flip(2) + b.flip(3)).relu() * c.flip(1)).permute(0, 2, 3, 1).contiguous()

    agrees(f, torch.randn(1, 7, 7, 9), torch.randn(28, 1, 3, 3), *(torch.randn(1, 28, 7, 9) for _ in range(3)))


def test_convolution_of_padding_alone() -> None:
    """Its one place lies in the padding: it reads nothing of its input, which is made later then."""

    def f(x: torch.Tensor, w: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.nn.functional.conv1d(x, w, stride=2, padding=2)
        return torch.nn.functional.conv1d(y, last, stride=3, padding=1).relu() + 1, y * 2

    agrees(f, torch.randn(4, 16, 2), torch.randn(1, 16, 5), torch.randn(4, 1, 1))
