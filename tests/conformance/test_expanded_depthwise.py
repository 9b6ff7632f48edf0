"""Depthwise convolutions that take in the 1x1 convolution before them (codegen/expanded.py)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import random_blocks
import torch
import torchvision_without_ops
from torch import Tensor, nn

import lapilli
from lapilli.capture import capture
from lapilli.codegen import expanded
from lapilli.codegen.select import schedule_of
from lapilli.codegen.template import Asked
from lapilli.legalize.passes import prepare
from lapilli.lower import lower
from lapilli.target import TARGETS

torchvision_without_ops.allow()
import torchvision  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_any_device", "small_tiles")


@pytest.mark.part(8)
@pytest.mark.parametrize("seed", range(48))
def test_random_blocks(seed: int) -> None:
    random_blocks.check(seed, "gpu-fp16-matrix")


@pytest.mark.parametrize("channels", [16, 32])  # software devices have no memory for 64
def test_every_number_of_channels(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every number of rows, also those that do not divide the result's."""
    torch.manual_seed(channels)
    model = nn.Sequential(nn.Conv2d(24, 64, 1), nn.ReLU6(), nn.Conv2d(64, 64, 3, 2, 1, groups=64)).eval()
    for p in model.parameters():
        p.data = p.data.half().float()
    x = torch.randn(2, 24, 13, 9).half().float()
    wanted = model(x).detach().double()
    bands, tried = expanded.bands, set[int]()
    monkeypatch.setattr(expanded, "_WORTH", 100.0)
    for rows in range(1, 8):

        def of_rows(*args: object, rows: int = rows) -> list[expanded.Band]:
            return [b for b in bands(*args) if (b.rows, b.channels) == (rows, channels)]  # type: ignore[arg-type]

        monkeypatch.setattr(expanded, "bands", of_rows)
        with lapilli.compile(model, (x,), target="gpu-fp16-matrix", precision="fp16") as program:
            names, found = random_blocks.kernels(program), program(x).double()
        if "expanded_depthwise" in names:
            tried.add(rows)
        assert float((found - wanted).norm() / wanted.norm()) < 2**-11, rows
    assert tried == {1, 2, 3, 4, 7}  # 7 rows in as equal bands as there can be


def test_sums_of_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where shared memory does not hold all channels of the image; the last chunk is not full."""
    model = nn.Sequential(nn.Conv2d(200, 32, 1), nn.SiLU(), nn.Conv2d(32, 32, 5, 1, 2, groups=32)).eval()
    for p in model.parameters():
        p.data = p.data.half().float()
    x = torch.randn(1, 200, 11, 7).half().float()
    monkeypatch.setattr(expanded, "_DEEPEST", 3)
    monkeypatch.setattr(expanded, "_WORTH", 100.0)
    with lapilli.compile(model, (x,), target="gpu-fp16-matrix", precision="fp16") as program:
        assert "expanded_depthwise" in random_blocks.kernels(program)
        found, wanted = program(x).double(), model(x).detach().double()
    assert float((found - wanted).norm() / wanted.norm()) < 2**-11


def test_bfloat16() -> None:
    model = nn.Sequential(nn.Conv2d(16, 32, 1), nn.Hardswish(), nn.Conv2d(32, 32, 3, 1, 1, groups=32)).eval()
    x = torch.randn(1, 16, 9, 10)
    exact = model.double()(x.bfloat16().double()).detach()
    model, x = model.bfloat16(), x.bfloat16()
    with lapilli.compile(model, (x,), target="gpu-bf16-matrix") as program:
        assert "expanded_depthwise" in random_blocks.kernels(program)
        found = program(x).double()
    assert float((found - exact).norm() / exact.norm()) < 2**-7  # weights, what is between and results are rounded


Reader = Callable[[Tensor, nn.Module], Tensor | tuple[Tensor, ...]]
READERS: dict[str, Reader] = {
    "a result": lambda between, second: (between, second(between)),
    "what follows": lambda between, second: second(between) + between,
    "a part of another value": lambda between, second: torch.cat([between, second(between)], 1),
    "a sum": lambda between, second: (second(between), between.amax((2, 3))),
    "attention of a few queries, by its first step": lambda between, second: (second(between), _attention(between)),
    "attention": lambda between, second: (second(between), _attention(between, 300)),
}


def _attention(between: Tensor, queries: int = 4) -> Tensor:
    rows = between.flatten(2).transpose(1, 2)[:, None]
    given = torch.linspace(-1, 1, queries * rows.shape[-1]).reshape(1, 1, queries, -1).expand(rows.shape[0], -1, -1, -1)
    return torch.nn.functional.scaled_dot_product_attention(given.to(rows.dtype), rows, rows)


class Kept(nn.Module):
    """Something else reads what is between the convolutions."""

    def __init__(self, block: nn.Sequential, read: Reader) -> None:
        super().__init__()
        self.block, self.read = block, read

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.read(self.block[1](self.block[0](x)), self.block[2])


def block(channels: int = 32, kernel: int = 3, dilation: int = 1, read: int = 16) -> nn.Sequential:
    padding = dilation * (kernel // 2)
    second = nn.Conv2d(channels, channels, kernel, 1, padding, dilation, groups=channels)
    return nn.Sequential(nn.Conv2d(read, channels, 1), nn.ReLU(), second).eval()


@pytest.mark.parametrize(
    ("model", "images", "why"),
    [
        (block(), 1, ""),
        (block(), 40, "more work groups than run at once"),
        (block(channels=24), 1, "no whole fragments"),
        (block(kernel=7), 1, "too many taps to write out"),
        (block(dilation=2), 1, "dilated"),
        (block(read=400), 1, "too many steps to write out"),
        *((Kept(block(), read), 1, f"read by {why}") for why, read in READERS.items()),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_one_kernel(model: nn.Module, images: int, why: str) -> None:
    x = torch.randn(images, 400 if "steps" in why else 16, 28, 28).half().float()
    with lapilli.compile(model, (x,), target="gpu-fp16-matrix", precision="fp16") as program:
        assert ("expanded_depthwise" in random_blocks.kernels(program)) == (not why)
        found = program(x)
    wanted = model(x)
    for y, exact in zip(*((r,) if isinstance(r, Tensor) else r for r in (found, wanted)), strict=True):
        assert float((y - exact).norm() / exact.norm()) < 2**-9


@pytest.mark.parametrize("images", [0, 1])
def test_inputs_in_float32_that_are_added_too(images: int) -> None:
    """The image is rounded once for the product, and read as it is for the sum."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block(32, read=32)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = x + self.block(x)
            return found

    model, x = Residual().eval(), torch.randn(images, 32, 9, 8)
    with lapilli.compile(model, (x,), target="gpu-fp16-matrix", precision="fp16") as program:
        assert "expanded_depthwise" in random_blocks.kernels(program)
        assert float((program(x) - model(x)).norm()) <= 2**-9 * float(model(x).norm())


def test_it_is_not_tuned() -> None:
    """Records of the depthwise kernel's work groups would be about another kernel."""
    graph = lower(prepare(capture(block(), (torch.randn(1, 16, 28, 28),))), "fp16", True)
    asked: list[Asked] = []
    made = schedule_of(graph, TARGETS["gpu-fp16-matrix"], asked=asked)
    assert any(isinstance(t.template, expanded.ExpandedDepthwise) for t in made.tasks)
    assert not any("depthwise" in a.question.form for a in asked)


def test_a_whole_network() -> None:
    """Of ShuffleNet, whose blocks store parts of a value and read others."""
    torch.manual_seed(0)
    model = torchvision.models.shufflenet_v2_x0_5().eval()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):  # values that are neither large nor zero
            m.running_var.uniform_(0.5, 2)
            m.running_mean.normal_(0, 0.2)
    x = torch.randn(1, 3, 96, 80)
    with lapilli.compile(model, (x,), target="gpu-fp16-matrix", precision="fp16") as program:
        assert random_blocks.kernels(program).count("expanded_depthwise") >= 12
        found = program(x).double()
    with torch.no_grad():
        wanted = model.double()(x.double())
    assert float((found - wanted).norm() / wanted.norm()) < 2**-10


def test_open_batches_have_two_kernels() -> None:
    x = torch.randn(2, 16, 14, 14)
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    with lapilli.compile(block(), (x,), target="gpu-fp16-matrix", precision="fp16", dynamic_shapes=(batch,)) as program:
        assert "expanded_depthwise" not in random_blocks.kernels(program)
        for n in (1, 3):
            assert program(torch.randn(n, 16, 14, 14)).shape == (n, 32, 14, 14)
