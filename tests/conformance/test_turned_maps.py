"""Maps that store along another axis than they read along, and reductions of rows whose elements lie side by side."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapilli
from lapilli.capture import capture
from lapilli.codegen import kernel as code_of_kernels
from lapilli.codegen import transposing
from lapilli.codegen.kernel import KernelSource
from lapilli.codegen.select import schedule_of, write_all
from lapilli.legalize.passes import prepare
from lapilli.lower import lower
from lapilli.target import GPU


class Call(nn.Module):
    def __init__(self, f: Callable[..., Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, *args: Tensor) -> Tensor:
        return self.f(*args)


def case(seed: int) -> tuple[nn.Module, tuple[Tensor, ...], Any]:
    """A permuted tensor of odd sizes, and what is computed of it and of others that lie in either order."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    rank = r.choice((2, 3, 3, 4, 4, 5))
    while True:
        shape = [r.choice((1, 2, 3, 17, 31, 32, 33, 64, 70, 100, 300)) for _ in range(rank)]
        order = r.sample(range(rank), rank)
        if 1 << 14 <= torch.Size(shape).numel() <= 1 << 17 and order != sorted(order):
            break
    x, turned = torch.randn(shape), torch.randn([shape[d] for d in order])
    ways: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (lambda x: x.permute(order).contiguous(), (x,)),
        (lambda x, y: (x.permute(order) * 2 + y).relu(), (x, turned)),
        (lambda x, y: x.permute(order) - y, (x, turned[..., :1].clone())),
        (lambda x: x.permute(order)[..., 1:] * x.permute(order)[..., :-1], (x,)),
        (lambda x: x.half().permute(order) + 1, (x,)),
        (lambda x: x.permute(order).contiguous().flatten().view(-1), (x,)),
        (lambda x, i: x.permute(order)[i].sqrt(), (x, torch.randint(0, turned.shape[0], (turned.shape[0] + 3,)))),
    ]
    f, args = r.choice(ways)
    open_sizes = None
    if r.random() < 0.3 and len(args) == 1:
        d = max(range(rank), key=lambda k: shape[k])
        open_sizes = (({d: torch.export.Dim("size", min=3, max=4096)},),)
    return Call(f), args, open_sizes


@pytest.mark.part(4)
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("plan", ["gpu-fp32", "gpu-fp16"])
def test_random_turned_maps(seed: int, plan: Any, gpu_plans: None) -> None:
    model, args, sizes = case(seed)
    precision: Any = "fp16" if "fp16" in plan else "fp32"
    with lapilli.compile(
        model, args, precision=precision, target=plan, dynamic_shapes=sizes, fallback="error"
    ) as program:
        found = program(*args)
    # One operation or two; halves round what is read, and what is stored.
    near = 2e-3 if plan == "gpu-fp16" or found.dtype is torch.float16 else 2e-6
    torch.testing.assert_close(found, model(*args), rtol=near, atol=near, equal_nan=True)


def test_what_is_turned_is_stored_in_its_own_order(gpu_plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    write = transposing.write

    def noted(*args: Any) -> Any:
        written.append(args[0].label)
        return write(*args)

    monkeypatch.setattr(transposing, "write", noted)
    x = torch.randn(2, 64, 20, 20)
    lapilli.compile(Call(lambda x: x.permute(0, 2, 3, 1) + 1), (x,), target="gpu-fp32").close()
    assert len(written) == 1
    lapilli.compile(
        Call(lambda x: x.permute(2, 3, 0, 1) + 1), (x[:, :, :4, :4].contiguous(),), target="gpu-fp32"
    ).close()
    lapilli.compile(Call(lambda x: x.permute(1, 0, 2, 3) + 1), (x,), target="gpu-fp32").close()
    assert len(written) == 1, "few elements, and rows that stay rows"


def kernel(x: Tensor, **more: Any) -> KernelSource:
    """Of the transpose of a value, for a GPU."""
    graph = lower(prepare(capture(Call(lambda x: x.mT * 2), (x,))), "fp32", False)
    schedule = schedule_of(graph, replace(GPU, **more))
    (found,) = write_all(schedule).values()
    assert found.name == "turned_map"
    return found


@pytest.mark.parametrize("invocations", [64, 128, 256, 1024])
def test_work_groups_fit_the_device(invocations: int) -> None:
    assert kernel(torch.empty(512, 512), invocations=invocations).requirements(False).invocations <= invocations


def test_work_groups_of_the_last_row_stop() -> None:
    """Those of two rows are more than there are tiles: no place is beyond the end."""
    tiles = 66 * 1024
    x = torch.empty(66, 1, 1, dtype=torch.float32).expand(66, 1024, 1024)
    found = kernel(x)
    assert [int(n.value or 0) for n in found.groups] == [65535, 2, 1]
    assert f"if (g >= {tiles}) return;" in found.source
    assert "return;" not in kernel(torch.empty(512, 512)).source


@pytest.mark.part(1)
def test_more_tiles_than_a_row_of_work_groups(gpu_plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_of_kernels, "MAX_GROUPS", 5)
    x = torch.randn(3, 70, 100)
    with lapilli.compile(Call(lambda x: x.mT * 2), (x,), target="gpu-fp32", fallback="error") as program:
        assert torch.equal(program(x), x.mT * 2)


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(0),
    "gate": lambda x: x * x.mean(0, keepdim=True).sigmoid(),
    "maxima": lambda x: x - x.amax(0, keepdim=True),
    "norm": lambda x: torch.nn.functional.normalize(x, dim=0),
    "log_softmax": lambda x: x.log_softmax(0),
}


@pytest.mark.part(3)
@pytest.mark.parametrize("name", list(ROWS))
@pytest.mark.parametrize("shape", [(1, 40), (2, 40), (37, 19), (100, 64), (257, 5), (1000, 16), (1536, 33), (4096, 24)])
@pytest.mark.parametrize("plan", ["gpu-fp32", "gpu-fp16-matrix"])
def test_rows_side_by_side(name: str, shape: tuple[int, int], plan: Any, on_any_device: None) -> None:
    x = torch.randn(shape)
    x[0, 0] = 30.0
    model = Call(ROWS[name])
    half = "fp16" in plan
    with lapilli.compile(model, (x,), precision="fp16" if half else "fp32", target=plan, fallback="error") as program:
        found = program(x)
    want = model((x.half() if half else x).double())
    near = 2**-10 if half else 1e-5
    torch.testing.assert_close(found.double(), want, rtol=near, atol=near * float(want.abs().max()))
