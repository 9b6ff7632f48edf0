"""The code of PyTorch's own tutorials on stock torch, pasted into a file and run.

- "PyTorch Vulkan Backend User Workflow" (tutorials/prototype/vulkan_workflow)
- "(Prototype) Use iOS GPU in PyTorch" (tutorials/prototype/ios_gpu_workflow)
- "PyTorch Mobile Performance Recipes" (tutorials/recipes/mobile_perf)

A second process then loads what a tutorial saved, with no import but torch's, and compares it with the model itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import fresh
import pytest

VULKAN_MODEL = """
import torch
import torchvision

model = torchvision.models.mobilenet_v2(pretrained=True)
model.eval()
script_model = torch.jit.script(model)
torch.jit.save(script_model, "mobilenet2.pt")
"""

VULKAN_OPTIMIZE = """
from torch.utils.mobile_optimizer import optimize_for_mobile
script_model_vulkan = optimize_for_mobile(script_model, backend='vulkan')
torch.jit.save(script_model_vulkan, "mobilenet2-vulkan.pt")
"""

VULKAN_BLOCKED = """
from torch.utils.mobile_optimizer import MobileOptimizerType
script_model_vulkan = optimize_for_mobile(
    script_model, backend='vulkan', optimization_blocklist={MobileOptimizerType.VULKAN_AUTOMATIC_GPU_TRANSFER})
"""

VULKAN_PYTHON = """
print(torch.is_vulkan_available())
tensor = torch.rand(1, 3, 64, 64)
tensor_vulkan = tensor.to(device='vulkan')
tensor_output_vulkan = script_model_vulkan.forward(tensor_vulkan)
tensor_output = tensor_output_vulkan.cpu()
"""

METAL = """
import torch
import torchvision
from torch.utils.mobile_optimizer import optimize_for_mobile

model = torchvision.models.mobilenet_v2(pretrained=True)
scripted_model = torch.jit.script(model)
optimized_model = optimize_for_mobile(scripted_model, backend='metal')
print(torch.jit.export_opnames(optimized_model))
optimized_model._save_for_lite_interpreter('./mobilenetv2_metal.pt')
"""

RECIPE_MODEL = """
import torch
from torch.utils.mobile_optimizer import optimize_for_mobile

class AnnotatedConvBnReLUModel(torch.nn.Module):
    def __init__(self):
        super(AnnotatedConvBnReLUModel, self).__init__()
        self.conv = torch.nn.Conv2d(3, 5, 3, bias=False).to(dtype=torch.float)
        self.bn = torch.nn.BatchNorm2d(5).to(dtype=torch.float)
        self.relu = torch.nn.ReLU(inplace=True)
        self.quant = torch.quantization.QuantStub()
        self.dequant = torch.quantization.DeQuantStub()

    def forward(self, x):
        x.contiguous(memory_format=torch.channels_last)
        x = self.quant(x)
        x = self.conv(x)
        x = self.bn(x)
        x = self.relu(x)
        x = self.dequant(x)
        return x

model = AnnotatedConvBnReLUModel()
"""

RECIPE_FUSE = """
torch.quantization.fuse_modules(model, [['conv', 'bn', 'relu']], inplace=True)
"""

RECIPE_QUANTIZE = """
model.qconfig = torch.quantization.get_default_qconfig('qnnpack')
torch.quantization.prepare(model, inplace=True)
# Calibrate your model
def calibrate(model, calibration_data):
    # Your calibration code here
    return
calibrate(model, [])
torch.quantization.convert(model, inplace=True)
"""

RECIPE_OPTIMIZE = """
torchscript_model = torch.jit.script(model)
torchscript_model_optimized = optimize_for_mobile(torchscript_model)
torch.jit.save(torchscript_model_optimized, "model.pt")
"""

RECIPE_IOS = """
import torch
import torchvision
from torch.utils.mobile_optimizer import optimize_for_mobile

model = torchvision.models.mobilenet_v2(pretrained=True)
model.eval()
example = torch.rand(1, 3, 224, 224)
traced_script_module = torch.jit.trace(model, example)
torchscript_model_optimized = optimize_for_mobile(traced_script_module)
torch.jit.save(torchscript_model_optimized, "model.pt")
"""

COMPARE = """
import torch
optimized = {load}
x = torch.rand(1, 3, 64, 64)
with torch.no_grad():
    want = {want}(x)
    got = optimized(x)
assert got.device.type == "cpu"
error = float((got - want).norm() / want.norm())
assert error < {bound}, error
"""


def test_vulkan_workflow(tmp_path: Path) -> None:
    """From the top to the end, where tensors are moved to the device and back by hand; then what it saved, without those."""
    printed = fresh.run(
        tmp_path, VULKAN_MODEL, VULKAN_OPTIMIZE, VULKAN_BLOCKED, VULKAN_PYTHON,
        "print(tensor_output_vulkan.device.type, float((tensor_output - script_model(tensor)).norm() / tensor_output.norm()))",
    )  # fmt: skip
    available, result = printed.splitlines()
    assert available == "True"
    device, error = result.split()
    assert device == "vulkan" and float(error) < 1e-4
    reload = {"load": 'torch.jit.load("mobilenet2-vulkan.pt")', "want": 'torch.jit.load("mobilenet2.pt")'}
    fresh.run(tmp_path, COMPARE.format(bound=1e-4, **reload))


@pytest.mark.long
def test_metal_workflow(tmp_path: Path) -> None:
    """In training mode, as the tutorial leaves the model: the optimized one is in eval mode. It computes in half precision."""
    printed = fresh.run(tmp_path, METAL, 'model.eval(); torch.jit.save(torch.jit.script(model), "model.pt")')
    assert "'lapilli_prepack::run'" in printed
    fresh.run(
        tmp_path,
        "from torch.jit.mobile import _load_for_lite_interpreter as load",
        COMPARE.format(bound=5e-3, load='load("mobilenetv2_metal.pt")', want='torch.jit.load("model.pt")'),
    )


def test_mobile_performance_recipe(tmp_path: Path) -> None:
    fresh.run(tmp_path, RECIPE_MODEL, RECIPE_FUSE, RECIPE_QUANTIZE, "quantized = model", RECIPE_OPTIMIZE,
              'torch.jit.save(torch.jit.script(quantized), "quantized.pt")')  # fmt: skip
    fresh.run(
        tmp_path, COMPARE.format(bound=1e-6, load='torch.jit.load("model.pt")', want='torch.jit.load("quantized.pt")')
    )


def test_benchmark_lines(scaled: Path) -> None:
    """`lapilli bench` says what speed_benchmark_torch says in the recipe, with its options."""
    command = [sys.executable, "-m", "lapilli.cli", "bench", str(scaled), "--input_dims=4,3", "--input_type=float"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    lines = iter(printed.splitlines())
    for wanted in ("Starting benchmark.", "Running warmup runs.", "Main runs."):
        assert wanted in lines  # in this order
    assert any(
        re.fullmatch(r"Main run finished\. Microseconds per iter: [\d.]+\. Iters per second: [\d.]+", line)
        for line in lines
    )


@pytest.mark.long  # of two large files: the recipe above does the same with a small one
def test_mobile_performance_recipe_for_ios(tmp_path: Path) -> None:
    fresh.run(tmp_path, RECIPE_IOS, 'torch.jit.save(traced_script_module, "traced.pt")')
    fresh.run(
        tmp_path, COMPARE.format(bound=1e-4, load='torch.jit.load("model.pt")', want='torch.jit.load("traced.pt")')
    )
