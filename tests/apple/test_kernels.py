"""The kernels of models for Apple's GPUs in Metal's language: by Slang, and as MoltenVK translates them, each read by Clang."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import language_models
import metal_language
import pytest
import torch
from image_models import SIDES, model_of
from torch import nn

from lapilli import sampling
from lapilli.codegen import slang
from lapilli.compiler import compile_to_bytes
from lapilli.llm import from_source

Given = tuple[Any, tuple[torch.Tensor, ...]]


def transformer() -> Given:
    layer = nn.TransformerDecoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerDecoder(layer, 2).eval(), (torch.zeros(2, 17, 64), torch.zeros(2, 9, 64))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(24, 32, batch_first=True), nn.GRU(32, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.gru(self.lstm(x)[0])[0]
        return found


def recurrent() -> Given:
    return Recurrent().eval(), (torch.zeros(3, 20, 24),)


def next_token() -> Given:
    return (lambda logits: sampling.next_token(logits, 0.8, 20, 0.9)), (torch.zeros(2, 1000),)


def others() -> Given:
    def compute(x: torch.Tensor, at: torch.Tensor) -> list[torch.Tensor]:
        picked = x[at].sort(-1).values.cumsum(-1)
        return [
            picked, x.topk(5).indices, x.argmax(-1), torch.fft.rfft(x).abs(), x.erf().lgamma(), (at << 2) // 3, x.isnan()
        ]  # fmt: skip

    return compute, (torch.zeros(33, 40), torch.zeros(7, dtype=torch.int64))


def of_images(name: str) -> Callable[[], Given]:
    return lambda: (model_of(name), (torch.zeros(1, 3, SIDES[name], SIDES[name]),))


MODELS: dict[str, Callable[[], Given]] = {
    **{name: of_images(name) for name in SIDES},
    **{make.__name__: make for make in (transformer, recurrent, next_token, others)},
}


class Kernels:
    """What a program is made of, once each."""

    def __init__(self) -> None:
        self.noted: dict[str, tuple[str, str, bytes]] = {}

    def note(self, name: str, source: str, spirv: bytes) -> None:
        self.noted[source] = name, slang.to_metal(source), spirv

    def check(self) -> None:
        found = metal_language.problems(self.noted.values())
        assert self.noted and not found, f"{len(found)} of {len(self.noted)}:\n" + "\n".join(found[:5])


@pytest.mark.parametrize(
    "name, precision", [*((name, "fp16") for name in MODELS), *((name, "fp32") for name in MODELS if name not in SIDES)]
)
def test_kernels_are_in_the_language(name: str, precision: str) -> None:
    model, inputs = MODELS[name]()
    kernels = Kernels()
    compile_to_bytes(model, inputs, target="metal", precision=precision, each_kernel=kernels.note)
    kernels.check()


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_those_of_language_models_too(quantize: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels()
    monkeypatch.setattr(from_source, "compile_to_bytes", partial(compile_to_bytes, each_kernel=kernels.note))
    folder = language_models.save_folder(language_models.made("llama"), tmp_path)
    from_source.compile_source(folder, precision="fp16", quantize=quantize, target="metal", say=lambda text: None)
    kernels.check()


@pytest.mark.parametrize(
    "wrong",
    [
        "kernel void main0(device float* x [[buffer(0)]] { }",
        "kernel void main0(device float* x [[buffer(0)]]) { y[0] = 1.0; }",
        "kernel void main0(device float4* x [[buffer(0)]]) { x[0] = int4(1); }",
        "kernel void main0(device float4* x [[buffer(0)]]) { x[0] = float4(1.0, 2.0, 3.0); }",
        "kernel void main0(device uint* x [[buffer(0)]]) { x[0] = as_type<uint>(half(1)); }",
        "kernel void main0(device float* x [[buffer(0)]]) { x[0] = unknown(1.0); }",
    ],
)
def test_what_is_not_in_the_language_is_seen(wrong: str) -> None:
    with pytest.raises(metal_language.RefusedError, match="error:"):
        metal_language.check(f"#include <metal_stdlib>\nusing namespace metal;\n{wrong}\n")
