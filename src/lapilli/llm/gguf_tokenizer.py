"""A tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lapilli.errors import CompileError, InvalidFileError
from lapilli.llm.packages import need
from lapilli.llm.text import Text

_SPACE = "▁"
_GPT2 = r"(?:'s|'t|'re|'ve|'m|'ll|'d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MODERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, list[str]] = {  # how text is cut before pairs are merged; patterns one after the other
    "default": [_GPT2], "gpt-2": [_GPT2], "gpt2": [_GPT2], "phi-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2], "starcoder": [r"\p{N}", _GPT2], "refact": [r"\p{N}", _GPT2], "command-r": [r"\p{N}", _GPT2],
    "llama-bpe": [_MODERN % "{1,3}"], "llama3": [_MODERN % "{1,3}"], "llama-v3": [_MODERN % "{1,3}"], "gpt-4o": [_MODERN % "{1,3}"],
    "smaug-bpe": [_MODERN % "{1,3}"], "dbrx": [_MODERN % "{1,3}"],
    "qwen2": [_MODERN % ""], "stablelm2": [_MODERN % ""], "deepseek-r1-qwen": [_MODERN % ""],
}  # fmt: skip
del _SPLITS["gpt-4o"]  # its letters are cut by case

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6


def text_of(fields: Mapping[str, Any]) -> Text:
    """The tokenizer and the chat template.

    Args:
        fields: metadata by name.

    Raises:
        CompileError: the tokenizer is of another kind.
        InvalidFileError: a token is there twice.
    """
    package = need("tokenizers", "A GGUF file")
    gemma, phi3 = (fields.get("general.architecture") == name for name in ("gemma", "phi3"))
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    if gemma:  # spaces are written as such there
        tokens = [_SPACE * len(t) if t and not t.strip(" ") else t for t in tokens]
    if len(set(tokens)) < len(tokens):
        raise InvalidFileError("The tokenizer of the GGUF file has a token twice.")
    kinds: Sequence[int] = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    kind = fields.get("tokenizer.ggml.model")
    if kind == "gpt2":
        made = _bytes_in_pairs(package, fields, tokens)
    elif kind == "llama":
        # Gemma's pairs merge in the order of the vocabulary, whatever its scores are.
        scores = range(0, -len(tokens), -1) if gemma else fields["tokenizer.ggml.scores"]
        made = _sentence_pieces(package, fields, tokens, kinds, scores)
    else:
        raise CompileError(f"The tokenizer of the GGUF file is of kind {kind!r}; taken are 'gpt2' and 'llama'.")
    for token, of in zip(tokens, kinds, strict=True):
        if of in (_CONTROL, _USER_DEFINED):
            # Phi-3's templates have line ends after these, which its tokenizer drops.
            drops = phi3 and of == _CONTROL and token not in ("<unk>", "<s>", "<|endoftext|>")
            added = package.AddedToken(token, special=of == _CONTROL, normalized=False, rstrip=drops)
            (made.add_special_tokens if of == _CONTROL else made.add_tokens)([added])
    first, last = (fields.get(f"tokenizer.ggml.{n}_token_id") for n in ("bos", "eos"))
    if fields.get("tokenizer.ggml.add_bos_token", kind == "llama") and first is not None:
        named = f"{tokens[first]}:0"
        made.post_processor = package.processors.Sequence([
            made.post_processor or package.processors.ByteLevel(trim_offsets=False),
            package.processors.TemplateProcessing(
                single=f"{named} $A:0", pair=f"{named} $A:0 $B:0", special_tokens=[(tokens[first], first)]
            ),
        ])  # fmt: skip
    ends = {last, *(fields.get(f"tokenizer.ggml.{n}_token_id") for n in ("eot", "eom"))}
    ends |= {
        tokens.index(t)
        for t in ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
        if t in tokens
    }
    special = {f"{n}_token": tokens[k] for n, k in (("bos", first), ("eos", last)) if k is not None}
    template = fields.get("tokenizer.chat_template")
    return Text(made.to_str(), tuple(sorted(e for e in ends if e is not None)), template, special)


def _bytes_in_pairs(package: Any, fields: Mapping[str, Any], tokens: Sequence[str]) -> Any:
    """Byte-pair encoding as of GPT-2."""
    name = fields.get("tokenizer.ggml.pre", "default")
    if name not in _SPLITS:
        raise CompileError(
            f"The tokenizer of the GGUF file cuts text as {name!r} does; taken are {', '.join(_SPLITS)}."
        )
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"]]
    vocabulary = {t: k for k, t in enumerate(tokens)}
    modern = name in ("llama-bpe", "llama3", "llama-v3", "smaug-bpe")
    made = package.Tokenizer(package.models.BPE(vocabulary, merges, fuse_unk=False, ignore_merges=modern))
    cut = package.pre_tokenizers
    splits = [cut.Split(package.Regex(p), "isolated") for p in _SPLITS[name]]
    made.pre_tokenizer = cut.Sequence([*splits, cut.ByteLevel(add_prefix_space=False, use_regex=False)])
    if name in ("qwen2", "deepseek-r1-qwen"):
        made.normalizer = package.normalizers.NFC()
    made.decoder = package.decoders.ByteLevel()
    return made


def _sentence_pieces(
    package: Any, fields: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]
) -> Any:
    """SentencePiece's byte-pair encoding: pairs merge in the order of their results' scores."""
    vocabulary = {t: k for k, t in enumerate(tokens)}
    pairs = []
    for token, number in vocabulary.items():
        if kinds[number] not in (_CONTROL, _USER_DEFINED, _BYTE):
            parts = [(token[:k], token[k:]) for k in range(1, len(token))]
            pairs += [(-scores[number], number, *p) for p in parts if p[0] in vocabulary and p[1] in vocabulary]
    pairs.sort(key=lambda p: (p[0], p[1], vocabulary[p[2]], vocabulary[p[3]]))
    unknown = fields.get("tokenizer.ggml.unknown_token_id")
    made = package.Tokenizer(
        package.models.BPE(
            vocabulary, [p[2:] for p in pairs], unk_token=None if unknown is None else tokens[unknown], fuse_unk=True,
            byte_fallback=_BYTE in kinds,
        )
    )  # fmt: skip
    normal, decoders = package.normalizers, package.decoders
    begins = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    made.normalizer = normal.Sequence([*[normal.Prepend(_SPACE)] * begins, normal.Replace(" ", _SPACE)])
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(parts + [decoders.Strip(" ", 1, 0)] * begins)
    return made
