"""Transformers through torch.compile(backend="vulkan") and on the device: models of the transformers package with random weights,
constants that they make as they run, and the encoders of torch.nn with masks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torchvision_without_ops
from torch import Tensor, nn

from lapilli import autoload, backend

torchvision_without_ops.allow()
import transformers as hf  # noqa: E402

autoload.register()
CPU_OR_DEVICE = pytest.mark.parametrize("device", ["cpu", "vulkan"])
SMALL: dict[str, Any] = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


def llama() -> Any:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            **SMALL, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )  # fmt: skip


def gpt2() -> Any:
    return hf.GPT2LMHeadModel(hf.GPT2Config(**SMALL, n_positions=64, n_embd=32, n_layer=1, n_head=4))


def bert() -> Any:
    return hf.BertModel(
        hf.BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
            max_position_embeddings=64,
        )
    )  # fmt: skip


def t5() -> Any:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(**SMALL, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0)
    )


def whisper() -> Any:
    return hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            **SMALL, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=16, max_target_positions=32, num_mel_bins=8,
            decoder_start_token_id=1, begin_suppress_tokens=None, suppress_tokens=None,
        )
    )  # fmt: skip


MODELS: list[Callable[[], Any]] = [llama, gpt2, bert, t5, whisper]


def made(kind: Callable[[], Any]) -> tuple[Any, dict[str, Tensor]]:
    """A model, and arguments for it: two rows, one padded at its beginning."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    tokens = torch.randint(2, 64, (2, 7))
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    given = {"input_ids": tokens, "attention_mask": mask}
    if kind is whisper:
        given = {"input_features": torch.rand(2, 8, 32)}
    return kind().eval(), given


def on_gpu_alone(known: list[tuple[str, Any]]) -> bool:
    """Whether graphs were compiled and called that were not `known`, and none of them has a part that runs in torch."""
    made = [report for _, report in backend.reports() if all(report is not old for _, old in known)]
    return bool(made) and all(report.segments == ("gpu",) for report in made)


def cases(*short: tuple[Callable[[], Any], str], of: list[Callable[[], Any]]) -> list[Any]:
    """Every model on both devices; those of `short` in every run."""
    every = [(kind, device) for device in ("cpu", "vulkan") for kind in of]
    return [pytest.param(*case, marks=[] if case in short else pytest.mark.long) for case in every]


@pytest.mark.part(1)
@pytest.mark.parametrize("kind, device", cases((gpt2, "cpu"), (llama, "vulkan"), of=MODELS))
def test_forward(kind: Callable[[], Any], device: str) -> None:
    model, given = made(kind)
    if kind in (t5, whisper):
        given["decoder_input_ids"] = torch.randint(2, 64, (2, 3))
    known = backend.reports()
    run = torch.compile(copy.deepcopy(model).to(device), backend=backend.vulkan)
    with torch.no_grad():
        want, got = model(**given), run(**{name: t.to(device) for name, t in given.items()})
    assert on_gpu_alone(known) and got[0].device.type == device
    torch.testing.assert_close(got[0].cpu(), want[0], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of the package, about its own settings
@pytest.mark.part(1)
@pytest.mark.parametrize("kind, device", cases((gpt2, "vulkan"), of=[llama, gpt2, t5, whisper]))
def test_generate(kind: Callable[[], Any], device: str) -> None:
    """Every step is compiled: a cache that grows, and sizes that turn dynamic."""
    model, given = made(kind)
    known, own = backend.reports(), copy.deepcopy(model).to(device)
    own.compile(backend=backend.vulkan)
    options = {"max_new_tokens": 3 if kind in (llama, gpt2) else 2, "do_sample": False}
    with torch.no_grad():
        want = model.generate(**given, **options)
        got = own.generate(**{name: t.to(device) for name, t in given.items()}, **options)
    assert on_gpu_alone(known) and got.cpu().equal(want)


def constants(x: Tensor) -> list[Tensor]:
    device = x.device
    return [
        x[torch.tensor([0, 2], device=device)],
        x + torch.tensor(x.shape[0], device=device),
        x + torch.tensor([1.0, 2.0, 3.0], device=device)[1:2],
        x * torch.as_tensor(2.5),
        x * torch.tensor(2, dtype=torch.float64),
        (x.sqrt() * torch.tensor(0.1, dtype=torch.float64)).sum() + 1,
        torch.tensor([1.0, 2.0, 3.0], device=device).add_(x),
        torch.where(x > 1, x, torch.tensor(float("-inf"), device=device)),
        torch.tensor([1.0, 2.0], device=device),
        x + x.new_tensor([1, 2, 3]),
    ]


@CPU_OR_DEVICE
@pytest.mark.parametrize("with_gradients", [False, True])
def test_constants_that_a_graph_makes(with_gradients: bool, device: str) -> None:
    torch._dynamo.reset()
    x = torch.rand(3)
    own = x.clone().to(device).requires_grad_(with_gradients)
    got = torch.compile(constants, backend=backend.vulkan)(own)
    torch.testing.assert_close([t.detach().cpu() for t in got], constants(x))
    if with_gradients:
        like = x.clone().requires_grad_()
        for given, results in ((own, got), (like, constants(like))):
            sum((t.clamp(-9, 9).sum() for t in results), torch.zeros((), device=given.device)).backward()
        torch.testing.assert_close(own.grad.cpu(), like.grad)


@pytest.mark.filterwarnings("ignore")  # that nested tensors are a prototype
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoders_with_masks(norm_first: bool) -> None:
    """The quick way of inference. PyTorch has zeros where rows are padded at their ends; those are no results."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    own, x = copy.deepcopy(model).to("vulkan"), torch.rand(3, 5, 16)
    ends = torch.arange(5) >= torch.tensor([5, 3, 1])[:, None]
    empty = ends | torch.tensor([True, False, False])[:, None]
    additive = torch.zeros(3, 5).masked_fill(ends, float("-inf"))
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for padding in (None, ends, ends.flip(1), empty, additive):
            for mask in (None, causal):
                with context():
                    want = model(x, mask, padding)
                    got = own(x.to("vulkan"), *(None if m is None else m.to("vulkan") for m in (mask, padding))).cpu()
                dropped = torch.zeros(3, 5, dtype=torch.bool) if padding is None else padding.bool()
                torch.testing.assert_close(got[~dropped], want[~dropped], rtol=1e-4, atol=1e-5, equal_nan=True)


def test_attention_with_masks() -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    own, x = copy.deepcopy(model).to("vulkan"), torch.rand(3, 5, 16)
    ends = torch.arange(5) >= torch.tensor([5, 3, 1])[:, None]
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    heads = causal.expand(12, 5, 5) | torch.eye(5, dtype=torch.bool).flip(0)
    with torch.no_grad():
        for padding in (None, ends):
            for mask in (None, causal, heads, torch.zeros(5, 5).masked_fill(causal, float("-inf"))):
                for weights in ({"need_weights": False}, {}, {"average_attn_weights": False}):
                    if padding is not None and mask is not None and mask.dtype != padding.dtype:
                        continue
                    named: dict[str, Any] = {"key_padding_mask": padding, "attn_mask": mask}
                    want = model(x, x, x, **named, **weights)
                    there = {k: None if m is None else m.to("vulkan") for k, m in named.items()}
                    got = own(*[x.to("vulkan")] * 3, **there, **weights)
                    for a, b in zip(got, want, strict=True):
                        if b is not None:
                            torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5, equal_nan=True)
