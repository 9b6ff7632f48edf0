"""The exporters of the package transformers, and its modules for export, with Lapilli as the backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import language_models
import pytest
import torch
import torchvision_without_ops

import lapilli

torchvision_without_ops.allow()
import transformers as hf  # noqa: E402
from transformers.exporters import AutoHfExporter  # noqa: E402
from transformers.exporters.base import ExportedModel  # noqa: E402
from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM  # noqa: E402

from lapilli.export.hugging_face import VulkanConfig, VulkanRunner  # noqa: E402


def bert() -> Any:
    torch.manual_seed(0)
    return hf.BertForSequenceClassification(
        hf.BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
            max_position_embeddings=64,
        )
    ).eval()  # fmt: skip


def inputs(rows: int, length: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[0, length // 2 :] = 0
    return {"input_ids": torch.randint(2, 64, (rows, length)), "attention_mask": mask}


@pytest.mark.parametrize("precision, bound", [("fp32", 1e-4), ("fp16", 1e-2)])
def test_exported_and_loaded(precision: str, bound: float, tmp_path: Path) -> None:
    model, given = bert(), inputs(2, 9)
    config = VulkanConfig(precision=precision)
    exported = AutoHfExporter.from_config(config).export(model, given, config)
    want = model(**given)
    got = exported(**given)
    assert type(got) is type(want)
    torch.testing.assert_close(got.logits, want.logits, rtol=bound, atol=bound)
    exported.save_pretrained(tmp_path)
    assert (tmp_path / "model.lap").exists()
    again = ExportedModel.from_pretrained(tmp_path)
    torch.testing.assert_close(again(**given).logits, got.logits, rtol=0, atol=0)


def test_open_sizes() -> None:
    model, given = bert(), inputs(2, 9)
    sizes = {0: torch.export.Dim("n", min=1, max=8), 1: torch.export.Dim("tokens", min=2, max=64)}
    config = VulkanConfig(dynamic_shapes={name: sizes for name in given}, fallback="error")
    exported = AutoHfExporter.from_config(config).export(model, given, config)
    for rows, length in ((1, 2), (8, 31)):
        other = inputs(rows, length)
        torch.testing.assert_close(exported(**other).logits, model(**other).logits, rtol=1e-4, atol=1e-5)


def test_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="device is cuda"):
        VulkanRunner.from_program(None, None, "cuda")  # type: ignore[arg-type]


def test_the_package_s_module_for_decoders() -> None:
    """A cache of fixed size as the program's states: a token a run, after a prompt of one token at a time, as its generate does."""
    model = language_models.made("llama")
    model.generation_config.cache_implementation = "static"
    model.generation_config.cache_config = {"batch_size": 1, "max_cache_len": 24}
    module = TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=24)
    token = torch.tensor([[5]])
    exported = module.export(input_ids=token, cache_position=torch.tensor([0]))
    prompt = torch.randint(2, 290, (1, 6), generator=torch.Generator().manual_seed(3))
    want = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    with lapilli.compile(exported) as program:
        program.reset()
        written = prompt[0].tolist()
        for place in range(want.shape[1] - 1):
            logits = program(input_ids=torch.tensor([[written[place]]]), cache_position=torch.tensor([place]))
            if place >= prompt.shape[1] - 1:
                written.append(int(logits[0, -1].argmax()))
    assert written == want[0].tolist()
