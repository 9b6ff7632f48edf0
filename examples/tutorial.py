"""PyTorch's Vulkan tutorial, on stock PyTorch: a scripted model is optimized for the GPU, saved, loaded and run.

    python examples/tutorial.py [MODEL]

Needs lapilli[compile] and torchvision. Weights are random: nothing is downloaded. MODEL: a name of torchvision, default
mobilenet_v2."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.mobile_optimizer import optimize_for_mobile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import torchvision_without_ops

torchvision_without_ops.allow()
import torchvision  # noqa: E402


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "mobilenet_v2"
    model = torchvision.models.get_model(name, weights=None).eval()
    script_model = torch.jit.script(model)
    image = torch.rand(1, 3, 224, 224)
    with torch.no_grad():
        want = model(image)
    for backend in ("cpu", "vulkan", "metal"):
        optimized = optimize_for_mobile(script_model, backend=backend)
        with tempfile.TemporaryDirectory() as folder:
            torch.jit.save(optimized, f"{folder}/model.pt")
            loaded = torch.jit.load(f"{folder}/model.pt")
        with torch.no_grad():
            begin = time.perf_counter()
            got = loaded(image)
            first = time.perf_counter() - begin
            begin = time.perf_counter()
            loaded(image)
            second = time.perf_counter() - begin
        error = float((got - want).norm() / want.norm())
        operators = torch.jit.export_opnames(optimized)
        print(f"{backend:6}  relative error {error:.1e}, first run {first:.2f} s, second {second * 1e3:.1f} ms")
        print(f"        {', '.join(operators)}")


if __name__ == "__main__":
    main()
