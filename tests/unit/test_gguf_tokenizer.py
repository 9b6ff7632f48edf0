"""Tokenizers of GGUF files, beside other ways to make the same."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torchvision_without_ops
from tokenizers import Tokenizer, models, pre_tokenizers

import lapilli
from lapilli.llm.gguf_tokenizer import _SPLITS, text_of

torchvision_without_ops.allow()
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS  # noqa: E402

TEXTS = (
    "",
    " ",
    "a",
    "It's 12345 o'clock,  isn't it?\n\n\tYes ",
    "été 日本語 🙂 x²",
    "HeLLo'LL   w0rld\r\n !!",
    "don't  stop",
)


def bytes_in_pairs(pre: str) -> dict[str, Any]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "Ġ t", "Ġt h", "1 2", "Ġ Ġ", "' t", "Ċ Ċ", "12 3", "l l", "L L"]
    tokens = letters + [m.replace(" ", "") for m in merges] + ["<end>"]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3], "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }  # fmt: skip


@pytest.mark.parametrize("pre", ["gpt-2", "smollm"])
def test_text_is_cut_as_the_original_tokenizers_do(pre: str) -> None:
    fields = bytes_in_pairs(pre)
    vocabulary = {t: k for k, t in enumerate(fields["tokenizer.ggml.tokens"])}
    theirs = Tokenizer(models.BPE(vocabulary, [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"]]))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    theirs.pre_tokenizer = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    ours = text_of(fields)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("a<end>b")[1] == len(vocabulary) - 1 and ours.decode(ours.encode("a<end>b")) == "ab"
    assert ours.ends == (len(vocabulary) - 1,)


def test_patterns_are_those_of_transformers() -> None:
    for name in ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "qwen2", "deepseek-r1-qwen"):
        assert _SPLITS[name] == [GGUF_PRE_TOKENIZER_SPLITS[name]]
    with pytest.raises(lapilli.CompileError, match="as 'other' does; taken are default"):
        text_of(bytes_in_pairs("other"))
    with pytest.raises(lapilli.CompileError, match="kind 'wpm'"):
        text_of({"tokenizer.ggml.model": "wpm", "tokenizer.ggml.tokens": ["a"]})


def merged(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's way: again and again the neighbours whose pair has the highest score, the first of several."""
    parts = list(text)
    while True:
        pairs = [(scores.get(a + b), -k) for k, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_merge_by_their_scores(prefix: bool) -> None:
    rng = np.random.default_rng(1)
    letters = list("▁abcde")
    words = ["".join(rng.choice(letters, n)) for n in rng.integers(2, 6, 60)]
    pieces = list(dict.fromkeys(letters + words + ["".join(w[:k]) for w in words for k in range(2, len(w))]))
    rng.shuffle(pieces)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    scores = [0.0] * 259 + [-float(k) for k in range(len(pieces))]
    text = text_of({
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.add_space_prefix": prefix,
    })  # fmt: skip
    of = dict(zip(tokens[259:], scores[259:], strict=True))
    for _ in range(50):
        given = "".join(rng.choice(list(" abcde"), 20))
        found = text.encode(given)
        assert found[0] == 1  # begins as its texts do
        spelled = ("▁" if prefix else "") + given.replace(" ", "▁")
        assert [tokens[k] for k in found[1:]] == merged(spelled, of)
        assert text.decode(found) == given
    assert text.decode(text.encode("aé")) == "aé"  # as bytes
    assert b"".join(map(text.piece_bytes, text.encode("aé")))[-3:] == "aé".encode()


def test_parts_of_characters_have_bytes() -> None:
    fields = bytes_in_pairs("gpt-2")
    text = text_of(fields)
    for given in TEXTS:
        assert b"".join(map(text.piece_bytes, text.encode(given))) == given.encode()
    alone = {text.piece_bytes(k) for k in range(256)}
    assert alone == {bytes([b]) for b in range(256)}
    assert text.piece_bytes(len(fields["tokenizer.ggml.tokens"]) - 1) == b"<end>"
