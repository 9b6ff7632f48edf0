"""Depthwise convolutions that take in the 1x1 convolution before them (codegen/expanded.py)."""

from __future__ import annotations

import pytest
import random_blocks
import torch
from torch import Tensor, nn

import lapilli
from lapilli.codegen import expanded

pytestmark = pytest.mark.usefixtures("on_any_device", "small_tiles")


@pytest.mark.part(8)
@pytest.mark.parametrize("seed", range(48))
def test_random_blocks(seed: int) -> None:
    random_blocks.check(seed, "gpu-fp16-matrix")


@pytest.mark.parametrize("channels", [16, 32])  # software devices have no memory for 64
def test_every_number_of_channels(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of rows, among them such that do not divide the result's."""
    torch.manual_seed(channels)
    model = nn.Sequential(nn.Conv2d(24, 64, 1), nn.ReLU6(), nn.Conv2d(64, 64, 3, 2, 1, groups=64)).eval()
    for p in model.parameters():
        p.data = p.data.half().float()
    x = torch.randn(2, 24, 13, 9).half().float()
    wanted = model(x).detach().double()
    bands, tried = expanded.bands, set[int]()
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


class Kept(nn.Module):
    """What is between the convolutions is a result as well."""

    def __init__(self, block: nn.Sequential) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        between = self.block[1](self.block[0](x))
        return between, self.block[2](between)


def block(channels: int = 32, kernel: int = 3, dilation: int = 1, read: int = 16) -> nn.Sequential:
    padding = dilation * (kernel // 2)
    second = nn.Conv2d(channels, channels, kernel, 1, padding, dilation, groups=channels)
    return nn.Sequential(nn.Conv2d(read, channels, 1), nn.ReLU(), second).eval()


@pytest.mark.parametrize(
    ("model", "images", "why"),
    [
        (block(), 1, ""),
        (block(), 40, "as many work groups as would wait for each other"),
        (block(channels=24), 1, "no whole fragments"),
        (block(kernel=7), 1, "too many taps to write out"),
        (block(dilation=2), 1, "dilated"),
        (Kept(block()), 1, "what is between is a result"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_one_kernel(model: nn.Module, images: int, why: str) -> None:
    x = torch.randn(images, 16, 28, 28)
    with lapilli.compile(model, (x,), target="gpu-fp16-matrix", precision="fp16") as program:
        assert ("expanded_depthwise" in random_blocks.kernels(program)) == (not why)


def test_open_batches_have_two_kernels() -> None:
    x = torch.randn(2, 16, 14, 14)
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    with lapilli.compile(block(), (x,), target="gpu-fp16-matrix", precision="fp16", dynamic_shapes=(batch,)) as program:
        assert "expanded_depthwise" not in random_blocks.kernels(program)
        for n in (1, 3):
            assert program(torch.randn(n, 16, 14, 14)).shape == (n, 32, 14, 14)
