"""Depthwise convolutions of volumes: their kernels go through the depths of an image where it is, for every class of devices."""

from __future__ import annotations

import pytest
import torch
from agreement import FLOAT_BOUND, relative_error
from taken_plan import taken_plan
from torch import Tensor, nn

import lapilli

PLANS = ["cpu-fp32", "any-fp32", "any-fp32-few", "gpu-fp32", "gpu-fp16", "gpu-fp16-matrix"]
VOLUMES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "3x3x3": (nn.Conv3d(8, 8, 3, padding=1, groups=8), (3, 8, 5, 6, 7)),
    "one depth": (nn.Conv3d(8, 8, (1, 3, 3), padding=(0, 1, 1), groups=8), (1, 8, 4, 5, 6)),
    "channels in no fours": (nn.Conv3d(11, 11, 3, padding=1, groups=11, bias=False), (1, 11, 3, 7, 5)),
    "strides": (nn.Conv3d(12, 12, 3, stride=2, padding=1, groups=12), (2, 12, 6, 9, 8)),
    "strides and dilations": (nn.Conv3d(5, 5, (2, 3, 2), (3, 1, 2), (2, 0, 1), (2, 1, 3), groups=5), (3, 5, 7, 6, 11)),
    "depths alone": (nn.Conv3d(8, 8, (5, 1, 1), padding=(2, 0, 0), groups=8), (2, 8, 6, 3, 4)),
    "stride of one depth": (nn.Conv3d(8, 8, (1, 2, 2), stride=(2, 1, 1), groups=8), (2, 8, 5, 4, 4)),
    "5x5x5": (nn.Conv3d(4, 4, 5, padding=2, groups=4), (1, 4, 5, 6, 7)),
    "many taps": (nn.Conv3d(4, 4, (2, 11, 13), padding=(1, 5, 6), groups=4), (1, 4, 3, 6, 9)),
    "wide": (nn.Conv3d(7, 7, (2, 3, 17), padding=(1, 1, 8), groups=7), (2, 7, 3, 5, 19)),
    "wide, with stride": (nn.Conv3d(8, 8, (2, 2, 18), stride=2, padding=(1, 0, 8), groups=8), (1, 8, 5, 6, 30)),
    "three results a channel": (nn.Conv3d(5, 15, 3, padding=1, groups=5), (2, 5, 3, 6, 7)),
    "transposed": (nn.ConvTranspose3d(6, 6, 3, 2, 1, 1, groups=6), (2, 6, 3, 4, 5)),
}


def compared(program: lapilli.Program, model: nn.Module, x: Tensor, bound: float) -> None:
    """With the results in float64, which are NaN or infinite in the same places."""
    with torch.no_grad():
        found, exact = program(x).double(), model.double()(x.double())
    model.to(x.dtype)
    finite = exact.isfinite()
    assert torch.equal(finite, found.isfinite()) and torch.equal(exact.isnan(), found.isnan())
    assert relative_error(found[finite], exact[finite]) < bound


@pytest.mark.part(4)
@pytest.mark.usefixtures("on_any_device", "small_tiles")
@pytest.mark.parametrize("target", PLANS)
@pytest.mark.parametrize("name", VOLUMES)
def test_volumes(name: str, target: str) -> None:
    torch.manual_seed(0)
    half = "fp16" in target
    model, shape = VOLUMES[name]
    dtype, bound = (torch.float16, 2**-10) if half else (torch.float32, FLOAT_BOUND)
    model, x = model.eval().to(dtype), torch.randn(shape).to(dtype)
    if shape[0] > 1:
        x = x.to(memory_format=torch.channels_last_3d)
    with lapilli.compile(model, (x,), target=target, precision="fp16" if half else "fp32", fallback="error") as program:
        names = [d.kernel for d in taken_plan(program).run]
        assert any("depthwise" in name for name in names) and not any(name.startswith("generic") for name in names)
        compared(program, model, x, bound)
        x[0, 1, 0, 0, 0], x[-1, -1, ..., 2, -1] = torch.inf, torch.nan
        compared(program, model, x, bound)
    model.float()


@pytest.mark.usefixtures("on_any_device", "small_tiles")
@pytest.mark.parametrize("target", ["cpu-fp32", "gpu-fp32"])
def test_volumes_of_open_sizes(target: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(6, 6, 3, padding=1, groups=6), nn.ReLU(), nn.Conv3d(6, 6, 2, groups=6)).eval()
    batch, depth, width = (torch.export.Dim(name, min=4, max=12) for name in ("batch", "depth", "width"))
    sizes = ({0: batch, 2: depth, 4: width},)
    with lapilli.compile(model, (torch.randn(5, 6, 6, 5, 7),), dynamic_shapes=sizes, target=target) as program:
        for n, d, w in ((4, 5, 12), (5, 4, 7)):
            compared(program, model, torch.randn(n, 6, d, 5, w), FLOAT_BOUND)
