"""Programs for the tests of the Java API, with inputs and what Python's player computes from them.

    python make_models.py FOLDER

For NAME.lap the files NAME.in0, NAME.out0, ... hold the elements of tensors, as they are in memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.export import Dim
from torch.utils.mobile_optimizer import optimize_for_mobile

import lapilli
from lapilli.llm.from_source import build, read
from lapilli.llm.gguf_source import read_gguf

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "examples"), str(ROOT / "tools")]

from chat import packaged  # noqa: E402
from language_models import made, save_folder  # noqa: E402


class Net(nn.Module):
    """An image classifier: (1, 3, 32, 32) -> (1, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Pair(nn.Module):
    """Two results of a float, an integer and a truth value."""

    def forward(self, x: torch.Tensor, n: torch.Tensor, on: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.where(on, x * 2, x), n * n + 1


class Count(nn.Module):
    """Adds up what it is given, from run to run."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        return self.total * 1.0


class Half(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 0.5, x.to(torch.bfloat16) + 1


def keep(
    folder: Path,
    name: str,
    program: lapilli.Program,
    inputs: Sequence[torch.Tensor],
    want: Sequence[torch.Tensor],
    **bounds: float,
) -> None:
    program.save(folder / f"{name}.lap")
    results = program(*inputs)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    for got, wanted in zip(results, want, strict=True):
        torch.testing.assert_close(got, wanted, equal_nan=True, **bounds)
    for kind, tensors in (("in", inputs), ("out", results)):
        for i, tensor in enumerate(tensors):
            words = (
                tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else torch.zeros(0, dtype=torch.uint8)
            )
            (folder / f"{name}.{kind}{i}").write_bytes(words.numpy().tobytes())


def mobile(folder: Path, net: nn.Module, x: torch.Tensor) -> None:
    """The files of the Vulkan tutorial and of the iOS tutorial, and one without a program."""
    optimized = optimize_for_mobile(torch.jit.script(net), backend="vulkan")
    torch.jit.save(optimized, folder / "told.pt")  # only its first layer tells what it takes
    optimized(x)
    torch.jit.save(optimized, folder / "net-vulkan.pt", _extra_files={"labels.txt": "one\ntwo"})
    metal = optimize_for_mobile(torch.jit.trace(net, x), backend="metal")
    metal._save_for_lite_interpreter(str(folder / "net_metal.pt"))
    torch.jit.save(torch.jit.script(net), folder / "plain.pt")


def classifier(folder: Path) -> None:
    """EfficientNet-Lite0 with its real weights, and a photo as Android's pixels."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    from efficientnet_lite0 import LABELS, PREPARE, pretrained
    from PIL import Image
    from skimage import data

    photo = np.asarray(Image.fromarray(data.chelsea()[:, 75:375]).resize(PREPARE.size), np.uint32)
    pixels = 255 << 24 | photo[..., 0] << 16 | photo[..., 1] << 8 | photo[..., 2]
    (folder / "cat.argb").write_bytes(pixels.astype(np.uint32).tobytes())
    (folder / "labels.txt").write_text("\n".join(LABELS))
    model = pretrained()
    x = (
        torch.from_numpy((photo.astype(np.float32) - PREPARE.mean[0]) / PREPARE.std[0])
        .permute(2, 0, 1)[None]
        .contiguous()
    )
    keep(folder, "efficientnet", lapilli.compile(model, (x,)), (x,), (model(x),), rtol=1e-4, atol=1e-4)


TEXTS = [
    "", " ", "The theory of an answer in a sentence", "  two  spaces\n\n\tand 12345 numbers, it's 3.14!",
    "Grüße, 世界 👩‍💻 e\u0301",
    "<begin>special<end> tokens <|im_start|>user\nHi<|im_end|>", "don't WE'LL\r\n x\u00a0y\u2003z ½ ٣", "a" * 40,
]  # fmt: skip


def language_model(folder: Path) -> None:
    """A random one, what Python writes with it, and what real tokenizers make of texts."""
    source = read(save_folder(made("llama"), folder / "llama"))
    (folder / "llm.lap").write_bytes(build(source, 96, target="cpu-fp32", sequences=2))
    expected: dict[str, Any] = {"tokenizers": [], "texts": TEXTS, "answers": []}
    texts = [source.text, read_gguf(packaged()).text]
    expected["tokenizers"] = [{"json": t.tokenizer, "tokens": [t.encode(x) for x in TEXTS]} for t in texts]
    with lapilli.LLM(folder / "llm.lap") as lm:
        for choices in ({}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3}):
            answer = lm.generate(TEXTS[2], max_tokens=24, seed=7, **choices)
            expected["answers"].append({"tokens": [t.id for t in answer.tokens], "text": answer.text, **choices})
        expected["prompt"] = lm.tokens(TEXTS[2])
    (folder / "llm.json").write_text(json.dumps(expected))


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    net = Net().eval()
    x = torch.rand(1, 3, 32, 32)
    keep(folder, "net", lapilli.compile(net, (x,)), (x,), (net(x),))
    mobile(folder, net, x)
    x = torch.rand(5, 7)
    model = nn.Sequential(nn.Linear(7, 7), nn.Tanh()).eval()
    keep(
        folder, "rows", lapilli.compile(model, (x,), dynamic_shapes=({0: Dim("n", min=0, max=64)},)), (x,), (model(x),)
    )
    x, n, on = torch.rand(3, 1), torch.tensor([1, -7, 46340]), torch.tensor([[True, False]])
    pair = Pair()
    keep(folder, "pair", lapilli.compile(pair, (x, n, on)), (x, n, on), pair(x, n, on))
    x = torch.tensor([1.0, float("nan"), float("inf")])
    keep(folder, "count", lapilli.compile(Count(), (x,)), (x,), (x,))
    x = torch.tensor([0.0, -1.5, 65504.0, 6e-8, float("inf"), float("nan"), 0.1], dtype=torch.float16)
    half = Half()
    with torch.no_grad():
        keep(folder, "half", lapilli.compile(half, (x,)), (x,), half(x))
    classifier(folder)
    language_model(folder)


if __name__ == "__main__":
    with torch.no_grad():
        main(Path(sys.argv[1]))
