"""Half precision: no worse than torch's own half-precision result on the CPU, both against float64."""

from __future__ import annotations

import copy

import pytest
import torch
from agreement import relative_error
from image_models import image, model_of, small
from torch import nn

import lapilli
from lapilli.ir.dtype import DType
from lapilli.target import FEW, plans_for


def check(model: nn.Module, x: torch.Tensor, target: str | None) -> None:
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        half = copy.deepcopy(model).half()(x.half())
    program = lapilli.compile(model, (x,), precision="fp16", target=target)
    got = program(x)
    assert got.dtype is torch.float32  # outputs keep the model's own type
    assert relative_error(got, exact) <= relative_error(half.double(), exact)


PLANS = [None, "cpu-fp16", "gpu-fp16", "gpu-fp32", pytest.param("any-fp32", marks=pytest.mark.poor_device)]


@pytest.mark.parametrize("target", PLANS)
def test_small_network(target: str | None, gpu_plans: None) -> None:
    check(small(), torch.randn(3, 3, 17, 15, generator=torch.Generator().manual_seed(1)), target)


@pytest.mark.parametrize("target", PLANS)
def test_a_model_in_half_precision_as_it_comes(target: str | None, gpu_plans: None) -> None:
    """Its own values decide which kernels it gets, not an option: all plans that precision="fp16" has."""
    model, x = small(), torch.randn(3, 3, 17, 15, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact = copy.deepcopy(model).half().double()(x.half().double())
        theirs = copy.deepcopy(model).half()(x.half())
    program = lapilli.compile(copy.deepcopy(model).half(), (x.half(),), target=target)
    got = program(x.half())
    assert got.dtype is torch.float16
    assert relative_error(got.double(), exact) <= relative_error(theirs.double(), exact)
    if target is None:
        others = {t.name for t in plans_for([DType.float16]) if t.dot} | {FEW.name}  # for codes, and for more buffers
        plans = [t.name for t in plans_for([DType.float16]) if t.name not in others]
        assert [plan.name for plan in program.description.methods[0].plans] == plans


def test_models_in_half_precision_use_matrix_units() -> None:
    from lapilli.compiler import compile_to_bytes
    from lapilli.runtime.description import Description

    def kernels(dtype: torch.dtype, device: str) -> list[str]:
        model = nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 64, 128)).eval()
        data = compile_to_bytes(model.to(dtype), (torch.randn(8, 16, 8, 8).to(dtype),), target=device)
        commands = Description.of(data).methods[0].plans[0].run
        return [command.kernel for command in commands if not command.kernel.startswith("map")]

    # The product has a long sum and few results: it is several, and their sum.
    assert kernels(torch.float16, "h100") == ["convolution_matrix", "matmul_matrix", "reduce_sum"]
    assert not any("matrix" in name for name in kernels(torch.float32, "h100"))


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18", "efficientnet_b0", "convnext_tiny"])
@pytest.mark.long
def test_classifiers(name: str) -> None:
    check(model_of(name), image(name), "cpu-fp16")  # what lavapipe takes


def test_classifier_on_kernels_for_gpus(gpu_plans: None) -> None:
    check(model_of("mobilenet_v2"), image("mobilenet_v2"), "gpu-fp16")


@pytest.mark.poor_device
def test_classifier_without_16_bit_types() -> None:
    check(model_of("mobilenet_v2"), image("mobilenet_v2"), "any-fp32")


def test_kernels_for_matrix_units_compile() -> None:
    """They run nowhere here: their code is made, and the plan says what it needs of a device."""
    from lapilli.compiler import compile_to_bytes
    from lapilli.runtime.description import Description

    model = nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 64, 128)).eval()
    data = compile_to_bytes(model, (torch.randn(8, 16, 8, 8),), precision="fp16", target="gpu-fp16-matrix")
    (plan,) = Description.of(data).methods[0].plans
    assert "cooperative_matrix" in str(plan.requirements)


def test_one_kernel_for_buffers_of_both_types() -> None:
    """The image is float32 and what the first layer makes is half; both are read by the same code."""
    layers = [nn.Conv2d(4, 32, 3, padding=1), nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.Conv2d(32, 8, 1)]
    check(nn.Sequential(*layers).requires_grad_(False), torch.randn(1, 4, 16, 16), "cpu-fp16")


class Masked(nn.Module):
    """Softmax of products over the columns that are not masked; in the last row, which has none, over all."""

    def forward(self, x: torch.Tensor, by: str) -> torch.Tensor:
        scores = x @ x.mT / 8
        mask = torch.arange(scores.shape[-1]) + torch.arange(scores.shape[-2])[:, None] >= scores.shape[-1] - 1
        least = torch.finfo(x.dtype).min
        masked = scores.masked_fill(mask, least) if by == "number" else scores + torch.where(mask, least, 0.0)
        return torch.softmax(masked, -1) @ x


@pytest.mark.parametrize("by", ["number", "sum"])
@pytest.mark.parametrize("target", ["cpu-fp16", "gpu-fp16", "any-fp32"])
def test_masks_of_the_least_number(target: str, by: str, gpu_plans: None) -> None:
    """float32's is infinite in half precision, and a row without anything else would become NaN."""
    x = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(2))
    with lapilli.compile(Masked(), (x, by), precision="fp16", target=target) as program:
        assert relative_error(program(x, by), Masked()(x, by)) <= 1e-3


def test_unknown_precision() -> None:
    with pytest.raises(lapilli.CompileError, match='choose "fp32" or "fp16"'):
        lapilli.compile(nn.ReLU(), (torch.ones(1),), precision="half")  # type: ignore[arg-type]


def test_unknown_target() -> None:
    with pytest.raises(lapilli.CompileError, match="choose None"):
        lapilli.compile(nn.ReLU(), (torch.ones(1),), target="cuda")


def test_weights_take_half_the_space() -> None:
    model = nn.Linear(256, 256)
    full = lapilli.compile(model, (torch.randn(1, 256),), target="any-fp32")
    half = lapilli.compile(model, (torch.randn(1, 256),), precision="fp16", target="any-fp32")

    def size(program: lapilli.Program) -> int:
        return sum(c.size for c in program.description.constants)

    assert size(half) < 0.6 * size(full)


def test_a_module_of_halves_needs_no_precision() -> None:
    """model.half() has half-precision inputs, weights and outputs."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4)).eval()
    x = torch.randn(2, 3, 6, 6)
    exact = copy.deepcopy(model).half().double()(x.half().double()).detach()
    theirs = copy.deepcopy(model).half()(x.half()).detach()
    got = lapilli.compile(copy.deepcopy(model).half(), (x.half(),))(x.half())
    assert got.dtype is torch.float16
    floor = 2**-11  # one rounding of the result
    assert relative_error(got.double(), exact) <= max(relative_error(theirs.double(), exact), floor)


class NormOfPooled(nn.Module):
    """The powers under the root follow a pooling, which computes them as its epilogue."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(nn.functional.max_pool2d(x, 2, 1, 1), dim=-1)


@pytest.mark.parametrize("scale", [1e-6, 300.0])
def test_squares_under_a_root_are_not_rounded_to_half_precision(scale: float) -> None:
    x = torch.rand(2, 4, 3, 3) * scale
    made = lapilli.compile(NormOfPooled(), (x,), precision="fp16")(x)
    torch.testing.assert_close(made, NormOfPooled()(x), rtol=2**-10, atol=0)


@pytest.mark.parametrize("target", ["gpu-fp16", "cpu-fp16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gelu_of_every_number_of_16_bits(dtype: torch.dtype, target: str, gpu_plans: None) -> None:
    """Less precise than for float32, but rounded once: to the nearest number, or the next one if they are about as near."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    got = lapilli.compile(nn.GELU(), (x,), target=target)(x)
    exact = x.double() * torch.special.erfc(x.double() * -(0.5**0.5)) / 2
    nearest, limits = exact.to(dtype), torch.finfo(dtype)
    torch.testing.assert_close(got[~exact.isfinite()], nearest[~exact.isfinite()], rtol=0, atol=0, equal_nan=True)
    unit = (exact.abs().log2().floor().exp2() * limits.eps).clamp(min=limits.smallest_normal * limits.eps)
    if dtype is torch.bfloat16:  # whose least numbers are those of float32: drivers need not keep denormals there
        unit = unit.clamp(min=16 * limits.smallest_normal)
    assert ((got.double() - exact).abs() <= 0.6 * unit)[exact.isfinite()].all()
