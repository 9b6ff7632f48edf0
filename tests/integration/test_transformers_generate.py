"""`generate` of the package transformers on the device: quick by default, with the tokens of the CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import language_models
import pytest
import torch
import torch._dynamo
import torch._dynamo.utils
import torchvision_without_ops
from installed import ROOT, run_installed

from lapilli import autoload, backend

torchvision_without_ops.allow()
import transformers as hf  # noqa: E402
from transformers.generation import utils  # noqa: E402

autoload.register()


@pytest.fixture(autouse=True)
def anew() -> None:
    torch._dynamo.reset()
    _before[:] = list(backend._live)


_before: list[int] = []


def compiled() -> int:
    """How many graphs a test has compiled so far, of those that are still in use."""
    return sum(made.report is not None for key, made in list(backend._live.items()) if key not in _before)


def breaks() -> list[str]:
    """Why a graph ended before its function did."""
    return list(torch._dynamo.utils.counters["graph_break"])


def pair(kind: str) -> tuple[Any, Any]:
    model = language_models.made(kind)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model, copy.deepcopy(model).to("vulkan")


def prompt(rows: int, length: int) -> torch.Tensor:
    return torch.randint(2, 290, (rows, length), generator=torch.Generator().manual_seed(rows * length))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma", "phi3"])
def test_tokens_are_the_same(kind: str) -> None:
    """Answers of several lengths by one program of a step."""
    model, own = pair(kind)
    seen: list[int] = []
    for rows, length, count in ((1, 5, 40), (1, 9, 12)):
        tokens = prompt(rows, length)
        want = model.generate(tokens, max_new_tokens=count, do_sample=False)
        got = own.generate(tokens.to("vulkan"), max_new_tokens=count, do_sample=False)
        assert got.is_vulkan and got.cpu().equal(want)
        seen.append(compiled())
    few = 4 if kind == "phi3" else 1  # its window: not full, full, and with numbers as symbols
    assert 1 <= seen[0] <= few and seen[1] <= few, breaks()


@pytest.mark.long
def test_padded_rows_and_beams() -> None:
    model, own = pair("llama")
    tokens = prompt(3, 7)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    for options in ({"num_beams": 3}, {"repetition_penalty": 1.3, "min_new_tokens": 4}):
        given: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False} | options
        want = model.generate(tokens, attention_mask=mask, **given)
        got = own.generate(tokens.to("vulkan"), attention_mask=mask.to("vulkan"), **given)
        assert got.cpu().equal(want), options
    assert compiled()


def test_the_end_and_a_whole_context() -> None:
    """An answer ends with its end token, and the last place of the context is used."""
    model, own = pair("llama")
    tokens = prompt(1, 4)
    free = model.generate(tokens, max_new_tokens=20, do_sample=False)
    end = int(free[0, 11])
    want = model.generate(tokens, max_new_tokens=20, do_sample=False, eos_token_id=end)
    assert want.shape[1] < free.shape[1]
    assert own.generate(tokens.to("vulkan"), max_new_tokens=20, do_sample=False, eos_token_id=end).cpu().equal(want)
    most = model.config.max_position_embeddings
    tokens = prompt(1, most - 6)
    want = model.generate(tokens, max_length=most, do_sample=False)
    assert own.generate(tokens.to("vulkan"), max_length=most, do_sample=False).cpu().equal(want)


@pytest.mark.long
def test_what_the_caller_chooses_stays() -> None:
    model, own = pair("llama")
    tokens = prompt(1, 5)
    want = model.generate(tokens, max_new_tokens=6, do_sample=False)
    there = tokens.to("vulkan")
    for options in (
        {"disable_compile": True}, {"use_cache": False}, {"cache_implementation": "dynamic"},
        {"past_key_values": hf.DynamicCache(config=model.config)}, {"prompt_lookup_num_tokens": 2},
    ):  # fmt: skip
        got = own.generate(there, max_new_tokens=6, do_sample=False, **options)
        assert got.cpu().equal(want) and not compiled(), options
    cache = hf.StaticCache(config=model.config, max_cache_len=32)
    assert own.generate(there, max_new_tokens=6, do_sample=False, past_key_values=cache).cpu().equal(want)
    assert compiled() == 1, breaks()
    config = hf.CompileConfig(backend="vulkan", mode="default", fullgraph=True)
    assert own.generate(there, max_new_tokens=6, do_sample=False, compile_config=config).cpu().equal(want)
    before = compiled()
    assert model.generate(tokens, max_new_tokens=6, do_sample=False).equal(want)
    assert compiled() == before  # the CPU's own
    assistant = copy.deepcopy(own)
    got = own.generate(there, max_new_tokens=6, do_sample=False, assistant_model=assistant)
    assert got.cpu().equal(want)


@pytest.mark.long
def test_samples_follow_the_device_and_its_seed() -> None:
    _, own = pair("llama")
    there = prompt(2, 5).to("vulkan")
    answers = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        answers.append(own.generate(there, max_new_tokens=12, do_sample=True, top_k=20).tolist())
    assert answers[0] == answers[1] != answers[2]


ORDER = """
import sys
sys.path.insert(0, {tools!r})
import torch, torchvision_without_ops
torchvision_without_ops.allow()
{first}
{second}
from transformers.generation.utils import GenerationMixin
from lapilli import torch_compat
ours = "lapilli" in GenerationMixin.__dict__["_prepare_cache_for_generation"].__code__.co_filename
listed = [name for name, patch in torch_compat.PATCHES.items() if patch.when == "transformers"]
replaced = [name for name in torch_compat.replaced if name.startswith("transformers")]
assert (ours, replaced) == ({expected}, listed if {expected} else [])
"""
USE, IMPORT = 'torch.ones(2, device="vulkan")', "import transformers.generation.utils"


@pytest.mark.part(3)
@pytest.mark.parametrize("first, second, expected", [(USE, IMPORT, True), (IMPORT, USE, True), (IMPORT, "pass", False)])
def test_nothing_is_replaced_before_the_device_is_used(first: str, second: str, expected: bool, tmp_path: Path) -> None:
    script = ORDER.format(first=first, second=second, expected=expected, tools=str(ROOT / "tools"))
    run_installed(script, tmp_path)


def test_another_version_of_the_package() -> None:
    """One without what this builds on is left as it is."""
    from lapilli.eager.generation import prefer_compiled_steps

    class Mixin:
        pass

    prefer_compiled_steps(type("utils", (), {"GenerationMixin": Mixin}))
    assert not hasattr(Mixin, "_prepare_cache_for_generation") and hasattr(utils, "GenerationMixin")
