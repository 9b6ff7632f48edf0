"""Adapters of the package peft on a Llama of the package transformers: trained on the device as on the CPU, with nothing of it
there; saved, loaded, merged, compiled."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision_without_ops
from torch import Tensor, nn

import lapilli
from lapilli import autoload, backend

torchvision_without_ops.allow()
import peft  # noqa: E402
import transformers as hf  # noqa: E402

autoload.register()
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
SOME = ["q_proj", "down_proj"]
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that runs on the CPU raises."""
    monkeypatch.setenv("LAPILLI_STRICT", "1")


def llama() -> Any:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=16, pad_token_id=0,
        )
    )  # fmt: skip


def lora(**options: Any) -> peft.PeftConfig:
    return peft.LoraConfig(r=2, lora_alpha=4, target_modules=SOME, task_type="CAUSAL_LM", **options)


def adapted(config: peft.PeftConfig) -> tuple[Any, Any]:
    """A model with an adapter, and the same one on the device."""
    torch.manual_seed(1)
    model = peft.get_peft_model(llama(), config)
    return model, copy.deepcopy(model).to("vulkan")


def losses(model: Any) -> list[float]:
    """Of three steps, in which the adapter alone is trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    model.train()
    tokens, found = TOKENS.to(model.device), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    assert found[2] < found[1] < found[0]
    return found


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model.eval()(input_ids=TOKENS.to(model.device)).logits
    return found.cpu()


class Logits(nn.Module):
    """What lapilli.compile takes: tensors to tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return found


def near(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_training_and_files(tmp_path: Path) -> None:
    """The file that the device's adapter wrote is that of the CPU's, and serves models there and here."""
    model, own = adapted(lora())
    near(losses(own), losses(model))
    own.save_pretrained(tmp_path)
    want = logits(model)
    assert (want - logits(llama())).abs().max() > 0.01
    for device in ("cpu", "vulkan"):
        near(logits(peft.PeftModel.from_pretrained(llama().to(device), tmp_path)), want)


def test_merged_and_compiled() -> None:
    """An adapter that is made on the device, merged there, and compiled from there."""
    base = llama()
    own = peft.get_peft_model(copy.deepcopy(base).to("vulkan"), lora(init_lora_weights=False))
    unmerged = logits(own)
    with own.disable_adapter():
        near(logits(own), logits(base))
    assert (unmerged - logits(base)).abs().max() > 0.01
    merged = own.merge_and_unload()
    near(logits(merged), unmerged)
    with lapilli.compile(Logits(merged).eval(), (TOKENS.to("vulkan"),)) as program:
        assert program.report().segments == ("gpu",)
        near(program(TOKENS), unmerged)


@pytest.mark.long
@pytest.mark.parametrize(
    "config",
    [
        lora(use_dora=True),
        lora(use_rslora=True, modules_to_save=["lm_head"]),
        lora(bias="lora_only", trainable_token_indices=[1, 3]),
        peft.AdaLoraConfig(
            init_r=4, target_r=2, total_step=9, tinit=1, tfinal=2, target_modules=SOME, task_type="CAUSAL_LM"
        ),
        peft.IA3Config(
            target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
        ),
        peft.LoHaConfig(r=2, target_modules=SOME, task_type="CAUSAL_LM"),
        peft.LoKrConfig(r=2, target_modules=SOME, task_type="CAUSAL_LM"),
        peft.OFTConfig(oft_block_size=4, target_modules=SOME, task_type="CAUSAL_LM"),
        peft.FourierFTConfig(n_frequency=8, target_modules=SOME, task_type="CAUSAL_LM"),
        peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
        peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    ],
    ids=["dora", "rslora", "tokens", "adalora", "ia3", "loha", "lokr", "oft", "fourier", "prompt", "prefix"],
)
def test_methods(config: peft.PeftConfig, tmp_path: Path) -> None:
    model, own = adapted(config)
    near(losses(own), losses(model))
    own.save_pretrained(tmp_path)
    near(logits(peft.PeftModel.from_pretrained(llama().to("vulkan"), tmp_path)), logits(model))


@pytest.mark.long
@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_adapters_from_factors_of_weights(start: str) -> None:
    """docs/device.md: PyTorch refuses them on a device that it does not have built in; on the CPU they are made, and then moved."""
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        peft.get_peft_model(llama().to("vulkan"), lora(init_lora_weights=start))
    model, own = adapted(lora(init_lora_weights=start))
    near(losses(own), losses(model))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")  # peft has this name alone
def test_checkpointing() -> None:
    """Activations that the backward computes again."""
    model, own = adapted(lora())
    for m in (model, own):
        m.gradient_checkpointing_enable()
        m.enable_input_require_grads()
    near(losses(own), losses(model))


@pytest.mark.long
def test_compiled_training() -> None:
    torch._dynamo.reset()
    model, own = adapted(lora())
    own.compile(backend=backend.vulkan)
    near(losses(own), losses(model))
    assert backend.reports()
