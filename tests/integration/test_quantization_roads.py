"""The programs of docs/quantization-roads.md, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx_quantized
import pytest
import torch
from language_models import made, save_folder, save_gguf

import lapilli
from lapilli.llm import from_source

PAGE = Path(__file__).parents[2] / "docs" / "quantization-roads.md"
PROGRAMS = {
    title: re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    for title, section in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
}  # fmt: skip
LAYERS = {
    "PT2E with VulkanQuantizer": [(2, 0)],
    "Weights that are chosen by data": [(2, 0)],
    "Training with quantization": [(2, 0)],
    "torchao's quantize_": [(0, 2), (0, 2)],
    "The eager recipe": [(2, 0)],
    "quantize_dynamic": [(2, 0)],
}
"""How many layers are sums of integers, and how many are not, of the programs of a section."""


@pytest.mark.parametrize("title, number", [(title, k) for title, of in LAYERS.items() for k in range(len(of))])
def test_models_give_torchs_results(title: str, number: int) -> None:
    """To two of 255 steps of their range."""
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    exec(compile(PROGRAMS[title][number], str(PAGE), "exec"), found)
    program, x = found["program"], found["x"]
    with torch.no_grad():
        wanted = found["quantized"](x)
    assert (program(x) - wanted).abs().max() <= 2 / 255 * (wanted.max() - wanted.min())
    report = program.report()
    assert (len(report.in_integers), len(report.dequantized)) == LAYERS[title][number]
    assert report.segments == ("gpu",)


def test_files_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    weights = {f"w{k}": rng.standard_normal((64, 64)).astype(np.float32) for k in range(2)}
    node = onnx_quantized.NODE
    nodes = [node("MatMul", ["x", "w0"], ["a"]), node("Relu", ["a"], ["b"]), node("MatMul", ["b", "w1"], ["y"])]
    x = np.zeros((4, 64), np.float32)
    onnx_quantized.saved(tmp_path, nodes, {"x": x}, weights, {"y": x})
    found: dict[str, Any] = {}
    exec(compile(PROGRAMS["A quantized ONNX file"][0], str(PAGE), "exec"), found)
    wanted = onnxruntime.InferenceSession("int8.onnx").run(None, {"x": found["x"].numpy()})[0]
    assert np.abs(found["y"].numpy() - wanted).max() <= 2 / 255 * (wanted.max() - wanted.min())
    assert len(found["program"].report().in_integers) == 2


@pytest.mark.part(2)
@pytest.mark.parametrize("title", ["A GGUF file", "A Hugging Face folder, quantized on the way in"])
def test_language_models_write(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compiled for one device: the other plans take as long again."""
    monkeypatch.chdir(tmp_path)
    build = from_source.build
    monkeypatch.setattr(
        from_source, "build", lambda source, **options: build(source, **options | {"target": "cpu-fp32"})
    )
    model = made("qwen2")
    model.config.hidden_size = 64  # in whole blocks
    torch.manual_seed(0)
    model = type(model)(model.config).eval().requires_grad_(False)
    if "GGUF" in title:
        save_gguf(model, tmp_path / "model.gguf", "Q8_0")
    else:
        save_folder(model, tmp_path / "folder")
    exec(compile(PROGRAMS[title][0], str(PAGE), "exec"), {})
    assert len(capsys.readouterr().out) > 1
    assert ("GGUF" in title) == (tmp_path / "model.lap").exists()


def test_every_program_of_the_page_is_run() -> None:
    others = {"A quantized ONNX file": 1, "A GGUF file": 1, "A Hugging Face folder, quantized on the way in": 1}
    assert {title: len(found) for title, found in PROGRAMS.items()} == {t: len(of) for t, of in LAYERS.items()} | others
    assert lapilli.__name__ in PAGE.read_text(encoding="utf-8")
